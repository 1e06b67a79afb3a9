"""The training benchmark: the same settings for all, and what it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.contest import PEER_PYTHON
from benchmarks.train import Limits, train_once
from benchmarks.train_case import PPO, SAC, Episodes, Training, last_tenth
from benchmarks.train_contestants import CONTESTANTS
from benchmarks.train_ours import overrides, read_episodes
from benchmarks.train_report import Row, Turn, fastest_peer
from harness.config.plan import plan_run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_S = 60.0  # for machines that have other things to do, too
LIMITS = Limits(rounds=2, seconds=WAIT_S)
OURS = [name for name in CONTESTANTS if name.startswith("lockstep")]


def test_the_command_prints_a_table_and_saves_every_training(tmp_path):
    ran = subprocess.run(
        [
            *(sys.executable, "benchmarks/train.py", "--no-peers", "--rounds", "1"),
            *("--contestants", "lockstep_single,lockstep_multi_sync,sb3"),
            *("--frames", "ppo=2048,sac=1100", "--output", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert "ppo, 2,048 frames" in ran.stdout
    results = json.loads((tmp_path / "train.json").read_text())["results"]
    assert [(each["algo"], each["contestant"], each["problem"]) for each in results] == [
        ("ppo", "lockstep_single", ""),
        ("ppo", "lockstep_multi_sync", ""),
        ("sac", "lockstep_single", ""),
    ]
    for each in results:
        (turn,) = each["turns"]
        assert turn["frames"] >= {"ppo": 2048, "sac": 1100}[each["algo"]]
        assert each["fps"] == [turn["frames"] / turn["seconds"]]
    assert results[0]["turns"][0]["final_return"] > 0  # a return of CartPole


@pytest.mark.skipif(not PEER_PYTHON.exists(), reason="the peers' environment is missing")
@pytest.mark.parametrize(("algo", "name"), [("ppo", "sb3"), ("sac", "sb3"), ("sac", "sb3_16")])
def test_stable_baselines_trains(algo, name, tmp_path):
    frames = {"ppo": 2048, "sac": 1120}[algo]
    turn = train_once(Row(algo, name), Training(algo, frames, 1, str(tmp_path)), LIMITS)
    assert turn.frames == frames
    if algo == "ppo":
        assert turn.final_return is not None
        assert turn.final_return > 0


@pytest.mark.parametrize("name", OURS)
def test_each_of_our_own_ppo_batches_is_of_as_many_environments_and_steps(name):
    config = plan_run(
        overrides(Training("ppo", 4096, 3, ""), *CONTESTANTS[name].settings("ppo"))
    ).config
    makers = 2 if config.collector.name == "multi_sync" else 1
    assert config.env.num_envs * makers == PPO.num_envs
    assert config.collector.frames_per_batch == PPO.num_envs * PPO.num_steps
    assert (config.algo.minibatch_size, config.algo.epochs) == (256, 4)
    assert config.algo.learning_rate == 2.5e-4
    assert config.model.hidden_sizes == [64, 64]
    assert (config.total_frames, config.seed) == (4096, 3)


@pytest.mark.parametrize("name", [name for name in OURS if CONTESTANTS[name].settings("pong")])
def test_our_pong_is_the_peers_task(name):
    given = overrides(Training("pong", 4096, 3, ""), *CONTESTANTS[name].settings("pong"))
    assert set(given) >= {
        *("env=atari", "env.kwargs.repeat_action_probability=0", "env.num_envs=8"),
        *("collector.frames_per_batch=1024", "algo.minibatch_size=256", "algo.clip=0.1"),
        *("model=cnn", "model.hidden_sizes=[512]"),
    }


@pytest.mark.parametrize("name", [name for name in OURS if CONTESTANTS[name].settings("sac")])
def test_our_sac_has_one_update_a_frame(name):
    config = plan_run(
        overrides(Training("sac", 2000, 3, ""), *CONTESTANTS[name].settings("sac"))
    ).config
    assert config.algo.updates_per_frame == 1
    assert config.algo.batch_size == SAC.batch_size
    assert config.algo.learning_starts == SAC.learning_starts
    assert config.model.hidden_sizes == [256, 256]
    assert config.model.activation == "relu"


def test_the_last_tenth_is_weighed_by_episodes():
    episodes = [Episodes(900, 7.0), Episodes(901, 1.0, 3), Episodes(1000, 5.0)]
    assert last_tenth(episodes, 1000) == (2.0, 4)
    assert last_tenth(episodes[:1], 1000) == (None, 0)


def test_records_without_episodes_are_passed_over():
    lines = [
        '{"step": 100}',
        '{"step": 200, "episode/return": 9.0, "episode/count": 4}',
        '{"step": 300}',
        '{"step": 400, "episode/return": 3.0, "episode/count": 5}',
    ]
    assert read_episodes(lines) == [Episodes(200, 9.0, 4), Episodes(400, 3.0, 1)]


def test_ratios_are_taken_to_the_fastest_peer_round_by_round():
    ours = row("lockstep", [10.0, 40.0, 90.0])
    slow = row("slow", [1.0, 2.0, 3.0], is_peer=True)
    fast = row("fast", [20.0, 50.0], is_peer=True)  # it failed in the third round
    none = row("none", [], is_peer=True)
    assert fastest_peer([ours, slow, fast, none], "ppo") is fast
    assert fastest_peer([ours, none], "ppo") is None
    assert ours.ratio(fast) == pytest.approx(0.65)
    assert ours.ratio(none) is None


def row(name: str, fps: list[float], *, is_peer: bool = False) -> Row:
    turns = [Turn(seed, round(rate), 1.0, 0.0, None, 0) for seed, rate in enumerate(fps)]
    return Row("ppo", name, is_peer=is_peer, turns=turns)
