"""The 128-byte tensor map (CUtensorMap) of TMA: decode, encode, legality.

The layout of the first 64 bytes was measured: 1,095 maps of an H200's driver (tiled and im2col) decode to the arguments
they were made from, and `encode_tensor_map` gives the same 64 bytes (tests/data/h200_tensor_maps.json.xz). The driver
also fills bytes 64-75 with hints; a map that a compiled host function packs leaves them undefined, so they are ignored.
Type codes 11 (packed u4), 12 and 13 (padded u4 and u6, which the driver refuses for an H200), the swizzle atom (bits
19-20) and bit 1, which is set there and ignored here, were seen in maps that CuTe DSL's compiled sm_100 host code packs.
Inferred: the atom codes 2 and 3.
Limits: CUDA driver API, cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col; PTX ISA 5.5.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DATA_TYPES", "TensorMap", "decode_tensor_map", "encode_tensor_map", "tensor_map_problems"]

# name -> (code, bit 16, bits per element in global memory)
DATA_TYPES: dict[str, tuple[int, int, int]] = {
    "u8": (0, 0, 8),
    "u16": (1, 0, 16),
    "u32": (2, 0, 32),
    "s32": (3, 0, 32),
    "u64": (4, 0, 64),
    "s64": (5, 0, 64),
    "f16": (6, 0, 16),
    "f32": (7, 0, 32),
    "f32_ftz": (8, 0, 32),
    "f64": (9, 0, 64),
    "bf16": (10, 0, 16),
    "tf32": (7, 1, 32),
    "tf32_ftz": (8, 1, 32),
    "u4": (11, 0, 4),
    "u4_padded": (12, 0, 4),
    "u6_padded": (13, 0, 6),
}
_NAMES = {(code, flag): name for name, (code, flag, _) in DATA_TYPES.items()}
_SWIZZLES = ("none", "32B", "64B", "128B")
_ATOMS = ("", "_32B", "_32B_flip", "_64B")


class TensorMap(NamedTuple):
    """A decoded tensor map. Index 0 is the innermost dimension; strides are bytes of dimensions 1 .. rank-1.

    `box` is the tile; for im2col maps box[0] is the channel count, `pixels` the pixels per column and `lower`, `upper`
    the corners of the bounding box (rank - 2 entries). `swizzle` is a key of `_layout.SWIZZLES` (or "128B_32B_flip").
    """

    address: int
    data_type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: str = "none"
    l2: int = 0
    nan_fill: bool = False
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    pixels: int = 0

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bits(self) -> int:
        """Bits of an element in global memory."""
        return DATA_TYPES[self.data_type][2]

    @property
    def shared_bits(self) -> int:
        """Bits an element takes in shared memory: padded types fill 16 bytes with 16 elements."""
        return 8 if self.data_type.endswith("padded") else self.element_bits

    @property
    def im2col(self) -> bool:
        return self.pixels > 0


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def decode_tensor_map(data: bytes) -> TensorMap:
    """Decode at least the first 64 bytes; an unknown type code raises ValueError."""
    word = [int.from_bytes(data[4 * i : 4 * i + 4], "little") for i in range(16)]
    flags = word[2]
    rank = (flags >> 4 & 7) + 1
    key = (flags >> 7 & 15, flags >> 16 & 1)
    if key not in _NAMES or rank > 5:
        raise ValueError(f"not a tensor map: type code {key[0]}, rank {rank}")
    swizzle = _SWIZZLES[flags >> 13 & 3]
    if swizzle == "128B":
        swizzle += _ATOMS[flags >> 19 & 3]
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    pixels = 0
    box: tuple[int, ...] = tuple(data[55 + i] + 1 for i in range(rank))
    if flags & 1:
        pixels = (word[15] & 0x3FF) + 1
        bits = {3: 16, 4: 8, 5: 5}[rank]
        lower = tuple(_signed(word[14] >> bits * i, bits) for i in range(rank - 2))
        upper = tuple(_signed(word[14] >> 16 + bits * i, bits) for i in range(rank - 2))
        box = (data[55] + 1,)
    return TensorMap(
        word[0] | word[1] << 32,
        _NAMES[key],
        tuple(word[8 + i] + 1 for i in range(rank)),
        tuple((word[3 + i] | (word[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)),
        box,
        tuple((word[13] >> 3 * i & 7) + 1 for i in range(rank)),
        flags >> 11 & 3,
        swizzle,
        flags >> 17 & 3,
        bool(flags >> 15 & 1),
        lower,
        upper,
        pixels,
    )


def encode_tensor_map(m: TensorMap) -> bytes:
    """128 bytes; the driver's hints after byte 63 are left zero."""
    code, flag, _ = DATA_TYPES[m.data_type]
    base, _, atom = m.swizzle.partition("_")
    word = [0] * 32
    word[0], word[1] = m.address & 0xFFFFFFFF, m.address >> 32
    word[2] = (
        int(m.im2col)
        | (m.rank - 1) << 4
        | code << 7
        | m.interleave << 11
        | _SWIZZLES.index(base) << 13
        | int(m.nan_fill) << 15
        | flag << 16
        | m.l2 << 17
        | _ATOMS.index(f"_{atom}" if atom else "") << 19
    )
    for i, stride in enumerate(m.strides):
        word[3 + i] = stride >> 4 & 0xFFFFFFFF
        word[7] |= (stride >> 36 & 15) << 4 * i
    for i, extent in enumerate(m.dims):
        word[8 + i] = extent - 1 & 0xFFFFFFFF
        word[13] |= (m.element_strides[i] - 1) << 3 * i
    word[13] |= (m.box[0] - 1) << 24
    if m.im2col:
        bits = {3: 16, 4: 8, 5: 5}[m.rank]
        mask = (1 << bits) - 1
        for i in range(m.rank - 2):
            word[14] |= (m.lower[i] & mask) << bits * i | (m.upper[i] & mask) << 16 + bits * i
        word[15] = m.pixels - 1
    else:
        for i, extent in enumerate(m.box[1:]):
            word[14] |= (extent - 1) << 8 * i
    return b"".join(w.to_bytes(4, "little") for w in word)


def _padded_problems(m: TensorMap) -> list[str]:
    """Restrictions of padded 4- and 6-bit types (PTX ISA 9.7.9.27.1.1). A 6-bit store of sm_103 may take half the box."""
    name, problems = m.data_type, []
    half = 64 if name == "u6_padded" else 128
    if m.dims[0] % half:
        problems.append(f"inner extent {m.dims[0]} of {name} is not a multiple of 128")
    if m.box[0] not in (half, 128):
        problems.append(f"inner box extent {m.box[0]} of {name} is not 128")
    if m.swizzle not in ("none", "128B", "128B_32B", "128B_64B"):
        problems.append(f"{name} does not go with the {m.swizzle} swizzle")
    return problems


def tensor_map_problems(m: TensorMap) -> list[str]:
    """Limits that the driver API states and the hardware does not forgive; empty when the map is legal."""
    problems: list[str] = []
    align = 32 if m.interleave == 2 or m.data_type.endswith("padded") else 16
    if m.address % align:
        problems.append(f"global address {m.address:#x} is not a multiple of {align}")
    for i, stride in enumerate(m.strides, 1):
        if stride % align or stride >= 1 << 40:
            problems.append(f"stride {stride} of dimension {i} is not a multiple of {align} below 2^40")
    problems += [
        f"extent {d} of dimension {i} is not in 1 .. 2^32" for i, d in enumerate(m.dims) if not 1 <= d <= 1 << 32
    ]
    problems += [
        f"box extent {b} of dimension {i} is not in 1 .. 256" for i, b in enumerate(m.box) if not 1 <= b <= 256
    ]
    problems += [f"element stride {s} is not in 1 .. 8" for s in m.element_strides if not 1 <= s <= 8]
    inner = m.box[0] * m.shared_bits // 8 if m.box else 0
    if m.interleave == 0:
        if m.box[0] * m.shared_bits % 128:
            problems.append(f"inner box extent of {m.box[0]} elements is not a multiple of 16 bytes")
        limit = {"none": 1 << 30, "32B": 32, "64B": 64}.get(m.swizzle, 128)
        if inner > limit:
            problems.append(f"inner box extent of {inner} bytes exceeds the {m.swizzle} swizzle span")
    elif m.rank < 3:
        problems.append("interleaved maps have at least 3 dimensions")
    if m.interleave == 2 and m.swizzle != "32B":
        problems.append("32-byte interleave needs the 32-byte swizzle")
    if m.data_type.endswith("padded"):
        problems += _padded_problems(m)
    if m.data_type == "u4" and m.dims[0] % 2:
        problems.append("inner extent of a 4-bit tensor is not a multiple of 2")
    if m.nan_fill and m.data_type.startswith(("u4", "u6")):
        problems.append(f"NaN fill does not exist for {m.data_type}")
    if m.im2col and not 1 <= m.pixels <= 1024:
        problems.append(f"{m.pixels} pixels per column are not in 1 .. 1024")
    return problems
