"""How long a blocking `send` from a GPU to two workers on it takes, beside bare copies.

    .venv/bin/python benchmarks/sync_cuda.py [--rounds 12] [--sizes 4.5k,1M,25M]

"Page-locked" and "pageable" are the bare copies that a send cannot do without: one from the GPU to
the host, and one to the GPU for each worker. "Unlocked" is our scheme without page-locked blocks.
Everything is measured in turns within one run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sync.model.copying  # noqa: E402
from benchmarks.models import MODEL_WIDTHS, build_model, timed_ms  # noqa: E402
from benchmarks.sync_latency import (  # noqa: E402
    SENDS_A_ROUND,
    WORKERS,
    Closing,
    Times,
    in_turns,
    machine,
    markdown,
    save,
    shown,
)
from sync import WeightSyncScheme  # noqa: E402


class Row(NamedTuple):
    """What was measured with one model."""

    model: str
    times: dict[str, Times]


SCHEMES = ("shared_mem", "multiprocess")
DEVICE = "cuda"


def without_page_locks() -> None:
    """From here on, this process copies from and to memory as it is."""
    sync.model.copying.page_lock = lambda block, device: None


def receive_idle(scheme: WeightSyncScheme, worker: int, model: str, page_locked: bool) -> None:
    """A worker that does nothing but take weights, in a background thread."""
    if not page_locked:
        without_page_locks()
    torch.set_num_threads(1)
    scheme.init_on_receiver(model=build_model(model).to(DEVICE), worker_idx=worker)
    scheme.connect()
    while True:
        time.sleep(60.0)


class Lockstep:
    """Our scheme, with its workers."""

    def __init__(self, scheme: str, model: str, *, page_locked: bool):
        ctx = multiprocessing.get_context("spawn")
        self.page_locked = page_locked
        self.model = build_model(model).to(DEVICE)
        self.scheme = WeightSyncScheme.from_backend(scheme)
        self.scheme.init_on_sender(model=self.model, devices=[DEVICE] * WORKERS, ctx=ctx)
        given = ((self.scheme, worker, model, page_locked) for worker in range(WORKERS))
        self.processes = [ctx.Process(target=receive_idle, args=a, daemon=True) for a in given]
        for process in self.processes:
            process.start()
        self.scheme.connect()

    def times_ms(self, count: int) -> list[float]:
        kept = sync.model.copying.page_lock
        if not self.page_locked:
            without_page_locks()
        try:
            times = []
            for _ in range(count):
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter += 1e-3
                torch.cuda.synchronize()
                times += timed_ms(self.scheme.send, 1)
            return times
        finally:
            sync.model.copying.page_lock = kept

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.scheme.shutdown()


class Copies:
    """One copy from the GPU, and one to it for each worker, of the model's bytes in one piece."""

    def __init__(self, model: str, *, page_locked: bool):
        size = sum(p.numel() for p in build_model(model).parameters())
        self.there = [torch.ones(size, device=DEVICE) for _ in range(1 + WORKERS)]
        self.here = torch.ones(size, pin_memory=page_locked)

    def _copy(self) -> None:
        self.here.copy_(self.there[0], non_blocking=True)
        torch.cuda.synchronize()
        for target in self.there[1:]:
            target.copy_(self.here, non_blocking=True)
        torch.cuda.synchronize()

    def times_ms(self, count: int) -> list[float]:
        return timed_ms(self._copy, count)

    def close(self) -> None:
        self.there.clear()


def measure(model: str, rounds: int) -> dict[str, Times]:
    with Closing() as contestants:
        for scheme in SCHEMES:
            contestants[scheme] = Lockstep(scheme, model, page_locked=True)
            contestants[f"{scheme}, unlocked"] = Lockstep(scheme, model, page_locked=False)
        contestants["page-locked"] = Copies(model, page_locked=True)
        contestants["pageable"] = Copies(model, page_locked=False)
        return in_turns(contestants, SENDS_A_ROUND[model], rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", default=",".join(MODEL_WIDTHS), help="of 4.5k, 1M, 25M")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here")
        return 2
    rows = []
    for model in arguments.sizes.split(","):
        print(f"measuring {model}", file=sys.stderr, flush=True)
        rows.append(Row(model, measure(model, arguments.rounds)))
    lines = [[row.model, *map(shown, row.times.values())] for row in rows]
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"Blocking send to {WORKERS} workers on {torch.cuda.get_device_name()}, p50 / p95 in ms")
    print(f"({about}):\n\n{markdown(['floats', *rows[0].times], lines)}")
    save("sync_cuda", arguments.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
