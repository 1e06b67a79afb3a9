"""Whatever happens to a worker becomes an exception that names it, or a fresh worker; promptly."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing import forkserver
from typing import Any

import gymnasium as gym
import pytest
import torch

from collectors import MultiAsyncCollector
from collectors.rollout.shared_counters import STAGES
from sync import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from tests.collectors.support import MULTI
from tests.collectors.troubled import (
    ActorCritic,
    Mishap,
    Plain,
    PoolClock,
    balance,
    hold,
    make,
    pids,
    wait_until,
)

EACH = pytest.mark.parametrize("kind", MULTI)
PAIRED = pytest.mark.parametrize(
    ("kind", "scheme"), [("sync", "shared_mem"), ("async", "multiprocess")]
)
SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}


def gather(collector: Any, batches: int | None = None) -> None:
    """So many batches; for ever, if it is not said how many."""
    for _ in range(batches) if batches else itertools.count():
        collector.next()


@pytest.mark.parametrize(
    ("kind", "where"), [("sync", "make"), ("sync", "step"), ("async", "reset"), ("async", "step")]
)
def test_an_environment_that_raises_is_named_with_the_workers_traceback(kind, where):
    at = 30 if where == "step" else 1
    with pytest.raises(WorkerRaised) as raised:  # noqa: PT012
        trouble, devices = {"where": where, "at": at}, ["cpu", "cpu:0"]
        with make(kind, trouble=trouble, policy_device=devices) as collector:
            collector.set_seed(7)
            gather(collector)
    text = str(raised.value)
    assert raised.value.worker_idx == 1
    stage = {"make": "starting", "reset": "resetting", "step": "stepping"}[where]
    assert "worker 1 (cpu:0, " in text
    assert "Troubled" in text
    assert f"raised Mishap while {stage}" in text
    assert "Traceback (most recent call last)" in text
    assert text.endswith("Mishap: the pole fell off")
    assert "seed 7" in text or (where == "make" and "seed" in text)


@pytest.mark.parametrize(
    ("kind", "what", "how"),
    [
        ("sync", "exit", "with exit code 7"),
        ("async", "segv", "by SIGSEGV"),
        ("async", "sys.exit", "raised SystemExit"),
    ],
)
def test_an_environment_that_ends_its_process_is_named_with_its_stage(kind, what, how):
    with (
        make(kind, trouble={"where": "step", "at": 30, "what": what}) as collector,
        pytest.raises(WorkerError, match=r"worker 1 \(cpu, Troubled, seed \d+\)") as raised,
    ):
        gather(collector)
    assert how in str(raised.value)
    assert "while stepping" in str(raised.value)


def test_an_environment_that_hangs_is_named_when_its_time_is_over(tmp_path, monkeypatch):
    clock, hangs = PoolClock(monkeypatch), tmp_path / "hangs"
    trouble = {"where": "step", "at": 30, "what": "hang", "once": str(hangs)}
    with make("async", trouble=trouble, timeout=50.0) as collector:
        with (
            pytest.raises(WorkerTimeout, match=r"worker 1 .*hangs: it has been stepping") as raised,
            clock.put_forward(60.0, hangs.exists),
        ):
            gather(collector)
        assert "timeout=50 s" in str(raised.value)
        collector.shutdown(timeout=0.2)


def test_an_environment_that_hangs_while_it_is_made_is_named():
    trouble = {"where": "make", "what": "hang"}
    with pytest.raises(
        WorkerTimeout,
        match=r"worker 1 .*Troubled.*not ready within start_timeout=10 s: it is start",
    ):
        make("sync", trouble=trouble, start_timeout=10.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_is_handed_no_more_descriptors_the_more_workers_there_are(monkeypatch, scheme):
    monkeypatch.setattr(forkserver, "MAXFDS_TO_SEND", 18)  # a fork server takes some 250
    schemes = {"policy": SCHEMES[scheme]()}
    with make("sync", workers=8, weight_sync_schemes=schemes, start_method="forkserver") as it:
        assert it.next().numel() >= 40


TIDY = """
import gc, os, signal
from tests.collectors.troubled import Plain, make

class Handle:  # must be cleared away by the process that made it
    def __init__(self):
        self.itself, self.owner = self, os.getpid()
    def __del__(self):
        if os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGSEGV)

class Tidy(Plain):
    def forward(self, observation):
        gc.collect()
        return super().forward(observation)

gc.disable()
Handle()
with make("sync", Tidy(), start_method="fork") as collector:
    print(collector.next().numel())
"""


def test_a_forked_worker_does_not_clear_away_what_is_the_trainers():
    ran = subprocess.run([sys.executable, "-c", TIDY], capture_output=True, text=True, timeout=110)
    assert (ran.stdout, ran.stderr) == ("40\n", "")


def test_a_policy_that_raises_is_named():
    with (
        make("async", Plain(fail_at=30)) as collector,
        pytest.raises(WorkerError, match=r"raised Mishap while acting") as raised,
    ):
        gather(collector)
    assert "no action comes to mind" in str(raised.value)


@PAIRED
def test_weights_that_do_not_fit_are_refused_and_nobody_is_worse_off(kind, scheme):
    policy = Plain()
    with make(kind, policy, weight_sync_schemes={"policy": SCHEMES[scheme]()}) as collector:
        for wrong in ({"weight": torch.zeros(3)}, {"other": torch.zeros(())}):
            with pytest.raises((KeyError, ValueError), match=r"weight|other"):
                collector.update_policy_weights_(wrong)
        with pytest.raises(ValueError, match="weight"):
            collector.update_policy_weights_({"weight": torch.tensor(float("nan"))})
        hold(policy, 5)
        collector.update_policy_weights_()
        for _ in range(6):
            batch = collector.next()
        assert set(batch["weight"].flatten().tolist()) == {5.0}
        assert set(batch["policy_version"].flatten().tolist()) == {1}


class Cramped(SharedMemWeightSyncScheme):
    """Whose workers have no room for a second version, and can tell nobody."""

    def receive(self, timeout: float | None = None) -> Any:
        raise OSError("no room for more weights")


def test_weights_that_cannot_be_taken_are_no_secret():
    with make("async", weight_sync_schemes={"policy": Cramped(sync=False)}) as collector:
        collector.update_policy_weights_()
        with pytest.raises(WorkerError, match="no room for more weights"):  # of one, or of both
            gather(collector)


class Stubborn(Plain):
    """Whose extra state is refused where it arrives, but for the first."""

    number = 0

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        if state:
            raise Mishap("not with me")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_that_refuses_weights_is_named_with_its_environment(scheme):
    policy = Stubborn()
    with make("sync", policy, weight_sync_schemes={"policy": SCHEMES[scheme]()}) as collector:
        policy.number = 1
        with pytest.raises(WorkerError, match="not with me") as raised:
            collector.update_policy_weights_()
        for worker in collector.stats()["workers"]:
            assert f"worker {worker['worker']} (cpu, {worker['environment']})" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "start_method"),
    [
        ("sync", "fork"),
        ("async", "forkserver"),
        pytest.param("sync", "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_named_however_it_was_started(kind, start_method):
    with make(kind, start_method=start_method) as collector:
        collector.next()
        victim = pids(collector)[1]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(
            WorkerDied,
            match=rf"worker 1 \(cpu, Troubled, seed \d+\) died by SIGKILL \(pid {victim}\)",
        ):
            gather(collector)
        with pytest.raises(WorkerDied, match="worker 1"):
            collector.next()  # it stays dead, and nobody keeps quiet about it


@EACH
def test_a_worker_that_is_stopped_counts_as_hanging_even_if_it_was_idle(kind, monkeypatch):
    clock = PoolClock(monkeypatch)
    with make(kind, timeout=50.0) as collector:
        gather(collector, 4)
        wait_until(lambda: all(w["stage"] == "idle" for w in collector.stats()["workers"]))
        os.kill(pids(collector)[0], signal.SIGSTOP)
        stopped = collector.pool.handles[0]
        with (
            pytest.raises(WorkerTimeout, match=r"worker 0 .*hangs"),
            clock.put_forward(60.0, lambda: stopped.owed),
        ):
            gather(collector)
        with pytest.raises(WorkerTimeout, match=r"worker 0 .*did not answer 'getattr_env'|hangs"):
            collector.getattr_env("steps")
        collector.shutdown(timeout=0.2)


def test_a_stopped_worker_that_was_idle_is_replaced_when_it_is_asked_for_its_state(
    monkeypatch,
):
    clock = PoolClock(monkeypatch)
    with make("async", timeout=50.0, on_worker_failure="restart") as collector:
        gather(collector, 4)
        wait_until(lambda: all(w["stage"] == "idle" for w in collector.stats()["workers"]))
        os.kill(pids(collector)[0], signal.SIGSTOP)
        other = collector.pool.handles[1]
        with clock.put_forward(60.0, lambda: other.answers):  # it has answered, and only it
            assert len(collector.state_dict()["workers"]) == 2
        assert collector.stats()["restarts"] == 1


def kill(pid: int) -> None:
    """Kill, and wait for the death: until then a worker may be given weights."""
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([fd], [], [], 30.0)
    os.close(fd)


@pytest.mark.parametrize("policy", ["raise", "restart"])
@PAIRED
def test_an_update_while_a_worker_is_dead_raises_or_replaces_it(kind, scheme, policy):
    model = Plain()
    schemes = {"policy": SCHEMES[scheme]()}
    with make(kind, model, weight_sync_schemes=schemes, on_worker_failure=policy) as collector:
        collector.next()
        kill(pids(collector)[1])
        hold(model, 3)
        if policy == "raise":
            with pytest.raises(WorkerDied, match="worker 1"):
                collector.update_policy_weights_()
            return
        collector.update_policy_weights_()
        for _ in range(8):
            batch = collector.next()
            if kind == "sync":
                assert set(batch["weight"].flatten().tolist()) == {3.0}
        assert set(batch["weight"].flatten().tolist()) == {3.0}
        assert collector.stats()["restarts"] == 1
        assert balance(collector) == 0


def test_an_update_of_two_models_brings_both_to_all_though_a_worker_is_dead():
    model = ActorCritic()
    schemes = {"actor": SharedMemWeightSyncScheme(), "critic": SharedMemWeightSyncScheme()}
    with make("sync", model, weight_sync_schemes=schemes, on_worker_failure="restart") as collector:
        collector.next()
        kill(pids(collector)[1])
        hold(model.actor, 1)
        hold(model.critic, 2)
        collector.update_policy_weights_()
        batch = collector.next()
        assert set(batch["weight"].flatten().tolist()) == {1.0}
        assert set(batch["value"].flatten().tolist()) == {2.0}


def check(batch: Any, seen: dict[int, int], weights: set[float]) -> None:
    """Steps go up by one inside a trajectory, and its number is used by nobody else."""
    mask = batch["collector", "mask"]
    weights |= set(batch["weight"][mask].tolist())
    assert torch.equal(batch["weight"][mask], batch["policy_version"][mask].float())
    for row in range(batch.batch_size[0]):
        worker = int(batch["collector", "worker"][row, 0])
        for t in range(int(mask[row].sum())):
            number = int(batch["collector", "traj_ids"][row, t])
            step = int(batch["observation"][row, t, 1])
            assert int(batch["observation"][row, t, 0]) == worker
            assert batch["is_init"][row, t] == (step == 0)
            assert seen.get(number, -1) == step - 1, (number, step)
            seen[number] = step


@PAIRED
def test_workers_killed_at_any_moment_are_replaced_and_every_frame_is_accounted_for(kind, scheme):
    chance = random.Random(f"{kind} {scheme}")
    model, seen, weights = Plain(), {}, set()
    kills = 8
    with make(
        kind,
        model,
        weight_sync_schemes={"policy": SCHEMES[scheme]()},
        on_worker_failure="restart",
        max_restarts=kills,
    ) as collector:
        for number in range(1, kills + 1):
            for _ in range(chance.randrange(3)):
                check(collector.next(), seen, weights)
            victim = pids(collector)[chance.randrange(2)]
            timer = threading.Timer(chance.random() * 0.01, os.kill, (victim, signal.SIGKILL))
            timer.start()
            hold(model, number)
            collector.update_policy_weights_()
            while collector.stats()["restarts"] < number:
                check(collector.next(), seen, weights)
                assert balance(collector) == 0
            timer.join()
        stats = collector.stats()
        assert stats["restarts"] == kills
        assert stats["dropped"] <= kills * 40 * (1 if kind == "sync" else 2)
        for _ in range(6):
            batch = collector.next()
        assert set(batch["weight"].flatten().tolist()) == {float(kills)}
        lives = [seeds for worker in collector.getattr_env("seeded") for seeds in [worker]]
        assert lives[0] != lives[1]


@pytest.mark.parametrize("stage", ["acting", "stepping", "taking weights", "handing over"])
def test_workers_killed_in_a_given_stage_are_replaced(stage):
    assert stage in STAGES
    model, seen = Plain(), {}
    chance = random.Random(stage)
    with make("async", model, on_worker_failure="restart", max_restarts=2) as collector:
        for kill in range(2):
            handle = collector.pool.handles[kill % 2]
            killed = False
            numbers = iter(range(1 + 10_000 * kill, 10_000 * (kill + 1)))
            while not killed and (number := next(numbers, None)):
                if chance.random() < 0.3:
                    hold(model, collector.policy_version + 1)
                    collector.update_policy_weights_()
                for _ in range(200):
                    if handle.counters.stage == stage or number == 2_000:  # too short to be seen
                        os.kill(handle.process.pid, signal.SIGKILL)
                        killed = True
                        break
                check(collector.next(), seen, set())
            while collector.stats()["restarts"] <= kill:
                check(collector.next(), seen, set())
            assert balance(collector) == 0


def test_a_newcomer_in_a_pause_stands_still_as_the_others_do():
    with make("async", on_worker_failure="restart") as collector:
        collector.next()
        with collector.pause():
            before = collector.stats()["collected"]
            os.kill(pids(collector)[0], signal.SIGKILL)
            for _ in range(20):
                assert collector.getattr_env("worker") == [0, 1]
            stats = collector.stats()
            assert stats["restarts"] == 1
            assert stats["collected"] == before
        assert len(collector.next())


def test_a_newcomer_has_a_new_seed_of_the_runs_own():
    seeds = []
    for _ in range(2):
        with make("sync", on_worker_failure="restart") as collector:
            collector.set_seed(3)
            collector.next()
            before = collector.getattr_env("seeded")
            os.kill(pids(collector)[1], signal.SIGKILL)
            collector.next()
            after = collector.getattr_env("seeded")
            assert after[0] == before[0]
            assert after[1] != before[1][-1:]
            seeds.append((before[0][-1], before[1][-1], after[1][-1]))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_a_newcomer_makes_only_the_random_frames_that_were_left():
    with make("sync", init_random_frames=80, on_worker_failure="restart") as collector:
        collector.next()
        assert collector.load_state_dict(collector.state_dict())
        for random in (True, False):
            os.kill(pids(collector)[1], signal.SIGKILL)
            assert ((collector.next()["policy_version"] < 0) == random).all()


def test_restarts_are_bounded_and_the_last_failure_is_raised():
    trouble = {"where": "step", "at": 30}
    with make("sync", trouble=trouble, on_worker_failure="restart", max_restarts=2) as collector:
        with pytest.raises(WorkerRaised, match="worker 1") as raised:
            gather(collector)
        assert raised.value.__notes__ == ["all max_restarts=2 are used up"]
        assert collector.stats()["restarts"] == 2


def test_a_newcomer_that_cannot_be_made_counts_as_a_restart(tmp_path):
    trouble = {"where": "make", "at": 1, "once": str(tmp_path / "made")}
    (tmp_path / "made").touch()
    with make("sync", trouble=trouble, on_worker_failure="restart", max_restarts=3) as collector:
        collector.next()
        (tmp_path / "made").unlink()
        os.kill(pids(collector)[1], signal.SIGKILL)
        collector.next()
        assert collector.stats()["restarts"] == 2
        assert balance(collector) == 0


@pytest.mark.parametrize(
    ("kind", "what"), [("sync", "raise"), ("async", "exit"), ("async", "hang")]
)
def test_trouble_that_passes_costs_only_the_workers_unfinished_block(
    kind, what, tmp_path, monkeypatch
):
    once = tmp_path / "once"
    trouble = {"where": "step", "at": 50, "what": what, "once": str(once)}
    seen: dict[int, int] = {}
    clock = PoolClock(monkeypatch)
    waits = clock.put_forward(60.0, once.exists) if what == "hang" else nullcontext()
    with make(kind, trouble=trouble, on_worker_failure="restart", timeout=50.0) as collector:
        with waits:
            while not collector.stats()["restarts"]:
                check(collector.next(), seen, set())
        for _ in range(5):
            check(collector.next(), seen, set())
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert stats["workers"][0]["dropped"] == 0
        assert stats["workers"][1]["dropped"] < 40
        assert balance(collector) == 0


ASKING = {
    "all": lambda collector: collector.state_dict()["workers"][1],
    "one": lambda collector: collector.reset([1]) or True,
}


@pytest.mark.parametrize(("kind", "asking"), [("async", "all"), ("sync", "one")])
def test_a_worker_that_dies_while_it_is_asked_is_replaced_and_asked_again(kind, asking):
    with make(kind, on_worker_failure="restart") as collector:
        gather(collector, 2)
        os.kill(pids(collector)[1], signal.SIGKILL)
        assert ASKING[asking](collector)
        assert collector.stats()["restarts"] == 1
        gather(collector, 4)
        assert balance(collector) == 0


def test_several_failures_are_told_together():
    with make("sync", workers=3, frames_per_batch=42) as collector:
        collector.next()
        for pid in pids(collector)[1:]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"worker [12] .*died by SIGKILL"):
            gather(collector)
        wait_until(lambda: bool(collector.stats()) and len(collector.pool.failed()) == 2)
        with pytest.raises(WorkerError, match="2 workers failed") as raised:
            collector.next()
        assert set(raised.value.failures) == {1, 2}


def test_a_call_that_fails_in_a_worker_says_so_and_the_worker_goes_on():
    with make("async") as collector:
        collector.next()
        with pytest.raises(WorkerRaised, match=r"worker 0 .*failed in getattr_env.*'nothing'"):
            collector.getattr_env("nothing")
        with pytest.raises(WorkerRaised, match="failed in getattr_env: TypeError: cannot pickle"):
            collector.getattr_env("lock")
        gather(collector, 5)
        assert balance(collector) == 0


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), BrokenPipeError("Broken pipe")])
def test_a_fork_server_that_dies_while_it_starts_a_worker_is_named(monkeypatch, error):
    def die(self):
        raise error

    monkeypatch.setattr(multiprocessing.get_context("forkserver").Process, "start", die)
    with pytest.raises(RuntimeError, match=r"worker 0.* could not be started: the fork server"):
        make("sync")


def test_a_lack_of_descriptors_for_a_workers_frames_is_an_error_that_says_so():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with make("sync") as collector:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            with pytest.raises(WorkerError, match="Too many open files"):
                collector.next()
            for handle in collector.pool.handles:  # its frames have come as well, and are no error
                wait_until(lambda handle=handle: not handle.is_busy())
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_reset_may_take_as_long_as_the_collectors_timeout(monkeypatch):
    monkeypatch.setattr("sync.scheme.SEND_TIMEOUT_S", 0.1)  # what a scheme waits elsewhere

    class Slow(gym.Wrapper):
        num_resets = 0

        def reset(self, **options):
            self.num_resets += 1
            if self.num_resets == 4:  # while a version waits for this worker
                time.sleep(1.0)  # loads a level
            return self.env.reset(**options)

    def make_env():
        return Slow(gym.make("CartPole-v1", max_episode_steps=4))

    scheme = SharedMemWeightSyncScheme()
    options = {"num_workers": 1, "frames_per_batch": 8, "weight_sync_schemes": {"policy": scheme}}
    with MultiAsyncCollector(make_env, ActorCritic(), timeout=50, **options) as collector:
        for _ in range(4):
            collector.next()
            collector.update_policy_weights_()
        assert scheme.timeout == 50
