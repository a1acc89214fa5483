# Targets for users (demo, test) and for development. `make demo` and `make test` need nothing but python3 (3.10 or
# newer) and make: the environment in .venv is made by tools/setup_env.sh, once, and brought up to date when a
# requirement changes.
#
#   PYTHON=python make gpu-test    uses that interpreter's environment as it is, installs nothing and needs no index:
#                                  tools/dev_site.py makes the in-tree packages visible (for an offline GPU machine)
#   TORCH_INDEX=URL make test      takes torch from that index
#   PYTEST_ARGS="-k sdpa" make test
SHELL := bash
VENV ?= .venv
# Without the compiled modules every start of the interpreter costs two seconds more with torch; pip does not make them here.
unexport PYTHONDONTWRITEBYTECODE
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))

ifdef PYTHON
PY := $(PYTHON)
ENV := dev-site
export PYTHONPATH := $(CURDIR)/build/dev-site$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
ENV := venv
PARALLEL := -n 2 --dist loadfile
endif

.PHONY: help demo test test-all gpu-test bench bench-emulator bench-gemm bench-backend bench-la sanitize-la lint format docs clean venv dev-site

help:
	@echo 'make demo      the main job: a sentence encoder on cudnn_core graphs'
	@echo 'make test      the tests that need no GPU (a few minutes)'
	@echo 'make test-all  the slow sweeps too        make gpu-test  the tests that need a GPU'
	@echo 'make bench     host overhead              make lint      ruff and mypy'
	@echo 'make format    rewrite the sources        make docs      rewrite what pages show'
	@echo 'make clean     remove .venv and caches    make bench-emulator  time of the PTX emulator'
	@echo 'make bench-gemm  GEMM on a GPU against cuBLAS and others'
	@echo 'make bench-backend  the cuDNN backend plugin against the frontend, on a GPU'
	@echo 'make bench-la  linear attention on a GPU against flash-linear-attention and others'
	@echo 'make sanitize-la  the linear-attention kernels under compute-sanitizer, on a GPU'

demo: $(ENV)
	@$(PY) examples/sentence_search $(ARGS)

test: $(ENV)
	$(PY) -m pytest -q $(PARALLEL) -m 'not L2 and not gpu' $(PYTEST_ARGS)

test-all: $(ENV)
	$(PY) -m pytest -q $(PARALLEL) -m 'not gpu' $(PYTEST_ARGS)

gpu-test: $(ENV)
	$(PY) -m pytest -q -m gpu $(PYTEST_ARGS)

bench: $(ENV)
ifndef PYTHON
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-bench.txt 2>$(VENV)/bench.log || { cat $(VENV)/bench.log >&2; exit 1; }
endif
	$(PY) benchmarks/host_overhead.py $(ARGS)

bench-emulator: $(ENV)
	$(PY) benchmarks/emulator.py $(ARGS)

bench-gemm: $(ENV)
	$(PY) benchmarks/gemm.py $(ARGS)

bench-backend: $(ENV)
	$(PY) benchmarks/backend.py $(ARGS)

bench-la: $(ENV)
	$(PY) benchmarks/linear_attention.py $(ARGS)

sanitize-la: $(ENV)
	$(PY) plugins/linear_attention/tests/sanitize.py $(ARGS)

lint: $(ENV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(addprefix -p ,cudnn_core ptx_emulator $(PLUGINS))

format: $(ENV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(ENV)
	$(PY) tools/make_docs.py
	UPDATE_DOCS=1 $(PY) -m pytest -q tests/docs $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@tools/setup_env.sh $(VENV)

dev-site:
	@$(PY) tools/dev_site.py build/dev-site
