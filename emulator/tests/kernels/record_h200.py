"""Run the recorded Hopper kernels on an H200 and keep what it returned: see test_h200_kernels.py.

    python emulator/tests/kernels/record_h200.py cubins FOLDER             with the CuTe DSL, without a GPU
    python emulator/tests/kernels/record_h200.py run FOLDER OUTPUT.npz     with a GPU and cuda-bindings, without the DSL

`cubins` compiles the kernels again, checks that the PTX is the recorded one and keeps the cubins (a driver older than
the compiler loads those, not its PTX). `run` launches them as recorded, with the addresses of real allocations: once
with the tensor maps of `encode_tensor_map`, once with the recorded maps with nothing but the address replaced. Both
must return the same bytes. Inputs come from `inputs(case)`, which depends on no numpy version, so only their CRC is kept. Of an
output that is compared bit for bit every ninth row is kept, and a digest.
"""

import ctypes
import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CASES = {
    f"{kernel}/{kind}": (f"{kernel}.sm_90a", kind)
    for kernel, kinds in {"tma_copy": ("normal", "special"), "wgmma_gemm": ("exact", "normal", "wide", "special")}.items()
    for kind in kinds
}  # fmt: skip
SHAPES = {
    "tma_copy.sm_90a": [((64, 32), np.float32), ((64, 32), np.float32)],
    "wgmma_gemm.sm_90a": [((64, 128), np.float16), ((64, 128), np.float16), ((64, 64), np.float32)],
}  # the output is the last one
SPECIAL_F32 = (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001,
               0x807FFFFF, 0x00800000, 0x80000000, 0x00000000, 0x7F000000)  # fmt: skip
SPECIAL_F16 = (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x7BFF, 0xFBFF, 0x0001, 0x83FF, 0x0400, 0x8000, 0x0000)


def inputs(case):
    """The input arrays of a case, from raw PCG64 words: the same in every numpy."""
    key, kind = CASES[case]
    bits = np.random.PCG64(zlib.crc32(case.encode()))
    arrays = []
    for shape, dtype in SHAPES[key][:-1]:
        count = int(np.prod(shape))
        words = bits.random_raw(count)
        fields = [(words >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4)]
        # the sum of four uniform numbers: nearly normal, variance 4/3 in units of 2^15
        values = (sum(fields) - 2 * 65535) / 2.0**15
        if kind == "exact":
            values = (fields[0] % 17 - 8).astype(np.float64)
        if kind == "wide":
            values = values * 2.0 ** (bits.random_raw(count) % np.uint64(24)).astype(np.float64) * 2.0**-14
        array = values.astype(dtype)
        if kind == "special":
            codes = SPECIAL_F32 if dtype is np.float32 else SPECIAL_F16
            raw = array.view(np.uint32 if dtype is np.float32 else np.uint16)
            places = (bits.random_raw(40) % np.uint64(count)).astype(np.int64)
            raw[places] = np.resize(np.array(codes, raw.dtype), 40)
        arrays.append(array.reshape(shape))
    if kind == "special" and key.startswith("wgmma"):  # rows of nothing but subnormals and zeros, and of the largest
        arrays[0].view(np.uint16)[5] = np.resize(np.array([0x0001, 0x83FF, 0x0000, 0x8000], np.uint16), 128)
        arrays[0].view(np.uint16)[6] = 0x7BFF
    return arrays


def bitwise(case):
    """Whether the emulator must return the same bits: copies, and sums that are exact in float32."""
    return case.startswith("tma_copy") or case.endswith("exact")


def sample(result):
    """The rows that are kept of a result that is compared bit for bit, beside a digest."""
    return np.ascontiguousarray(result[::9])


def digest(result):
    return hashlib.sha256(result.tobytes()).hexdigest()[:16]


def crc(arrays):
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


def parameters(recorded, addresses, encode):
    """The recorded parameters with `addresses` in place of the recorded ones."""
    sys.path.insert(0, str(HERE.parents[1]))
    from ptx_emulator._layout import decode_tensor_map, encode_tensor_map

    moved = dict(zip(recorded["addresses"], addresses, strict=True))
    result = []
    for raw in map(bytes.fromhex, recorded["parameters"]):
        if len(raw) == 128:
            tensor_map = decode_tensor_map(raw)
            address = moved[tensor_map.address]
            patched = address.to_bytes(8, "little") + raw[8:]
            result.append(encode_tensor_map(tensor_map._replace(address=address)) if encode else patched)
        elif len(raw) == 8 and int.from_bytes(raw, "little") in moved:
            result.append(moved[int.from_bytes(raw, "little")].to_bytes(8, "little"))
        else:
            result.append(raw)
    return result


class Device:
    """The few calls of the driver API that a launch needs."""

    def __init__(self):
        from cuda.bindings import driver

        self._driver = driver
        self.call("cuInit", 0)
        device = self.call("cuDeviceGet", 0)
        self.name = self.call("cuDeviceGetName", 96, device).split(b"\0")[0].decode()
        self.version = self.call("cuDriverGetVersion")
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", device))

    def call(self, name, *args):
        error, *values = getattr(self._driver, name)(*args)
        if int(error):
            raise SystemExit(f"{name}: {error!r}")
        return values[0] if values else None

    def launch(self, cubin, recorded, arrays, encode):
        """Run the kernel on copies of `arrays` (output last); what the output holds then."""
        function = self.call("cuModuleGetFunction", self.call("cuModuleLoadData", cubin), recorded["entry"].encode())
        buffers = [self.call("cuMemAlloc", array.nbytes) for array in arrays]
        for buffer, array in zip(buffers, arrays, strict=True):
            self.call("cuMemcpyHtoD", buffer, array.ctypes.data, array.nbytes)
        values = parameters(recorded, [int(buffer) for buffer in buffers], encode)
        # 64-byte aligned copies: the driver reads a tensor map as its own type
        store = ctypes.create_string_buffer(128 * len(values) + 64)
        start = -ctypes.addressof(store) % 64 + ctypes.addressof(store)
        for i, value in enumerate(values):
            ctypes.memmove(start + 128 * i, value, len(value))
        table = (ctypes.c_void_p * len(values))(*(start + 128 * i for i in range(len(values))))
        self.call("cuLaunchKernel", function, *recorded["grid"], *recorded["block"], recorded["dynamic_smem"], 0,
                  ctypes.addressof(table), 0)  # fmt: skip
        self.call("cuCtxSynchronize")
        output = np.empty_like(arrays[-1])
        self.call("cuMemcpyDtoH", output.ctypes.data, buffers[-1], output.nbytes)
        for buffer in buffers:
            self.call("cuMemFree", buffer)
        return output


def run(folder, target):
    """Launch every case in both forms and keep the outputs."""
    recording = runpy.run_path(str(HERE.parent / "_recorded.py"))["recording"]
    device, results, kept, index, failed = Device(), {}, {}, {}, []

    def launch(case, encode):
        key = CASES[case][0]
        shape, dtype = SHAPES[key][-1]
        arrays = [*inputs(case), np.full(shape, np.nan, dtype)]
        cubin = (Path(folder) / f"{key}.cubin").read_bytes()
        return arrays[:-1], device.launch(cubin, recording(key), arrays, encode)

    print(f"{device.name}, driver API {device.version}")
    print(f"{'case':20} {'inputs':>10} {'equal':5} {'nan':>5} {'inf':>5} {'largest':>10} {'error':>9}")
    for case in CASES:
        arrays, result = launch(case, encode=True)
        equal = result.tobytes() == launch(case, encode=True)[1].tobytes()
        with np.errstate(all="ignore"):
            wide = [array.astype(np.float64) for array in arrays]
            answer = 2 * wide[0] if len(arrays) == 1 else wide[0] @ wide[1].T
            finite = np.isfinite(answer) & (np.abs(answer) < 3.4e38)
            error = float(np.abs(result - answer)[finite].max())
            size = float(np.abs(answer[finite]).max())
        # nothing but a plausibility check: 2^-12 of the largest value is far above any order of accumulation
        good = equal and error <= size * 2**-12 and bool((finite == np.isfinite(result)).all())
        failed += [] if good else [case]
        print(f"{case:20} {crc(arrays):#010x} {equal!s:5} {np.isnan(result).sum():5} {np.isinf(result).sum():5}"
              f" {size:10.4g} {error:9.3g}{'' if good else '  FAILED'}")  # fmt: skip
        results[case] = result
        kept[case.replace("/", ".")] = sample(result) if bitwise(case) else result
        index[case] = [crc(arrays), digest(result)]
    index["device"], index["driver"] = device.name, int(device.version)
    index_bytes = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez_compressed(target, index=index_bytes, **kept)
    for case in CASES:  # last: a map that the GPU refuses ends every launch of this process
        if launch(case, encode=False)[1].tobytes() != results[case].tobytes():
            failed.append(f"{case} with the recorded maps")
    print(f"{target}: {Path(target).stat().st_size} bytes", f"FAILED: {failed}" if failed else "ok")
    return bool(failed)


def _compile(key, folder):
    """Child process: the cubin of one case, if it belongs to the recorded PTX."""
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    import cutlass
    import record
    import wgmma_gemm
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr
    from tma_copy import TYPES, tma_copy

    function, types = {
        "tma_copy.sm_90a": (tma_copy, TYPES["tma_copy"]),
        "wgmma_gemm.sm_90a": (wgmma_gemm.wgmma_gemm, wgmma_gemm.TYPES["wgmma_gemm"]),
    }[key]
    pointers = [
        make_ptr(getattr(cutlass, t), record.BASE + i * record.STEP, cute.AddressSpace.gmem, assumed_align=128)
        for i, t in enumerate(types)
    ]
    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --generate-line-info --dump-dir {dump}"
        compiled = cute.compile(function, *pointers, options=options)
    recorded = runpy.run_path(str(HERE.parent / "_recorded.py"))["recording"](key)
    if record.tidy(compiled.__ptx__) != recorded["ptx"] or compiled.__cubin__[:4] != b"\x7fELF":
        raise SystemExit(f"{key}: this compiler makes other PTX than the recorded one, or the assembler failed")
    (Path(folder) / f"{key}.cubin").write_bytes(compiled.__cubin__)
    print(key, len(compiled.__cubin__), "bytes")


def main():
    """See the module's docstring."""
    match sys.argv[1:]:
        case ["cubins", folder]:
            Path(folder).mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_NO_CACHE": "1"}
            return max(
                subprocess.run([sys.executable, __file__, "--compile", k, folder], env=environment).returncode
                for k in SHAPES
            )
        case ["--compile", key, folder]:
            return _compile(key, folder)
        case ["run", folder, target]:
            return run(folder, target)
    sys.stderr.write(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
