"""The tables of docs/branch.md, from the stored records of a run and its branches.

    tar xf docs/findings/records/branches.tar.xz -C outputs
    cd outputs/branches
    python ../../docs/findings/branches.py collapse collapse-lag

The second folder is what `lockstep branch collapse --out collapse-lag` makes. With `--report DIR`
the whole report is made, with figures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.branch.report import (  # noqa: E402
    CONTROL,
    Results,
    brief,
    document,
    read_results,
)
from harness.report.make import save  # noqa: E402
from harness.report.pages import to_text  # noqa: E402


def course(results: Results, update: int, arm: str) -> str:
    """The mean over repeats of each evaluation."""
    metric, branches = results.metrics[0], results.of(update, arm)
    evaluations = [
        one.run.records[["step", metric]].dropna().groupby("step")[metric].last()
        for one in branches
    ]
    means = pd.concat(evaluations, axis=1).dropna().mean(axis=1)
    first = branches[0].frames
    return ", ".join(f"{step - first:,.0f}: {mean:.3f}" for step, mean in means.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parent", type=Path, help="the run that was branched")
    parser.add_argument("branches", type=Path, help="the folder of its branches")
    parser.add_argument("--report", type=Path, help="a folder for the whole report")
    options = parser.parse_args()
    places = sorted(file.parent for file in options.branches.glob("update-*/*/*/manifest.json"))
    results = read_results(options.parent, places)
    print(to_text(brief(results), 110))
    print("\nMean returns by frames since the branches began:")
    for update in sorted({one.update for one in results.done}):
        for arm in (CONTROL, *results.arms):
            print(f"from update {update}, {arm}: {course(results, update, arm)}")
    if options.report is not None:
        save(options.report, document(results, f"Branches of {options.parent.name}"), {})


if __name__ == "__main__":
    main()
