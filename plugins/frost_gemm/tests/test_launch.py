"""The bound run: which words a host function gets, what is refused and how, and what a call costs. No GPU: functions are stubs."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from array import array
from dataclasses import replace

import pytest
from frost_gemm.binding import Binding, Place, SizeOf
from frost_gemm.ir import Aux, Gemm, Matrix, Op, Program, Reduction, Ref, Store, argument_words
from frost_gemm.launch import Launcher, broken, layout_words, rules
from frost_gemm.layout import LARGEST_EXTENT
from frost_gemm.lower import lower

import cudnn_core
from cudnn_core import Dim, DriverError, ExecutionError, Operand

PROGRAM = Program(
    a=(Matrix("bfloat16"),),
    b=(Matrix("bfloat16", major="mn"),),
    gemms=(Gemm(),),
    aux=(Aux("float32", "scalar", by_value=True), Aux("bfloat16", "col", major="n", alignment=16)),
    ops=(
        Op("mul", (Ref("acc", 0), Ref("aux", 0)), "float32"),
        Op("add", (Ref("val", 0), Ref("aux", 1)), "float32"),
    ),
    stores=(Store(Ref("val", 1), "bfloat16"),),
)
SHAPE = {"m": (SizeOf(4, 1),), "n": (SizeOf(4, 2),), "k": (SizeOf(0, 2),), "l": (SizeOf(4, 0),)}
BINDING = Binding(
    (
        Place("a0", 0, 1, 2, 0),
        Place("b0", 1, 2, 1, 0),
        Place("aux0", 2),
        Place("aux1", 3, None, 2),
        Place("store0", 4, 1, 2, 0),
    ),
    SHAPE,
)
SLOTS = {"a0": 0, "b0": 1, "aux0": 2, "aux1": 3, "store0": 4}
NAMES = argument_words(PROGRAM)
POINTERS = (0x10000, 0x20000, 0x7FFF0004, 0x30010, 0x40000)


def operand(name, dtype, dim, stride, role="input", by_value=False, alignment=16):
    return Operand(hash(name) % 100, name, dtype, dim, stride, role, by_value, alignment)


def operands(m=24, n=40, k=64, batch=3, **changes):
    made = {
        "a": operand("a", "bfloat16", (batch, m, k), (m * k, k, 1)),
        "b": operand("b", "bfloat16", (batch, k, n), (k * n, n, 1)),
        "alpha": operand("alpha", "float32", (1, 1, 1), (1, 1, 1), by_value=True, alignment=4),
        "bias": operand("bias", "bfloat16", (1, 1, n), (n, n, 1)),
        "c": operand("c", "bfloat16", (batch, m, n), (m * n, n, 1), "output"),
    }
    for name, fields in changes.items():
        made[name] = made[name]._replace(**fields)
    return tuple(made.values())


class Calls:
    """A host function that remembers the block and the stream of each call."""

    def __init__(self):
        self.seen = []

    def __call__(self, address, stream):
        block = ctypes.string_at(address, 8 * len(NAMES)) if address else b""
        self.seen.append((dict(zip(NAMES, struct.unpack(f"{len(block) // 8}q", block), strict=False)), stream))


def launcher(function=None, program=PROGRAM):
    return Launcher(program, BINDING, lambda: function or Calls())


def test_words_are_sizes_strides_and_addresses_in_the_kernels_orientation():
    calls = Calls()
    run = launcher(calls).bind(operands())
    run(POINTERS, 0x5000, 77)
    words, stream = calls.seen[-1]
    assert stream == 77
    assert words == {
        "m": 24, "n": 40, "k": 64, "l": 3, "workspace": 0x5000,
        "a0.address": 0x10000, "a0.row": 64, "a0.col": 1, "a0.batch": 24 * 64,
        "b0.address": 0x20000, "b0.row": 1, "b0.col": 40, "b0.batch": 64 * 40,
        "aux0.address": 0x7FFF0004, "aux0.row": 0, "aux0.col": 0, "aux0.batch": 0,
        "aux1.address": 0x30010, "aux1.row": 0, "aux1.col": 1, "aux1.batch": 0,
        "store0.address": 0x40000, "store0.row": 40, "store0.col": 1, "store0.batch": 24 * 40,
    }  # fmt: skip


def test_binding_loads_the_gpu_code_and_launches_nothing():
    calls = Calls()
    launcher(calls).bind(operands())
    assert calls.seen == [({}, 0)]


def test_calls_share_nothing():
    calls = Calls()
    run = launcher(calls).bind(operands())
    run(POINTERS, 0, 1)
    run(tuple(p + 0x100 for p in POINTERS), 0, 2)
    (first, _), (second, _) = calls.seen[1:]
    assert (first["a0.address"], second["a0.address"]) == (0x10000, 0x10100)


def test_threads_get_their_own_addresses():
    wrong = []

    def check(address, stream):
        if address:
            (a,) = struct.unpack("q", ctypes.string_at(address + 8 * NAMES["a0.address"], 8))
            time.sleep(0)
            (again,) = struct.unpack("q", ctypes.string_at(address + 8 * NAMES["a0.address"], 8))
            if not a == again == stream:
                wrong.append((a, stream))

    run = launcher(check).bind(operands())

    def work(base):
        for _ in range(200):
            run((base, *POINTERS[1:]), 0, base)

    threads = [threading.Thread(target=work, args=(0x1000 * (i + 1),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_stride_of_an_axis_of_size_one_does_not_count():
    calls = Calls()
    odd = operands(batch=1, a={"stride": (7, 64, 1)}, c={"stride": (3, 40, 1)})
    launcher(calls).bind(odd)(POINTERS, 0, 0)
    words = calls.seen[-1][0]
    assert words["a0.batch"] % 8 == words["store0.batch"] % 8 == 0


@pytest.mark.parametrize("empty", ["m", "n", "batch"])
def test_an_empty_output_launches_nothing(empty):
    calls = Calls()
    launcher(calls).bind(operands(**{empty: 0}))(POINTERS, 0, 0)
    assert calls.seen == []


@pytest.mark.parametrize(("empty", "size"), [("m", "m"), ("n", "n"), ("batch", "l")])
def test_an_empty_output_has_no_grid_for_an_executor(empty, size):
    with pytest.raises(ExecutionError, match=f"{size} is 0"):
        launcher().host_block(operands(**{empty: 0}), POINTERS, 0)


def test_a_machine_without_a_device_is_a_typed_error():
    def fail(words, stream):
        raise RuntimeError("Got Cuda Runtime Error: cudaErrorInsufficientDriver")

    with pytest.raises(DriverError, match=r"GPU code can't be loaded: .*cudaErrorInsufficientDriver"):
        launcher(fail).bind(operands())


def test_nothing_to_add_up_is_refused():
    with pytest.raises(ExecutionError, match="k is 0, and the kernel needs at least 1"):
        launcher().bind(operands(k=0))


def test_a_reduction_of_nothing_is_refused():
    program = replace(PROGRAM, reductions=(Reduction(Ref("val", 1), "amax", "lmn"),))
    binding = Binding((*BINDING.places, Place("reduction0", 5)), SHAPE)
    given = (*operands(m=0), operand("amax", "float32", (1, 1, 1), (1, 1, 1), "output", alignment=4))
    with pytest.raises(ExecutionError, match="m is 0"):
        Launcher(program, binding, Calls).bind(given)


@pytest.mark.parametrize(("slot", "name", "multiple"), [(0, "a", 16), (1, "b", 16), (3, "bias", 16), (4, "c", 16)])
def test_a_misaligned_address_is_refused_by_name_before_the_launch(slot, name, multiple):
    calls = Calls()
    run = launcher(calls).bind(operands())
    shifted = [pointer + 2 * (at == slot) for at, pointer in enumerate(POINTERS)]
    with pytest.raises(
        ExecutionError, match=rf"operand {name}: the address is 0x\w+2, .* a multiple of {multiple}"
    ) as error:
        run(shifted, 0, 0)
    assert error.value.operand == name
    assert len(calls.seen) == 1


def test_a_host_value_may_lie_anywhere():
    calls = Calls()
    run = launcher(calls).bind(operands())
    run((*POINTERS[:2], 0x7FFF0001, *POINTERS[3:]), 0, 0)
    assert calls.seen[-1][0]["aux0.address"] == 0x7FFF0001


def test_one_operand_of_little_alignment_does_not_speak_for_the_others():
    """The core binds once for all addresses of an alignment class, which is that of the least aligned of them."""
    calls = Calls()
    poor = {name: {"alignment": 2} for name in ("a", "b", "alpha", "bias", "c")}
    run = launcher(calls).bind(operands(**poor))
    run(POINTERS, 0, 0)
    assert calls.seen[-1][0]["a0.address"] == POINTERS[0]
    with pytest.raises(ExecutionError, match="operand b: the address"):
        run((POINTERS[0], POINTERS[1] + 2, *POINTERS[2:]), 0, 0)


@pytest.mark.parametrize(
    ("name", "stride", "text"),
    [
        ("a", (24 * 72, 68, 1), "stride of its rows is 68, .* a multiple of 8"),
        ("a", (24 * 64 + 4, 64, 1), "stride of its batches is 1540, .* a multiple of 8"),
        ("b", (64 * 44, 44, 1), "stride of its columns is 44, .* a multiple of 8"),
        ("c", (24 * 41, 41, 1), "stride of its rows is 41, .* a multiple of 8"),
        ("a", (2**40, 64, 1), "stride of its batches is 1099511627776, .* at most 549755813887"),
        ("c", (2**39, 40, 1), "stride of its batches is 549755813888, .* at most 549755813887"),
    ],
)
def test_strides_that_a_tensor_map_cannot_hold_are_refused(name, stride, text):
    with pytest.raises(ExecutionError, match=f"operand {name}: the {text}") as error:
        launcher().bind(operands(**{name: {"stride": stride}}))
    assert error.value.operand == name


def test_sizes_are_32_bit():
    big = operands(m=2**31 - 1)
    with pytest.raises(ExecutionError, match="m is 2147483647, and the kernel needs at most 2147479552"):
        launcher().bind(big)


def test_positions_past_the_last_row_are_32_bit_too():
    """Of any tile and cluster: a position that wraps is negative, and looks as if it were inside."""
    for tile in range(8, 257, 8):
        for ctas in (1, 2, 4, 8):
            assert -(-LARGEST_EXTENT // (tile * ctas)) * tile * ctas < 2**31


def test_tiles_are_counted_in_32_bits():
    fields = {"m": 65, "n": 8, "k": 8}
    launcher().bind(operands(**fields, batch=2**27 - 1))
    with pytest.raises(ExecutionError, match=r"blocks of 64 x 8 elements is 268435456, .* at most 268435455"):
        launcher().bind(operands(**fields, batch=2**27))


def test_offsets_beyond_32_bits_reach_the_kernel_unharmed():
    calls = Calls()
    launcher(calls).bind(operands(a={"stride": (2**34, 2**32, 1)}))(POINTERS, 0, 0)
    words = calls.seen[-1][0]
    assert (words["a0.row"], words["a0.batch"]) == (2**32, 2**34)


def test_unaligned_outputs_and_aux_are_checked_for_what_their_kernel_assumes():
    program = replace(
        PROGRAM,
        stores=(replace(PROGRAM.stores[0], alignment=2),),
        aux=(PROGRAM.aux[0], replace(PROGRAM.aux[1], alignment=2)),
    )
    calls = Calls()
    run = launcher(calls, program).bind(operands(c={"stride": (24 * 41, 41, 1), "alignment": 2}))
    run((*POINTERS[:3], 0x30002, 0x40006), 0, 0)
    assert calls.seen[-1][0]["store0.address"] == 0x40006
    with pytest.raises(ExecutionError, match="operand bias: the address is 0x30001"):
        run((*POINTERS[:3], 0x30001, 0x40006), 0, 0)


def test_the_guard_and_the_message_come_from_one_list():
    """Every address rule is guarded in a call, and nothing else is refused there."""
    addresses = [rule for rule in rules(PROGRAM) if rule.what == "address"]
    assert {rule.subject for rule in addresses} == {"a0", "b0", "aux1", "store0"}
    run = launcher().bind(operands())
    for rule in addresses:
        slot = SLOTS[rule.subject]
        pointers = list(POINTERS)
        pointers[slot] += rule.multiple // 2
        with pytest.raises(ExecutionError):
            run(pointers, 0, 0)
        pointers[slot] += rule.multiple // 2
        run(pointers, 0, 0)


def test_runtime_sizes_are_not_judged_before_they_are_known():
    words = {"m": Dim("m"), "k": "k", "a0.row": Dim("k"), "b0.col": 44}
    assert [(rule.subject, value) for rule, value in broken(rules(PROGRAM), words)] == [("b0", 44)]


def test_a_batch_of_several_axes_is_their_product():
    places = (Place("a0", 0, 2, 3, 1), *BINDING.places[1:])
    shape = Binding(places, SHAPE | {"k": (SizeOf(0, 3),), "l": (SizeOf(0, 0), SizeOf(0, 1))})
    given = list(operands(batch=6))
    given[0] = operand("a", "bfloat16", (2, 3, 24, 64), (3 * 24 * 64, 24 * 64, 64, 1))
    calls = Calls()
    Launcher(PROGRAM, shape, lambda: calls).bind(tuple(given))(POINTERS, 0, 0)
    words = calls.seen[-1][0]
    assert (words["l"], words["a0.batch"]) == (6, 24 * 64)


@pytest.mark.parametrize("inner", [1, 2])
def test_a_batch_axis_that_has_one_element_at_run_time_hides_no_other(inner):
    h = Dim("h", min=1, max=16)
    g = cudnn_core.Graph(io_data_type="bfloat16", intermediate_data_type="float32", compute_data_type="float32")
    c = g.matmul(A=g.tensor(dim=(3, h, 16, 64)), B=g.tensor(dim=(3, h, 64, 32)))
    c.set_output(True).set_data_type("bfloat16")
    graph = g.freeze("cuda")
    words = layout_words(graph.facts(lower).binding, graph.at({"h": inner}).operands)
    assert words["l"] == 3 * inner
    assert (words["a0.batch"], words["b0.batch"], words["store0.batch"]) == (16 * 64, 64 * 32, 16 * 32)


def test_the_block_for_an_executor_names_addresses_and_host_values():
    alpha = ctypes.c_float(0.75)
    pointers = (0x10000, 0x20000, ctypes.addressof(alpha), 0x30010, 0x40000)
    block = launcher().host_block(operands(), pointers, 0x9000)
    words = dict(zip(NAMES, array("q", block.data), strict=True))
    assert words["a0.address"] == 0x10000
    assert words["workspace"] == 0x9000
    assert {at // 8 for at in block.addresses} == {
        NAMES[word] for word in ("workspace", "a0.address", "b0.address", "aux1.address", "store0.address")
    }
    assert block.values == ((8 * NAMES["aux0.address"], struct.pack("f", 0.75)),)


def test_a_run_costs_less_than_a_microsecond_beyond_the_function():
    """Median over short bursts; a busy machine gets the same grace as in the conformance kit."""

    def nothing(address, stream):
        return None

    run = launcher(nothing).bind(operands())
    bursts = []
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(50):
            run(POINTERS, 0, 0)
        middle = time.perf_counter()
        for _ in range(50):
            nothing(1, 0)
        bursts.append((middle - begin) - (time.perf_counter() - middle))
    assert sorted(bursts)[20] / 50 < 1.5e-6
