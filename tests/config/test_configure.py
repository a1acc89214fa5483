"""configure(): plainly for the process, as a with block for one context; the snapshot and its epoch."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest

import cudnn_core
from cudnn_core import _config
from cudnn_core._config import _state, configure, current, epoch
from cudnn_core._errors import ConfigError
from cudnn_core.testing import temporary_plugin


def patterns(named):
    return [item.pattern for item in named]


pytestmark = pytest.mark.usefixtures("process")


def test_a_plain_call_holds_for_the_process():
    configure(strict=True)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current().strict))
    thread.start()
    thread.join()
    assert (current().strict, seen) == (True, [True])
    assert current().origin("strict") == "configure()"


def test_plain_calls_add_up_like_layers():
    configure(disable=["a:x"], order=["a:*"])
    configure(disable=["a:y"], order=["b:*"])
    assert patterns(current().disable) == ["a:x", "a:y"]
    assert current().order == ("b:*",)


def test_a_plain_call_without_settings_forgets_the_earlier_ones():
    configure(strict=True)
    configure()
    assert current() == _config.Config()


def test_a_plain_call_is_above_every_file_and_variable(process, monkeypatch):
    process.write("project", "strict = true\n")
    monkeypatch.setenv("CUDNN_CORE_STRICT", "true")
    configure(strict=False)
    assert current().strict is False


def test_a_with_block_holds_inside_and_only_there():
    before = current()
    with configure(disable=["a:x"]) as inside:
        assert inside is current()
        assert patterns(inside.disable) == ["a:x"]
    assert current() is before


def test_a_with_block_is_over_the_plain_calls():
    configure(strict=True, disable=["a:x*"])
    with configure(strict=False, disable=["a:y"]):
        assert current().strict is False
        assert patterns(current().disable) == ["a:x*", "a:y"]
    assert current().strict is True


def test_with_blocks_nest_and_the_inner_one_wins():
    with configure(order=["a:*"]):
        with configure(order=["b:*"], strict=True):
            assert current().order == ("b:*",)
        assert (current().order, current().strict) == (("a:*",), False)


def test_a_with_block_ends_on_an_exception():
    with pytest.raises(RuntimeError), configure(strict=True):
        raise RuntimeError
    assert current().strict is False


def test_a_with_block_is_not_seen_by_another_thread():
    seen = []
    with configure(strict=True):
        thread = threading.Thread(target=lambda: seen.append(current().strict))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_with_block_follows_a_copied_context():
    with configure(strict=True):
        context = contextvars.copy_context()
    assert current().strict is False
    assert context.run(lambda: current().strict) is True


def test_one_object_can_be_entered_again_and_nested():
    block = configure(strict=True)
    for _ in range(2):
        with block, block:
            assert current().strict is True
        assert current().strict is False


def test_a_plain_call_inside_a_with_block_is_below_the_block():
    with configure(order=["a:*"]):
        configure(order=["b:*"], disable=["c:d"])
        assert (current().order, patterns(current().disable)) == (("a:*",), ["c:d"])
    assert current().order == ("b:*",)


def test_blocks_of_many_threads_do_not_meet():
    start, failures = threading.Barrier(8), []

    def work(index):
        start.wait()
        for _ in range(20):
            with configure(disable=[f"a:x{index}"]):
                if f"a:x{index}" not in patterns(current().disable):
                    failures.append((index, current().disable))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert current().disable == ()


# A block is a block from the start: nothing of it reaches the process, not even for a moment.


def elsewhere(ask=lambda: current().strict):
    """What ``ask()`` is in another thread."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ask()))
    thread.start()
    thread.join()
    return seen[0]


def test_another_thread_never_sees_a_block_between_its_call_and_its_start():
    before = elsewhere(epoch)
    block = configure(strict=True)
    assert elsewhere() is False
    with block:
        assert (current().strict, elsewhere()) == (True, False)
    assert (current().strict, elsewhere()) == (False, False)
    assert elsewhere(epoch) == before  # the snapshot was never swapped, and what was derived from it stays


def test_a_thread_that_polls_never_sees_the_blocks_of_another_one():
    seen, stop = set(), threading.Event()

    def poll():
        while not stop.is_set():
            seen.add(epoch())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(500):
            with configure(strict=True):
                assert current().strict is True
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert len(seen) == 1


def test_a_plain_call_reaches_other_threads_when_its_object_is_gone():
    configure(strict=True)
    assert elsewhere() is True  # although this thread has not looked yet


def test_a_plain_call_whose_object_is_kept_reaches_them_when_its_own_thread_has_looked():
    kept = configure(strict=True)
    assert elsewhere() is False
    assert current().strict is True
    assert elsewhere() is True
    del kept
    assert elsewhere() is True


def test_a_plain_call_of_a_thread_that_has_ended_holds():
    kept = elsewhere(lambda: configure(strict=True))
    assert elsewhere() is False
    del kept
    assert elsewhere() is True


def test_a_block_that_another_thread_enters_is_a_block_there():
    block = configure(strict=True)

    def enter():
        with block:
            return current().strict

    assert elsewhere(enter) is True
    assert current().strict is False


def test_an_object_that_was_taken_for_a_plain_call_stays_one():
    kept = configure(order=["a:*"])
    assert current().order == ("a:*",)
    with kept, configure(order=["b:*"]):
        assert current().order == ("b:*",)
    assert current().order == ("a:*",)


def test_calls_count_in_their_order_whenever_they_are_taken():
    kept = [configure(order=["a:*"]), configure(strict=True)]
    configure(order=["b:*"])
    assert elsewhere(lambda: (current().order, current().strict)) == (("b:*",), False)
    assert (current().order, current().strict) == (("b:*",), True)
    del kept


def test_forgetting_counts_in_order_too():
    kept = configure(order=["a:*"])
    configure()
    configure(strict=True)
    assert elsewhere(lambda: current().strict) is True
    assert (current().order, current().strict) == ((), True)
    del kept


def test_a_collection_inside_the_swap_does_not_deadlock():
    kept = configure(strict=True)
    with _state._lock:
        del kept  # what the collector may do at any allocation
    assert current().strict is True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_swaps_does_not_hang_the_child():
    code = """
        import os, signal, threading
        from cudnn_core._config import _state, configure, current
        current()
        held, release = threading.Event(), threading.Event()
        def hold():
            with _state._lock, _state._snapshot.lock:
                held.set()
                release.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            configure(max_workspace=1)
            os._exit(0 if current().max_workspace == 1 else 1)
        release.set()
        thread.join()
        print(os.waitpid(child, 0)[1])
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("0", "")


# Names under strict.


def test_an_unknown_engine_under_strict_is_refused_by_the_call_and_nothing_is_installed():
    before = current()
    with pytest.raises(ConfigError, match="no engine 'nope:x'") as caught:
        configure(strict=True, disable=["nope:x"])
    assert (caught.value.origin, caught.value.key) == ("configure()", "engines.disable")
    assert current() is before
    assert elsewhere(current) is before


@pytest.mark.parametrize(
    "settings",
    [
        {"disable": ["nope:x"]},
        {"enable": ["nope:x"]},
        {"order": ["nope:x"]},
        {"rule": [{"use": "nope:x"}]},
        {"rule": [{"avoid": ["nope:x"]}]},
        {"knobs": {"nope:x": {"tile": 1}}},
    ],
)
@pytest.mark.parametrize("strict", ["call", "block", "variable", "file", "held"])
def test_wherever_strict_comes_from_and_whatever_names_the_engine(process, monkeypatch, settings, strict):
    held = None
    if strict == "variable":
        monkeypatch.setenv("CUDNN_CORE_STRICT", "1")
        _config.reload()
    elif strict == "file":
        process.write("user", "strict = true\n")
        _config.reload()
    elif strict == "held":
        held = configure(strict=True)
    elif strict == "call":
        configure(strict=True)
    with contextlib.ExitStack() as stack:
        if strict == "block":
            stack.enter_context(configure(strict=True))
        with pytest.raises(ConfigError, match="no engine 'nope:x'"):
            configure(**settings)
        assert cudnn_core.registry().engines is not None  # nothing that raises later, either
    del held


def test_strict_over_a_file_that_names_an_unknown_engine_is_refused_by_the_call(process):
    file = process.write("user", '[engines]\ndisable = ["nope:x"]\n')
    with pytest.raises(ConfigError, match="no engine 'nope:x'") as caught, configure(strict=True):
        pass
    assert caught.value.origin == f"{file}:3"
    assert current().strict is False


def test_a_call_is_no_plain_call_because_a_later_one_is_checked():
    block = configure(order=["a:*"])
    with pytest.raises(ConfigError):
        configure(strict=True, disable=["nope:x"])
    assert elsewhere(lambda: current().order) == ()
    with block:
        assert current().order == ("a:*",)
    assert current().order == ()


def test_known_engines_and_globs_pass_under_strict():
    with temporary_plugin({"plugin": "acme", "engine": [{"name": "e", "ops": ["*"]}]}, {"e": object}):
        configure(strict=True, disable=["acme:e", "nope:*"])
        assert current().strict is True
        configure()


def test_without_strict_an_unknown_engine_only_warns_and_only_when_it_is_used():
    configure(disable=["nope:x"])
    with pytest.warns(_config.ConfigWarning, match="no engine 'nope:x'"):
        cudnn_core.registry()


# Validation is that of a file.


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"strikt": True}, "strikt", "did you mean 'strict'?"),
        ({"engines": {"disabel": []}}, "engines.disabel", "did you mean 'disable'?"),
        ({"strict": 1}, "strict", "must be true or false"),
        ({"disable": "a:b"}, "engines.disable", "must be a list"),
        ({"disable": ["a.b:C"]}, "engines.disable", "never modules or paths"),
        ({"rule": [{"use": "a:b", "avoid": ["a:b"]}]}, "rule[0].avoid", "contradicts use"),
        ({"enable": ["a:b"], "disable": ["a:b"]}, "engines.enable", "contradicts engines.disable"),
        ({"engines": {"disable": []}, "disable": []}, "disable", "given twice"),
        ({"engine": {}, "knobs": {}}, "knobs", "given twice"),
        ({"max_workspace": "1 mib"}, "engines.max_workspace", "is not a size"),
        ({"schema": 2}, "schema", "schema 1"),
        ({"cache_dir": "relative"}, "cache_dir", "not an absolute path"),
        ({"knobs": {"a:b": {"c": object()}}}, 'engine."a:b".knobs.c', "a knob is"),
        ({"plugins": {1: 2}}, "plugins", "must be a table"),
    ],
)
def test_a_malformed_call_changes_nothing_and_names_the_key(settings, key, message):
    before = current()
    with pytest.raises(ConfigError) as caught:
        configure(**settings)
    assert message in str(caught.value)
    assert (caught.value.origin, caught.value.key) == ("configure()", key)
    assert current() is before


def test_tables_and_short_keys_say_the_same():
    long = {"engines": {"disable": ["a:b"]}, "plugins": {"allow": ["a"]}, "engine": {"a:c": {"knobs": {"t": 1}}}}
    short = {"disable": ["a:b"], "allow": ["a"], "knobs": {"a:c": {"t": 1}}}
    with configure(**long) as one:
        pass
    with configure(**short) as other:
        pass
    assert one == other


def test_the_callers_objects_are_not_changed(tmp_path):
    tables = {"disable": ["a:b"]}
    configure(engines=tables, order=["a:*"], cache_dir=tmp_path)
    assert tables == {"disable": ["a:b"]}
    tables["disable"].append("c:d")
    assert patterns(current().disable) == ["a:b"]
    assert current().cache_dir == str(tmp_path)


# The snapshot.


def test_files_are_read_once_per_snapshot(process):
    process.write("project", "strict = true\n")
    assert current().strict is True
    process.project.unlink()
    assert current().strict is True
    with configure(order=["a:*"]):
        assert current().strict is True
    _config.reload()
    assert current().strict is False


def test_a_plain_call_reads_files_and_variables_anew(process, monkeypatch):
    assert current().strict is False
    monkeypatch.setenv("CUDNN_CORE_STRICT", "1")
    assert current().strict is False
    configure(order=["a:*"])
    assert current().strict is True


def test_reload_keeps_the_plain_calls(process):
    configure(order=["a:*"])
    process.write("project", "strict = true\n")
    _config.reload()
    assert (current().strict, current().order) == (True, ("a:*",))


def test_configure_itself_reads_no_file_unless_strict_may_matter(process):
    process.write("project", "strict = = true\n")
    configure(order=["a:*"])
    with pytest.raises(ConfigError, match="invalid TOML"):
        current()


def test_a_with_block_over_a_broken_file_leaves_nothing_behind(process):
    process.write("project", "strict = = true\n")
    with pytest.raises(ConfigError), configure(order=["a:*"]):
        pass
    process.project.unlink()
    assert current() == _config.Config()


def test_the_epoch_tells_configurations_apart_and_comes_back():
    first = epoch()
    assert epoch() == first
    with configure(strict=True):
        inside = epoch()
        assert inside == epoch() != first
    assert epoch() == first
    configure(strict=True)
    assert epoch() not in (first, inside)
    second = epoch()
    _config.reload()
    assert epoch() > second


def test_overlapping_blocks_of_two_threads_give_the_snapshot_back():
    before = epoch()
    one = configure(strict=True)
    other = configure(order=["a:*"])
    with one, other:
        assert (current().strict, current().order) == (True, ("a:*",))
    assert epoch() == before


def test_load_changes_nothing(process):
    before = current()
    assert _config.load(overlay={"strict": True}).strict is True
    assert current() is before


# The log key.


@pytest.fixture
def logger():
    logger = logging.getLogger("cudnn_core")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_log_sets_the_level_of_the_package_logger(logger):
    configure(log="info")
    current()
    assert logger.level == logging.INFO
    configure(log="off")
    current()
    assert not logger.isEnabledFor(logging.CRITICAL)


def test_without_handlers_records_go_to_stderr(logger, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure(log="info")
    current()
    logger.info("selected a:b")
    assert capsys.readouterr().err == "INFO cudnn_core: selected a:b\n"
    handlers = list(logger.handlers)
    configure(log="debug")
    current()
    assert logger.handlers == handlers


def test_without_the_key_logging_is_left_alone(logger):
    logger.setLevel(logging.ERROR)
    current()
    assert logger.level == logging.ERROR


def test_variables_of_the_process_are_seen(monkeypatch):
    monkeypatch.setitem(os.environ, "CUDNN_CORE_PLUGINS", "a")
    configure()
    assert current().allow == ("a",)
