"""The settings of `experiment=ages`, from a policy that was trained without lag.

    .venv/bin/python docs/findings/ages_warm.py outputs/ages outputs/ages_warm --seeds 1-20
    .venv/bin/python docs/findings/lag_studies.py ages outputs/ages_warm

The parent of a seed is its on-policy run, which `outputs/ages` must have. Each setting with claims
continues it after 256 of its 1,024 gradient steps, by `lockstep branch`; the control goes on
on-policy. Branches of a seed share their random streams. The same command continues what was
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.findings.lag_studies import FRESH, STUDIES, seed_range  # noqa: E402
from harness.command import main as lockstep  # noqa: E402

MOMENT = 256  # updates of one gradient step each
FRESH_POINT = 0  # of experiment=ages


def arms() -> list[list[str]]:
    """What each setting with claims changes in an on-policy run, once for settings of one run."""
    study = STUDIES["ages"]
    fresh = study.settings[FRESH]
    named = dict.fromkeys(name for claim in study.claims for name in (claim.left, claim.right))
    changes = [
        tuple(
            f"{key}={value}" for key, value in study.settings[name].items() if value != fresh[key]
        )
        for name in named
    ]
    return [list(change) for change in dict.fromkeys(changes) if change]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="the directory of the sweep of experiment=ages")
    parser.add_argument("out", type=Path, help="where the branches go, a directory for each seed")
    parser.add_argument("--seeds", type=seed_range, default=range(1, 21), help="as 1-20")
    parser.add_argument("--jobs", default="1", help="branches at a time")
    arguments = parser.parse_args(argv)
    for seed in arguments.seeds:
        parent = arguments.sweep / f"point={FRESH_POINT},seed={seed}"
        out = arguments.out / f"seed={seed}"
        for change in arms():
            options = ("--at", str(MOMENT), "--repeats", "1", "--jobs", arguments.jobs)
            status = lockstep(["branch", str(parent), *options, "--out", str(out), *change])
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
