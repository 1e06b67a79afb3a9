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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.branch.report import brief, document, read_results  # noqa: E402
from harness.report.make import save  # noqa: E402
from harness.report.pages import to_text  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parent", type=Path, help="the run that was branched")
    parser.add_argument("branches", type=Path, help="the folder of its branches")
    parser.add_argument("--report", type=Path, help="a folder for the whole report")
    options = parser.parse_args()
    places = sorted(file.parent for file in options.branches.glob("update-*/*/*/manifest.json"))
    results = read_results(options.parent, places)
    print(to_text(brief(results), 110))
    if options.report is not None:
        save(options.report, document(results, f"Branches of {options.parent.name}"), {})


if __name__ == "__main__":
    main()
