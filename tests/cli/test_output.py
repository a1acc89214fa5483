"""What the verbs print with: aligned tables, escaped text, a progress bar for terminals only."""

from __future__ import annotations

import io
import json

from cudnn_core._cli._output import Progress, aligned


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_columns_are_aligned_and_control_characters_escaped():
    text = aligned([("a", 1), ("long\n", 22)], ("name", "count"), right=(1,))
    assert text.splitlines() == ["name    count", "a           1", "long\\n     22"]


def test_progress_is_drawn_on_a_terminal_and_wiped(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    bar = Progress(4, "bench")
    bar.step(2, "p:e@1")
    assert "[############............] 2/4 p:e@1" in terminal.getvalue()
    bar.close()
    assert terminal.getvalue().endswith("\r")


def test_without_a_terminal_there_is_no_progress(monkeypatch):
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    bar = Progress(4)
    bar.step(1)
    bar.close()
    assert log.getvalue() == ""


def test_progress_stays_out_of_the_json(cli, graph_file, engines, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with engines(one={}):
        code, out, _ = cli("bench", graph_file(), "--repeats", "2", "--json")
    assert code == 0
    assert json.loads(out)["recorded"] is True
    assert "one:add@1" in terminal.getvalue()
