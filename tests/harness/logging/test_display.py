from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from harness.logging.display import Display, next_commands

OPTIONS = {"algo": {"name": "ppo", "clip": 0.2}, "seed": 1, "env": {"id": "X", "wrappers": ["a"]}}
METRICS = {"collector/fps": 1234.5, "policy/lag_updates_mean": 1.5, "sync/publish_ms": 0.25}


def shown(*, terminal: bool, **options: float) -> tuple[Display, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100, highlight=False)
    return Display(1000, console=console, print_every_s=options.get("print_every_s", 0)), text


def test_a_run_starts_with_its_config_and_its_place():
    display, text = shown(terminal=False)
    display.start(OPTIONS, "outputs/here")
    printed = text.getvalue()
    assert "algo: ppo" in printed
    assert "clip=0.2" in printed
    assert "wrappers=[a]" in printed
    assert "writing to outputs/here" in printed


def test_without_a_terminal_there_is_a_line_now_and_then():
    display, text = shown(terminal=False)
    display.start(OPTIONS, "here")
    display.update(500, METRICS, episode_return=21.5)
    line = text.getvalue().splitlines()[-1]
    for part in (
        "500/1,000 frames",
        "return 21.5",
        "1,234 frames/s",
        "lag 1.5",
        "0.25 ms",
        "s left",
    ):
        assert part in line


def test_the_time_left_does_not_count_the_start_of_the_workers(monkeypatch):
    clock = {"s": 0.0}
    monkeypatch.setattr("harness.logging.display.time.monotonic", lambda: clock["s"])
    display, text = shown(terminal=False)
    display.start(OPTIONS, "here")
    for clock["s"], frames in ((20.0, 100), (21.0, 200)):
        display.update(frames, METRICS, episode_return=1)
    assert text.getvalue().splitlines()[-1].endswith("  8 s left")


def test_large_times_are_plain_numbers():
    display, text = shown(terminal=False)
    display.finish("done", {"sync/ack_ms_p50": 889.4, "sync/ack_ms_p95": 1040.2})
    assert "889 / 1,040" in text.getvalue()


def test_lines_do_not_come_more_often_than_wanted():
    display, text = shown(terminal=False, print_every_s=1000)
    display.start(OPTIONS, "here")
    before = text.getvalue()
    display.update(500, METRICS, episode_return=1)
    assert text.getvalue() == before


def test_on_a_terminal_there_is_a_bar():
    display, text = shown(terminal=True)
    display.start(OPTIONS, "here")
    display.update(500, METRICS, episode_return=21.5)
    display.stop()
    assert "500/1,000" in text.getvalue()
    assert "return 21.5" in text.getvalue()


def test_the_table_at_the_end_leaves_out_what_is_not_known():
    display, text = shown(terminal=False)
    display.finish("done", {"frames": 1000, "eval/return": 475.0, "fps": 99.5})
    printed = text.getvalue()
    assert "run done" in printed
    assert "475" in printed
    assert "lag" not in printed
    assert "publish" not in printed


def test_a_run_ends_with_the_commands_for_its_directory():
    ends = {}
    for state in ("done", "interrupted", "failed"):
        display, text = shown(terminal=False)
        display.start(OPTIONS, "outputs/a [b]")
        display.finish(state, {"frames": 1000})
        ends[state] = text.getvalue().splitlines()[-2:]
    assert ends["done"][0].endswith(" report 'outputs/a [b]'")
    assert ends["done"][1].endswith(" reproduce 'outputs/a [b]'")
    assert ends["interrupted"][-1].endswith(" resume='outputs/a [b]'")
    assert ends["failed"][-1].endswith(" report 'outputs/a [b]'")


def test_the_table_at_the_end_shows_lag_in_updates():
    display, text = shown(terminal=False)
    lags = {
        "updates_mean": 5.25,
        "updates_p95": 9,
        "updates_max": 15,
        "mean": 1,
        "p95": 2,
        "max": 3,
    }
    display.finish("done", {f"policy/lag_{name}": lag for name, lag in lags.items()})
    assert "5.25 / 9 / 15" in text.getvalue()


def test_output_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "output").symlink_to("/dev/full")
    with (tmp_path / "output").open("w", buffering=1) as output:
        display = Display(100, print_every_s=0, console=Console(file=output))
        display.start(OPTIONS, "outputs/here")
        display.finish("done", {})


UNUSED = {"policy/dropped": 180, "collector/dropped": 20, "collector/delivered": 780}


def test_frames_that_were_not_learned_from_are_shown():
    display, text = shown(terminal=False)
    display.start(OPTIONS, "here")
    display.update(800, METRICS | UNUSED, episode_return=1, updates=7)
    line = text.getvalue().splitlines()[-1]
    assert "  7 updates  " in line
    assert line.count("unused 200 (25%)") == 1
    display.finish("done", {"frames": 780, "updates": 7} | UNUSED)
    end = text.getvalue().split("run done")[1]
    assert "200 (25%)" in end
    assert "warning: 200 of 800 frames were not learned from: they were older" in end


def test_waiting_is_advised_only_where_it_helps():
    for may_wait in (True, False):
        display, text = shown(terminal=False)
        display.finish("done", {"frames": 780} | UNUSED, may_wait=may_wait)
        assert ("sync.on_stale=wait" in text.getvalue()) is may_wait
        assert "Allow a larger lag" in text.getvalue()


def test_what_a_logger_has_to_say_stands_beside_the_end():
    display, text = shown(terminal=False)
    display.finish("done", {"frames": 780}, remarks=["upload it: wandb sync [here]"])
    assert "upload it: wandb sync [here]" in text.getvalue().split("run done")[1]


def test_a_tenth_of_the_frames_may_be_unused_without_a_warning():
    display, text = shown(terminal=False)
    display.finish("done", {"policy/dropped": 10, "collector/delivered": 100})
    assert "10 (10%)" in text.getvalue()
    assert "warning" not in text.getvalue()


def test_figures_have_no_exponents():
    display, text = shown(terminal=False)
    display.start(OPTIONS, "here")
    metrics = {"policy/lag_updates_mean": 100.0, "sync/publish_ms": 1020.0}
    display.update(500, metrics, episode_return=-12345.6)
    assert "return -12,350  0 updates  lag 100  publish 1,000 ms" in text.getvalue()
    display.finish("done", {"episode/return": 1.5e5, "policy/lag_updates_mean": 1234.5})
    assert "150,000" in text.getvalue()
    assert "e+0" not in text.getvalue()


@pytest.mark.parametrize(
    ("program", "start"),
    [
        ("/somewhere/bin/lockstep", "/somewhere/bin/lockstep"),
        ("/somewhere/run.py", f"{sys.executable} /somewhere/run.py"),
        ("/somewhere/my_script.py", f"{sys.executable} -m harness.command"),
    ],
)
def test_the_commands_at_the_end_are_those_that_work_where_the_run_was_started(
    program, start, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert next_commands("done", Path("here"), repeatable=True).splitlines() == [
        f"report:  {start} report here",
        f"repeat:  {start} reproduce here",
    ]
    assert next_commands("interrupted", Path("here"), repeatable=True).endswith(
        f"{start} resume=here"
    )
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # an activated environment
    report, _ = next_commands("done", Path("here"), repeatable=True).splitlines()
    assert report == f"report:  {start.replace(sys.executable, 'python')} report here"


def test_values_in_brackets_are_shown_as_they_are():
    display, text = shown(terminal=False)
    options = {"name": "[/b]", "logger": {"tags": ["a", "[b]"]}, "env": {"id": "[red]X[/red]"}}
    display.start(options, "outputs/[/b]")
    printed = text.getvalue()
    for part in ("name: [/b]", "tags=[a,[b]]", "id=[red]X[/red]", "writing to outputs/[/b]"):
        assert part in printed
