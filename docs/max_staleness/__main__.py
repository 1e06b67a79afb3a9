"""What limits of staleness keep, in the frameworks' own classes: docs/max-staleness.md's table.

    python -m docs.max_staleness
    python -m docs.max_staleness --only areal --seeds 5 --traces outputs/controllers

Rollouts and updates take virtual time, and all tasks that are ready at one moment run in an order
that is drawn by the seed. `make controllers` installs the frameworks first.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.max_staleness import (
    areal,
    nemo_rl,
    prime_rl,
    skyrl,
    tinker,
    torchtitan,
    trl,
    verl,
    virtual_time,
)
from docs.max_staleness.foreign import Missing
from docs.max_staleness.record import UPDATES, WORKLOADS, Record, Workload
from docs.max_staleness.setup import Setup

FRAMEWORKS: dict[str, Callable[[], list[Setup]]] = {
    "torchtitan": torchtitan.setups,
    "prime_rl": prime_rl.setups,
    "verl": verl.setups,
    "nemo_rl": nemo_rl.setups,
    "trl": trl.setups,
    "areal": areal.setups,
    "skyrl": skyrl.setups,
    "tinker": tinker.setups,
}


@dataclass
class Outcome:
    """All runs of one setup under one workload."""

    workload: Workload
    records: list[Record]

    @property
    def worst(self) -> Record:
        """The run with the oldest sample."""
        return max(self.records, key=lambda record: max(record.ages))

    def share_above(self, limit: int) -> float:
        """Of the samples that were trained on."""
        return statistics.fmean(age > limit for record in self.records for age in record.ages)

    @property
    def mean_age(self) -> float:
        """Of the samples that were trained on."""
        return statistics.fmean(age for record in self.records for age in record.ages)

    @property
    def update_time(self) -> float:
        """Of an update and the wait for its samples, where the update alone takes 1."""
        return statistics.fmean(record.time / record.updates for record in self.records)

    @property
    def share_dropped(self) -> float:
        """Of the samples that came to an end."""
        dropped = sum(record.dropped for record in self.records)
        return dropped / (dropped + sum(len(record.ages) for record in self.records))


def run_once(setup: Setup, workload: Workload, seed: int, updates: int = UPDATES) -> Record:
    """One run to its end."""
    record = Record(workload, seed, updates)

    async def bounded() -> None:
        await asyncio.wait_for(setup.run(record), timeout=1000.0 * updates)  # in virtual time
        record.time = record.time or asyncio.get_running_loop().time()

    virtual_time.run(bounded(), seed)
    return record


def outcomes(setup: Setup, seeds: int) -> list[Outcome]:
    """One for each workload."""
    return [
        Outcome(workload, [run_once(setup, workload, seed) for seed in range(seeds)])
        for workload in WORKLOADS
    ]


def row(setup: Setup, results: list[Outcome]) -> str:
    """The line of the table."""
    worst = max(results, key=lambda result: max(result.worst.ages))
    oldest = max(worst.worst.ages)
    bound = setup.bound if setup.most is None else f"{setup.bound} = {setup.most}"
    cells = [
        f"{setup.framework} `{setup.option}`",
        setup.unit,
        setup.measured_at,
        bound,
        str(oldest),
        *(
            f"{result.share_above(setup.limit):.1%} ({max(result.worst.ages)})"
            for result in results
        ),
        f"{statistics.fmean(result.mean_age for result in results):.2f}",
        f"{max(result.share_dropped for result in results):.1%}",
        f"{max(result.update_time for result in results):.2f}",
        f"{worst.workload.name}, seed {worst.worst.seed}",
    ]
    return f"| {' | '.join(cells)} |"


def head() -> str:
    """The first lines of the table."""
    names = [
        *("framework and option", "unit", "judged at", "stated bound", "oldest"),
        *(f"{workload.name}: above (oldest)" for workload in WORKLOADS),
        *("mean age", "dropped at most", "time of an update at most", "oldest under"),
    ]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=FRAMEWORKS, nargs="+", default=list(FRAMEWORKS))
    parser.add_argument("--seeds", type=int, default=10, help="runs of each row and workload")
    parser.add_argument("--traces", type=Path, help="a folder for the trace of each oldest sample")
    options = parser.parse_args()
    print(head(), flush=True)
    broken, missing = [], False
    for name in options.only:
        try:
            setups = FRAMEWORKS[name]()
        except Missing as error:
            print(f"max_staleness: {error}", file=sys.stderr)
            missing = True
            continue
        for number, setup in enumerate(setups):
            results = outcomes(setup, options.seeds)
            print(row(setup, results), flush=True)
            oldest = max((result.worst for result in results), key=lambda each: max(each.ages))
            if setup.most is not None and max(oldest.ages) > setup.most:
                broken.append(f"{setup.framework} {setup.option}: {setup.promise}")
            if options.traces:
                options.traces.mkdir(parents=True, exist_ok=True)
                program = f"{setup.framework} {setup.option}"
                oldest.save(options.traces / f"{name}-{number}.jsonl", program)
    for promise in broken:
        print(f"not kept: {promise}", file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
