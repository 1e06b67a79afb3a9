"""A model that lives where the sender writes it: while it rests, and never while it is used."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from sync import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WorkerDied,
    WorkerError,
    WorkerRaised,
)
from sync.home import HOME_BYTES, RESTING, Home, Turns
from sync.memory import AnonymousMemory, Watch
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from tests.promises.probe import wait_until
from tests.sync.support import Worker, bits, connect, fill, held, policy, receive, running

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "shared_mem": (SharedMemWeightSyncScheme, SharedMemTransport),
    "multiprocess": (MultiProcessWeightSyncScheme, MPTransport),
}


@pytest.fixture(autouse=True, params=KINDS)
def kind(request, monkeypatch):
    """Every test is of every scheme whose sender writes into models that rest."""
    monkeypatch.setenv("LOCKSTEP_TEST_KIND", request.param)  # also in programs that tests start
    return request.param


@pytest.fixture
def transport(kind):
    return KINDS[kind][1]


def sender(model=None, *, workers=1, **options):
    scheme = KINDS[os.environ["LOCKSTEP_TEST_KIND"]][0](**options)
    scheme.init_on_sender(model=policy(1) if model is None else model, devices=["cpu"] * workers)
    return scheme


def lives_at_home(scheme, model):
    return scheme._receiver._home is not None


@pytest.fixture
def stopped():
    """Processes that are stopped, and go on afterwards whatever happens."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    yield stop
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def at_rest(stopped):
    """Stop a worker when its model rests, however long its thread takes to get there."""

    def stop(scheme, worker: Worker, worker_idx: int = 0) -> int:
        line, pid = scheme._transports[worker_idx], worker.process.pid

        def rests() -> bool:
            stopped(pid)
            home = line.row.home if hasattr(line, "row") else line.weight_queue.home
            if home == RESTING and line.slots.turns.take(worker_idx):
                line.slots.turns.give(worker_idx)
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        wait_until(rests)
        return pid

    return stop


# -- turns


def test_a_turn_belongs_to_one_user_at_a_time_also_within_a_process():
    memory = AnonymousMemory(4096)
    ours, theirs = Turns(memory), Turns(memory)
    assert ours.take(5)
    assert ours.take(5)  # its own already
    assert not theirs.take(5)
    assert theirs.take(6)
    ours.give(5)
    assert theirs.take(5)
    theirs.close()
    assert ours.take(5)


def test_the_kernel_takes_a_turn_back_from_a_process_that_is_killed():
    memory = AnonymousMemory(4096)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        theirs = Turns(memory)
        theirs.take(5)
        os.write(writer, b"!")
        signal.pause()
    try:
        os.read(reader, 1)
        ours = Turns(memory)
        assert not ours.take(5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ours.take(5)


# -- what lives at home


@pytest.mark.parametrize("background", [False, True], ids=["asking", "background"])
def test_a_small_model_lives_at_home_and_a_large_or_special_one_does_not(background, kind):
    def lives(make, **options):
        scheme = sender(make(), **options)
        with running(scheme, make, background=background) as (worker,):
            return worker.do(lives_at_home)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Parameter(torch.zeros(4))
            self.register_buffer("first", self.all.detach()[:2])

    assert lives(policy)
    assert not lives(lambda: nn.Linear(HOME_BYTES // 4, 1))
    assert not lives(Tied)  # two tensors of one memory would part
    assert not lives(lambda: dict(policy().state_dict()))
    assert not lives(policy, wire="bfloat16")
    if kind == "shared_mem":
        assert lives(policy, zero_copy=False)
        assert not lives(policy, zero_copy=True)


def test_tied_parameters_stay_tied():
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    with running(scheme := sender(tied()), tied, background=True) as (worker,):
        assert worker.do(lives_at_home)
        scheme.send(new := fill(tied(), 7))
        assert worker.do(held) == bits(new)
        assert worker.do(lambda s, m: m[1].weight is m[0].weight)


# -- while it rests


def test_a_worker_that_rests_has_a_version_in_use_without_being_woken(at_rest):
    with running(scheme := sender(workers=2), background=True) as workers:
        for worker_idx, worker in enumerate(workers):
            at_rest(scheme, worker, worker_idx)
        scheme.send(policy(2), worker_ids=[1])
        scheme.send(policy(3), worker_ids=[1])
        assert scheme.acknowledged == {0: 0, 1: 2}
        for worker in workers:
            os.kill(worker.process.pid, signal.SIGCONT)
        assert [w.do(held) for w in workers] == [bits(policy(1)), bits(policy(3))]
        assert [w.do(lambda s, m: s.version) for w in workers] == [0, 2]
        assert [w.do(receive) for w in workers] == [False, True]
        stats = scheme.stats["workers"]
        assert [stats[i]["applied"] for i in (0, 1)] == [1, 3]


def test_a_worker_that_asks_rests_only_where_it_says_so():
    with running(scheme := sender()) as (worker,):
        scheme.send_async(policy(2))
        assert worker.do(held) == bits(policy(1))
        assert worker.do(receive)
        assert worker.do(held) == bits(policy(2))
        worker.do(begin_resting)
        scheme.send(policy(3))
        assert worker.do(held) == bits(policy(3))
        worker.do(end_resting)
        scheme.send_async(policy(4))
        assert worker.do(held) == bits(policy(3))
        assert worker.do(receive)
        assert worker.do(held) == bits(policy(4))


def begin_resting(scheme, model):
    model.resting = scheme.resting()
    model.resting.__enter__()


def end_resting(scheme, model):
    model.resting.__exit__(None, None, None)


def test_what_comes_while_somebody_waits_for_it_wakes_him():
    with running(scheme := sender(), background=True) as (worker,):
        for value in range(2, 8):
            worker.tell(receive, 20)
            time.sleep(0.05)
            scheme.send(policy(value))
            assert worker.hear()
            assert worker.do(held) == bits(policy(value))


def test_each_worker_gets_its_own(kind):
    scheme = sender(workers=3, **({"per_worker_weights": True} if kind == "shared_mem" else {}))
    with running(scheme, background=True) as workers:
        scheme.send({0: policy(10), 2: policy(12)})
        assert [w.do(held) for w in workers] == [bits(policy(v)) for v in (10, 1, 12)]


def test_a_dead_worker_has_nothing_in_use():
    with running(scheme := sender(workers=2), background=True) as workers:
        scheme.send(policy(2))
        workers[0].process.kill()
        workers[0].process.join()
        with pytest.raises(WorkerDied):
            scheme.send(policy(3))
        assert workers[1].do(held) == bits(policy(3))
        assert scheme.acknowledged[0] == 1


def test_who_forks_children_that_outlive_him_harms_nobody():
    def fork_a_child(scheme, model):
        with scheme.reading():
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
        return child

    with running(scheme := sender(), background=True) as (worker,):
        child = worker.do(fork_a_child)
        try:
            scheme.send(policy(2))
            assert worker.do(held) == bits(policy(2))
        finally:
            os.kill(child, signal.SIGKILL)


# -- leaving home


@pytest.mark.parametrize("background", [False, True], ids=["asking", "background"])
def test_a_parameter_that_its_owner_replaced_gets_the_next_version(background):
    def replace(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(4, 3))

    with running(scheme := sender(), background=background) as (worker,):
        worker.do(replace)
        for value in (2, 3):
            scheme.send_async(policy(value))
            if not background:
                worker.do(receive)
            scheme.wait_async(20)
            worker.do(lambda s, m: s.receive())
            assert worker.do(held) == bits(policy(value))
        assert not worker.do(lives_at_home)


def test_a_parameter_of_another_shape_is_an_error_at_the_sender(at_rest):
    def replace(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(5, 3))

    def receive_in_vain(scheme, model):
        with pytest.raises(ValueError, match=r"0\.weight"):
            scheme.receive()

    with running(scheme := sender(), background=True) as (worker,):
        worker.do(replace)
        pid = at_rest(scheme, worker)
        scheme.send(policy(2))  # nobody has looked at its model yet
        os.kill(pid, signal.SIGCONT)
        worker.do(receive_in_vain)
        with pytest.raises(WorkerRaised, match=r"0\.weight"):
            scheme.send(policy(3))


def test_weights_that_are_applied_by_hand_stay_until_the_next_version():
    with running(scheme := sender(), background=True) as (worker,):
        worker.do(lambda s, m: s.apply_weights(policy(9)))
        assert worker.do(held) == bits(policy(9))
        scheme.send(policy(2))
        assert worker.do(held) == bits(policy(2))


def test_after_shutdown_the_model_keeps_its_weights():
    with running(scheme := sender(), background=True) as (worker,):
        scheme.send(policy(2))
        worker.do(lambda s, m: s.shutdown())
        assert worker.do(held) == bits(policy(2))
        assert worker.do(lambda s, m: s.version) == 1


# -- a sender that does not finish


def test_what_an_interrupt_kept_from_being_booked_is_booked_later(monkeypatch, transport):
    with running(scheme := sender(), background=True) as (worker,):
        with monkeypatch.context() as patch:
            interrupted_once(patch, transport, "heard")
            with pytest.raises(KeyboardInterrupt):
                scheme.send(policy(2))
        scheme.wait_async(5)
        assert scheme.acknowledged == {0: 1}
        assert worker.do(held) == bits(policy(2))


def test_what_an_interrupt_left_half_written_is_not_used(monkeypatch, at_rest):
    with running(scheme := sender(), background=True) as (worker,):

        def interrupt(self, other) -> None:
            self._header[0] = NEVER
            self._rest[: len(self._rest) // 2] = other._rest[: len(self._rest) // 2]
            raise KeyboardInterrupt

        pid = at_rest(scheme, worker)
        with monkeypatch.context() as interrupting:
            interrupting.setattr(Snapshot, "become", interrupt)
            with pytest.raises(KeyboardInterrupt):
                scheme.send(policy(2))
        os.kill(pid, signal.SIGCONT)
        scheme.wait_async(5)
        assert worker.do(read) == (1, bits(policy(2)))
        scheme.send(policy(3))
        assert worker.do(read) == (2, bits(policy(3)))


def read(scheme, model):
    with scheme.reading() as version:
        return version, bits(model)


@contextlib.contextmanager
def successor(scheme):
    """Who takes worker 0's place."""
    with Worker(scheme, policy, worker_idx=0) as second:
        second.tell(connect, True)
        scheme.connect(worker_idx=0)
        second.hear()
        yield second


def test_a_newcomer_is_asked_and_not_what_its_predecessor_left():
    def come_again(scheme, model):
        scheme.shutdown()

    with running(scheme := sender(), background=True) as (worker,):
        scheme.send(policy(2))
        worker.do(come_again)
        with successor(scheme) as second:
            for value in (3, 4):
                scheme.send(policy(value))
                assert second.do(held) == bits(policy(value))


SENDER_THAT_FAILS = """
import os, signal, sys, time
from sync.snapshot import Snapshot
from tests.sync.support import fill, policy, running
from tests.sync.test_home import sender, held

def half(self, other):
    self._header[0] = -1
    end = len(self._rest) // 2
    self._rest[:end] = other._rest[:end]
    os.kill(os.getpid(), signal.{signal})
    self._rest[end:] = other._rest[end:]
    self._header[0] = other._header[0]

with running(scheme := sender(), background=True) as (worker,):
    whole, Snapshot.become = Snapshot.become, half
    worker.tell(wait_and_look)
    time.sleep(0.5)
    scheme.send_async(policy(2))
    print("went on", flush=True)
    Snapshot.become = whole
    worker.hear()
    scheme.send(policy(3))
    print(worker.do(held) == __import__("tests.sync.support").sync.support.bits(policy(3)))
"""
WORKER_THAT_LOOKS = """
def wait_and_look(scheme, model):
    time.sleep(1.0)
    with scheme.reading() as version:
        values = {float(p.detach().flatten()[0]) for p in model.parameters()}
        whole = {float(v) for p in model.parameters() for v in p.detach().flatten()}
    print(version, values, whole == values, flush=True)
"""


def start_failing(how: str) -> subprocess.Popen[str]:
    code = WORKER_THAT_LOOKS + SENDER_THAT_FAILS.format(signal=how)
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_what_a_killed_sender_left_half_written_is_not_used():
    with start_failing("SIGKILL") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1 {2.0} True\n"


def test_a_sender_that_is_stopped_while_it_writes_is_not_waited_for():
    with start_failing("SIGSTOP") as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "1 {2.0} True\n"
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "went on\n"
        assert process.stdout.readline() == "True\n"


def test_a_thread_that_moves_out_with_a_model_that_fits_no_more_says_so_and_goes_on():
    def lose_the_turn(scheme, model):
        scheme._receiver._home._take()  # whoever has it now never gives it back
        Home.enter = lambda home: False
        model[0].weight = nn.Parameter(torch.zeros(5, 3))

    def fit_again(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(4, 3))

    with running(scheme := sender(timeout=20), background=True) as (worker,):
        worker.do(lose_the_turn)
        with pytest.raises(WorkerRaised, match=r"0\.weight"):
            scheme.send(policy(2))
        worker.do(fit_again)
        scheme.send(policy(3))
        assert worker.do(held) == bits(policy(3))


# -- under load


def test_nobody_sees_a_version_change_while_he_reads():
    """Several threads of a worker read while the sender floods; a use lasts for a while."""

    def read_often(scheme, model):
        torn: list[int] = []
        seen: set[int] = set()
        until = time.monotonic() + 2.0

        def read() -> None:
            while time.monotonic() < until:
                with scheme.reading() as version:
                    before = bits(model)
                    time.sleep(0.0002)
                    if bits(model) != before or before != bits(policy(version + 1)):
                        torn.append(version)
                    seen.add(version)
                time.sleep(0.0005)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torn, len(seen)

    model = policy(1)
    with running(scheme := sender(model, workers=2), background=True) as workers:
        for worker in workers:
            worker.tell(read_often)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            fill(model, scheme.version + 2)
            scheme.send()
        for worker in workers:
            torn, seen = worker.hear()
            assert not torn
            assert seen > 10


# -- interrupts, forks, and other surprises


def interrupted_once(monkeypatch, owner, name, *, after=False):
    """The next call of that method ends in a Ctrl-C."""
    whole = getattr(owner, name)

    def interrupt(self, *args):
        monkeypatch.setattr(owner, name, whole)
        if after:
            whole(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupt)


def test_what_was_half_written_while_it_rested_is_whole_when_it_rests_no_more():
    def half(self, other):
        self._header[0] = NEVER
        self._rest[: len(self._rest) // 2] = other._rest[: len(self._rest) // 2]
        os._exit(1)

    scheme = sender()
    with running(scheme) as (worker,):
        worker.do(begin_resting)
        pid = os.fork()  # a sender that dies; this one has the worker
        if pid == 0:
            Snapshot.become = half
            scheme._sender._pid = scheme._pid = os.getpid()
            scheme.send_async(policy(2))
            os._exit(0)
        os.waitpid(pid, 0)
        worker.do(end_resting)
        assert worker.do(held) == bits(policy(2))
        assert worker.do(lambda s, m: s.version) == 1


def test_an_interrupt_on_the_way_back_from_rest_does_not_leave_the_model_to_the_sender():
    def rest_interrupted(scheme, model):
        with pytest.MonkeyPatch.context() as patch:
            interrupted_once(patch, Home, "work")
            with pytest.raises(KeyboardInterrupt), scheme.resting():
                pass

    with running(scheme := sender()) as (worker,):
        worker.do(rest_interrupted)
        scheme.send_async(policy(2))
        assert worker.do(held) == bits(policy(1))
        assert worker.do(receive)
        scheme.send_async(policy(3))
        assert worker.do(held) == bits(policy(2))


def test_rests_within_rests_and_uses_within_rests_end_when_they_should():
    def rest_in_rest(scheme, model):
        home = scheme._receiver._home
        states = [home._taken]
        with scheme.resting():
            with scheme.resting():
                states.append(home._taken)
                with scheme.reading():
                    states.append(home._taken)
                states.append(home._taken)
            states.append(home._taken)
        return [*states, home._taken]

    with running(sender()) as (worker,):
        assert worker.do(rest_in_rest) == [True, False, True, False, True, True]


def test_a_forked_child_neither_gives_away_its_parents_turn_nor_sees_what_comes():
    def fork_while_reading(scheme, model):
        reader, writer = os.pipe()
        receiver, reading = scheme._receiver, scheme.reading()
        move = receiver._moved_by_fork

        def late(*args):
            os.read(reader, 1)
            move(*args)

        receiver._moved_by_fork = late
        reading.__enter__()
        model.child = os.fork()
        if model.child == 0:
            reading.__exit__(None, None, None)
            os._exit(int(bits(model) != bits(policy(1))))
        model.tell = writer
        return scheme._receiver._home._taken

    def child_saw_nothing(scheme, model):
        os.write(model.tell, b"!")
        return os.waitpid(model.child, 0)[1] == 0

    with running(scheme := sender()) as (worker,):
        assert worker.do(fork_while_reading)
        scheme.send_async(policy(2))
        assert worker.do(held) == bits(policy(1))
        worker.do(begin_resting)
        scheme.send_async(policy(3))
        worker.do(end_resting)
        wait_until(lambda: worker.do(receive) and worker.do(held) == bits(policy(3)))
        assert worker.do(child_saw_nothing)


def test_a_model_that_has_left_is_nobody_elses():
    def replace(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(4, 3))

    def leave(scheme, model):
        scheme.receive()
        scheme.shutdown()

    with running(scheme := sender(), background=True) as (worker,):
        worker.do(replace)
        scheme.send(policy(2))
        worker.do(leave)
        with successor(scheme):
            scheme.send(policy(3))
            assert worker.do(held) == bits(policy(2))


def test_a_worker_that_is_interrupted_before_it_said_so_says_so_later():
    def receive_interrupted(scheme, model):
        with pytest.MonkeyPatch.context() as patch:
            interrupted_once(patch, Snapshot, "become", after=True)
            with pytest.raises(KeyboardInterrupt):
                scheme.receive()

    with running(scheme := sender()) as (worker,):
        scheme.send_async(policy(2))
        worker.do(receive_interrupted)
        worker.do(lambda s, m: s.receive())
        scheme.wait_async(5)
        assert worker.do(held) == bits(policy(2))


def test_an_interrupt_between_two_workers_keeps_nothing_from_the_second(monkeypatch, transport):
    with running(scheme := sender(workers=2), background=True) as workers:
        interrupted_once(monkeypatch, transport, "put_home")
        with pytest.raises(KeyboardInterrupt):
            scheme.send(policy(2))
        scheme.wait_async(5)
        assert [worker.do(held) for worker in workers] == [bits(policy(2))] * 2


def test_an_interrupt_while_deaths_are_looked_for_does_not_hide_one(monkeypatch):
    with running(scheme := sender(workers=2), background=True) as workers:
        interrupted_once(monkeypatch, Watch, "fds")
        with pytest.raises(KeyboardInterrupt):
            scheme.send(policy(2))
        workers[0].process.kill()
        workers[0].process.join()
        with pytest.raises(WorkerDied):
            scheme.send(policy(3))


def test_what_is_applied_by_hand_is_not_undone_by_what_came_before():
    with running(scheme := sender(), background=True) as (worker,):
        scheme.send(policy(2))
        worker.do(lambda s, m: s.apply_weights(policy(9)))
        assert worker.do(read) == (1, bits(policy(9)))


def test_a_worker_whose_model_fits_no_more_says_goodbye():
    def misfit_and_end(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(5, 3))
        scheme.shutdown()

    with running(scheme := sender(), background=True) as (worker,):
        scheme.send(policy(2))
        worker.do(misfit_and_end)
        with pytest.raises(WorkerError):  # what it raised, if it had not looked before
            scheme.send(policy(3))
        with pytest.raises(WorkerDied, match="left"):
            scheme.send(policy(4))


def test_models_of_inference_tensors_or_of_memory_that_others_know_stay_where_they_are():
    def inference():
        with torch.inference_mode():
            return policy()

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.register_buffer("view", self.weight.detach()[:2], persistent=False)

    for make in (inference, Viewed, lambda: policy().share_memory()):
        scheme = sender(make(), strategy="state_dict")
        with running(scheme, make) as (worker,):
            assert not worker.do(lives_at_home)


def test_parameters_stay_trainable_where_the_scheme_ends_in_inference_mode():
    def end(scheme, model):
        with torch.inference_mode():
            scheme.shutdown()
        return any(parameter.is_inference() for parameter in model.parameters())

    with running(sender(), background=True) as (worker,):
        assert not worker.do(end)


def test_a_sender_without_descriptors_wakes_its_workers(monkeypatch):
    def no_more(self):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Slots, "turns", property(no_more))
    with running(scheme := sender(workers=2), background=True) as workers:
        scheme.send(policy(2))
        assert [worker.do(held) for worker in workers] == [bits(policy(2))] * 2
