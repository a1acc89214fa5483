"""configure(): plainly for the process, as a with block for one context; the snapshot and its epoch."""

from __future__ import annotations

import contextvars
import logging
import os
import threading

import pytest

from cudnn_core import _config
from cudnn_core._config import configure, current, epoch
from cudnn_core._errors import ConfigError


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
    configure(strict=True, disable=["a:x"])
    with configure(strict=False, disable=["a:y"]):
        assert current().strict is False
        assert patterns(current().disable) == ["a:x", "a:y"]
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


def test_configure_itself_reads_no_file(process):
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
