"""Evaluation while training: when it happens, and that training goes on as if it had not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import harness.measures.clock
import run
from collectors import BaseCollector
from harness.environments.evaluate import Evaluator
from harness.files import read_json
from harness.run_comparison import compare_records, compare_weights
from tests.harness.test_every_algorithm import ALGORITHMS, SMALL
from tests.harness.test_run import records

pytestmark = pytest.mark.usefixtures("here")

MEASURED = {
    *("eval/return", "eval/return_std", "eval/length", "eval/return_sampled", "eval/entropy"),
}
GRPO = (
    *("algo=grpo", "env=tokens", "env.kwargs={task: sort, length: 2, group_size: 4}"),
    *("env.num_envs=8", "model=transformer", "model.width=8", "model.heads=2"),
    "algo.minibatch_size=16",
)
CASES = {**ALGORITHMS, "grpo": GRPO}
OFTEN = ("evaluation.every_updates=1", "evaluation.num_episodes=2", "evaluation.max_steps=20")
NEVER = ("evaluation.at_end=false",)


def start(*given: str, into: str) -> Path:
    own = [one for one in SMALL if not any(one.split("=")[0] == g.split("=")[0] for g in given)]
    assert run.main([*own, *given, f"hydra.run.dir={into}"]) == 0
    return Path(into)


def evaluated(directory: Path) -> list[int]:
    """The frames of the records that have an evaluation, the one at the end included."""
    return [record["step"] for record in records(directory) if "eval/return" in record]


def check_same(first: Path, second: Path, *, replayed: bool = False) -> None:
    difference = compare_records(first, second, replayed=replayed, without=MEASURED)
    assert (difference or compare_weights(first, second)) is None


@pytest.mark.parametrize("algorithm", CASES)
def test_training_has_the_same_bits_with_and_without_evaluations(algorithm):
    given = (*CASES[algorithm], "collector=single", "sync.lag=1", "sync=shared_mem")
    often, never = start(*given, *OFTEN, into="often"), start(*given, *NEVER, into="never")
    assert len(evaluated(often)) >= 4
    assert not evaluated(never)
    check_same(often, never)
    assert {*records(often)[-1]} >= MEASURED


@pytest.mark.parametrize("algorithm", CASES)
def test_an_asynchronous_run_with_evaluations_is_replayed_without_them(algorithm):
    given = (*CASES[algorithm], "collector.num_workers=2")
    start(*given, *OFTEN, "collector=multi_async", into="original")
    replay = ("collector=simulated", "collector.replay=original")
    check_same(Path("original"), start(*given, *NEVER, *replay, into="again"), replayed=True)


def test_workers_stand_still_while_the_newest_weights_are_played(monkeypatch):
    pauses: list[str] = []
    pause, play = BaseCollector.pause, Evaluator.run

    @contextmanager
    def paused(collector: BaseCollector) -> Iterator[None]:
        with pause(collector):
            pauses.append("pause")
            yield
        pauses.append("on")

    def played(evaluator: Evaluator, policy: object) -> dict[str, float]:
        pauses.append("play")
        return play(evaluator, policy)

    monkeypatch.setattr(BaseCollector, "pause", paused)
    monkeypatch.setattr(Evaluator, "run", played)
    start(*CASES["ppo"], "collector=multi_async", "evaluation.times=3", into="run")
    assert pauses == ["pause", "play", "on"] * 3


@pytest.mark.parametrize(
    ("options", "frames"),
    [
        (("evaluation.times=5",), [96, 192, 288, 384, 480]),
        (("evaluation.times=4",), [144, 240, 384, 480]),  # at the first batch that is that far
        (("evaluation.times=1",), [480]),
        (("evaluation.times=1", "evaluation.at_end=false"), [480]),
        (("evaluation.every_updates=4",), [192, 384, 480]),
        (("evaluation.every_updates=4", "evaluation.at_end=false"), [192, 384]),
        (("evaluation.every_frames=200", "evaluation.at_end=false"), [240, 432]),
        (("evaluation.every_frames=240", "evaluation.every_updates=8"), [240, 384, 480]),
    ],
)
def test_evaluations_are_made_when_an_option_asks_for_them(options, frames):
    directory = start(*CASES["ppo"], "collector=single", "sync=none", *options, into="run")
    assert evaluated(directory) == frames


def test_a_resumed_run_evaluates_when_the_whole_run_does():
    given = (*CASES["ppo"], "collector=single", "sync=none", "evaluation.every_updates=3")
    whole = start(*given, into="whole")
    part = start(*given, "checkpoint.every_frames=192", "checkpoint.keep=9", into="part")
    newest = sorted((part / "checkpoints").glob("*.safetensors"))
    for file in newest[1:]:
        file.unlink()
    assert run.main([f"resume={part}"]) == 0
    assert evaluated(part) == evaluated(whole) == [144, 288, 432, 480]


def test_times_leave_evaluations_out(monkeypatch):
    """An evaluation that lasts, by the clock, far longer than the run."""
    hour_s = 3600.0
    moved = [0.0]
    clock = harness.measures.clock.time
    now = clock.perf_counter

    def play(evaluator: Evaluator, policy: object) -> dict[str, float]:
        moved[0] += hour_s
        return {"eval/return": 1.0}

    monkeypatch.setattr(clock, "perf_counter", lambda: now() + moved[0])
    monkeypatch.setattr(Evaluator, "run", play)
    directory = start(*CASES["ppo"], "collector=single", "evaluation.times=2", into="run")
    summary = read_json(directory / "summary.json")
    assert 2 * hour_s <= summary["time/evaluate_s"] < 2.1 * hour_s
    assert summary["wall_s"] < hour_s / 2
    assert summary["fps"] == pytest.approx(480 / summary["wall_s"])
    assert summary["time/log_s"] < hour_s / 2
    middle = next(record for record in records(directory) if "eval/return" in record)
    assert hour_s <= middle["time/evaluate_s"] < 1.1 * hour_s
    assert middle["collector/fps"] > 48 / hour_s * 2


def test_times_and_errors_of_a_resumed_run_are_those_of_the_whole_run(monkeypatch):
    """Each phase takes its own time by a clock that moves only when it is read."""
    seconds = itertools.count(step=0.5)
    clock = harness.measures.clock.time
    monkeypatch.setattr(clock, "perf_counter", lambda: next(seconds))
    given = (*CASES["ppo"], "collector=single", "sync=shared_mem", "sync.wire=int8")
    given = (*given, "evaluation.every_updates=4", "checkpoint.every_frames=192")
    directory = start(*given, "checkpoint.keep=9", into="run")
    whole = read_json(directory / "summary.json")
    for file in sorted((directory / "checkpoints").glob("*.safetensors"))[1:]:
        file.unlink()
    assert run.main([f"resume={directory}"]) == 0
    summary, lines = read_json(directory / "summary.json"), records(directory)
    for name in ("collect", "train", "evaluate"):
        name = f"time/{name}_s"
        assert summary[name] == pytest.approx(sum(line.get(name, 0) for line in lines))
        assert summary[name] == whole[name]
    assert summary["wall_s"] > 0.8 * whole["wall_s"]
    assert summary["fps"] == pytest.approx(480 / summary["wall_s"])
    errors = [line["sync/wire_error"] for line in lines if "sync/wire_error" in line]
    assert summary["sync/wire_error"] == pytest.approx(sum(errors) / len(errors))
    assert summary["sync/wire_error_max"] == max(
        line["sync/wire_error_max"] for line in lines if "sync/wire_error_max" in line
    )
