"""What a worker's own code does around `receive` must not matter, or must be told clearly."""

from __future__ import annotations

import pytest
import torch

from sync import WeightSyncScheme
from tests.promises.probe import (
    CALLS,
    SCHEMES,
    SHARED_BY_ALL,
    SPOILED,
    STOP,
    Findings,
    VersionPolicy,
    call,
    take_part,
    trial,
)


def read_in_inference_mode(
    scheme: WeightSyncScheme, worker: int, findings: Findings, width: int, background: bool
) -> None:
    policy = VersionPolicy(width)
    with torch.inference_mode():
        take_part(scheme, worker, policy)
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
    policy, other = take_part(scheme, worker, VersionPolicy(width)), VersionPolicy(width)
    while not findings.get(worker, STOP):
        call(scheme, policy, worker, findings, background)
        version = scheme.version
        other.hold(1_000)
        scheme.apply_weights(other)
        findings.add(worker, SPOILED, policy() == (1_000, 1_000))
        other.hold(version)
        scheme.apply_weights(other)


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_a_worker_may_apply_other_weights_by_itself(kind):
    with trial(SCHEMES[kind](), workers=2, target=apply_on_its_own) as running:
        for _ in range(30):
            running.publish(wait=True)
        running.calls_from_now(5)
        assert running.findings.violations() == {}
        assert running.findings.total(SPOILED) > 0
