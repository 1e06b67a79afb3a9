"""Several hosts: a cable pulled and put in again, a host lost, a slow way."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.promises.network import network, why_not
from tests.promises.probe import VersionPolicy

ROOT = Path(__file__).parents[2]
REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(120),
]
NBYTES = sum(one.nbytes for one in VersionPolicy().parameters())
MECHANISMS = {"distributed": "gloo", "rpc": "rpc"}
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


class Trainer:
    """The trainer's process, asked line by line."""

    def __init__(self, process):
        self.process = process

    def tell(self, do, **more):
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, do, **more):
        self.tell(do, **more)
        return self.answer()

    def said(self):
        answer = self.answer()
        assert "said" in answer, answer
        return answer["said"]

    def says(self, do, **more):
        self.tell(do, **more)
        return self.said()


@contextmanager
def hosts(kind, number=2):
    """A trainer and workers, each on a host of its own, connected."""
    with network(number) as net:
        program = ("-m", "tests.promises.remote_hosts")
        process = net.start(None, *program, "trainer", kind, str(number), cwd=ROOT, **PIPES)
        trainer = Trainer(process)
        port = str(trainer.says("port"))
        peers = [
            net.start(host, *program, "peer", kind, str(host), port, cwd=ROOT, **PIPES)
            for host in range(number)
        ]
        assert set(trainer.says("connect").values()) == {0}
        assert trainer.says("mechanisms") == [MECHANISMS[kind]]
        yield net, trainer, peers


@pytest.mark.parametrize("kind", ["distributed", pytest.param("rpc", marks=pytest.mark.slow)])
def test_a_pulled_cable_is_noticed_in_time_and_a_host_that_stays_lost_is_named(kind):
    with hosts(kind) as (net, trainer, peers):
        trainer.says("send")
        net.pull(1)
        begun = time.monotonic()
        answer = trainer.ask("send")
        assert answer["raised"] == "WorkerTimeout", answer
        assert "worker 1" in answer["text"]
        assert time.monotonic() - begun < 5.0
        version = trainer.says("send", to=[0])  # the other goes on
        assert trainer.says("held", peer=0) == [version] * 3
        net.plug(1)  # nothing was lost
        assert trainer.says("settle", seconds=20.0)["1"] == 2
        version = trainer.says("send")
        for peer in (0, 1):
            assert trainer.says("held", peer=peer) == [version] * 3
        net.pull(1)  # for good: nothing will ever say that its connections are over
        assert trainer.ask("send")["raised"] == "WorkerTimeout"
        deadline = time.monotonic() + 30.0
        while trainer.says("gone", peer=1) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        answer = trainer.ask("send")
        assert answer["raised"] == "WorkerDied", answer
        assert "worker 1" in answer["text"]
        version = trainer.says("send", to=[0])
        assert trainer.says("held", peer=0) == [version] * 3
        assert peers[1].wait(30.0) == 0  # it does not wait for ever for a trainer that is not there
        assert "no sign of life" in peers[1].stdout.read()
        trainer.says("close")


@pytest.mark.parametrize("kind", [pytest.param("distributed", marks=pytest.mark.slow), "rpc"])
def test_a_slow_way_makes_sends_slow_and_nothing_else(kind):
    with hosts(kind) as (net, trainer, _):
        try:
            net.slow_down(1, rate="2mbit")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no token bucket here: {error.stderr.strip()}")
        before = [net.received(host) for host in (0, 1)]
        for _ in range(3):
            version = trainer.says("send")
        for peer in (0, 1):
            assert trainer.says("held", peer=peer) == [version] * 3
            assert net.received(peer) - before[peer] > 3 * NBYTES  # none took another way
        trainer.says("close")


def test_a_collector_that_loses_a_host_collects_on_and_replaces_it_elsewhere(tmp_path):
    with network(3) as net:
        program = (
            "-m",
            "tests.promises.remote_collecting",
            "distributed",
            str(tmp_path),
            *net.names[1:],
        )
        trainer = Trainer(net.start(None, *program, cwd=ROOT, **PIPES))
        trainer.says("collect", until=[0, 1])
        trainer.tell("collect", until=[0, 1], restarts=1)
        net.pull(1)  # and host 1 is never heard of again
        makers = trainer.said()
        assert makers.count(0) > makers.count(1)
        assert trainer.says("publish") == 1
        trainer.says("collect", until=[0, 1], restarts=1)
        stats = trainer.says("stats")
        assert stats["restarts"] == 1
        assert stats["delivered"] == stats["seen"]
        assert stats["collected"] == stats["delivered"] + stats["dropped"] + stats["in_flight"]
        trainer.says("close")
