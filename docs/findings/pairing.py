"""How many seeds it saves to compare objectives on the same schedules.

    .venv/bin/python docs/findings/pairing.py outputs/replayed

For two objectives with n runs each, the variance of the mean difference is var(a - b) / n if runs
are paired, and (var(a) + var(b)) / n if they are not. The table has, for all pairs of objectives,
both standard deviations, the width of the paired interval as a share of the other, and the share of
runs that pairing saves at the same width: one minus the ratio of the variances. Scores are mean
returns over training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.findings.predictors import scored_runs  # noqa: E402

Scores = Mapping[str, Mapping[int, float]]  # by objective, then by seed


def scores(runs: pd.DataFrame) -> Scores:
    """The mean return over training of the runs that are done."""
    scored = runs[runs["score"].notna()]
    return {
        objective: dict(zip(inside["seed"], inside["score"], strict=True))
        for objective, inside in scored.groupby("objective", sort=False)
    }


def lines(found: Scores) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| pair | runs | deviation, paired | not paired | width of the interval | runs saved |"
    yield "|---|--:|--:|--:|--:|--:|"
    ratios = []
    for one, other in combinations(found, 2):
        seeds = sorted(found[one].keys() & found[other].keys())
        if len(seeds) < 3:
            raise ValueError(f"{one} and {other} have {len(seeds)} seeds in common: 3 are needed")
        left, right = (np.array([found[name][seed] for seed in seeds]) for name in (one, other))
        paired = float(np.var(left - right, ddof=1))
        apart = float(np.var(left, ddof=1) + np.var(right, ddof=1))
        ratios.append(paired / apart)
        yield (
            f"| {one}, {other} | {len(seeds)} | {paired**0.5:.1f} | {apart**0.5:.1f} | "
            f"{ratios[-1] ** 0.5:.0%} | {1 - ratios[-1]:.0%} |"
        )
    ratio = float(np.median(ratios))
    yield f"| median | | | | {ratio**0.5:.0%} | {1 - ratio:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "sweeps", nargs="+", type=Path, help="directories of sweeps over objectives"
    )
    try:
        print("\n".join(lines(scores(scored_runs(parser.parse_args().sweeps)))))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
