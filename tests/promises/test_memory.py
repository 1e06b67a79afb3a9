"""How much memory sending takes: a fixed number of copies, however many workers there are."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme
from tests.own_process import in_own_process

MODEL_MB = 100
SCHEMES = {"multiprocess": MultiProcessWeightSyncScheme, "shared_mem": SharedMemWeightSyncScheme}


def receive(scheme: WeightSyncScheme, worker: int, done: Any) -> None:
    scheme.init_on_receiver(worker_idx=worker)
    scheme.connect(background=False)
    while not done.is_set():
        scheme.receive(timeout=0.05)


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def own_weights(worker: int, weights: Any) -> Any:
    """Weights for one worker, created when it is there to take them."""
    return {"w": weights["w"] + worker}


# A model's copies in the trainer, beside the model itself. With weights for each worker, there is
# also the copy that the caller's function creates.
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize(
    ("kind", "form", "copies"),
    [("multiprocess", "sent", 1.2), ("multiprocess", "own", 2.2), ("shared_mem", "sent", 3.2)],
)
@in_own_process
def test_a_sender_has_a_fixed_number_of_copies(kind, form, copies, workers):
    ctx = multiprocessing.get_context("fork")
    done = ctx.Event()
    scheme = SCHEMES[kind](timeout=60.0)
    weights = {"w": torch.ones(MODEL_MB * 2**18)}
    before = peak_mb()
    if form == "own":
        scheme.init_on_sender(weights=weights, device_map_fn=own_weights, num_workers=workers)
    else:
        scheme.init_on_sender(weights=weights, devices=["cpu"] * workers)
    processes = [ctx.Process(target=receive, args=(scheme, w, done)) for w in range(workers)]
    for process in processes:
        process.start()
    scheme.connect()
    if form == "sent":
        for _ in range(3):
            scheme.send()
    extra = (peak_mb() - before) / MODEL_MB
    done.set()
    for process in processes:
        process.join()
    scheme.shutdown()
    print(f"{kind}, {form}: {extra:.2f} extra copies with {workers} workers")
    assert extra < copies
