"""The training benchmark: same settings for all, what it counts, and that nobody can spoil it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.collect_contestants import OUR_PYTHON, PEER_PYTHON
from benchmarks.collect_remote import ContestantFailed, ContestantLeftOut, Remote
from benchmarks.train import Limits, measure, parse, train_once
from benchmarks.train_case import PPO, SAC, Episodes, Training, last_tenth
from benchmarks.train_contestants import CONTESTANTS, Contestant
from benchmarks.train_ours import overrides, read_episodes
from benchmarks.train_report import Row, Turn, fastest_peer
from harness.config.plan import plan_run
from tests.benchmarks.test_collect import group_of, until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)
WAIT_S = 60.0  # for machines that have other things to do, too
LIMITS = Limits(rounds=2, seconds=WAIT_S)
OURS = [name for name in CONTESTANTS if name.startswith("lockstep")]

HOST = """
import multiprocessing, os, sys, time
from benchmarks.collect_host import LeftOut
from benchmarks.train_case import Episodes, Trained
from benchmarks.train_host import serve

def train(training, options):
    how = options["how"]
    if how == "left out":
        raise LeftOut("too few arms")
    if how == "raises":
        raise ValueError("no such thing\\nand more")
    if how == "dies":
        sys.stderr.write("the last word")
        os._exit(3)
    if how == "hangs":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
        time.sleep(600)
    print("noise")
    return Trained(training.frames, 2.0, [Episodes(training.frames, 10.0 * training.seed)])

if __name__ == "__main__":
    serve(train)
"""

# Not CleanRL's, but written against what its scripts are: tyro, a SummaryWriter, gymnasium 0.29.
SCRIPT = """
from dataclasses import dataclass

import cleanrl_utils
import gymnasium as gym
import tyro
from torch.utils.tensorboard import SummaryWriter

@dataclass
class Args:
    {fields}

if __name__ == "__main__":
    args = tyro.cli(Args)
    writer = SummaryWriter("runs")
    make = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))
    envs = gym.vector.SyncVectorEnv([make] * args.num_envs)
    envs.reset(seed=args.seed)
    for frame in range(args.num_envs, args.total_timesteps + 1, args.num_envs):
        observations, _, terminations, truncations, infos = envs.step(envs.action_space.sample())
        for i in range(args.num_envs):
            if terminations[i] or truncations[i]:
                assert (infos["final_observation"][i] != observations[i]).any()
        for info in infos.get("final_info", []):
            if info and "episode" in info:
                writer.add_scalar("charts/episodic_return", info["episode"]["r"], frame)
    writer.add_scalar("charts/SPS", 1, frame)
    envs.close()
    writer.close()
"""
ARGUMENTS = [
    *("env_id", "seed", "total_timesteps", "cuda", "num_envs", "num_steps", "num_minibatches"),
    *("update_epochs", "learning_rate", "anneal_lr", "gamma", "gae_lambda", "norm_adv"),
    *("clip_coef", "clip_vloss", "ent_coef", "vf_coef", "max_grad_norm"),
]


@pytest.fixture
def known(tmp_path, monkeypatch) -> Callable[..., None]:
    """Make a contestant known that does as it is told."""
    (tmp_path / "training_host_of_tests.py").write_text(HOST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(how: str, name: str = "tester") -> None:
        contestant = Contestant("training_host_of_tests", OUR_PYTHON, "", ("ppo",), {"how": how})
        monkeypatch.setitem(CONTESTANTS, name, contestant)

    return make


@pytest.fixture
def checkout(tmp_path) -> Callable[[list[str]], str]:
    """A folder that looks like a checkout of CleanRL, with a ppo.py of the given arguments."""

    def make(arguments: list[str]) -> str:
        folder = tmp_path / "checkout"
        (folder / "cleanrl").mkdir(parents=True)
        (folder / "cleanrl_utils").mkdir()
        (folder / "cleanrl_utils" / "__init__.py").touch()
        fields = "\n    ".join(f"{name}: object" for name in arguments)
        (folder / "cleanrl" / "ppo.py").write_text(SCRIPT.format(fields=fields))
        return str(folder)

    return make


@pytest.mark.parametrize(
    "how", ["left out", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raises", "dies"))]
)
def test_a_contestant_that_cannot_go_on_is_named_and_the_others_are_measured(known, how):
    known(how, name="ill")
    known("well", name="sound")
    ill, sound = measure("ppo", ["ill", "sound"], 100, LIMITS)
    reasons = {
        "left out": "too few arms",
        "raises": "ValueError: no such thing",
        "dies": "its process ended: the last word",
    }
    assert ill.problem == reasons[how]
    assert ill.turns == []
    assert [turn.fps for turn in sound.turns] == [50.0, 50.0]
    assert sound.returns == [10.0, 20.0]


def test_a_training_that_takes_too_long_is_ended_with_all_its_processes(known, monkeypatch):
    known("hangs")
    started: list[Remote] = []
    make = Remote.__init__

    def remember(remote: Remote, *arguments: object) -> None:
        make(remote, *arguments)
        started.append(remote)

    monkeypatch.setattr(Remote, "__init__", remember)
    with pytest.raises(ContestantFailed, match="'train' took more than 5 s"):
        train_once(Row("ppo", "tester"), Training("ppo", 100, 1, ""), Limits(1, 5.0))
    (remote,) = started
    assert group_of(remote.process.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_no_process(number, tmp_path, tmp_path_factory):
    command = [sys.executable, "benchmarks/train.py", "--contestants", "lockstep_multi_async"]
    options = ["--algos", "ppo", "--frames", "ppo=100000000", "--output", str(tmp_path)]
    scratch = tmp_path_factory.mktemp("s")  # a socket's path must be short
    driver = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(psutil.Process(driver.pid).children()) == 1)
        (host,) = psutil.Process(driver.pid).children()
        until(lambda: any(file.stat().st_size for file in scratch.glob("*/run/metrics.jsonl")))
        driver.send_signal(number)
        driver.wait(WAIT_S)
        until(lambda: group_of(host.pid) == [])
        if number != signal.SIGKILL:
            assert driver.returncode == 128 + number
            assert list(scratch.glob("lockstep-train-*")) == []
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.slow
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
        timeout=150,
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


def test_a_script_is_run_as_it_was_written_and_measured_from_outside(checkout, tmp_path):
    turn = run_script(checkout(ARGUMENTS), tmp_path)
    assert turn.frames == 1024
    assert turn.seconds > 0
    assert turn.final_episodes > 0


def test_a_script_that_does_not_know_a_setting_says_which(checkout, tmp_path):
    with pytest.raises(ContestantFailed, match="unexpected keyword argument 'clip_coef'"):
        run_script(checkout([name for name in ARGUMENTS if name != "clip_coef"]), tmp_path)


@pytest.mark.slow
def test_cleanrl_is_absent_where_there_is_no_checkout(tmp_path):
    with pytest.raises(ContestantLeftOut, match="--cleanrl PATH"):
        run_script(None, tmp_path)
    with pytest.raises(ContestantLeftOut, match=r"holds no cleanrl/ppo.py"):
        run_script(str(tmp_path), tmp_path)


def run_script(checkout: str | None, scratch: Path) -> Turn:
    """With the interpreter of the tests, which has what the script of the tests needs."""
    contestant = CONTESTANTS["cleanrl"]
    ours = Contestant(contestant.module, OUR_PYTHON, "", contestant.algos)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTESTANTS, "cleanrl", ours)
        return train_once(
            Row("ppo", "cleanrl"),
            Training("ppo", 1024, 1, str(scratch)),
            Limits(1, WAIT_S, checkout),
        )


@pytest.mark.parametrize("name", OURS)
def test_each_of_our_own_ppo_batches_is_of_as_many_environments_and_steps(name):
    config = plan_run(overrides(Training("ppo", 4096, 3, ""), CONTESTANTS[name].options)).config
    makers = 2 if config.collector.name == "multi_sync" else 1
    assert config.env.num_envs * makers == PPO.num_envs
    assert config.collector.frames_per_batch == PPO.num_envs * PPO.num_steps
    assert (config.algo.minibatch_size, config.algo.epochs) == (256, 4)
    assert config.algo.learning_rate == 2.5e-4
    assert config.model.hidden_sizes == [64, 64]
    assert (config.total_frames, config.seed) == (4096, 3)


@pytest.mark.parametrize("name", [name for name in OURS if "pong" in CONTESTANTS[name].algos])
def test_our_pong_is_the_peers_task(name):
    given = overrides(Training("pong", 4096, 3, ""), CONTESTANTS[name].options)
    assert set(given) >= {
        *("env=atari", "env.kwargs.repeat_action_probability=0", "env.num_envs=8"),
        *("collector.frames_per_batch=1024", "algo.minibatch_size=256", "algo.clip=0.1"),
        *("model=cnn", "model.hidden_sizes=[512]"),
    }


@pytest.mark.parametrize("name", [name for name in OURS if "sac" in CONTESTANTS[name].algos])
def test_our_sac_has_one_update_a_frame(name):
    config = plan_run(overrides(Training("sac", 2000, 3, ""), CONTESTANTS[name].options)).config
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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--frames", "ppo=0"),
        ("--frames", "dqn=100"),
        ("--frames", "300"),
        ("--algos", "a2c"),
        ("--contestants", "rlpyt"),
        ("--rounds", "0"),
    ],
)
def test_an_unknown_value_is_answered_in_one_line(option, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", option, value])
    with pytest.raises(SystemExit, match="2"):
        parse()
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert value in last_line
    assert "expected" in last_line


def test_frames_that_are_not_named_keep_their_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--frames", "sac=2000"])
    assert parse().frames == {"ppo": 300_000, "pong": 200_000, "sac": 2000}
