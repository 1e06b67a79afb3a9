"""The changes, read from the TOML files of this folder.

Each has a name, says in words what it breaks, replaces a text that stands once in its file, and
names the tests of which at least one must fail:

    [[mutant]]
    name = "ppo-entropy-sign"
    what = "the entropy bonus has the wrong sign"
    file = "harness/algorithms/ppo.py"
    old = "- config.entropy_weight * entropy"
    new = "+ config.entropy_weight * entropy"
    tests = ["tests/harness/test_ppo.py::test_a_policy_without_gain_is_drawn_to_entropy"]

`make mutants` records in witnesses.txt which case noticed each change, and `make mutants-random` in
random.jsonl which one noticed each change that it drew.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
WITNESSES = FOLDER / "witnesses.txt"
RANDOM = FOLDER / "random.jsonl"


@dataclass(frozen=True)
class Mutant:
    name: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]

    def applied_to(self, text: str) -> str:
        """The file's text with this change; ValueError if the change does not fit it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: `old` stands {count} times in {self.file}, not once")
        if self.old == self.new:
            raise ValueError(f"{self.name}: `old` and `new` are the same")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """All changes, in the order of the files."""
    return [
        Mutant(**entry)
        for path in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]


def read_witnesses() -> dict[str, str]:
    """Of each change that `make mutants` has recorded, the case that noticed it."""
    lines = WITNESSES.read_text().splitlines()
    return {name: test for name, _, test in (line.partition(" ") for line in lines)}


def write_witnesses(witnesses: dict[str, str]) -> None:
    lines = [f"{name} {test}\n" for name, test in sorted(witnesses.items())]
    WITNESSES.write_text("".join(lines))


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """What is known of each change that was drawn, the newest row last."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, lines):
        rows[row["name"]] = rows.get(row["name"], {}) | row
    return rows
