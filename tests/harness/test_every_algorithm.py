"""Every algorithm with every collector: it runs, learns from each batch, and can be repeated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import run
from harness.files import read_json
from harness.reproduce import main
from harness.run.checkpoints import Checkpoints
from harness.run_comparison import compare_records, compare_weights
from tests.collectors.remote.support import needs_ray
from tests.harness.test_run import records

pytestmark = pytest.mark.usefixtures("here")

FRAMES = 480
SMALL = (
    *(f"total_frames={FRAMES}", "collector.frames_per_batch=48", "env.num_envs=2"),
    *("model.hidden_sizes=[16]", "evaluation.num_episodes=1", "logger=jsonl"),
)
REPLAY = ("algo.learning_starts=96", "algo.batch_size=16", "algo.buffer_size=300")
ALGORITHMS = {
    "ppo": ("algo=ppo", "algo.minibatch_size=16", "algo.epochs=2"),
    "impala": ("algo=impala",),
    "dqn": ("algo=dqn", *REPLAY, "algo.epsilon_frames=200"),
    "sac": ("algo=sac", *REPLAY, "env=pendulum", "algo.normalise_observations=true"),
}
LOSSES = {"ppo": "policy_loss", "impala": "policy_loss", "dqn": "loss", "sac": "critic_loss"}
SYNCHRONOUS = {
    "single": ("collector=single", "sync=none"),
    "multi_sync": ("collector=multi_sync", "sync=multiprocess"),
    "simulated": ("collector=simulated", "collector.num_workers=3"),
    "distributed": ("collector=distributed", "sync=distributed"),
    "rpc": ("collector=rpc", "sync=rpc"),
    "ray": ("collector=ray", "sync=ray"),
}
ASYNCHRONOUS = {
    "multi_async": ("collector=multi_async",),
    "distributed, asynchronous": (
        *("collector=distributed", "sync=distributed", "collector.remote.asynchronous=true"),
    ),
    "rpc, asynchronous": ("collector=rpc", "sync=rpc", "collector.remote.asynchronous=true"),
    "ray, asynchronous": ("collector=ray", "sync=ray", "collector.remote.asynchronous=true"),
}
# What `make test` takes beside test_repeated_runs.py and test_replayed_runs.py.
QUICK = [("ppo", "distributed, asynchronous"), ("impala", "multi_async")]


def with_each(collectors):
    """Each algorithm with each of the collectors; most pairs are slow tests."""
    cases = []
    for algorithm in ALGORITHMS:
        for collector in collectors:
            marks = [needs_ray] if collector.startswith("ray") else []
            if (algorithm, collector) not in QUICK:
                marks.append(pytest.mark.slow)
            case = f"{algorithm}, {collector}"
            cases.append(pytest.param(algorithm, collector, marks=marks, id=case))
    return cases


def start(*given: str, into: str) -> Path:
    assert run.main([*SMALL, *given, f"hydra.run.dir={into}"]) == 0
    return Path(into)


def check_learned(directory: Path, algorithm: str) -> None:
    assert read_json(directory / "summary.json")["frames"] == FRAMES
    name = f"train/{LOSSES[algorithm]}"
    losses = [record[name] for record in records(directory) if name in record]
    assert len(losses) >= 4
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(("algorithm", "collector"), with_each(SYNCHRONOUS))
def test_a_synchronous_run_has_the_same_bits_twice_and_when_it_is_resumed(algorithm, collector):
    check_repeats(algorithm, SYNCHRONOUS[collector])


def check_repeats(algorithm: str, more: tuple[str, ...]) -> None:
    """A run has the same bits twice, and when it goes on from a checkpoint."""
    given = (*ALGORITHMS[algorithm], *more, "checkpoint.every_frames=48", "checkpoint.keep=99")
    whole, again = (start(*given, into=into) for into in ("whole", "again"))
    check_learned(whole, algorithm)
    assert (compare_records(whole, again) or compare_weights(whole, again)) is None
    for file in Checkpoints(again / "checkpoints").files()[4:]:
        file.unlink()
    assert run.main([f"resume={again}"]) == 0
    assert (compare_records(whole, again) or compare_weights(whole, again)) is None


@pytest.mark.parametrize(("algorithm", "collector"), with_each(ASYNCHRONOUS))
def test_an_asynchronous_run_is_replayed_to_the_bit(algorithm, collector, capsys):
    check_replayed(algorithm, ASYNCHRONOUS[collector], capsys)


def check_replayed(algorithm: str, more: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    """An asynchronous run is repeated by its recorded schedule."""
    given = (*ALGORITHMS[algorithm], *more)
    check_learned(start(*given, into="original"), algorithm)
    capsys.readouterr()
    assert main(["original", "--out", "again"]) == 0, capsys.readouterr().out
    assert "identical: all metrics but times, and the final weights" in capsys.readouterr().out
