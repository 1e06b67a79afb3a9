"""How many frames a second a training can have, if it is arithmetic alone.

    .venv/bin/python docs/performance/limits.py [--algos sac,pong]

Two short runs of the training benchmark are done, one longer than the other, and their floating
point operations are counted. The difference, divided by the frames, is what a frame costs: acting
and learning. The rate is that of a large matrix product on one thread, the best of some. A training
whose learner has one thread cannot be faster than their quotient.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.train_case import SAC, Training  # noqa: E402
from benchmarks.train_contestants import CONTESTANTS  # noqa: E402
from benchmarks.train_ours import train  # noqa: E402

FRAMES = {"sac": (SAC.learning_starts + 32, SAC.learning_starts + 96), "pong": (1024, 2048)}
SIZE, PRODUCTS = 1024, 20


def operations(algo: str, frames: int) -> int:
    """Those of a run's matrix products and convolutions."""
    counter = FlopCounterMode(display=False)
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(StringIO()), counter:
        train(
            Training(algo=algo, frames=frames, seed=1, scratch=scratch),
            *CONTESTANTS["lockstep_single"].settings(algo),
        )
    return counter.get_total_flops()


def rate() -> float:
    """Operations a second of a matrix product."""
    matrix = torch.randn(SIZE, SIZE)
    best = float("inf")
    for _ in range(PRODUCTS):
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - begun)
    return 2 * SIZE**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algos", default=",".join(FRAMES))
    algos = parser.parse_args().algos.split(",")
    torch.set_num_threads(1)
    print(f"a product of {SIZE} × {SIZE}: {rate() / 1e9:.1f} GFLOP/s on one thread")
    print("| training | MFLOP a frame | frames/s at most |\n|---|--:|--:|")
    for algo in algos:
        short, long = FRAMES[algo]
        cost = (operations(algo, long) - operations(algo, short)) / (long - short)
        print(f"| {algo} | {cost / 1e6:.1f} | {rate() / cost:,.0f} |")


if __name__ == "__main__":
    main()
