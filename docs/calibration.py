"""Does the simulator predict what a real run does? Its lag and its speed, beside those measured.

    make bench BENCH=calibration            or
    .venv/bin/python docs/calibration.py [--cases two,wan,fast_learner] [--frames 150000]
        [--seed 1] [--train]

Each case is a run of PPO on CartPole with collector=multi_async. `harness.calibrate` reads costs
off its directory, and the simulator is given those: its mean and 95th percentile of the lag and its
frames a second are the prediction. With --train a run with collector=simulated makes it, which
trains, too, in virtual time; that takes as long as the real one.

two            2 workers, which are faster than the learner
wan            4 workers behind an emulated wide-area network
fast_learner   2 workers, which are slower than the learner
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.calibrate import Figures, calibrate  # noqa: E402

CASES = {
    "two": ("collector.num_workers=2",),
    "wan": ("collector.num_workers=4", "sync.link.preset=wan"),
    "fast_learner": ("collector.num_workers=2", "algo.epochs=1", "algo.minibatch_size=512"),
}
WITHIN = 0.15


@dataclass(frozen=True)
class Row:
    """One figure of one case."""

    case: str
    figure: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def run(directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A run by the command line; its summary."""
    command = [sys.executable, str(ROOT / "run.py"), *overrides, "logger=[]"]
    told = [*command, f"hydra.run.dir={directory}", "evaluation.at_end=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(told, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(told)} failed:\n{done.stderr}")
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def trained(directory: Path, summary: dict[str, Any]) -> Figures:
    """What a simulated run did, in virtual time."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "sim/time_s" in record]
    frames = records[-1]["step"] - records[0]["step"]
    seconds = records[-1]["sim/time_s"] - records[0]["sim/time_s"]
    return Figures(summary["policy/lag_mean"], summary["policy/lag_p95"], frames / seconds)


def compare(case: str, frames: int, seed: int, *, train: bool) -> list[Row]:
    """Run it, calibrate by it, and simulate it."""
    told = [f"total_frames={frames}", f"seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="lockstep-calibration-") as scratch:
        real, virtual = Path(scratch) / "real", Path(scratch) / "simulated"
        summary = run(real, ["collector=multi_async", *CASES[case], *told])
        found = calibrate(real)
        was = Figures(summary["policy/lag_mean"], summary["policy/lag_p95"], found.recording.fps)
        if train:
            others = [text for text in CASES[case] if not text.startswith("collector.")]
            will = trained(virtual, run(virtual, [*found.overrides(), *others, *told]))
        else:
            will = found.predict(len(found.recording.at_s), seed)
    print(f"{case}: {' '.join(found.overrides())}", file=sys.stderr, flush=True)
    return [
        Row(case, "lag, mean", was.lag_mean, will.lag_mean),
        Row(case, "lag, 95th percentile", was.lag_p95, will.lag_p95),
        Row(case, "frames a second", was.fps, will.fps),
    ]


def table(rows: Sequence[Row]) -> str:
    """Predicted and measured, as Markdown."""
    lines = ["| run | | measured | predicted | error |", "|---|---|---|---|---|"]
    for row in rows:
        digits = 0 if row.measured >= 100 else 2
        numbers = f"{row.measured:,.{digits}f} | {row.predicted:,.{digits}f} | {row.error:+.0%}"
        lines.append(f"| {row.case} | {row.figure} | {numbers} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a prediction is further off than it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--frames", type=int, default=150_000, help="of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", action="store_true", help="simulate by training, too")
    options = parser.parse_args(arguments)
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"--cases {','.join(unknown)}: known are {', '.join(CASES)}")
    rows = []
    for case in cases:
        rows += compare(case, options.frames, options.seed, train=options.train)
    print(table(rows))
    far = [row for row in rows if not abs(row.error) <= WITHIN]
    print(f"\n{len(rows) - len(far)} of {len(rows)} within {WITHIN:.0%}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
