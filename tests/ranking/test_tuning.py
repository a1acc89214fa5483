"""Tuning records: one file per graph, device and environment; every sample kept; anything doubtful is a miss."""

from __future__ import annotations

import json
import os
import stat

import pytest

from cudnn_core._canonical import digest
from cudnn_core._engine import PlanConfig
from cudnn_core._errors import CudnnCoreError
from cudnn_core._tuning import Sample, TuningRecord, device_facts, load, path_of, store

KEY = "ab" * 32
DEVICE = {"name": "NVIDIA H200", "key": ["cuda", [9, 0], 132, 232448, 0]}
ENV = {"cudnn_core": "0.1.0", "driver": "13000"}
OPEN = {"pinned": False, "filtered": False}


def sample(engine="p:e@1", us=12.5, knobs=None, **more):
    config = PlanConfig(engine, knobs or {"tile": 64}, "")
    return Sample(engine, config, us, 3, 0.02, (us - 1, us, us + 1), **more)


def record(*samples, key=KEY, device=DEVICE, environment=ENV):
    return TuningRecord(key, device, environment, samples)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cudnn_core"


@pytest.fixture
def file(root):
    """The file of a stored record."""
    assert store(record(sample()), **OPEN, root=root) == ""
    return root.joinpath(*path_of(KEY, DEVICE, ENV))


def read(root, key=KEY, device=DEVICE, environment=ENV):
    return load(key, device, environment, root=root)


def test_a_stored_record_is_read_back_whole(root):
    samples = (sample(), sample("q:e@2", 7.25, {"split": [1, 2], "fast": True}, sizes={"m": 64}, dists={"q": "1"}))
    assert store(record(*samples), **OPEN, root=root) == ""
    assert read(root) == record(*samples)


def test_there_is_one_file_per_graph_device_and_environment(root):
    other = {**DEVICE, "name": "NVIDIA H100"}
    places = [record(sample()), record(sample(), key="cd" * 32), record(sample(), device=other)]
    places.append(record(sample(), environment={**ENV, "driver": "13010"}))
    for place in places:
        store(place, **OPEN, root=root)
    files = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) == 4
    assert read(root, device=other).device == other
    assert read(root, environment={**ENV, "driver": "1"}) is None


def test_reading_creates_nothing(root):
    assert read(root) is None
    assert not root.exists()


def test_every_sample_is_kept(root):
    for us in (12.5, 11.0):
        store(record(sample(us=us)), **OPEN, root=root)
    store(record(sample("q:e@1")), **OPEN, root=root)
    assert [(item.engine, item.us) for item in read(root).samples] == [
        ("p:e@1", 12.5),
        ("p:e@1", 11.0),
        ("q:e@1", 12.5),
    ]


def test_the_latest_sample_of_an_engine_is_its_time():
    made = record(sample(us=12.5), sample(us=11.0), sample("q:e@1", 1.0))
    assert made.best("p:e@1").us == 11.0
    assert made.best("p:e@2") is None


def test_a_sample_counts_at_its_sizes_and_with_its_distributions():
    made = record(sample("p:e@1", dists={"p": "1.0", "torch": "2.9"}), sample("q:e@1", sizes={"m": 64}))
    assert made.best("p:e@1", {}, {"torch": "2.9", "p": "1.0"}) == made.samples[0]
    assert made.best("p:e@1", {}, {"torch": "2.10", "p": "1.0"}) is None
    assert made.best("p:e@1") is None
    assert made.best("q:e@1", {"m": 64}) == made.samples[1]
    assert made.best("q:e@1", {"m": 65}) is None


@pytest.mark.parametrize(("why", "reason"), [("pinned", "pinned"), ("filtered", "left engines out")])
def test_a_pinned_or_filtered_run_writes_nothing_and_says_why(root, caplog, why, reason):
    assert reason in store(record(sample()), **{**OPEN, why: True}, root=root)
    assert not root.exists()
    assert reason in caplog.text


def test_the_caller_must_say_whether_the_run_was_pinned_or_filtered(root):
    with pytest.raises(TypeError):
        store(record(sample()), root=root)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_sample_that_is_no_time_is_refused(root, bad):
    assert "us" in store(record(sample()._replace(us=bad)), **OPEN, root=root) or "JSON" in store(
        record(sample()._replace(us=bad)), **OPEN, root=root
    )
    assert not root.exists()


def test_folders_are_private(file, root):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (root, *file.parents[: len(file.relative_to(root).parts) - 1]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_temporary_file_stays_behind(file):
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", file.name]


def test_a_crash_while_writing_leaves_the_old_record(file, root, monkeypatch):
    def crash(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    assert "No space left" in store(record(sample("q:e@1")), **OPEN, root=root)
    assert read(root) == record(sample())
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", file.name]


# --- doubtful files


@pytest.mark.parametrize("part", [0, 1, 0.5, 0.99])
def test_a_truncated_record_is_a_miss(file, root, caplog, part):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part) if isinstance(part, float) else part])
    assert read(root) is None
    assert "tuning record ignored" in caplog.text


def test_any_changed_byte_is_a_miss(file, root, caplog):
    data = file.read_bytes()
    for at in range(0, len(data), 41):
        file.write_bytes(data[:at] + (b"7" if data[at : at + 1] != b"7" else b"8") + data[at + 1 :])
        assert read(root) is None
    file.write_bytes(data)
    assert read(root) == record(sample())


def rewritten(file, change):
    """Change the record and sign it again."""
    body = json.loads(file.read_bytes())
    change(body)
    body.pop("digest")
    file.write_text(json.dumps({**body, "digest": digest(body)}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.update(schema=2), "schema 2"),
        (lambda body: body.update(graph_key="cd" * 32), "another graph"),
        (lambda body: body["device"].update(name="NVIDIA H100"), "another device"),
        (lambda body: body["environment"].update(driver="1"), "another environment"),
        (lambda body: body.update(extra=1), "unknown field 'extra'"),
        (lambda body: body["samples"][0].pop("n"), "field 'n' is missing"),
        (lambda body: body["samples"][0].update(us=-1), r"samples[0].us"),
        (lambda body: body["samples"][0].update(samples_us=[0]), r"samples[0].samples_us"),
        (lambda body: body["samples"][0].update(engine="q:e@1"), "of another engine"),
        (lambda body: body["samples"][0]["config"].update(knobs=[]), r"samples[0].config.knobs"),
    ],
)
def test_a_foreign_record_is_a_miss_with_a_logged_reason(file, root, caplog, change, reason):
    rewritten(file, change)
    assert read(root) is None
    assert reason in caplog.text


def test_a_symbolic_link_is_refused(file, root, tmp_path, caplog):
    elsewhere = tmp_path / "elsewhere.json"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert read(root) is None
    assert "tuning record ignored" in caplog.text


def test_a_linked_folder_is_refused(file, root, tmp_path, caplog):
    file.parent.rename(tmp_path / "moved")
    file.parent.symlink_to(tmp_path / "moved")
    assert read(root) is None
    assert "symbolic link" in caplog.text
    assert "symbolic link" in store(record(sample()), **OPEN, root=root)


def test_a_file_that_others_may_write_is_a_miss(file, root, caplog):
    file.chmod(0o666)
    assert read(root) is None
    assert "others may write" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_a_miss(file, root, caplog):
    os.chown(file, 12345, -1)
    assert read(root) is None
    assert "belongs to user 12345" in caplog.text


def test_a_doubtful_record_is_replaced_by_the_next_benchmark(file, root):
    file.write_text("{")
    assert store(record(sample("q:e@1")), **OPEN, root=root) == ""
    assert read(root) == record(sample("q:e@1"))


def test_a_folder_that_cannot_be_made_is_a_reason_not_an_exception(tmp_path):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "cudnn_core"
    assert str(tmp_path / "file") in store(record(sample()), **OPEN, root=root)
    assert read(root) is None


def test_a_graph_key_is_no_path():
    with pytest.raises(CudnnCoreError, match="not a graph key"):
        load("../../etc/passwd", DEVICE, ENV)


def test_device_facts_tell_devices_of_one_kind_apart_by_name(fake):
    a, b = device_facts(fake.device(name="NVIDIA H100")), device_facts(fake.device(name="NVIDIA H200"))
    assert a["key"] == b["key"]
    assert a != b
    assert json.loads(json.dumps(a)) == a
