"""The dashboard at several widths, from recorded runs, and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

import run
from harness.config.explain import known_options
from harness.logging import bottleneck as verdict_module
from harness.logging.bottleneck import verdict
from harness.logging.dashboard import Dashboard
from tests.harness.small import ROOT, SMALL

SPENT = {"collect": 1.0, "train": 2.0, "sync": 0.5, "log": 0.5}
METRICS = {
    "sync/publish_ms": 0.25,
    "sync/ack_ms": 1.5,
    "policy/lag_updates_mean": 1.5,
    "policy/lag_updates_max": 4.0,
    "policy/share/lag_1": 0.75,
    "policy/share/lag_3_4": 0.25,
}


def example(num_workers: int = 2) -> Dashboard:
    """Half-way through a run of 1000 frames."""
    shown = Dashboard(1000, collector="multi_async")
    for step in range(50):
        shown.record(10 * (step + 1), METRICS, float(step))
        spent = {phase: seconds * step for phase, seconds in SPENT.items()}
        stages = ["acting" if (step + i) % 2 else "idle" for i in range(num_workers)]
        shown.sample(step, 10 * (step + 1), spent, stages)
    return shown


def printed(shown: Dashboard, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_a_wide_console_shows_everything_in_words():
    text = printed(example(), 100)
    for part in (
        *("500/1,000 frames", "10 frames/s", "50 s left", "return 49", "▁", "█"),
        *("collect 25%", "update 50%", "publish 12%", "log 12%"),
        *("worker 0", "worker 1", "acting 50%", "waiting 50%", "applying 0%"),
        *("1 ", "75%", "3-4", "25%", "mean 1.5, at most 4 updates"),
        *("publish 0.25 ms", "acknowledge 1.5 ms", "learner-bound", "To go faster,"),
    ):
        assert part in text


@pytest.mark.parametrize("width", [1, 5, 12, 30, 60, 80, 200])
def test_no_line_is_longer_than_the_console_is_wide(width):
    lines = printed(example(), width).splitlines()
    assert lines
    assert max(map(len, lines)) <= width
    if width >= 30:
        assert sum(re.match(r"worker \d", line) is not None for line in lines) == 2


def test_of_many_workers_the_first_are_shown():
    text = printed(example(64), 100)
    assert "worker 11" in text
    assert "worker 12" not in text
    assert "and 52 more workers" in text


def test_a_dashboard_that_knows_nothing_yet_is_one_line():
    assert len(printed(Dashboard(1000), 80).splitlines()) == 1
    unmoved = Dashboard(1000)
    unmoved.record(0, {}, float("nan"))
    for second in range(3):
        unmoved.sample(second, 0, dict.fromkeys(SPENT, 0.0), [""])
    assert "0/1,000 frames" in printed(unmoved, 80)


def test_letters_do_where_a_terminal_has_no_more():
    for width in (80, 30):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        Console(file=stream, width=width).print(example())  # which raises for other characters
        stream.seek(0)
        assert "worker 0" in stream.read()


@pytest.mark.parametrize(
    ("phases", "workers", "collector", "name", "advice"),
    [
        (
            {"train": 0.8, "collect": 0.2},
            {"waiting": 0.7},
            "multi_async",
            "learner-bound",
            "larger",
        ),
        (
            {"train": 0.2, "collect": 0.8},
            {"acting": 0.9},
            "multi_async",
            "environment-bound",
            "add",
        ),
        ({"train": 0.2, "collect": 0.8}, {}, "single", "environment-bound", "multi_async"),
        ({"train": 0.2, "collect": 0.8}, {"acting": 0.9}, "multi_sync", "environment-bound", "add"),
        (
            *({"train": 0.4, "collect": 0.6}, {"acting": 0.4, "waiting": 0.6}),
            *("multi_async", "environment-bound", "run ahead"),
        ),
        ({"sync": 0.8, "collect": 0.2}, {"acting": 0.9}, "multi_async", "sync-bound", "interval"),
        (
            {"train": 0.2, "collect": 0.8},
            {"applying": 0.9},
            "multi_async",
            "sync-bound",
            "interval",
        ),
        ({"log": 0.8, "collect": 0.2}, {}, "single", "log-bound", "less often"),
    ],
)
def test_the_verdict_names_what_takes_the_time(phases, workers, collector, name, advice):
    found = verdict(phases, workers, collector)
    assert found is not None
    assert found.name == name
    assert advice in found.advice


def test_advice_names_options_that_there_are():
    advice = [value for name, value in vars(verdict_module).items() if name.isupper()]
    options = set(re.findall(r"[a-z]+\.[a-z_]+", str(advice)))
    assert len(options) >= 5
    assert options <= set(known_options())


def test_without_any_time_there_is_no_verdict():
    assert verdict({}, {}) is None
    assert verdict(dict.fromkeys(SPENT, 0.0), {}) is None


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, folder: Path):
        ours, theirs = pty.openpty()
        self.text = ""
        self._ours = ours
        self.resize(columns=90)
        environment = dict(os.environ)
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *arguments],
            cwd=folder,
            env={**environment, "TERM": "xterm-256color"},
            **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._changed = threading.Condition()
        self._reader.start()

    def _read(self, ours: int) -> None:
        with open(ours, "rb", buffering=0) as stream:
            while True:
                try:
                    data = stream.read(1 << 16)
                except OSError:  # the other end is closed
                    data = b""
                with self._changed:
                    self.text += data.decode(errors="replace")
                    self._changed.notify_all()
                if not data:
                    return

    def resize(self, *, columns: int, lines: int = 40) -> None:
        termios.tcsetwinsize(self._ours, (lines, columns))

    def wait_for(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.text, 60), self.text

    def end(self) -> int:
        status = self.process.wait(60)
        self._reader.join(60)
        return status


def test_after_a_resize_ctrl_c_gives_the_terminal_back(tmp_path):
    arguments = ("total_frames=100000000", "collector=multi_async", "hydra.run.dir=run")
    terminal = Terminal(*SMALL, *arguments, folder=tmp_path)
    terminal.wait_for("worker 1")
    terminal.wait_for("-bound")
    terminal.resize(columns=40)
    terminal.wait_for("\x1b[2J")  # drawn anew
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l") > -1  # the cursor
    assert "run interrupted" in terminal.text
    assert "Traceback" not in terminal.text


def test_an_error_gives_the_terminal_back(tmp_path):
    options = ("collector=multi_async", "env.id=tests.harness.mortal:Raising-v0")
    kwargs = "env.kwargs={after: 400}"
    terminal = Terminal(
        *SMALL, *options, kwargs, "total_frames=100000", "hydra.run.dir=run", folder=tmp_path
    )
    assert terminal.end() == 1
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l") > -1
    assert "raised ArithmeticError" in terminal.text
    assert "run failed" in terminal.text


def test_without_a_terminal_there_are_lines(tmp_path, capfd):
    assert run.main([*SMALL, "print_every_s=0.001", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    shown = capfd.readouterr().out
    assert "256/256 frames  return" in shown
    assert "\x1b" not in shown


def test_unused_frames_are_shown_with_the_updates():
    shown = example()
    unused = {"policy/dropped": 300.0, "collector/delivered": 500.0, "collector/dropped": 0.0}
    shown.record(500, METRICS | unused, 49.0, 12)
    assert "unused    300 (60%) of the frames, in 12 updates" in printed(shown, 100)
