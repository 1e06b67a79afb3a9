"""Workers that fail, die, are replaced and come back, as the sender sees them."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from torch import nn

from sync import WorkerDied, WorkerError, WorkerRaised
from sync.local import worker_connections as local_channel
from sync.local.unix_connection import REFUSED
from sync.local.waiting import Doorbell, wait_for
from tests.sync.support import (
    EACH,
    KINDS,
    Counting,
    Handed,
    ThreadWorker,
    Worker,
    bits,
    connect,
    fill,
    held,
    policy,
    receive,
    running,
    sender,
    version,
)

# What has to be decoded cannot be pointed at.
WIRED = pytest.mark.parametrize(
    ("kind", "wire"),
    [
        *((kind, "float32") for kind in KINDS),
        ("shared_copy", "bfloat16"),
        ("multiprocess", "bfloat16"),
    ],
)


@WIRED
def test_who_takes_a_dead_workers_place_gets_what_was_sent_to_it_last_and_is_counted(kind, wire):
    scheme = sender(kind, model := policy(1), workers=2, wire=wire)
    with running(scheme, method="fork") as (alive, dying):
        scheme.send_async(policy(2))
        assert alive.do(receive, 20)
        dying.die()
        alive.tell(receive, 20)
        with pytest.raises(WorkerDied, match="worker 1"):
            scheme.send(policy(3))  # to both
        assert alive.hear()
        for value in range(4, 9):
            scheme.send_async(policy(value), worker_ids=0)
            assert alive.do(receive, 20)
        fill(model, 99)  # in training, and not published
        with Worker(scheme, worker_idx=1) as newcomer:
            newcomer.meet(scheme, worker_idx=1)
            assert newcomer.do(version) == scheme.acknowledged[1]
            assert newcomer.do(held) == bits(policy(3))
            assert [scheme.stats["workers"][w]["restarts"] for w in (0, 1)] == [0, 1]
            scheme.send_async(policy(9))
            assert newcomer.do(receive, 20)
            assert newcomer.do(held) == bits(policy(9))


@EACH
def test_a_refused_send_does_not_swallow_what_went_wrong_before(kind):
    scheme = sender(kind, model := nn.Sequential(Counting()))
    with running(scheme, lambda: nn.Sequential(Counting())) as (worker,):
        worker.do(lambda s, m: setattr(m[0], "refuses", True))
        scheme.send_async()
        with pytest.raises(RuntimeError, match="refuses"):
            worker.do(receive, 20)
        with pytest.raises(ValueError, match="NaN"):
            scheme.send_async(fill(model, float("nan")))
        with pytest.raises(WorkerRaised, match="refuses"):
            scheme.send_async(fill(model, 1))
        worker.do(lambda s, m: setattr(m[0], "refuses", False))
        assert worker.do(receive, 20)
        scheme.wait_async(20)  # it was raised once, and the version of that send was published
        assert scheme.acknowledged == {0: scheme.version} == {0: 2}


@EACH
def test_a_worker_that_fails_keeps_nobody_from_being_heard(kind):
    scheme = sender(kind, nn.Sequential(Counting()), workers=3, timeout=60)
    with running(scheme, lambda: nn.Sequential(Counting()), method="fork") as (
        refusing,
        dying,
        slow,
    ):
        refusing.do(lambda s, m: setattr(m[0], "refuses", True))
        outcome = []

        def send():
            try:
                scheme.send()
            except WorkerError as error:
                outcome.append((str(error), error.failures))

        thread = threading.Thread(target=send)
        thread.start()
        with pytest.raises(RuntimeError, match="refuses"):
            refusing.do(receive, 20)
        dying.die()
        assert slow.do(receive, 20)
        thread.join(20)
        ((text, failures),) = outcome
        assert "2 workers failed" in text
        assert {w: type(f) for w, f in failures.items()} == {0: WorkerRaised, 1: WorkerDied}
        assert scheme.acknowledged[2] == 1


@EACH
def test_a_worker_may_join_again_in_the_same_process(kind):
    def again(scheme, model):
        scheme.init_on_receiver(model=model, worker_idx=0)

    scheme = sender(kind, model := policy(1), connect_timeout=60)
    with running(scheme) as (worker,):
        for value in (3, 4, 5):
            scheme.send_async(policy(2))  # never read
            scheme.send_async(fill(model, value))
            worker.do(again)
            worker.meet(scheme)
            while worker.do(receive, 0.1):  # what was sent to its former self may come first
                pass
            assert worker.do(held) == bits(policy(value))
            assert scheme.acknowledged == {0: scheme.version}


def wait_for_the_end(worker):
    """Until its process has ended, without collecting how."""
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)


@EACH
def test_an_error_says_how_the_worker_ended(kind):
    with running(scheme := sender(kind), method="fork") as (worker,):
        worker.tell(lambda s, m: os._exit(3))
        wait_for_the_end(worker)
        with pytest.raises(WorkerDied, match=r"worker 0 \(cpu\) died \(pid \d+\), exit code 3: "):
            scheme.send()


@EACH
def test_a_worker_that_wrote_to_its_read_only_parameters_is_reported_and_harms_no_other(kind):
    def crash(scheme, model):
        faulthandler.disable()  # which would tell of it on the terminal
        if kind == "shared_zero_copy":
            model[0].weight.data.fill_(9)
        os.kill(os.getpid(), signal.SIGSEGV)

    scheme = sender(kind, model := policy(1), workers=2)
    with running(scheme, method="fork") as (worker, other):
        worker.tell(crash)
        wait_for_the_end(worker)
        with pytest.raises(WorkerDied, match=r"worker 0 .*killed by SIGSEGV") as failure:
            scheme.send(worker_ids=[0])
        hint = "did it write to its parameters? With zero_copy=True they are read-only"
        assert (hint in str(failure.value)) == (kind == "shared_zero_copy")
        assert other.do(held) == bits(model) == bits(policy(1))


def test_a_sender_that_was_stopped_itself_blames_no_worker():
    """Ctrl-Z stops workers with it: when all go on, nobody was silent for so long."""

    def send(handed, model):
        scheme = sender("multiprocess", timeout=2.5)
        receiver = copy.deepcopy(scheme)
        receiver.init_on_receiver(model=policy(), worker_idx=0)
        thread = threading.Thread(target=receiver.connect, kwargs={"background": False})
        thread.start()
        scheme.connect()
        thread.join()

        def answer():
            time.sleep(0.3)
            handed.about_to.ring()
            time.sleep(0.7)  # the stop comes now
            time.sleep(0.3)
            receiver.receive(20)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            scheme.send(policy(2))
        finally:
            thread.join()
            receiver.shutdown()
            scheme.shutdown()

    about_to = Doorbell()
    with Worker(Handed(about_to=about_to), None) as process:
        process.tell(send)
        assert any(wait_for([about_to.fd], 1.0) for _ in range(30))
        os.kill(process.process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(process.process.pid, signal.SIGCONT)
        process.hear()


def test_a_background_thread_that_cannot_go_on_tells_the_sender_why():
    def leave_no_descriptors(scheme, model):
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)

    with running(scheme := sender("shared_zero_copy"), background=True, method="fork") as (worker,):
        worker.do(leave_no_descriptors)  # so that no other version's memory can be mapped
        with pytest.raises(WorkerRaised, match="Too many open files"):
            scheme.send(policy(2))


def come_and_go(scheme, model):
    """A process that takes the place, and leaves again before the sender looks."""
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect_timeout = 0.05
    with contextlib.suppress(TimeoutError):
        scheme.connect(background=False)
    os._exit(0)


@WIRED
def test_of_several_processes_that_came_for_one_worker_the_last_is_served(kind, wire):
    scheme = sender(kind, wire=wire, timeout=60)
    with running(scheme, method="fork") as (worker,):
        scheme.send_async(policy(2))
        worker.die()
        for _ in range(2):
            with Worker(scheme) as brief:
                brief.tell(come_and_go)
                brief.process.join(20)
        with Worker(scheme, worker_idx=0) as last:
            last.meet(scheme, worker_idx=0)
            for value in range(3, 12):
                scheme.send_async(policy(value))
                assert last.do(receive, 20)
                assert last.do(held) == bits(policy(value))


@EACH
def test_what_a_successor_raised_is_told_although_another_send_came_between(kind):
    scheme = sender(kind, workers=2, connect_timeout=20)
    with running(scheme, method="fork") as (_, dying):
        dying.die()
        with Worker(scheme, lambda: nn.Linear(3, 4), worker_idx=1) as misfit:
            misfit.tell(connect)
            with pytest.raises(KeyError, match=r"lacks '0\.weight'"):
                misfit.hear()
            scheme.send_async(worker_ids=[0])
            with pytest.raises(WorkerRaised, match=r"lacks '0\.weight'"):
                scheme.connect(worker_idx=1)


@EACH
def test_a_successor_whose_weights_were_overwritten_gets_a_new_version(kind):
    model, scheme = policy(1), KINDS[kind](connect_timeout=60)
    scheme.init_on_sender(model=model, device_map_fn=lambda worker, weights: weights, num_workers=2)
    with running(scheme) as (leaving, other):
        leaving.do(lambda s, m: s.shutdown())
        for value in range(2, 12):
            scheme.send_async(fill(model, value), worker_ids=[1])
            other.do(receive, 20)
        with ThreadWorker(scheme, worker_idx=0) as successor:
            successor.meet(scheme, worker_idx=0)
            assert successor.do(version) == scheme.acknowledged[0] == scheme.version
            assert successor.do(held) == bits(policy(11))


@pytest.mark.parametrize(("wire", "refused"), [("float32", float("nan")), ("float16", 1e6)])
@pytest.mark.parametrize("kind", ["shared_copy", "multiprocess"])
def test_a_successor_gets_its_weights_of_before_those_that_were_refused(kind, wire, refused):
    model, scheme = policy(1), KINDS[kind](connect_timeout=60, wire=wire)
    scheme.init_on_sender(model=model, device_map_fn=lambda worker, weights: weights, num_workers=2)
    with running(scheme) as (leaving, other):
        scheme.send_async(fill(model, 2))
        leaving.do(receive, 20)
        other.do(receive, 20)
        scheme.wait_async(20)
        leaving.do(lambda s, m: s.shutdown())
        nn.init.constant_(model[2].weight, refused)
        with pytest.raises(ValueError, match=r"NaN|too large"):
            scheme.send_async(model)
        with ThreadWorker(scheme, worker_idx=0) as successor:
            successor.meet(scheme, worker_idx=0)
            assert successor.do(version) == scheme.version == 1
            assert successor.do(held) == bits(policy(2))


def close_the_connection(scheme, model):
    """End the connection and nothing else, as a process does that takes long to dump its core."""
    os.close(scheme._receiver.channel._connection.fd)


@EACH
def test_a_send_does_not_wait_for_another_worker_whose_connection_ended(kind, monkeypatch):
    monkeypatch.setattr(local_channel, "_DYING_S", 1e6)
    with running(scheme := sender(kind, workers=2), method="fork") as (broken, healthy):
        broken.do(close_the_connection)
        for value in (2, 3):
            healthy.tell(receive, 20)
            scheme.send(policy(value), worker_ids=[1])
            assert healthy.hear()
        broken.tell(lambda s, m: os._exit(7))
        wait_for_the_end(broken)
        with pytest.raises(WorkerDied, match="exit code 7"):
            scheme.send(policy(4), worker_ids=[0])


@EACH
def test_what_a_live_process_may_still_read_is_not_overwritten(kind, monkeypatch):
    monkeypatch.setattr(local_channel, "_DYING_S", 0.0)
    with running(scheme := sender(kind, workers=2), method="fork") as (broken, healthy):
        broken.do(close_the_connection)
        with pytest.raises(WorkerDied, match="its connection ended"):
            scheme.send(policy(2), worker_ids=[0])
        for value in range(3, 12):
            healthy.tell(receive, 20)
            scheme.send(policy(value), worker_ids=[1])
            assert healthy.hear()
        assert broken.do(held) == bits(policy(1))


def no_descriptors_for_a_while(handed, model):
    """Have strangers knock while this process cannot open files; then send as before."""
    scheme = sender("multiprocess", timeout=20)
    with running(scheme) as (worker,):
        scheme.send_async(policy(2))
        scheme.send_async(policy(3))  # it waits, so the service thread polls
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        resource.setrlimit(resource.RLIMIT_NOFILE, (knocking.fileno(), hard))
        knocking.connect(scheme._handout.name)
        knocking.settimeout(20)
        kind = struct.unpack("<i", knocking.recv(4))[0]  # it is told, and not left to wait
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        knocking.close()
        while worker.do(version) != 2:
            worker.do(receive, 5)
        worker.tell(receive, 20)
        scheme.send(policy(4))
        worker.hear()
        return kind, worker.do(held) == bits(policy(4))


def test_a_moment_without_descriptors_is_survived():
    with Worker(Handed(), None) as process:
        assert process.do(no_descriptors_for_a_while) == (REFUSED, True)


ELSEWHERE = """
import pickle, sys
from tests.sync.support import bits, policy
with open(sys.argv[1], "rb") as file:
    schemes = pickle.load(file)
for scheme in schemes:
    model = policy()
    scheme.init_on_receiver(model=model, worker_idx=0)
    scheme.connect(background=False)
    assert scheme.receive(0.01) is None  # it waits, since the sender is not gone
    print("waits", flush=True)
    assert scheme.receive(60) is not None
    assert bits(model) == bits(policy(2))
    print("received", flush=True)
    scheme.shutdown()
"""


def test_a_worker_may_live_in_another_pid_namespace(tmp_path):
    """A container that shares the host's network, for instance."""
    isolated = ["unshare", "--pid", "--fork"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("processes cannot be put into a namespace here")
    schemes = [sender(kind, timeout=60, connect_timeout=100) for kind in KINDS]
    (tmp_path / "schemes").write_bytes(pickle.dumps(schemes))
    command = [*isolated, sys.executable, "-c", ELSEWHERE, str(tmp_path / "schemes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for scheme in schemes:
            with scheme:
                scheme.connect()
                assert process.stdout.readline() == "waits\n"
                scheme.send(policy(2))
                assert process.stdout.readline() == "received\n"
        assert process.wait(60) == 0
