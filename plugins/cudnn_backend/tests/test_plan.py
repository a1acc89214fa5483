"""Plans over the fake libcudnn: built, run, saved and loaded by the real binding."""

from __future__ import annotations

START = "from programs import *\n"


def test_a_plan_hands_the_backend_its_operands_in_their_order(fake):
    fake.run(
        START
        + """
graph = matmul()
plan = build(graph)
assert [operand.name for operand in graph.freeze("cuda").operands] == ["A", "B", "C"]
plan.bind(layout(graph))((256, 512, 768), 4096, 77)
assert Fake().last() == {"pointers": {1: 256, 2: 512, 3: 768}, "workspace": 4096, "stream": 77, "engine": 0}, Fake().last()
assert plan.workspace_size == 512
"""
    )


def test_many_threads_run_one_plan_with_their_own_pointers(fake):
    fake.run(
        START
        + """
import sys, threading
sys.setswitchinterval(1e-6)
graph = matmul()
plan = build(graph)
run = plan.bind(layout(graph))
seen = Fake()
seen.set("pitch", 256)
def work(mine):
    pointers = tuple(256 * (3 * mine + i + 1) for i in range(3))
    for _ in range(2000):
        run(pointers, 4096, mine)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert seen.get("executions") == 8000
assert seen.get("mixed") == 0
"""
    )


def test_what_cudnn_answers_to_a_run_is_an_execution_error_with_its_text(fake):
    fake.run(
        START
        + """
graph, count = matmul(), Fake()
run = build(graph).bind(layout(graph))
count.set("execute_status", 5000)
try:
    run((256, 512, 768), 4096, 0)
except cudnn_core.ExecutionError as error:
    assert "CUDNN_STATUS_EXECUTION_FAILED: the fake was told to fail" in str(error), error
else:
    raise AssertionError
assert "told to fail" in cudnn_core.get_last_error_string()
count.set("execute_status", 0)
run((256, 512, 768), 4096, 0)
assert count.get("executions") == 1
"""
    )


def test_addresses_that_the_plan_was_not_made_for_are_refused(fake):
    fake.run(
        START
        + """
graph, count = matmul(), Fake()
plan = build(graph)
run = plan.bind(layout(graph, alignment=2))
run((256, 512, 768), 4096, 0)  # the layout vouches for nothing, and the addresses are good
for pointers in ((258, 512, 768), (256, 512, 770)):
    try:
        run(pointers, 4096, 0)
    except cudnn_core.ExecutionError as error:
        assert error.operand == ("A" if pointers[0] == 258 else "C") and "multiple of 16" in str(error), error
    else:
        raise AssertionError(pointers)
assert count.get("executions") == 1
"""
    )


def test_operands_that_are_off_by_an_element_are_refused_before_the_backend_is_called(fake):
    """As the conformance kit shifts them: by ``execute``, by a bound run, and through the engine's own ``execute``."""
    fake.run(
        START
        + """
from cudnn_core import VariantPack
graph, count = matmul(), Fake()
with present_gpu():
    with cudnn_core.configure(plugins={"allow": ["cudnn_backend"]}):
        plan = graph.plan(device=cudnn_core.device_info(0))
    good = {"A": 4096, "B": 8192, "C": 16384}
    for shifted in (("A",), ("C",), ("A", "B", "C")):
        pack = plan.pack({name: address + 2 * (name in shifted) for name, address in good.items()})
        bound = plan.bind(pack)
        ctx = ExecutionContext(None, plan.device, 0, 65536)
        for run in (
            lambda: plan.execute(pack, 65536),
            lambda: bound(pack.pointers, 65536, 0),
            lambda: plan._compiled.execute(VariantPack(pack.operands, pack.pointers), ctx),
        ):
            try:
                run()
            except cudnn_core.ExecutionError as error:
                assert error.operand == shifted[0], error
            else:
                raise AssertionError(shifted)
    assert count.get("executions") == 0
    plan.execute(good, 65536)
    assert count.get("executions") == 1
"""
    )


def test_a_number_by_value_may_lie_anywhere_in_the_memory_of_the_host(fake):
    fake.run(
        START
        + """
graph, count = cudnn_core.Graph(io_data_type="float16", compute_data_type="float32", intermediate_data_type="float32"), Fake()
c = graph.matmul(A=graph.tensor(dim=(1, 64, 32), name="A"), B=graph.tensor(dim=(1, 32, 16), name="B"))
alpha = graph.tensor(dim=(1, 1, 1), name="alpha", data_type="float32").set_is_pass_by_value(True)
graph.mul(c, alpha).set_output(True).set_data_type("float16").set_name("C")
names = [operand.name for operand in graph.freeze("cuda").operands]
pointers = [4100 if name == "alpha" else 256 * (1 + place) for place, name in enumerate(names)]
build(graph).bind(layout(graph, alignment=4))(pointers, 4096, 0)
assert count.get("executions") == 1
"""
    )


def test_a_saved_plan_is_loaded_without_planning(fake):
    fake.run(
        START
        + """
from cudnn_backend.engines import BackendGraph
graph, count = matmul(), Fake()
plan = build(graph, config("eng1"))
header, payloads = plan.serialize()
assert (header["cudnn"], header["variant"], header["settings"]) == (91900, "eng1", "KERNEL_CFG=21"), header
asked = count.get("heuristics_asked")
loaded = BackendGraph().load_plan(header, payloads, graph.freeze("cuda"), CTX)
assert count.get("heuristics_asked") == asked
assert (loaded.workspace_size, loaded.choice) == (512, plan.choice)
loaded.bind(layout(graph))((256, 512, 768), 4096, 9)
assert count.last() == {"pointers": {1: 256, 2: 512, 3: 768}, "workspace": 4096, "stream": 9, "engine": 1}, count.last()
wrong = ({"cudnn": "x"}, {"cudnn": None}, {"knobs": []}, {"knobs": {}})
for broken, text in (
    ({"schema": 2}, "schema 2"), ({"cudnn": 92800}, "cuDNN 9.28.0, this is 9.19.0"), ({"variant": None}, ""),
    *((change, "not a plan of this plugin") for change in wrong),
):
    try:
        BackendGraph().load_plan({**header, **broken}, payloads, graph.freeze("cuda"), CTX)
    except cudnn_core.BuildError as error:
        assert text in str(error), error
    else:
        assert broken == {"variant": None}
try:
    BackendGraph().load_plan(header, {}, graph.freeze("cuda"), CTX)
except cudnn_core.BuildError as error:
    assert "not a plan of this plugin" in str(error)
else:
    raise AssertionError
other = matmul(n=24)
other.relu(input=other.tensor(dim=(1, 4, 4), name="D")).set_output(True)
try:
    BackendGraph().load_plan(header, payloads, other.freeze("cuda"), CTX)
except cudnn_core.BuildError as error:
    assert "slots [1, 2, 3] for 5 operands" in str(error), error
else:
    raise AssertionError
"""
    )


def test_kernels_that_are_no_text_are_not_loaded(fake):
    fake.run(
        START
        + """
from cudnn_backend.engines import BackendGraph
graph = matmul(cudnn_core.Dim("m", min=8, max=64, multiple_of=8))
header, _ = build(graph).serialize()
try:
    BackendGraph().load_plan(header, {"kernels": bytes([255, 254])}, graph.freeze("cuda"), CTX)
except cudnn_core.BuildError as error:
    assert "not a plan of this plugin" in str(error), error
else:
    raise AssertionError
"""
    )


def test_a_number_that_cudnn_has_no_room_for_is_a_build_error(fake):
    fake.run(
        START
        + """
for chosen in (config("eng1", engine_knobs="KERNEL_CFG=" + "9" * 23), config("eng" + "9" * 23)):
    try:
        build(matmul(), chosen)
    except cudnn_core.BuildError as error:
        assert error.decline is not None, error
    else:
        raise AssertionError(chosen)
"""
    )


def test_the_core_saves_and_loads_the_plan(fake, tmp_path):
    fake.run(
        START
        + f"""
path = {str(tmp_path / "plan")!r}
with present_gpu():
    handle = cudnn_core.create_handle(0)
    graph = matmul()
    with cudnn_core.configure(plugins={{"allow": ["cudnn_backend"]}}):
        plan = graph.plan(handle)
        plan.save(path)
        asked = Fake().get("heuristics_asked")
        loaded = cudnn_core.Plan.load(path, handle, trust=True)
        assert Fake().get("heuristics_asked") == asked
        assert loaded.engine == "cudnn_backend:graph@1"
        loaded.execute({{"A": 4096, "B": 8192, "C": 16384}}, 4096 * 16, handle)
        assert Fake().last()["pointers"] == {{1: 4096, 2: 8192, 3: 16384}}
        rebuilt = cudnn_core.Plan.load(path, handle)
        assert rebuilt.workspace_size == 512  # without trust it is planned again, or shared with a plan of the process
"""
    )


def test_runtime_sizes_are_planned_when_they_are_first_bound(fake):
    fake.run(
        START
        + """
from cudnn_backend.engines import BackendGraph
count = Fake()
graph = matmul(cudnn_core.Dim("m", min=8, max=1024, multiple_of=8))
plan = build(graph)
assert (plan.workspace_size, count.get("plans_built")) == (512, 1)
plan.bind(layout(graph, m=64))((256, 512, 768), 4096, 0)
plan.bind(layout(graph, m=64))((256, 512, 768), 4096, 0)
assert count.get("plans_built") == 2
plan.bind(layout(graph, m=128))((256, 512, 768), 4096, 0)
assert count.get("plans_built") == 3
count.set("workspace", 1024)
try:
    plan.bind(layout(graph, m=256))
except cudnn_core.ExecutionError as error:
    assert "resource.workspace workspace: needs max 512, got 1024 (at m=256)" in str(error), error
else:
    raise AssertionError
count.set("workspace", 512)
count.set("workspace_of_engine_0", 4096)  # at this size the first engine of the heuristics needs more than there is
run = plan.bind(layout(graph, m=512))
run((256, 512, 768), 4096, 0)
assert count.last()["engine"] == 1
count.set("workspace_of_engine_0", 0)
header, payloads = plan.serialize()
loaded = BackendGraph().load_plan(header, payloads, graph.freeze("cuda"), CTX)
loaded.bind(layout(graph, m=64))((256, 512, 768), 4096, 0)
assert loaded.workspace_size == 512
"""
    )


def test_a_plan_of_runtime_sizes_is_of_one_engine_only_if_it_was_asked_for(fake):
    fake.run(
        START
        + """
from cudnn_backend.engines import BackendGraph
count = Fake()
graph = matmul(cudnn_core.Dim("m", min=8, max=1024, multiple_of=8))
plan, pinned = build(graph), build(graph, config("eng1"))
assert (plan.variant, plan.choice.variant) == ("", "eng0")
assert (pinned.variant, pinned.choice.variant) == ("eng1", "eng1")
count.set("failing_engines", 1)  # from now on: the own choice at this size is another
for built, engine in ((plan, 1), (pinned, 1)):
    built.bind(layout(graph, m=64))((256, 512, 768), 4096, 0)
    assert count.last()["engine"] == engine
assert plan.variant == ""
count.set("failing_engines", 0)
for built, variant in ((plan, ""), (pinned, "eng1")):
    loaded = BackendGraph().load_plan(*built.serialize(), graph.freeze("cuda"), CTX)
    assert loaded.variant == variant
    loaded.bind(layout(graph, m=8))((256, 512, 768), 4096, 0)
    assert count.last()["engine"] == (1 if variant else 0)
"""
    )


def test_native_cuda_graphs(fake):
    fake.run(
        START
        + """
from cudnn_core import VariantPack
count, graph = Fake(), matmul()
plan = build(graph)
pack = VariantPack(layout(graph), (256, 512, 768))
class Graph:  # as cuda-bindings: its int is the handle
    def __int__(self):
        return 0xabc
with present_gpu():
    handle = cudnn_core.create_handle(0, 5)
    plan.populate_cuda_graph(handle, pack, 4096, Graph())
    assert (count.get("populated"), count.last()["pointers"], count.last()["stream"]) == (1, {1: 256, 2: 512, 3: 768}, 5)
    plan.update_cuda_graph(handle, VariantPack(layout(graph), (1024, 512, 768)), 4096, 0xabc)
    assert (count.get("updated"), count.last()["pointers"]) == (1, {1: 1024, 2: 512, 3: 768})
    for stranger in (None, 7, cudnn_core.create_handle("cpu")):
        try:
            plan.populate_cuda_graph(stranger, pack, 4096, 1)
        except cudnn_core.HandleError as error:
            assert "needs a handle of cuda:0" in str(error), error
        else:
            raise AssertionError(stranger)
    for wrong, text in (((handle, pack, None, 1), "needs a workspace of 512"), ((handle, pack, 4096, "x"), "no address")):
        try:
            plan.populate_cuda_graph(*wrong)
        except cudnn_core.ExecutionError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    count.set("native_graph", 0)
    other = build(matmul(128))
    try:
        other.populate_cuda_graph(handle, pack, 4096, 1)
    except cudnn_core.ExecutionError as error:
        assert "capture execute instead" in str(error), error
    else:
        raise AssertionError
    assert count.get("populated") == 1
"""
    )
