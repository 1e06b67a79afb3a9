"""The promises where models are on a GPU: the trainer's, the workers', or both."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch

from collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from sync import WorkerDied
from tests.harness.small import ROOT
from tests.promises import collector_probe
from tests.promises.collector_probe import COLLECTORS, Judge, Trainer, make_cartpole, meanwhile
from tests.promises.probe import SCHEMES, Trial, VersionPolicy, flood, read, trial, wait_until

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]
KINDS = ("shared_copy", "multiprocess")  # zero_copy and hogwild need a model in CPU memory
PLACES = [pair for pair in itertools.product(("cpu", "cuda"), repeat=2) if "cuda" in pair]
LARGE = 1024  # three layers of it make 12.6 MB


def on_gpu(width: int) -> VersionPolicy:
    return VersionPolicy(width).to("cuda")


def trial_on(trainer: str, workers: str, kind: str, **options: Any) -> Any:
    """Two workers on one device, a trainer on another."""
    return trial(
        SCHEMES[kind](),
        workers=2,
        model=on_gpu if trainer == "cuda" else VersionPolicy,
        device=workers,
        target=functools.partial(read, device=workers),
        **{"start_method": "spawn", **options},
    )


def check(running: Trial, calls: int, **options: Any) -> None:
    running.calls_from_now(1)  # a CUDA context takes seconds to make
    flood(running, calls=calls, **options)
    assert running.findings.violations() == {}


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(("trainer", "workers"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_is_torn_or_wrongly_stamped(kind, trainer, workers, start_method):
    with trial_on(trainer, workers, kind, start_method=start_method) as running:
        check(running, calls=2_000)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_of_a_large_model_is_torn(kind, background):
    with trial_on("cuda", "cuda", kind, width=LARGE, background=background) as running:
        check(running, calls=1_000, versions=150)


@pytest.mark.parametrize("kind", KINDS)
def test_blocking_sends_are_in_use_when_they_return(kind):
    with trial_on("cuda", "cuda", kind) as running:
        for _ in range(100):
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == dict.fromkeys(range(2), version)
        running.calls_from_now(100)
        assert running.findings.violations() == {}


FORKS_FIRST = """
import torch
from tests.promises.probe import SCHEMES, flood, trial
with trial(SCHEMES["shared_copy"](), workers=2, start_method="fork") as running:
    assert not torch.cuda.is_initialized()
    running.policy.to("cuda")
    flood(running, calls=1_000)
    assert running.findings.violations() == {}
"""


def test_workers_on_the_cpu_can_be_forked_and_the_gpu_used_afterwards():
    subprocess.run([sys.executable, "-c", FORKS_FIRST], check=True, cwd=ROOT, timeout=240)


@pytest.mark.parametrize("policy_device", [None, "cuda"])
@pytest.mark.parametrize("scheme", collector_probe.SCHEMES)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_no_frame_is_torn_or_wrongly_stamped_or_lost(kind, scheme, policy_device):
    policy, judge = collector_probe.VersionPolicy().to("cuda"), Judge()
    if kind == "single" and policy_device is None:
        pytest.skip("its policy is the trainer's")
    options: dict[str, Any] = {} if kind == "single" else {"num_workers": 2}
    with COLLECTORS[kind](
        make_cartpole,
        policy,
        weight_sync_schemes={"policy": collector_probe.SCHEMES[scheme](sync=False)},
        frames_per_batch=200,
        policy_device=policy_device,
        **options,
    ) as collector:
        trainer = Trainer(collector, policy)
        with meanwhile(trainer.publish):
            while judge.frames < 3_000:
                judge.take(collector.next())
        stats = collector.stats()
    assert judge.violations() == {}
    assert stats["dropped"] == 0
    assert stats["delivered"] == judge.frames
    assert len(judge.versions) > 10


def collect(collector: BaseCollector, batches: int) -> None:
    for _ in range(batches):
        collector.next()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_killed_worker_is_named_and_the_workers_memory_is_given_back(kind):
    policy = collector_probe.VersionPolicy().to("cuda")
    with kind(make_cartpole, policy, num_workers=2, frames_per_batch=200) as collector:
        collector.next()
        before = torch.cuda.mem_get_info()[0]
        pid = sorted(child.pid for child in psutil.Process().children(recursive=True))[-1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker"):
            collect(collector, batches=100)
    wait_until(lambda: torch.cuda.mem_get_info()[0] > before)
