"""Record, or check, what a GPU of compute capability 9.0 returns for every opcode and matrix case of the tables.

    python emulator/tests/record_tables.py check            on a GPU: run the kept inputs, compare with what is kept
    python emulator/tests/record_tables.py record FOLDER    on a GPU: inputs from seeds; writes h200_numerics.xz and
                                                            h200_matrix.xz, for data/
    python emulator/tests/record_tables.py emulate          without a GPU: `check` in the emulator

The GPU forms need numpy and cuda-bindings (nvidia-cutlass-dsl brings them) and a driver of CUDA 12.9 or later, which compiles
the PTX of `_tables`. The recordings were thinned once after they were made: 32 of 96 lanes of each opcode, chosen so that
no opcode is mistaken for another one, nor any of 221 mutants of the arithmetic that the 96 lanes told apart; of
shared-memory images the bytes that operands cover; of wgmma every 27th thread and a digest.
"""

import ctypes
import json
import lzma
import runpy
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
_TABLES = runpy.run_path(str(HERE / "_tables.py"))
BITS, HEAD, digest, opcodes, programs, same, sample = (
    _TABLES[name] for name in ("BITS", "HEAD", "digest", "opcodes", "programs", "same", "sample")
)
# An emulated result may differ from an H200's: the last bits of approximations; tests/test_convert.py says why
FREE = ("cvt.rna.satfinite.tf32.f32",)


def approximate(program):
    return ".approx" in program.what or ".full" in program.what or program.what in FREE


class Gpu:
    """Runs programs with the driver API."""

    def __init__(self, made):
        device = runpy.run_path(str(HERE / "kernels" / "record_h200.py"))["Device"]()
        self.name, self._call = device.name, device.call
        text = HEAD + "".join(program.text for program in made)
        self._module = self._call("cuModuleLoadData", text.encode() + b"\0")

    def __call__(self, program):
        function = self._call("cuModuleGetFunction", self._module, program.name.encode())
        output = program.output.copy()
        arrays = [output, *map(np.ascontiguousarray, program.inputs)]
        buffers = [self._call("cuMemAlloc", max(array.nbytes, 4)) for array in arrays]
        for buffer, array in zip(buffers, arrays, strict=True):
            self._call("cuMemcpyHtoD", buffer, array.ctypes.data, array.nbytes)
        addresses = [ctypes.c_uint64(int(buffer)) for buffer in buffers]
        table = (ctypes.c_void_p * len(addresses))(*map(ctypes.addressof, addresses))
        self._call(
            "cuLaunchKernel", function, 1, 1, 1, program.threads, 1, 1, program.shared, 0, ctypes.addressof(table), 0
        )
        self._call("cuCtxSynchronize")
        self._call("cuMemcpyDtoH", output.ctypes.data, buffers[0], output.nbytes)
        for buffer in buffers:
            self._call("cuMemFree", buffer)
        return output


def emulator(program):
    """What the emulator returns; any finding is an error."""
    from ptx_emulator import run_ptx

    output = program.output.copy()
    arguments = [output, *(np.array(array) for array in program.inputs)]
    run_ptx(
        HEAD + program.text,
        program.name,
        1,
        program.threads,
        args=arguments,
        dynamic_smem=program.shared,
        check="raise",
    )
    return output


def covered(case):
    """Which bytes of the image of a wgmma its operands cover."""
    from ptx_emulator._layout import decode_wgmma, gather_operand

    size = BITS[case["type"]]
    places = np.arange(case["image"][1])
    mask = np.zeros(len(places), bool)
    operands = [(case["b"], case["n"], case["tb"])] + ([] if case["rs"] else [(case["a"], 64, case["ta"])])
    for descriptor, rows, transposed in operands:
        low, high = (
            gather_operand(part.astype(np.uint8), decode_wgmma(descriptor), rows, case["k"] * size // 8,
                           "MN" if transposed else "K", size).astype(np.int64)
            for part in (places & 255, places >> 8)
        )  # fmt: skip
        mask[(low | high << 8).ravel()] = True
    return mask


def record(made, device, folder):
    """Write the tables of `made`, programs with inputs from seeds, as `device` returns them."""
    index, lanes, cases, blob, masks, places = {}, b"", [], bytearray(), {}, {}

    def put(raw, key):
        if key not in places:
            places[key] = (len(blob), len(raw))
            blob.extend(raw)
        return places[key]

    for program in made:
        if program.case.get("what") == "wgmma":
            kind = program.case["type"]
            masks[kind] = masks.get(kind, False) | covered(program.case)
    known = set(opcodes())
    for program in made:
        result = device(program)
        if program.what in known:
            arrays = [*program.inputs, result]
            index[program.what] = [array.dtype.str[1:] for array in arrays]
            lanes += b"".join(array.tobytes() for array in arrays)
            continue
        case = dict(program.case)
        if case["what"] == "wgmma":
            image = np.where(masks[case["type"]], program.inputs[0], 0).astype(np.uint8)
            case["image"] = put(image.tobytes(), case["type"])
            if case["rs"]:
                case["a"] = put(program.inputs[1].tobytes(), (program.name, "a"))
            case["digest"], result = digest(result), sample(result)
        else:
            case["image"] = put(program.inputs[0].tobytes(), (program.name, "image"))
        case["out"] = put(result.tobytes(), (program.name, "out"))
        cases.append(case)
    for name, head, raw in (("h200_numerics", index, lanes), ("h200_matrix", cases, bytes(blob))):
        text = json.dumps(head, separators=(",", ":")).encode() + b"\n" + raw
        packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
        (Path(folder) / f"{name}.xz").write_bytes(packed)
        print(name, len(packed), "bytes")


def main():
    """See the module's docstring."""
    match sys.argv[1:]:
        case ["check" | "emulate" as where]:
            made = programs()
            device = emulator if where == "emulate" else Gpu(made)
            different = [p.what for p in made if not (where == "emulate" and approximate(p)) and not same(p, device(p))]
            print(getattr(device, "name", "emulator"), len(made), "programs,", len(different), "differ", *different)
            return bool(different)
        case ["record", folder]:
            Path(folder).mkdir(parents=True, exist_ok=True)
            made = programs(seeded=True)
            record(made, Gpu(made), folder)
            return 0
    sys.stderr.write(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
