"""Every ending is bounded and silent, and leaves no process and nothing in shared memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
import torch

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from collectors.workers.process_lifetime import sigint_blocked
from tests.collectors.support import MULTI
from tests.collectors.troubled import Mishap, Plain, Troubled, is_gone, make, pids, wait_until

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("kind", MULTI)
LONG = pytest.mark.timeout(300)  # programs load torch, and begin several collectors
PROGRAM = """
import signal, sys, threading
import gymnasium as gym
import torch

torch.set_num_threads(1)
from tests.collectors.support import COLLECTORS
from tests.collectors.troubled import Plain, Troubled


def vector():
    return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")


def begin(kind, method="forkserver", make=Troubled):
    options = {} if kind == "single" else {"num_workers": 2, "start_method": method}
    collector = COLLECTORS[kind](make, Plain(), frames_per_batch=40, **options)
    collector.next()
    return collector


def go_on(collector):
    try:
        for batch in collector:
            pass
    except RuntimeError as error:
        assert str(error) == "the collector was shut down"


def begin_all():
    return [begin("sync", "fork"), begin("async", make=vector), begin("sync", "spawn")]


def main(ending, *arguments):
    print("starting", flush=True)
    if ending == "walk":
        for kind in ("single", "sync", "async"):
            collector = begin(kind)
            collector.shutdown()
            collector.shutdown()
            collector = begin(kind)
            del collector
        begun = begin_all()  # which the interpreter's end finds running, one of them in a thread
        begun += [begin("single", make=vector)]
        threading.Thread(target=go_on, args=(begun[1],), daemon=True).start()
        return begun
    if ending == "crash":
        begun = [begin("single"), begin("async")]
        raise RuntimeError("the user's own mistake")
    begun = begin_all() if ending == "all" else [begin(*arguments)]
    print("ready", flush=True)
    while True:
        for collector in begun:
            collector.next()
            collector.update_policy_weights_()


if __name__ == "__main__":
    try:
        begun = main(*sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


@contextmanager
def program(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program above."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with in_session(str(file), *arguments) as process:
        yield process


@contextmanager
def in_session(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a session of its own, of which nothing may be left."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for one in of_session(process.pid):
            one.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (said := process.stdout.readline().strip()) != line:
        assert said, "it ended before that"


@LONG
def test_every_ending_is_silent(tmp_path):
    with program(tmp_path, "walk") as process:
        _, errors = process.communicate(timeout=250.0)
        assert (process.returncode, errors) == (0, "")
        wait_until(lambda: not of_session(process.pid))


@LONG
def test_a_crash_shows_the_users_error_and_nothing_of_ours(tmp_path):
    with program(tmp_path, "crash") as process:
        _, errors = process.communicate(timeout=250.0)
        assert process.returncode == 1
        assert errors.strip().endswith("RuntimeError: the user's own mistake")
        assert errors.count("Traceback") == 1
        wait_until(lambda: not of_session(process.pid))


def processes_held(pid: int) -> set[int]:
    """The processes whose end the kernel tells this one of, by a descriptor."""
    held = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            held |= {int(line[4:]) for line in file.read_text().splitlines() if line[:4] == "Pid:"}
    return held


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_kernel_tells_workers_of_the_trainers_end(method):
    # Without a policy, since schemes too watch the trainer.
    with MultiAsyncCollector(
        Troubled, num_workers=2, frames_per_batch=40, start_method=method
    ) as collector:
        collector.next()
        for worker in pids(collector):
            assert os.getpid() in processes_held(worker)
            assert worker in processes_held(os.getpid())


@LONG
def test_when_the_trainer_is_killed_its_workers_and_their_own_children_go_too(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with program(tmp_path, "all") as process:
        wait_for(process, "ready")
        mine = {p.pid for p in of_session(process.pid)}
        assert len(mine) >= 1 + 3 * 2 + 2 * 2  # workers, and the members of their vectors
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60.0)
        wait_until(lambda: not of_session(process.pid))
        assert process.stderr is not None
        errors = process.stderr.read()  # gymnasium's members say that their vector is gone
        assert not any(f"/{ours}/" in errors for ours in ("collectors", "sync")), errors
    left = set(os.listdir("/dev/shm")) - before
    assert not [n for n in left if any(str(pid) in n for pid in mine) or "lockstep" in n]


class HasAProcess(Troubled):
    """Ends its own process by the signal that is its trainer's to hear of in the worker."""

    @property
    def exit_code(self) -> int | None:
        process = multiprocessing.Process(target=time.sleep, args=(60.0,))
        process.start()
        process.terminate()
        process.join(30.0)
        return process.exitcode


def test_a_worker_leaves_sigterm_to_the_trainer_and_an_environments_process_heeds_it():
    with MultiSyncCollector([HasAProcess], Plain(), frames_per_batch=20) as collector:
        for worker in pids(collector):
            os.kill(worker, signal.SIGTERM)
        collector.next()
        assert collector.getattr_env("exit_code") == [-signal.SIGTERM]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("async", "forkserver"),
        pytest.param("async", "fork", marks=pytest.mark.slow),
        pytest.param("sync", "spawn", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_moment_ends_all_in_silence(tmp_path, kind, method):
    chance = random.Random(f"{kind} {method}")
    for phase in ("starting", "ready"):
        with program(tmp_path, "for ever", kind, method) as process:
            wait_for(process, phase)
            time.sleep(chance.random() * (1.0 if phase == "starting" else 0.1))
            os.killpg(process.pid, signal.SIGINT)
            said, errors = process.communicate(timeout=30.0)
            assert (process.returncode, errors) == (130, "")
            assert said.endswith("interrupted\n")
            wait_until(lambda p=process: not of_session(p.pid))


def test_an_interrupt_that_another_thread_takes_waits_until_a_process_has_started():
    other, started = threading.Thread(target=time.sleep, args=(0.2,)), []
    other.start()

    def start():
        with sigint_blocked():
            os.kill(os.getpid(), signal.SIGINT)
            other.join()
            started.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@EACH
def test_a_collector_ends_when_it_is_shut_down_and_when_it_is_deleted(kind):
    collector = make(kind)
    collector.next()
    workers = pids(collector)
    collector.shutdown()
    collector.shutdown()
    assert all(is_gone(pid) for pid in workers)
    collector = make(kind)
    workers = pids(collector)
    del collector
    gc.collect()
    wait_until(lambda: all(is_gone(pid) for pid in workers))


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "forkserver"])
def test_no_descriptor_is_left_to_the_interpreter_which_would_lose_an_interrupt(
    method, monkeypatch
):
    left = []

    class Told(weakref.finalize):
        def __call__(self, ref=None):
            left.extend([] if ref is None else [self])
            super().__call__(ref)

    monkeypatch.setattr("sync.local.memory.finalize", Told)
    with make("async", start_method=method, on_worker_failure="restart") as collector:
        collector.next()
        os.kill(pids(collector)[0], signal.SIGKILL)
        while collector.stats()["workers"][0]["restarts"] == 0:
            collector.update_policy_weights_()
            collector.next()
        gc.collect()
        assert not left


@pytest.mark.parametrize("tells", [True, False])
def test_an_environment_that_cannot_be_closed_keeps_nothing_else_open(tells):
    threads = torch.get_num_threads()
    collector = make("single", trouble={"where": "close"}, num_threads=threads + 1)
    with pytest.raises(Mishap) if tells else nullcontext():
        collector.shutdown(raise_on_error=tells)
    assert torch.get_num_threads() == threads
    with pytest.raises(RuntimeError, match=r"between init_on_sender\(\) and shutdown\(\)"):
        collector.publisher.schemes["policy"].send()
    collector.shutdown()


@pytest.mark.parametrize(("kind", "where", "at"), [("sync", "close", 1), ("async", "step", 25)])
def test_a_worker_that_hangs_does_not_keep_shutdown_from_ending(kind, where, at):
    collector = make(kind, trouble={"where": where, "what": "hang", "at": at})
    workers = pids(collector)
    if kind == "sync":
        collector.next()
    collector.shutdown(timeout=0.5)
    assert all(is_gone(pid) for pid in workers)


def test_a_stopped_worker_ends_though_its_fork_server_died():
    collector = make("async")
    workers = pids(collector)
    os.kill(workers[0], signal.SIGSTOP)
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    process = collector.pool.handles[0].process
    wait_until(lambda: not process.is_alive())  # so it seems from here
    collector.shutdown(timeout=0.5)
    wait_until(lambda: all(is_gone(pid) for pid in workers))


@EACH
def test_shutdown_while_another_thread_waits_for_a_batch_ends_that_wait(kind):
    collector = make(kind, trouble={"where": "step", "what": "hang", "at": 5})
    raised: list[BaseException] = []

    def iterate() -> None:
        try:
            while True:
                collector.next()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    wait_until(lambda: collector.stats()["workers"][1]["stage"] == "stepping")
    collector.shutdown(timeout=0.5)
    thread.join(20.0)
    assert not thread.is_alive()
    assert "shut down" in str(raised[0])


def test_a_start_that_fails_leaves_nothing():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match="worker 1"):
        make("sync", trouble={"where": "make"})
    with pytest.raises(RuntimeError, match="worker 1"):
        make("async", trouble={"where": "make", "what": "hang"}, start_timeout=1.5)
    wait_until(
        lambda: all(
            is_gone(child.pid)
            for child in set(psutil.Process().children(recursive=True)) - before
            if "forkserver" not in " ".join(child.cmdline()[:4])
            and "resource_tracker" not in " ".join(child.cmdline()[:4])
        )
    )


def test_a_forked_child_neither_uses_nor_ends_the_workers_of_its_parent():
    with make("async") as collector:
        collector.next()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                for call in (collector.next, collector.stats, collector.update_policy_weights_):
                    with pytest.raises(RuntimeError, match="this process was forked from"):
                        call()
                collector.shutdown()
                collector.__del__()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(5):
            collector.next()


class Owner:
    """An object that is part of a reference cycle with its collector."""

    def __init__(self, kind, **options):
        self.collector = kind(self.create_env, Plain(), frames_per_batch=4, seed=0, **options)
        self.collector.next()

    def create_env(self):
        return Troubled()


def test_collectors_in_reference_cycles_end_in_silence():
    owners = [Owner(Collector), Owner(MultiAsyncCollector, num_workers=1)]
    (worker,) = pids(owners[1].collector)
    del owners
    gc.collect()
    wait_until(lambda: is_gone(worker))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_collector_is_neither_copied_nor_pickled(duplicate):
    with Collector(Troubled, frames_per_batch=4) as collector:
        with pytest.raises(TypeError, match="a Collector cannot be copied or pickled"):
            duplicate(collector)
        assert collector.next().numel() == 4


LISTENING = """
import signal
from multiprocessing import forkserver
from collectors.workers.process_lifetime import context

if __name__ == "__main__":
    process = context("forkserver").Process(target=int)
    process.start()
    process.join()
    print(forkserver._forkserver._forkserver_pid, flush=True)
    signal.pause()
"""


@LONG
def test_the_fork_server_of_a_killed_trainer_leaves_no_socket(tmp_path):
    script, temporary = tmp_path / "listening.py", Path(tempfile.mkdtemp(dir="/tmp"))
    script.write_text(LISTENING)  # and the folder's path is short, as that of a socket has to be
    program = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        assert list(temporary.glob("pymp-*/listener-*"))
        program.kill()
        program.wait()
        wait_until(lambda: is_gone(server), 60.0)
        assert not list(temporary.iterdir())
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
        shutil.rmtree(temporary)
