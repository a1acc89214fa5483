"""Compile the kernels of this folder and record what the emulator tests run: PTX, launch and parameters.

    python emulator/tests/kernels/record.py [NAME ...]

One child process per architecture: the compiler fixes it at the first import. The host function that the compiler
made runs on the package's own runtime, which reports the launch; pointers are fixed fake addresses, so the recordings
are reproducible. The recorded PTX is generated from the kernels of this folder and is licensed like them.
"""

import ctypes
import difflib
import importlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data" / "kernels"
BASE, STEP = 0x7F10_0000_0000, 0x0100_0000  # fake addresses of the arguments
DEVICE = {1: 1024, 8: 49152, 97: 327 * 1024}  # cudaDeviceAttr: threads and shared memory per block, opt-in maximum


class Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("dynamic_smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.POINTER(Config),
    ctypes.POINTER(ctypes.c_void_p),
)


def parameter_sizes(ptx: str, entry: str) -> list[int]:
    start = re.search(r"\.entry\s+" + re.escape(entry) + r"\(", ptx).end()
    header = ptx[start : ptx.index("\n{", start)]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?", header)
    return [int(array) if array else int(bits) // 8 for bits, array in found]


def parameter(raw: bytes) -> str:
    """Bytes 64 to 127 of a tensor map are not written by the host function: whatever was on its stack."""
    return (raw[:64] + bytes(64) if len(raw) == 128 else raw).hex()


def tidy(ptx: str) -> str:
    """No paths of the machine that compiled it: the file table keeps names relative to this folder."""
    return re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1", ptx)


def write(key: str, made: dict) -> None:
    """Store a recording: as the edits to that of the kernel's first architecture, if nothing but the PTX differs."""
    from cases import CASES

    first = next(other for other in CASES if other.partition(".")[0] == key.partition(".")[0])
    path, kept = DATA / f"{key}.json.xz", made
    base = DATA / f"{first}.json.xz"
    if first != key and base.is_file():
        found = json.loads(lzma.decompress(base.read_bytes()))
        if {**found, "ptx": ""} == {**made, "ptx": ""}:
            old, new = found["ptx"].split("\n"), made["ptx"].split("\n")
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            edits = [(i, j, new[k:n]) for tag, i, j, k, n in matcher.get_opcodes() if tag != "equal"]
            kept = {"like": first, "crc": zlib.crc32(found["ptx"].encode()), "edits": edits}
    text = json.dumps(kept, indent=0)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def record(key: str) -> None:
    """Compile one case and write its recording (runs in a child process)."""
    import cutlass
    from cases import CASES
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    case = CASES[key]
    module = importlib.import_module(case.module)
    function, types = getattr(module, case.function), module.TYPES[case.function]
    pointers = [
        make_ptr(getattr(cutlass, t), BASE + i * STEP, cute.AddressSpace.gmem, assumed_align=128)
        for i, t in enumerate(types)
    ]
    launches = []

    @ON_LAUNCH
    def on_launch(name, image, maximum, config, args):
        try:
            asked, cluster, programmatic = config.contents, [1, 1, 1], False
            for i in range(asked.count):  # cudaLaunchAttribute, 72 bytes: 4 cluster, 6 programmatic
                raw = ctypes.string_at(asked.attributes + 72 * i, 72)
                if int.from_bytes(raw[:4], "little") == 4:
                    cluster = [int.from_bytes(raw[8 + 4 * j : 12 + 4 * j], "little") for j in range(3)]
                if int.from_bytes(raw[:4], "little") == 6:
                    programmatic = any(raw[8:12])
            sizes = parameter_sizes(compiled.__ptx__, name.decode())
            launches.append(dict(
                entry=name.decode(), grid=list(asked.grid), block=list(asked.block), cluster=cluster,
                dynamic_smem=asked.dynamic_smem, programmatic=programmatic,
                parameters=[parameter(ctypes.string_at(args[i], size)) for i, size in enumerate(sizes)],
            ))  # fmt: skip
        except Exception as problem:  # cannot cross the C frame
            sys.stderr.write(f"{problem!r}\n")
            return 1
        return 0

    runtime = ctypes.CDLL(os.environ["CUTE_DSL_LIBS"], mode=ctypes.RTLD_GLOBAL)
    pairs = [value for pair in DEVICE.items() for value in pair]
    table = (ctypes.c_int * len(pairs))(*pairs)
    runtime.ptxemu_configure(on_launch, table, len(DEVICE))
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch {case.arch} --keep-ptx --keep-cubin --generate-line-info --dump-dir {dump}"
        compiled = cute.compile(function, *pointers, *case.options, options=options)
    if compiled.__cubin__[:4] != b"\x7fELF":
        raise SystemExit(f"{key}: the assembler failed")
    compiled.__dict__["num_devices"] = 1
    compiled(*pointers)
    (launch,) = launches
    ptx = tidy(compiled.__ptx__)
    DATA.mkdir(parents=True, exist_ok=True)
    write(key, dict(launch, addresses=[BASE + i * STEP for i in range(len(types))], ptx=ptx))
    print(
        key, launch["grid"], launch["block"], launch["cluster"], launch["dynamic_smem"], len(ptx.splitlines()), "lines"
    )


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    from cases import CASES
    from ptx_emulator._runtime import runtime_library

    if sys.argv[1:2] == ["--child"]:
        record(sys.argv[2])
        return 0
    failed, runtime = [], str(runtime_library())
    for key, case in CASES.items():
        if sys.argv[1:] and not any(key.startswith(wanted) for wanted in sys.argv[1:]):
            continue
        environment = {**os.environ, "CUTE_DSL_ARCH": case.arch, "CUTE_DSL_NO_CACHE": "1", "CUTE_DSL_LIBS": runtime}
        if subprocess.run([sys.executable, __file__, "--child", key], env=environment, check=False).returncode:
            failed.append(key)
    print("failed:", failed) if failed else None
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
