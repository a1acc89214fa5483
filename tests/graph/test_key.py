"""The graph key: equal for equal graphs whatever their names, uids and order of construction; different otherwise."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn_core
from cudnn_core import Dim, Graph

F32 = {"io_data_type": "float32", "intermediate_data_type": "float32", "compute_data_type": "float32"}
UNARY = ("relu", "gelu", "tanh", "exp")
BINARY = ("add", "mul", "sub")


def build(recipe, order, names, uids, shapes):
    """The DAG of ``recipe`` with its nodes built in ``order`` (topological) and inputs declared last or first."""
    g = Graph(**F32)
    made = {}

    def tensor(i):
        if i not in made:
            made[i] = g.tensor(dim=shapes[i], name=names[i], uid=uids[i])
        return made[i]

    for n in order:
        op, sources, output = recipe[n]
        made[("n", n)] = getattr(g, op)(*[made[s] if isinstance(s, tuple) else tensor(s) for s in sources])
        if output:
            made[("n", n)].set_output(True)
    return g


def random_recipe(rng, inputs, count):
    recipe, alive = [], [*range(inputs)]
    for n in range(count):
        binary = rng.random() < 0.5
        sources = tuple(rng.choice(alive) for _ in range(2 if binary else 1))
        recipe.append((rng.choice(BINARY if binary else UNARY), sources, True))
        alive.append(("n", n))
    return recipe


def random_order(rng, recipe):
    done, order = set(), []
    while len(order) < len(recipe):
        ready = [
            n
            for n, (_, sources, _) in enumerate(recipe)
            if n not in done and all(not isinstance(s, tuple) or s[1] in done for s in sources)
        ]
        order.append(rng.choice(ready))
        done.add(order[-1])
    return order


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_names_uids_and_construction_order_do_not_change_the_key(seed):
    rng = random.Random(seed)
    recipe = random_recipe(rng, 3, rng.randint(1, 8))
    shapes = [rng.choice([(2, 3), (1, 3), (2, 1)]) for _ in range(3)]
    plain = build(recipe, range(len(recipe)), ["a", "b", "c"], [None] * 3, shapes)
    other = build(recipe, random_order(rng, recipe), ["x", "x", ""], [70, None, 12], shapes)
    assert plain.key() == other.key()
    frozen, twin = plain.freeze(), other.freeze()
    assert [n.op for n in frozen.nodes] == [n.op for n in twin.nodes]
    assert [(o.dtype, o.dim, o.role) for o in frozen.operands] == [(o.dtype, o.dim, o.role) for o in twin.operands]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_changed_op_or_wire_changes_the_key(seed):
    rng = random.Random(seed)
    recipe = random_recipe(rng, 3, rng.randint(2, 6))
    shapes = [(2, 3)] * 3
    n = rng.randrange(len(recipe))
    op, sources, output = recipe[n]
    others = [name for name in (BINARY if len(sources) == 2 else UNARY) if name != op]
    changed = [*recipe]
    changed[n] = (rng.choice(others), sources, output)
    args = (range(len(recipe)), ["a", "b", "c"], [None] * 3, shapes)
    assert build(recipe, *args).key() != build(changed, *args).key()


def test_swapped_operands_of_a_non_commutative_op_differ():
    def graph(swap):
        g = Graph(**F32)
        a, b = g.tensor(dim=(2, 3), name="a"), g.tensor(dim=(2, 3), name="b")
        sub = g.sub(b, a) if swap else g.sub(a, b)
        g.add(sub, g.relu(a)).set_output(True)
        return g

    assert graph(False).key() != graph(True).key()


def test_symmetric_branches_get_one_order_whatever_the_uids():
    """Two interchangeable branches: refinement ties, and either choice must give the same canonical form."""

    def graph(order):
        g = Graph(**F32)
        x = g.tensor(dim=(4, 4), name="x")
        branches = [g.relu(g.add(x, g.tensor(dim=(4, 4), name=f"b{i}"))) for i in order]
        total = branches[0]
        for branch in branches[1:]:
            total = g.max(total, branch)
        total.set_output(True)
        return g

    keys = {graph(order).key() for order in itertools.permutations(range(3))}
    assert len(keys) == 1


VARIANTS = {
    "dtype": lambda g: g.tensor(dim=(2, 3), data_type="bfloat16"),
    "dim": lambda g: g.tensor(dim=(2, 1)),
    "stride": lambda g: g.tensor(dim=(2, 3), stride=(1, 2)),
    "reordering": lambda g: g.tensor(dim=(2, 3), reordering_type="F8_128x4"),
    "alignment_value": lambda g: g.tensor(dim=(2, 3), alignment_value=8),
    "dim_range": lambda g: g.tensor(dim=(Dim("m", max=7), 3)),
    "constant": lambda g: 2.0,
    "other_constant": lambda g: 3.0,
}


def test_each_property_of_a_tensor_is_part_of_the_key():
    def key(make):
        g = Graph(**F32)
        g.add(
            g.tensor(dim=(Dim("m", max=7), 3)) if make is VARIANTS["dim_range"] else g.tensor(dim=(2, 3)), make(g)
        ).set_output(True)
        return g.key()

    keys = [key(lambda g: g.tensor(dim=(2, 3))), *(key(make) for make in VARIANTS.values())]
    assert len(set(keys)) == len(keys)


def test_dim_names_are_not_part_of_the_key_but_their_sharing_is():
    def key(first, second):
        g = Graph(**F32)
        a = g.tensor(dim=(1, Dim(first, max=64), 8), name="a")
        b = g.tensor(dim=(1, 8, Dim(second, max=64)), name="b")
        g.matmul(a, b).set_output(True)
        return g.key()

    assert key("m", "n") == key("rows", "cols")
    assert key("m", "m") != key("m", "n")


def test_a_dim_value_is_not_part_of_the_key_but_its_range_is():
    def key(**limits):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(Dim("m", **limits), 8))).set_output(True)
        return g.key()

    assert len({key(max=64), key(max=128), key(min=2, max=64), key(max=64, multiple_of=8)}) == 4


def test_attributes_and_compute_type_are_part_of_the_key():
    def key(compute=None, **attrs):
        g = Graph(**F32)
        g.relu(g.tensor(dim=(2, 3)), compute_data_type=compute, **attrs).set_output(True)
        return g.key()

    assert len({key(), key(negative_slope=0.5), key(upper_clip=6.0), key(compute="float64")}) == 4


def test_ragged_offsets_are_part_of_the_key():
    def key(shared):
        g = Graph(**F32)
        offsets = [g.tensor(dim=(3, 1), data_type="int32", name=f"o{i}") for i in range(2)]
        a = g.tensor(dim=(2, 3), name="a", ragged_offset=offsets[0])
        b = g.tensor(dim=(2, 3), name="b", ragged_offset=offsets[0 if shared else 1])
        g.add(a, b).set_output(True)
        return g.freeze()

    one, two = key(True), key(False)
    assert one.key != two.key
    assert len(one.operands) == 4
    assert len(two.operands) == 5


def test_the_key_is_stable_across_processes_and_releases():
    """A changed key orphans every stored tuning record: change it on purpose only."""
    g = Graph(**F32)
    x, w = g.tensor(dim=(1, 4, 8), name="x"), g.tensor(dim=(1, 8, 16), name="w")
    g.gelu(g.matmul(x, w)).set_output(True)
    assert g.key() == "02e64a484eabd680792d5ba178596c5729ec72fc24859fd17216b9df44057d4f"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_one_element_cpu_tensor_is_a_host_value_only_on_a_gpu(device_type):
    torch = pytest.importorskip("torch")
    g = Graph(**F32)
    x = g.tensor(dim=(2, 3), name="x")
    s = g.tensor_like(torch.ones(1, 1), name="s")
    g.mul(x, s).set_output(True)
    by_value = {operand.name: operand.by_value for operand in g.freeze(device_type).operands}
    assert by_value["s"] is (device_type == "cuda")


def test_frozen_objects_refuse_mutation():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(2, 3), name="x")).set_output(True)
    frozen = g.freeze()
    for target, name in ((frozen, "key"), (frozen.nodes[0], "op"), (frozen.tensors[0], "dim")):
        with pytest.raises(AttributeError):
            setattr(target, name, None)
    with pytest.raises(TypeError):
        frozen.nodes[0].attrs["negative_slope"] = 1.0
    with pytest.raises(TypeError):
        frozen.nodes[0].inputs["in0"] = None


def test_facts_are_computed_once():
    g = Graph(**F32)
    g.relu(g.tensor(dim=(2, 3), name="x")).set_output(True)
    frozen, calls = g.freeze(), []

    def count(graph):
        calls.append(graph)
        return len(graph.nodes)

    assert frozen.facts(count) == frozen.facts(count) == 1
    assert calls == [frozen]


def test_public_class_is_one_for_both_names():
    assert cudnn_core.pygraph is cudnn_core.Graph


def relus(*sizes):
    g = Graph(**F32)
    for size in sizes:
        g.relu(g.tensor(dim=(size,))).set_output(True)
    return g


def test_where_dims_repeat_is_structure_and_their_order_is_not():
    m, n = Dim("m", max=64), Dim("n", max=64)
    assert len({relus(*sizes).key() for sizes in ((m, m, n), (m, n, m), (n, m, m), (n, n, m))}) == 1
    assert relus(m, m, n).key() != relus(m, m, m).key()
    assert relus(m, m, n).key() != relus(m, n, Dim("k", max=64)).key()


def test_names_of_dims_in_a_product_of_strides_do_not_matter():
    def key(first, second):
        m, n = Dim(first, max=64), Dim(second, max=64)
        g = Graph(**F32)
        g.relu(g.tensor(dim=(2, 3), stride=(m * n, 1))).set_output(True).set_stride((3, 1))
        g.neg(g.tensor(dim=(m,))).set_output(True)
        g.abs(g.tensor(dim=(n,))).set_output(True)
        return g.key()

    assert key("a", "b") == key("b", "a")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_key_of_a_graph_with_dims_and_ragged_offsets_ignores_the_order_of_construction(seed):
    rng = random.Random(seed)
    sizes = [rng.choice("mnk") for _ in range(5)]
    offset_of = [rng.choice([None, 0, 1]) for _ in sizes]

    def key(order, names):
        dims = {name: Dim(names[name], max=64) for name in "mnk"}
        g = Graph(**F32)
        offsets = {i: g.tensor(dim=(3,), data_type="int32") for i in dict.fromkeys(offset_of[i] for i in order)}
        for i in order:
            x = g.tensor(dim=(dims[sizes[i]], 4))
            if offset_of[i] is not None:
                x.set_ragged_offset(offsets[offset_of[i]])
            g.relu(x).set_output(True)
        return g.key()

    order = [*range(len(sizes))]
    rng.shuffle(order)
    assert key(range(len(sizes)), {n: n for n in "mnk"}) == key(order, {"m": "z", "n": "m", "k": "a"})


def test_a_constant_is_its_value_whatever_python_calls_it():
    np = pytest.importorskip("numpy")

    def key(number):
        g = Graph(**F32)
        g.add(g.tensor(dim=(4,)), number).set_output(True)
        return g.key()

    assert key(1) == key(1.0) == key(np.float32(1)) == key(np.int64(1))
    assert len({key(1), key(True), key(0.0), key(-0.0)}) == 4


def test_what_the_key_depends_on_can_only_change_through_setters():
    g = Graph(**F32)
    x = g.tensor(dim=(Dim("m", max=8), 3), name="x")
    g.relu(x, name="r").set_output(True)
    g.key()
    fields = [(g, n) for n in ("name", "io_data_type", "intermediate_data_type", "compute_data_type")]
    fields += [(x, n) for n in ("by_value", "value", "default", "is_virtual", "alignment_value", "reordering")]
    fields += [(x, n) for n in ("ragged_offset", "ragged_offset_multiplier", "producer", "dim", "stride", "dtype")]
    fields += [(g.nodes[0], n) for n in ("row", "name", "compute_dtype", "inputs", "outputs", "attrs")]
    fields += [(x.dim[0], n) for n in ("name", "min", "max", "multiple_of")]
    fields += [(x.dim[0] * 2, n) for n in ("factor", "dims")]
    for target, name in fields:
        with pytest.raises(AttributeError):
            setattr(target, name, getattr(target, name))
    for mapping in (g.nodes[0].attrs, g.nodes[0].inputs, g.nodes[0].outputs):
        with pytest.raises(TypeError):
            mapping["negative_slope"] = 0.5
    before = g.key()
    assert x.set_alignment_value(4) is x
    assert g.key() != before


def test_dims_can_be_copied_and_pickled():
    import copy
    import pickle

    for extent in (Dim("m", min=2, max=8, multiple_of=2), Dim("m") * Dim("n") * 3):
        assert copy.deepcopy(extent) == extent == pickle.loads(pickle.dumps(extent))
