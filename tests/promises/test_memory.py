"""How much memory sending takes: a fixed number of copies, however many workers there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL_MB = 100
PROGRAM = """
import multiprocessing, sys
from pathlib import Path
import torch
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

MODEL_MB, kind, workers, form = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]


def peak_mb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def work(scheme, worker, done):
    scheme.init_on_receiver(worker_idx=worker)
    scheme.connect(background=False)
    while not done.is_set():
        scheme.receive(timeout=0.05)


def main():
    torch.set_num_threads(1)
    ctx = multiprocessing.get_context("fork")
    done = ctx.Event()
    kinds = {"multiprocess": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme}
    scheme = kinds[kind](timeout=60.0)
    weights = {"w": torch.zeros(MODEL_MB * 2**18)}
    weights["w"].fill_(1.0)
    before = peak_mb()
    if form == "own":  # weights of its own for each worker, made when it is there to take them
        own = lambda worker, weights: {"w": weights["w"] + worker}
        scheme.init_on_sender(weights=weights, device_map_fn=own, num_workers=workers)
    else:
        scheme.init_on_sender(weights=weights, devices=["cpu"] * workers)
    processes = [ctx.Process(target=work, args=(scheme, w, done)) for w in range(workers)]
    for process in processes:
        process.start()
    scheme.connect()
    if form == "sent":
        for _ in range(3):
            scheme.send()
    print(peak_mb() - before)
    done.set()
    for process in processes:
        process.join()
    scheme.shutdown()


main()
"""


def extra_copies(kind: str, workers: int, form: str) -> float:
    """The trainer's peak memory, in models, beyond the model itself."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL_MB), kind, str(workers), form],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    return float(output) / MODEL_MB


def test_message_passing_takes_one_extra_copy_with_one_worker_and_with_six():
    one, six = extra_copies("multiprocess", 1, "sent"), extra_copies("multiprocess", 6, "sent")
    print(f"sent: extra copies with 1 worker {one:.2f}, with 6 workers {six:.2f}")
    assert one < 1.2
    assert six < 1.2


def test_initial_weights_of_their_own_are_made_worker_after_worker():
    one, six = extra_copies("multiprocess", 1, "own"), extra_copies("multiprocess", 6, "own")
    print(f"own: extra copies with 1 worker {one:.2f}, with 6 workers {six:.2f}")
    # The copy that the caller's function makes, and the one that is sent.
    assert one < 2.2
    assert six < 2.2


def test_shared_memory_takes_the_same_with_six_workers_as_with_one():
    one, six = extra_copies("shared", 1, "sent"), extra_copies("shared", 6, "sent")
    print(f"shared: extra copies with 1 worker {one:.2f}, with 6 workers {six:.2f}")
    assert one < 3.2
    assert six < 3.2
