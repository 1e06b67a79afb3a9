"""Asynchronous runs are replayed to the bit: the recorded schedule, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run
from harness.files import parse_yaml, read_json
from harness.reproduce import main
from harness.run_comparison import compare_records
from tests.harness.small import SMALL

pytestmark = pytest.mark.usefixtures("here")

MORTAL = "tests.harness.mortal"
RUN = (*SMALL, "collector=multi_async", "hydra.run.dir=original")
PPO = ("total_frames=1536", "collector.frames_per_batch=64", "env.num_envs=2")
SAC = (
    *("algo=sac", "env.id=Pendulum-v1", "env.num_envs=1", "total_frames=1200"),
    *("collector.frames_per_batch=40", "algo.learning_starts=200"),
    *("algo.batch_size=32", "model.hidden_sizes=[16,16]"),
)
DQN = (
    *("algo=dqn", "env.num_envs=2", "total_frames=1200", "collector.frames_per_batch=40"),
    *("algo.learning_starts=200", "algo.batch_size=32", "algo.epsilon_frames=500"),
)
APE_X = ("algo.epsilon_per_worker=true", "algo.prioritised=true", "algo.n_steps=3")
LSTM = ("model=lstm", "model.hidden_sizes=[8]", "model.lstm_size=8", "model.sequence_length=8")
EPISODE = ("sync.apply_at=episode", "env.num_envs=1")
WAITING = ("sync.max_lag=2", "sync.on_stale=wait")


def restarts(env: str) -> tuple[str, ...]:
    return (
        *(f"env.id={MORTAL}:{env}-v0", "+env.kwargs.flag=struck", "+env.kwargs.after=120"),
        *("collector.on_worker_failure=restart", "collector.max_restarts=2"),
    )


CASES = {
    "PPO, LSTM, recomputed, a restart": (
        *(*PPO, *LSTM, *restarts("MortalCartPole"), "sync.state_on_update=recompute"),
    ),
    "PPO, LSTM, zeroed, waiting": (*PPO, *LSTM, *WAITING, "sync.state_on_update=zero"),
    "PPO, episodes": (*PPO, *EPISODE, "collector.num_workers=3"),
    "SAC, each step": SAC,
    "DQN, as Ape-X": (*DQN, *APE_X, "collector.num_workers=3"),
}
SLOW = {
    "PPO, LSTM, zeroed": (*PPO, *LSTM, "sync.state_on_update=zero"),
    "PPO, LSTM, recomputed": (*PPO, *LSTM, "sync.state_on_update=recompute"),
    "PPO, a restart": (*PPO, *restarts("MortalCartPole")),
    "PPO, waiting": (*PPO, *WAITING),
    "DQN, one epsilon": (*DQN, "collector.num_workers=3"),
    "PPO, multiprocess": (*PPO, "sync=multiprocess"),
    "PPO, batches": (*PPO, "sync.apply_at=batch", "sync=multiprocess"),
    "PPO, LSTM": (*PPO, *LSTM),
    "PPO, LSTM, episodes": (*PPO, *LSTM, *EPISODE, "sync=multiprocess"),
    "PPO, LSTM, batches": (*PPO, *LSTM, "sync.apply_at=batch"),
    "PPO, LSTM, a restart": (*PPO, *LSTM, *restarts("MortalCartPole"), "sync=multiprocess"),
    "PPO, LSTM, waiting": (*PPO, *LSTM, *WAITING, "collector.num_workers=3"),
    "PPO, rounded": (*PPO, "sync.wire=int8", "sync=multiprocess"),
    "PPO, a slow link": (*PPO, "sync.link.latency_ms=8", "sync.wire=bfloat16"),
    "PPO, normalised": (*PPO, "algo.normalise_observations=true", "algo.normalise_rewards=true"),
    "PPO, V-trace": (*PPO, "algo.vtrace=true", "sync.interval=2"),
    "PPO, decoupled": (*PPO, "algo.objective=decoupled", "collector.batches_ahead=4"),
    "DQN, as Ape-X, a restart": (*DQN, *APE_X, *restarts("MortalCartPole"), "algo.duelling=true"),
    "SAC, a restart": (*SAC, *restarts("MortalPendulum")),
    "SAC, episodes": (*SAC, *EPISODE, "sync=multiprocess"),
    "SAC, batches": (*SAC, "sync.apply_at=batch", "collector.num_workers=3"),
    "PPO, waiting, three": (*PPO, *WAITING, "collector.num_workers=3", "sync=multiprocess"),
}


def check_replayed(given, capsys):
    of_ppo = ("algo.minibatch_size", "algo.epochs")
    replays = "algo=sac" in given or "algo=dqn" in given
    small = [one for one in RUN if not replays or not one.startswith(of_ppo)]
    assert run.main([*small, *given]) == 0
    capsys.readouterr()
    # What the trusting person says of an environment that would be imported.
    asked = ["--import-env"] if any(MORTAL in one for one in given) else []
    assert main(["original", "--out", "again", *asked]) == 0, capsys.readouterr().out
    assert "identical: all metrics but times, and the final weights" in capsys.readouterr().out
    if "collector.on_worker_failure=restart" in given:
        assert Path("struck").exists(), "nobody died"


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_an_asynchronous_run_is_replayed_to_the_bit(case, capsys):
    check_replayed((CASES | SLOW)[case], capsys)


def test_a_recorded_run_is_replayed_and_with_another_learner_has_the_same_asynchrony(capsys):
    check_replayed(PPO, capsys)
    assert main(["original", "--set", "algo.objective=decoupled", "--out", "changed"]) == 0
    assert "with algo.objective=decoupled and the same schedule" in capsys.readouterr().out
    summary, changed = (read_json(Path(one, "summary.json")) for one in ("original", "changed"))
    for name in ("frames", "updates", "policy/lag_mean", "policy/mixed_batches"):
        assert summary[name] == changed[name]
    for change in ("algo.objectiv=decoupled", "algo", "nothing.here=1"):
        assert main(["original", "--set", change, "--out", "refused"]) == 2
        assert not Path("refused").exists()
        assert change.partition("=")[0].rpartition(".")[2] in capsys.readouterr().err
    # The same from the command line.
    simulated = [one for one in (*RUN, *PPO) if not one.startswith(("collector=", "hydra"))]
    follow = (
        *("collector=simulated", "collector.num_workers=2", "collector.replay=original"),
        "hydra.run.dir=followed",
    )
    assert run.main([*simulated, *follow]) == 0
    followed = read_json(Path("followed/summary.json"))
    assert summary["eval/return"] == followed["eval/return"]
    assert followed["sim/time_s"] > 0
    capsys.readouterr()
    assert run.main([*simulated, *follow, "env.num_envs=4"]) == 2
    needed = "use collector.num_workers=2 collector.frames_per_batch=64 env.num_envs=2"
    assert needed in capsys.readouterr().err
    assert run.main([*simulated, *follow, "collector.replay=nowhere"]) == 2
    assert "collector.replay=nowhere: there is no schedule.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("env", ["Poisoned", "Raising"])
def test_a_crash_is_replayed_up_to_the_crash(env, capsys):
    given = (f"env.id={MORTAL}:{env}-v0", "collector.frames_per_batch=64", "env.num_envs=2")
    assert run.main([*RUN, *given, "total_frames=100000"]) == 1
    capsys.readouterr()
    assert main(["original", "--out", "again", "--import-env"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "identical: all metrics but times, up to its end; it fails alike: " in out


def test_what_cannot_be_recorded_is_not(capsys):
    assert run.main([*RUN, *PPO, "sync=hogwild"]) == 0
    assert not Path("original/schedule.jsonl").exists()
    capsys.readouterr()
    main(["original", "--out", "again", "--repeats", "1"])
    assert "sync=hogwild: torn reads cannot be recorded" in capsys.readouterr().out


def test_sizes_and_seed_and_length_come_from_the_recording(capsys):
    recorded = ("collector.num_workers=3", "seed=7", "algo.anneal_learning_rate=true")
    assert run.main([*RUN, *PPO, *recorded]) == 0
    sizes = ("total_frames", "collector", "env.num_envs", "hydra")
    replay = [one for one in SMALL if not one.startswith(sizes)]
    replay += ["collector=simulated", "collector.replay=original", "algo.anneal_learning_rate=true"]
    assert run.main([*replay, "hydra.run.dir=again"]) == 0
    assert compare_records(Path("original"), Path("again"), replayed=True) is None
    assert "WARNING" not in capsys.readouterr().err
    frames = read_json(Path("again/summary.json"))["frames"]
    for given, said in (
        ("seed=8", "seed=8: original was recorded with seed=7"),
        (f"total_frames={frames + 1}", f"original has recorded {frames} frames; expected {frames}"),
    ):
        assert run.main([*replay, given]) == 2
        assert said in capsys.readouterr().err
    lines = Path("original/schedule.jsonl").read_text().splitlines(keepends=True)
    Path("original/schedule.jsonl").write_text("".join(lines[:4]))
    assert run.main([*replay, "hydra.run.dir=shorter"]) == 0
    assert "schedule.jsonl ends after 3 batches: the run ends here" in capsys.readouterr().err


def test_a_replay_refuses_what_it_would_ignore_and_keeps_what_the_recorded_run_had(capsys):
    recorded = (*PPO, "sync.apply_at=batch", "sync.lag=1", "collector.batches_ahead=3")
    assert run.main([*RUN, *recorded, "sync.link.latency_ms=1"]) == 0
    small = [one for one in SMALL if not one.startswith(("total_frames", "collector", "env"))]
    replay = [*small, "collector=simulated", "collector.replay=original"]
    assert run.main([*replay, "hydra.run.dir=again"]) == 0
    assert compare_records(Path("original"), Path("again"), replayed=True) is None
    stored = parse_yaml(Path("again/config.yaml").read_text())
    assert (stored["sync"]["apply_at"], stored["sync"]["lag"]) == ("batch", 1)
    assert stored["sync"]["link"]["latency_ms"] == 1
    assert stored["collector"]["batches_ahead"] == 3
    capsys.readouterr()
    for typed, kept in {
        "sync.apply_at=step": "sync.apply_at=batch",
        "sync.lag=0": "sync.lag=1",
        "sync.link.preset=wan": "sync.link.preset=null",
        "sync.link.latency_ms=2.5": "sync.link.latency_ms=1",
        "sync.blocking=true": "sync.blocking=false",
        "collector.batches_ahead=5": "collector.batches_ahead=3",
    }.items():
        assert run.main([*replay, typed, "hydra.run.dir=refused"]) == 2
        error = capsys.readouterr().err
        assert f"{typed}: original was recorded with {kept}, which its replay keeps" in error
        assert main(["original", "--out", "refused", "--set", typed]) == 2
        assert typed in capsys.readouterr().err
    for typed in (
        "collector.costs.update_ms=5",
        "collector.network.topology=tree",
        "collector.failures=[{worker: 0, at_s: 1, back_after_s: 1}]",
    ):
        assert run.main([*replay, typed, "hydra.run.dir=refused"]) == 2
        name = typed.partition("=")[0]
        assert f"{name}: a replay takes its times from the recording" in capsys.readouterr().err
    assert not Path("refused").exists()


HEADER = {"format": 1, "num_workers": 2, "num_steps": 16, "num_envs": 4, "group_size": 1, "seed": 1}


def recording(*versions):
    """Two workers in turn; of each batch, the pairs of steps and versions."""
    batches = [
        {"worker": i % 2, "generation": 0, "versions": pairs, "at_s": 0.1 * i}
        for i, pairs in enumerate(versions)
    ]
    Path("hand").mkdir()
    lines = [json.dumps(line) + "\n" for line in (HEADER, *batches)]
    Path("hand/schedule.jsonl").write_text("".join(lines))


FOLLOW = ("collector=simulated", "collector.replay=hand", "evaluation.at_end=false", "logger=jsonl")


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_replay_that_would_drop_whole_batches_is_refused_before_it_starts(on_stale, capsys):
    # With max_lag=1 nothing of the fourth batch is learned from, and there is no version 4.
    recording([[0, 0]], [[0, 0]], [[0, 1]], [[0, 0], [8, 1]], [[0, 4]])
    given = (*FOLLOW, "model.hidden_sizes=[8]", "algo.minibatch_size=32")
    assert run.main([*given, "hydra.run.dir=all"]) == 0
    limit = (f"sync.on_stale={on_stale}", "sync.max_lag=1")
    capsys.readouterr()
    assert run.main([*given, *limit, "hydra.run.dir=refused"]) == 2
    error = capsys.readouterr().err
    assert "batch 5 of hand acts with version 4, and this run would have published 3" in error
    assert run.main([*given, *limit, "sync.on_stale=wait", "hydra.run.dir=refused"]) == 2
    assert "sync.on_stale=wait: the workers of a replay wait" in capsys.readouterr().err
    assert not Path("refused").exists()
    assert run.main([*given, *limit, "total_frames=256", "hydra.run.dir=fewer"]) == 0
    assert run.main([*given, limit[0], "sync.max_lag=2", "hydra.run.dir=older"]) == 0


def test_a_replay_that_would_begin_to_learn_too_late_is_refused_before_it_starts(capsys):
    recording([[0, 0]], [[0, 1]], [[0, 1]], [[0, 2]])
    given = (*FOLLOW, "algo=dqn", "model.hidden_sizes=[8]", "algo.batch_size=16")
    assert run.main([*given, "algo.learning_starts=64", "hydra.run.dir=all"]) == 0
    for late in ("algo.learning_starts=128", "algo.updates_per_frame=0.01"):
        capsys.readouterr()
        begin = "algo.learning_starts=64"
        assert run.main([*given, begin, late, "hydra.run.dir=refused"]) == 2
        assert "acts with version" in capsys.readouterr().err
    assert not Path("refused").exists()
