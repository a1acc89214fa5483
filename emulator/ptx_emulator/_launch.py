"""`launch`: a compiled CuTe DSL function or an exported object, its real host code included, in a child process.

Contract: the parent packs the arguments, exports the host object and copies the tensors to shared memory; the child
(`_child`) runs the host function on the emulator's own runtime and executes the PTX of the kernels it launches; the
parent copies the results back. A dead, failing or late child is an `EmulationError`. Needs Linux and a C compiler. The
child neither imports the DSL nor sees the vendor's runtime, so nothing has to be set before the first compile.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import inspect
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._arena import Arena
from ._arguments import Packed, pack_compiled, pack_plain, relocate
from ._ffi_arguments import pack_ffi
from ._findings import EmulationError, Finding, FindingError, Report, UnsupportedError
from ._limits import device_attributes, device_limits
from ._memory import Outputs
from ._progress import Progress
from ._runtime import HostFunction, host_function, link_object, runtime_library

__all__ = ["Launch", "Subject", "launch", "pack_arguments", "record", "run_host"]

_CHILD = (
    "import json,sys; sys.path[:0] = json.loads(sys.argv[1]); from ptx_emulator._child import main; main(sys.argv[2])"
)
_PREFIX = "ptxemu"
# Matrices of one MMA are too small for threads: with them a small GEMM took twice as long (OpenBLAS, 2 cores).
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_TAIL = 2000


class Launch(NamedTuple):
    """One kernel launch as the host function made it. `params` follow the PTX .param list; addresses are the child's."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    params: tuple[bytes, ...]
    cubin: bytes
    attributes: tuple[tuple[int, bytes], ...]


class Subject(NamedTuple):
    """What is run: host object, PTX of its kernels, its host function; `packer` is a compiled function."""

    object: bytes
    ptx: tuple[str, ...]
    function: HostFunction
    packer: Any = None

    @classmethod
    def of(cls, raw: bytes, ptx: Sequence[str], entry: str | None = None, packer: Any = None) -> Subject:
        return cls(raw, tuple(ptx), host_function(raw, entry), packer)

    @property
    def target(self) -> str:
        match = re.search(r"^\s*\.target\s+(sm_\w+)", self.ptx[0], re.M)
        if not match:
            raise EmulationError("the PTX names no .target")
        return match[1]


def launch(
    compiled: Any,
    *args: Any,
    seed: int = 0,
    check: str = "report",
    schedule: str = "late",
    strict: bool = False,
    programmatic: bool | None = None,
    limits: Any = None,
    buffers: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    ptx: str | Path | Sequence[str | Path] = (),
    entry: str | None = None,
    timeout: float = 600.0,
    progress: bool | None = None,
) -> Report:
    """Run a compiled kernel, its host function included, on the CPU.

    Args:
        compiled: a function that `cute.compile` returned (compiled with `--keep-ptx`), an object with the attributes
            `object` and `ptx` (`cudnn_core.Artifact`), or the bytes or path of an object of `export_to_c`.
        args: what the compiled function takes; torch and numpy CPU tensors are written in place. An exported object
            takes the arguments of its header (see `Descriptor` and the README), one compiled for TVM-FFI those of a call.
            A host block (`cudnn_core.HostBlock` or alike) is host memory, passed by its address.
        seed, check, schedule, strict: as of `run_ptx`.
        programmatic: take each launch for one with programmatic stream serialization or for one without (see `run_ptx`);
            None: as its attributes say.
        limits: `Limits`, a mapping, an arch name or a `cudnn_core.DeviceInfo`; default: those of the PTX's target.
        buffers: tensors that arguments point to without being arguments themselves.
        outputs: those tensors whose contents count as uninitialised at launch.
        ptx, entry: for an exported object, its PTX (text or path) and, if it has several host functions, which.
        timeout: seconds for the child. progress: show a progress line (default: on a terminal).

    Returns: `Report(findings, counts)` over all launches of the host function. Raises `EmulationError`, and with
    check="raise" `FindingError`; what the kernel wrote before a finding is in the tensors then.
    """
    subject = _subject(compiled, ptx, entry)
    with _packed(subject, args, buffers, outputs) as (arena, packed):
        return run_host(subject, packed, arena, seed=seed, check=check, schedule=schedule, strict=strict,
                        programmatic=programmatic, limits=limits, timeout=timeout, progress=progress)  # fmt: skip


def record(
    compiled: Any,
    *args: Any,
    limits: Any = None,
    buffers: Sequence[Any] = (),
    ptx: str | Path | Sequence[str | Path] = (),
    entry: str | None = None,
    timeout: float = 60.0,
) -> tuple[Launch, ...]:
    """The launches that the host function makes for these arguments; no kernel is executed."""
    subject = _subject(compiled, ptx, entry)
    with _packed(subject, args, buffers, ()) as (arena, packed):
        documents = _run(_job(subject, packed, arena, limits, record=True), subject, arena, timeout, None)["launches"]
    decode = base64.b64decode
    return tuple(
        Launch(d["kernel"], tuple(d["grid"]), tuple(d["block"]), tuple(d["cluster"]), d["dynamic_smem"],
               tuple(map(decode, d["params"])), decode(d["cubin"]), tuple((k, decode(v)) for k, v in d["attributes"]))
        for d in documents
    )  # fmt: skip


def run_host(
    subject: Subject,
    packed: Sequence[Packed],
    arena: Arena,
    *,
    seed: int = 0,
    check: str = "report",
    schedule: str = "late",
    strict: bool = False,
    programmatic: bool | None = None,
    limits: Any = None,
    timeout: float = 600.0,
    progress: bool | None = None,
) -> Report:
    """Run a subject on packed arguments (host addresses in them) whose memory `arena` has; the arena is placed here."""
    if check not in ("report", "raise"):
        raise ValueError(f'check must be "report" or "raise", not {check!r}')
    if seed < 0 or not timeout > 0:
        raise EmulationError(f"seed is at least 0 and timeout above 0: {seed}, {timeout}")
    job = _job(subject, packed, arena, limits, seed=seed, check=check, schedule=schedule, strict=strict,
               programmatic=programmatic)  # fmt: skip
    document = _run(job, subject, arena, timeout, progress)["report"]
    return Report(tuple(_finding(f) for f in document["findings"]), document["counts"])


def _subject(compiled: Any, ptx: str | Path | Sequence[str | Path], entry: str | None) -> Subject:
    given = [ptx] if isinstance(ptx, (str, Path)) else list(ptx)
    texts = tuple(t if isinstance(t, str) and "\n" in t else Path(t).read_text() for t in given)
    if hasattr(compiled, "export_to_c"):
        found: Any = getattr(compiled, "__ptx__", None)
        if not texts and (not isinstance(found, str) or ".entry" not in found):
            raise EmulationError("the compiled function has no PTX: compile it with the option --keep-ptx")
        ffi = "function_name" in inspect.signature(compiled.export_to_c).parameters
        return Subject.of(_export(compiled, ffi), texts or (found,), packer=None if ffi else compiled)
    if isinstance(compiled, (bytes, bytearray)):
        raw = bytes(compiled)
    elif isinstance(compiled, (str, Path)):
        raw = Path(compiled).read_bytes()
    elif isinstance(getattr(compiled, "object", None), bytes) and isinstance(getattr(compiled, "ptx", None), str):
        raw, texts = compiled.object, texts or ((compiled.ptx,) if compiled.ptx else ())
    else:
        raise EmulationError(f"cannot launch a {type(compiled).__name__}: pass a compiled CuTe DSL function, an artifact, "
                             "or an exported object")  # fmt: skip
    if not raw:
        raise EmulationError("there is no host object: the artifact's `object` is empty")
    if not texts:
        raise EmulationError("there is no PTX of the object's kernels: pass ptx=")
    return Subject.of(raw, texts, entry)


def _export(compiled: Any, ffi: bool) -> bytes:
    """The host object of a compiled function; `ffi`: one that was compiled for TVM-FFI."""
    # The export resolves the vendor's runtime among the libraries of the process, but 4.8.1 has not loaded it yet when
    # no engine was made (first compile in a process that has no GPU and had no CUTE_DSL_ARCH at import).
    with contextlib.suppress(AttributeError, OSError):
        for library in compiled.export_provider.dsl._get_dsl().get_shared_libs():
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "host.o"
        try:
            if ffi:
                compiled.export_to_c(str(made), function_name=_PREFIX)
            else:
                made.write_bytes(compiled.dump_to_object(_PREFIX))  # a header has no form for a bool
        except Exception as error:
            raise EmulationError(f"the compiled function cannot be exported: {error}") from error
        return made.read_bytes()


def pack_arguments(
    subject: Subject, args: Sequence[Any], arena: Arena, outputs: Sequence[Any] | Outputs = ()
) -> list[Packed]:
    """The arguments of the subject's host function, in the form that it takes; their memory is registered."""
    if subject.packer is not None:
        return pack_compiled(subject.packer, args, arena, outputs)
    return (pack_ffi if subject.function.ffi else pack_plain)(args, arena, outputs)


@contextlib.contextmanager
def _packed(subject: Subject, args: Sequence[Any], buffers: Sequence[Any], outputs: Sequence[Any]) -> Iterator[tuple[Arena, list[Packed]]]:  # fmt: skip
    arena = Arena()
    fresh = Outputs(outputs)
    try:
        for number, value in enumerate(buffers):
            arena.add_tensor(value, f"buffer {number}", fresh=id(value) in fresh)
        packed = pack_arguments(subject, args, arena, fresh)
        fresh.check()
        yield arena, packed
    finally:
        arena.close()


def _job(subject: Subject, packed: Sequence[Packed], arena: Arena, limits: Any, *, seed: int = 0, check: str = "report",
         schedule: str = "late", strict: bool = False, programmatic: bool | None = None,
         record: bool = False) -> dict[str, Any]:  # fmt: skip
    found = device_limits(subject.target, limits)
    arena.place()
    return {
        "runtime": str(runtime_library()),
        **subject.function._asdict(),
        "ptx": subject.ptx,
        "arguments": [relocate(argument, arena) for argument in packed],
        "attributes": device_attributes(subject.target, found, limits),
        "limits": {name: getattr(found, name) for name in type(found).__dataclass_fields__},
        "buffers": [(p.device, p.offset, p.size, p.fresh) for p in arena.placed],
        "seed": int(seed),
        "check": check,
        "schedule": schedule,
        "strict": strict,
        "programmatic": programmatic,
        "record": record,
    }


def _run(job: dict[str, Any], subject: Subject, arena: Arena, timeout: float, progress: bool | None) -> dict[str, Any]:
    """Run the child on the job; its documents by name. Results are copied back whenever a kernel has run."""
    job["memory"], job["length"] = arena.share()
    arena.copy_in()
    with tempfile.TemporaryDirectory(prefix="ptx_emulator-") as folder, tempfile.TemporaryFile() as log:
        job["object"] = str(link_object(subject.object, Path(folder)))
        reader, job["pipe"] = os.pipe()
        request = Path(folder) / "job.json"
        request.write_text(json.dumps(job))
        paths = list(dict.fromkeys(str(Path(f).resolve().parents[1]) for f in (__file__, np.__file__)))
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(paths), str(request)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(job["memory"], job["pipe"]), cwd=folder,
                env={**dict.fromkeys(_ONE_THREAD, "1"), **os.environ},
            )  # fmt: skip
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(job["pipe"])
        shown = Progress(sys.stderr, show=progress)
        try:
            documents = _listen(reader, shown, time.monotonic() + timeout)
            if documents is not None:
                child.wait(timeout=10)
        finally:
            shown.close()
            if child.poll() is None:
                child.kill()
            child.wait()
            os.close(reader)
        log.seek(0)
        said = log.read().decode(errors="replace")
    if documents is None:
        raise EmulationError(
            f"the emulation did not end within {timeout:g} s; pass timeout= to wait longer{_tail(said)}"
        )
    if "error" not in documents and "report" not in documents and not (job["record"] and "launches" in documents):
        stage = "while a kernel was emulated" if "launches" in documents else "in the host function"
        raise EmulationError(f"the emulator's child process {_ending(child.returncode)} {stage}{_tail(said)}")
    if said:
        sys.stderr.write(said)
    if "error" in documents:
        error = _error(documents["error"])
        if isinstance(error, FindingError):
            arena.copy_out()
        raise error
    arena.copy_out()
    return documents


def _listen(reader: int, shown: Progress, deadline: float) -> dict[str, Any] | None:
    """The child's documents until it closes the pipe; None at the deadline."""
    documents: dict[str, Any] = {}
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return None
            got = os.read(reader, 1 << 16)
            if not got:
                return documents
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                document = json.loads(line)
                if "progress" in document:
                    shown.update(*document["progress"])
                    continue
                documents.update(document)
                if "launches" in document:
                    shown.launches([item["kernel"] for item in document["launches"]])
            if time.monotonic() > deadline:
                return None


def _finding(values: Sequence[Any]) -> Finding:
    kind, message, line, source, agents, seed = values
    return Finding(kind, message, line, source, tuple(agents), seed)


def _error(document: dict[str, Any]) -> EmulationError:
    if document["type"] == "finding":
        return FindingError(_finding(document["finding"]))
    if document["type"] == "unsupported":
        error = UnsupportedError(document["op"], document["line"])
        error.args = (document["message"],)
        return error
    if document["type"] == "internal":
        return EmulationError(f"internal error of the emulator: {document['message']}\n{document['traceback']}")
    return EmulationError(document["message"])


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    return f"exited with status {code}"


def _tail(said: str) -> str:
    said = said.strip()
    return f"; it wrote:\n{said[-_TAIL:]}" if said else ""
