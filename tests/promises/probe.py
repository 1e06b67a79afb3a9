"""The probe of the promise suite: a policy whose every tensor holds the version number.

Each policy call reads every tensor once. If two of them differ, the call was computed with torn
weights; if they differ from the version that the scheme states, the stamp is wrong. Findings are
written into anonymous shared memory, so that they survive whatever happens to a worker.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from examples.own_scheme import SocketWeightSyncScheme
from sync import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from sync.local.memory import AnonymousMemory

SCHEMES: dict[str, Callable[..., WeightSyncScheme]] = {
    "shared_copy": lambda *a, **k: SharedMemWeightSyncScheme(*a, zero_copy=False, **k),
    "shared_zero_copy": lambda *a, **k: SharedMemWeightSyncScheme(*a, zero_copy=True, **k),
    "multiprocess": MultiProcessWeightSyncScheme,
    "own": SocketWeightSyncScheme,  # an example: whoever follows the interface keeps the promises
}
# For what all mechanisms share: the sender, its records of workers, what it says of them. The other
# two take the same code, and are slow tests.
SHARED_BY_ALL = [
    *("shared_copy", "multiprocess"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("shared_zero_copy", "own")),
]
START_METHODS = ("fork", "forkserver", "spawn")
WAIT_S = 60.0


class VersionPolicy(nn.Module):
    """Parameters, buffers and extra state that all say the same number."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.register_buffer("steps", torch.zeros(width, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.extra = 0
        self.hold(0)

    def hold(self, number: int) -> None:
        """What a training step would do, in place."""
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(number)
        self.extra = number

    def forward(self) -> tuple[float, float]:
        """The lowest and the highest number that any part of the model says."""
        lows, highs = [float(self.extra)], [float(self.extra)]
        for tensor in (*self.parameters(), *self.buffers()):
            low, high = torch.aminmax(tensor.detach())
            lows.append(low.item())
            highs.append(high.item())
        return min(lows), max(highs)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def holding(number: int) -> VersionPolicy:
    policy = VersionPolicy()
    policy.hold(number)
    return policy


# The last is a switch of some tests: what a worker does to its model, or has done.
CALLS, TORN, WRONG_STAMP, BACKWARDS, VERSION, VALUE, STOP, ALIVE_AFTER, SPOILED = range(9)
_FIELDS = 9


class Findings:
    """One row of counters for each worker, shared by all processes that were handed it."""

    def __init__(self, workers: int):
        self.workers = workers
        self.memory = AnonymousMemory(workers * _FIELDS * 8)
        self._map()

    def _map(self) -> None:
        self._keep: Tensor = self.memory.map(0, mmap.PAGESIZE, writable=True)
        self._words = memoryview(self._keep.numpy()).cast("B").cast("q")

    def __getstate__(self) -> dict[str, Any]:
        return {"workers": self.workers, "memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def get(self, worker: int, field: int) -> int:
        return self._words[worker * _FIELDS + field]

    def set(self, worker: int, field: int, value: int) -> None:
        self._words[worker * _FIELDS + field] = value

    def add(self, worker: int, field: int, value: int = 1) -> None:
        self._words[worker * _FIELDS + field] += value

    def total(self, field: int) -> int:
        return sum(self.get(worker, field) for worker in range(self.workers))

    def stop(self) -> None:
        for worker in range(self.workers):
            self.set(worker, STOP, 1)

    def violations(self) -> dict[str, int]:
        names = {"torn": TORN, "wrong stamp": WRONG_STAMP, "backwards": BACKWARDS}
        return {name: n for name, field in names.items() if (n := self.total(field))}


def take_part(
    scheme: WeightSyncScheme, worker: int, policy: VersionPolicy, background: bool = False
) -> VersionPolicy:
    """Have this process be a worker with this policy."""
    torch.set_num_threads(1)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=background)
    return policy


def read(
    scheme: WeightSyncScheme,
    worker: int,
    findings: Findings,
    width: int,
    background: bool = False,
    device: str = "cpu",
    make: Callable[[int], VersionPolicy] = VersionPolicy,
) -> None:
    """A worker: policy calls without pause, each one checked, until it is told to stop."""
    policy = take_part(scheme, worker, make(width).to(device), background)
    while not findings.get(worker, STOP):
        call(scheme, policy, worker, findings, background)
    scheme.shutdown()


def call(
    scheme: WeightSyncScheme,
    policy: VersionPolicy,
    worker: int,
    findings: Findings,
    background: bool,
) -> None:
    """One policy call with the newest weights, judged."""
    if background:
        with scheme.reading() as version:
            low, high = policy()
    else:
        scheme.receive()
        version = scheme.version
        low, high = policy()
    findings.add(worker, TORN, low != high)
    findings.add(worker, WRONG_STAMP, low != version)
    findings.add(worker, BACKWARDS, version < findings.get(worker, VERSION))
    findings.set(worker, VERSION, version)
    findings.set(worker, VALUE, int(low))
    findings.add(worker, CALLS)


@dataclass
class Trial:
    """A trainer (this process) with its workers."""

    scheme: WeightSyncScheme
    policy: VersionPolicy
    processes: list[Any]
    findings: Findings

    def publish(self, *, wait: bool = False, worker_ids: list[int] | None = None) -> int:
        """One training step and one send; returns the version."""
        version = self.scheme.version + 1
        self.policy.hold(version)
        if wait:
            self.scheme.send(worker_ids=worker_ids)
        else:
            self.scheme.send_async(worker_ids=worker_ids)
        return version

    def calls_from_now(self, number: int) -> None:
        """Wait until every living worker has made so many more policy calls."""
        start = {
            w: self.findings.get(w, CALLS) for w, p in enumerate(self.processes) if p.is_alive()
        }
        wait_until(lambda: all(self.findings.get(w, CALLS) >= n + number for w, n in start.items()))


@contextmanager
def trial(
    scheme: WeightSyncScheme,
    *,
    workers: int = 3,
    width: int = 64,
    start_method: str = "fork",
    background: bool = False,
    target: Callable[..., None] = read,
    findings: Findings | None = None,
    model: Callable[[int], VersionPolicy] = VersionPolicy,
    device: str = "cpu",
) -> Iterator[Trial]:
    """Workers that make policy calls while the body runs."""
    ctx = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        ctx.set_forkserver_preload(["torch", "tests.promises.probe"])
    policy, findings = model(width), findings or Findings(workers)
    scheme.init_on_sender(model=policy, devices=[device] * workers, ctx=ctx)
    processes = [
        ctx.Process(target=target, args=(scheme, w, findings, width, background), daemon=True)
        for w in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        scheme.connect()
        yield Trial(scheme, policy, processes, findings)
    finally:
        findings.stop()
        for process in processes:
            with suppress(ProcessLookupError):  # it may just have ended
                os.kill(process.pid, signal.SIGCONT)
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        scheme.shutdown()


def flood(running: Trial, *, calls: int, versions: int = 200) -> None:
    """Publish as fast as can be until the workers have made so many calls in all."""
    deadline = time.monotonic() + WAIT_S
    while running.findings.total(CALLS) < calls or running.scheme.version < versions:
        running.publish()
        assert time.monotonic() < deadline, (running.findings.total(CALLS), running.scheme.version)


def stop(pid: int) -> None:
    """Stop a process, and return when it does nothing more, however quick it is."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
