"""The child process of a launch: runs the host function on the emulator's runtime, then the kernels it launched.

Contract: reads a job (a JSON file), writes JSON lines to the descriptor that the job names: "launches", "progress", and
at the end "report" or "error". Tensors are in the shared file of the job, at device addresses; the host
function only passes addresses on, as with a GPU. Started by `_launch`; imports neither torch nor the DSL.
"""

from __future__ import annotations

import base64
import ctypes
import faulthandler
import json
import mmap
import os
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._elf import read_image
from ._findings import EmulationError, Finding, FindingError, UnsupportedError
from ._grid import run_ptx
from ._host_call import call_host
from ._overlap import Overlap
from ._ptx import Entry, parse

__all__ = ["main"]

_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension
_PROGRAMMATIC = 6  # cudaLaunchAttributeProgrammaticStreamSerialization
_PROGRESS_SECONDS = 0.25


class _Extent(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    def values(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_ubyte * 64))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", _Extent),
        ("block", _Extent),
        ("dynamic_shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.POINTER(_Config),
    ctypes.POINTER(ctypes.c_void_p),
)


class Recorded(NamedTuple):
    """One launch, as the host function asked for it."""

    kernel: str
    text: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    max_dynamic: int
    params: tuple[bytes, ...]
    cubin: bytes
    attributes: tuple[tuple[int, bytes], ...]

    @property
    def programmatic(self) -> bool:
        return any(kind == _PROGRAMMATIC and any(value[:4]) for kind, value in self.attributes)


class Recorder:
    """Receives the launches of the host function."""

    def __init__(self, texts: list[str]) -> None:
        self.launches: list[Recorded] = []
        self.error: BaseException | None = None
        self._kernels: dict[str, tuple[Entry, str]] = {}
        for text in texts:
            self._kernels.update({name: (entry, text) for name, entry in parse(text).entries.items()})
        self.callback = _ON_LAUNCH(self._on_launch)

    def _on_launch(self, name: bytes, image: int, max_dynamic: int, config: Any, arguments: Any) -> int:
        try:
            self._record(name.decode(), image, max_dynamic, config.contents, arguments)
        except BaseException as error:  # it must not cross the C frames
            self.error = self.error or error
            return 1
        return 0

    def _record(self, name: str, image: int, max_dynamic: int, config: _Config, arguments: Any) -> None:
        if name not in self._kernels:
            raise EmulationError(f"the host function launches {name}, of which there is no PTX (there is of: "
                                 f"{', '.join(self._kernels) or 'nothing'})")  # fmt: skip
        entry, text = self._kernels[name]
        params = tuple(ctypes.string_at(arguments[i], param.size) for i, param in enumerate(entry.params))
        attributes = tuple((config.attributes[i].id, bytes(config.attributes[i].value)) for i in range(config.count))
        cluster = (1, 1, 1)
        for kind, value in attributes:
            if kind == _CLUSTER_DIMENSION:
                words = np.frombuffer(value, "<u4")
                cluster = (int(words[0]), int(words[1]), int(words[2]))
        cubin = read_image(image, ctypes.string_at)
        self.launches.append(
            Recorded(name, text, config.grid.values(), config.block.values(), cluster, int(config.dynamic_shared),
                     max_dynamic, params, cubin, attributes))  # fmt: skip


def run(job: Mapping[str, Any], send: Any) -> None:
    recorder = Recorder(job["ptx"])
    call_host(job, recorder)
    launches = recorder.launches
    send({"launches": [_document(launch, job["record"]) for launch in launches]})
    if job["record"]:
        return
    shared = mmap.mmap(job["memory"], job["length"])  # open until the process ends: machines hold views of it
    whole = np.frombuffer(shared, np.uint8)
    buffers = {device: whole[offset : offset + size] for device, offset, size, _ in job["buffers"]}
    fresh = [buffers[device] for device, *_, new in job["buffers"] if new]
    written: dict[int, Any] = {}
    findings: list[Finding] = []
    counts: dict[str, int] = {"launches": len(launches)}
    programmatic = [launch.programmatic if job["programmatic"] is None else job["programmatic"] for launch in launches]
    overlap = Overlap()
    for number, launch in enumerate(launches):
        overlap = overlap.follow(f"launch {number + 1} ({launch.kernel})", programmatic[number],
                                 kept=any(programmatic[number + 1 : number + 2]))  # fmt: skip
        if launch.dynamic_smem > launch.max_dynamic:
            message = (f"{launch.dynamic_smem} bytes of dynamic shared memory, but the kernel's maximum was set "
                       f"to {launch.max_dynamic}")  # fmt: skip
            finding = Finding("limits", message, 0, "", (), job["seed"])
            if job["check"] == "raise":
                raise FindingError(finding)
            findings.append(finding)
        watch = Watch(send, number, launch, written)
        try:
            report = run_ptx(launch.text, launch.kernel, launch.grid, launch.block, launch.cluster, launch.params,
                             job["seed"], job["check"], launch.dynamic_smem, job["limits"],
                             schedule=job["schedule"], strict=job["strict"], buffers=buffers, outputs=fresh, observe=watch,
                             overlap=overlap)  # fmt: skip
        finally:
            watch.stop()
        findings += report.findings
        for name, amount in report.counts.items():
            counts[name] = counts.get(name, 0) + amount
    send({"report": {"findings": findings, "counts": counts}})


class Watch:
    """Sends how far the machine has come, from a thread; carries what is initialised from one launch to the next."""

    def __init__(self, send: Any, number: int, launch: Recorded, written: dict[int, Any]) -> None:
        self._send, self._number, self._launch = send, number, launch
        self._written = written  # device address -> which bytes have been written
        self._machine: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, machine: Any) -> None:
        self._machine = machine
        for address, region in machine.memory.regions:
            if address in self._written:
                region.init[:] = self._written[address]
        self._thread = threading.Thread(target=self._loop, args=(machine,), daemon=True)
        self._thread.start()

    def _loop(self, machine: Any) -> None:
        shape = zip(self._launch.grid, self._launch.cluster, strict=True)
        total = int(np.prod([max(g // c, 1) for g, c in shape]))
        while not self._done.wait(_PROGRESS_SECONDS):
            self._send({"progress": [self._number, total - len(machine.work), total, sum(machine.hits)]})

    def stop(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._written.update({address: region.init for address, region in self._machine.memory.regions})


def _document(launch: Recorded, whole: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"kernel": launch.kernel}
    if whole:
        document.update(
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_smem=launch.dynamic_smem,
            params=[base64.b64encode(raw).decode() for raw in launch.params],
            cubin=base64.b64encode(launch.cubin).decode(),
            attributes=[(kind, base64.b64encode(value).decode()) for kind, value in launch.attributes],
        )
    return document


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, FindingError):
        return {"type": "finding", "finding": error.finding}
    if isinstance(error, UnsupportedError):
        return {"type": "unsupported", "op": error.op, "line": error.line, "message": str(error)}
    if isinstance(error, (EmulationError, OSError)):
        return {"type": "emulation", "message": str(error)}
    return {"type": "internal", "message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main(path: str) -> None:
    faulthandler.enable()
    job = json.loads(Path(path).read_text())
    lock = threading.Lock()
    with os.fdopen(job["pipe"], "w", encoding="utf-8") as pipe:

        def send(document: dict[str, Any]) -> None:
            try:
                with lock:
                    pipe.write(json.dumps(document) + "\n")
                    pipe.flush()
            except BrokenPipeError:  # the parent has gone
                os._exit(1)

        try:
            run(job, send)
        except Exception as error:
            send({"error": _failure(error)})
