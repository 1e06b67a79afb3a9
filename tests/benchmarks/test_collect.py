"""The collection benchmark: what it counts, and that no contestant can spoil it for the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import psutil
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch.distributions import Categorical, Normal

from benchmarks.collect import measure
from benchmarks.collect_bare import VectorLoop, make_loop
from benchmarks.collect_case import SIZES, Case, build_policy, single_env
from benchmarks.collect_contestants import CONTESTANTS
from benchmarks.contest import OUR_PYTHON, Contestant
from benchmarks.remote import ContestantFailed, Remote

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_S = 60.0  # for machines that have other things to do, too
CASE = Case("CartPole-v1", 1, "single")

HOST = """
import os, sys, time, multiprocessing
from benchmarks.collect_session import Session, serve
from benchmarks.host import LeftOut

class Contestant(Session):
    def __init__(self, case, options):
        self.how = options.get("how", "well")
        if self.how == "left out":
            raise LeftOut("too few arms")
        if self.how == "raises":
            raise ValueError("no such thing\\nand more")

    def turn(self, seconds):
        if self.how == "dies":
            sys.stderr.write("the last word")
            os._exit(3)
        if self.how == "hangs":
            self.queue = multiprocessing.get_context("spawn").Queue()  # semaphores in /dev/shm
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
            time.sleep(600)
        return 100 * len(self.how), 2.0

if __name__ == "__main__":
    serve(Contestant)
"""


@pytest.fixture
def known(tmp_path, monkeypatch) -> Callable[..., None]:
    """Make a contestant known that does as its options say."""
    (tmp_path / "host_of_tests.py").write_text(HOST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(*settings: dict[str, str], name: str = "tester") -> None:
        contestant = Contestant("host_of_tests", "", lambda case: list(settings))
        monkeypatch.setitem(CONTESTANTS, name, contestant)

    return make


@pytest.mark.parametrize("how", ["left out", "raises", "dies"])
def test_a_contestant_that_cannot_go_on_is_named_and_the_others_are_measured(known, how):
    known({"how": how}, name="ill")
    known({"how": "well"}, name="sound")
    ill, sound = measure([CASE], ["ill", "sound"], rounds=2, seconds=0.1)
    reasons = {
        "left out": "left out: too few arms",
        "raises": "ValueError: no such thing",
        "dies": "its process ended: the last word",
    }
    assert ill.problem == reasons[how]
    assert ill.fps == []
    assert sound.fps == [200.0, 200.0]
    assert sound.problem == ""


def test_a_contestant_that_hangs_is_ended_with_its_workers_and_shared_memory(known):
    known()
    remote = Remote(OUR_PYTHON, "host_of_tests")
    remote.ask(WAIT_S, cmd="open", case=CASE.message(), options={"how": "hangs"})
    with pytest.raises(ContestantFailed, match="'turn' took more than 2 s"):
        remote.ask(2.0, cmd="turn", seconds=0.1)
    assert group_of(remote.process.pid) == []
    remote.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_no_process(number, tmp_path):
    command = [sys.executable, "benchmarks/collect.py", "--contestants", "bare", "--sizes", "1"]
    options = ["--modes", "multi_sync", "--seconds", "600", "--output", str(tmp_path)]
    driver = subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        # Its host, and in the host's group the fork server and two workers.
        until(lambda: any(len(group_of(host.pid)) >= 4 for host in hosts(driver.pid)))
        (host,) = hosts(driver.pid)
        driver.send_signal(number)
        driver.wait(WAIT_S)
        until(lambda: group_of(host.pid) == [])
    finally:
        driver.kill()
        driver.wait()


def test_the_command_prints_a_table_and_saves_every_round(tmp_path):
    ran = subprocess.run(
        [
            *(sys.executable, "benchmarks/collect.py", "--no-peers", "--contestants", "bare,sb3"),
            *("--rounds", "2", "--seconds", "0.1", "--sizes", "8", "--modes", "single"),
            *("--envs", "Pendulum-v1", "--output", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Pendulum-v1" in ran.stdout
    (result,) = json.loads((tmp_path / "collect.json").read_text())["results"]
    assert result["contestant"] == "bare"
    assert result["to_bare"] == 1.0
    assert len(result["fps"]) == 2


def test_a_step_that_only_resets_is_not_a_frame():
    class Ending(gymnasium.Wrapper):
        """Every episode has three steps."""

        def reset(self, **kwargs):
            self.steps = 0
            return self.env.reset(**kwargs)

        def step(self, action):
            self.steps += 1
            observation, reward, *_, info = self.env.step(action)
            return observation, reward, self.steps == 3, False, info

    env = SyncVectorEnv([lambda: Ending(single_env("CartPole-v1")())] * 2)
    loop = VectorLoop(env, build_policy("CartPole-v1"), steps=8)
    assert loop() == 2 * 6
    assert loop() == 2 * 6
    env.close()


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("size", SIZES)
def test_the_bare_loop_takes_the_steps_of_a_batch(env, size):
    case = Case(env, size, "single")
    assert 0.5 * case.batch_frames < make_loop(case)() <= case.batch_frames


def test_the_categorical_policy_samples_what_it_reports():
    policy, observation = build_policy("CartPole-v1"), torch.randn(1, 4).expand(20_000, 4)
    with torch.no_grad():
        action, log_prob = policy(observation)
        wanted = Categorical(logits=policy.net(observation))
    torch.testing.assert_close(log_prob, wanted.log_prob(action))
    assert action.float().mean().item() == pytest.approx(wanted.probs[0, 1].item(), abs=0.02)


def test_the_gaussian_policy_reports_the_density_of_its_actions():
    policy, observation = build_policy("Pendulum-v1"), torch.randn(50, 3)
    with torch.no_grad():
        action, log_prob = policy(observation)
        wanted = Normal(policy.net(observation), policy.log_std.exp())
    torch.testing.assert_close(log_prob, wanted.log_prob(action).sum(-1))


def hosts(driver: int) -> list[psutil.Process]:
    return psutil.Process(driver).children()


def group_of(leader: int) -> list[psutil.Process]:
    """The living processes of a group."""
    return [process for process in psutil.process_iter() if in_group(process, leader)]


def in_group(process: psutil.Process, leader: int) -> bool:
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return os.getpgid(process.pid) == leader and not zombie
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
