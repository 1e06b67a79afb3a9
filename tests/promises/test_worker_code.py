"""What a worker's own code does around `receive` must not matter, or must be told clearly."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from sync import WeightSyncScheme, WorkerDied
from tests.promises.probe import (
    CALLS,
    SCHEMES,
    SHARED_BY_ALL,
    STOP,
    Findings,
    VersionPolicy,
    call,
    trial,
)

BREAK = 7


def read_in_inference_mode(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    torch.set_num_threads(1)
    policy = VersionPolicy(width)
    with torch.inference_mode():
        scheme.init_on_receiver(model=policy, worker_idx=worker)
        scheme.connect(background=False)
    while not findings.get(worker, STOP):
        with torch.inference_mode(bool(findings.get(worker, CALLS) % 3)):
            call(scheme, policy, worker, findings, background)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_weights_can_be_taken_inside_and_outside_of_inference_mode(kind):
    with trial(SCHEMES[kind](), workers=2, target=read_in_inference_mode) as running:
        for _ in range(30):
            running.publish(wait=True)
        running.calls_from_now(20)
        assert running.findings.violations() == {}


def apply_on_its_own(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    torch.set_num_threads(1)
    policy, other = VersionPolicy(width), VersionPolicy(width)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=False)
    while not findings.get(worker, STOP):
        call(scheme, policy, worker, findings, background)
        version = scheme.version
        other.hold(1_000)
        scheme.apply_weights(other)
        findings.add(worker, BREAK, policy() == (1_000, 1_000))
        other.hold(version)
        scheme.apply_weights(other)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_worker_may_apply_other_weights_by_itself(kind):
    with trial(SCHEMES[kind](), workers=2, target=apply_on_its_own) as running:
        for _ in range(30):
            running.publish(wait=True)
        running.calls_from_now(5)
        assert running.findings.violations() == {}
        assert running.findings.total(BREAK) > 0


def write_to_a_parameter(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, *_: Any
) -> None:
    policy = VersionPolicy(width)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=False)
    policy.hold(5)
    findings.set(worker, BREAK, 1)


def test_a_worker_that_writes_to_zero_copy_parameters_harms_only_itself():
    with trial(SCHEMES["shared_zero_copy"](), workers=1, target=write_to_a_parameter) as running:
        running.processes[0].join(30.0)
        assert running.processes[0].exitcode == -signal.SIGSEGV
        with pytest.raises(WorkerDied, match="worker 0"):
            running.publish(wait=True)
        assert running.policy() == (1, 1)


def leave(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    scheme.init_on_receiver(model=VersionPolicy(width), worker_idx=worker)
    scheme.connect(background=False)
    scheme.shutdown()
    while not findings.get(worker, STOP):
        signal.sigtimedwait([], 0.001)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_worker_that_shut_its_scheme_down_is_not_waited_for(kind):
    with (
        pytest.raises(WorkerDied, match=r"worker 0 .* left"),
        trial(SCHEMES[kind](), workers=1, target=leave) as running,
    ):
        running.publish(wait=True)  # unless the rendezvous has noticed already
