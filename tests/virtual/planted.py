"""Faults that are planted in the product, to see that stories find them, and by which rule.

python -m tests.virtual.planted --seeds 2000
python -m tests.virtual.planted --only counted-twice no-second-look

Each is a change of one file, as in `tests/mutants/table.py`: some of those there, and those of
`planted.toml`. A process of its own imports the product with the change.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.mutants.table import ROOT, Mutant, read_mutants

VARIABLE = "LOCKSTEP_PLANTED"
OWN = Path(__file__).with_name("planted.toml")
MUTANTS = [
    "no-second-look",
    "no-fence-after-the-pin",
    "no-fence-after-asleep",
    "no-fence-before-asleep-is-read",
    "latest-is-not-held",
    "second-pin-is-not-held",
    "kept-block-is-released",
    "worker-sleeps-without-saying-so",
    "refused-version-is-counted",
    "predecessors-acknowledgement-counts",
    "stamp-before-the-weights",
    "block-on-the-way-is-overwritten",
    "waiting-block-is-overwritten",
    "next-message-is-not-sent",
    "message-for-the-predecessor",
    "row-of-the-predecessor",
    "stopped-time-counts",
    "message-is-read-once",
    "last-tensor-is-not-loaded",
    "dead-worker-is-not-noticed",
    "first-output-of-older-weights",
    "promised-to-all",
    "lost-frames-not-dropped",
    "block-freed-twice",
    "worker-outlives-trainer",
    "pacing-one-too-many",
    "pipe-drops-long-messages",
    "refused-weights-are-where-a-successor-looks",
    "extra-state-is-that-of-the-beginning",
]


def read_planted() -> list[Mutant]:
    """All planted faults."""
    of_mutants = {mutant.name: mutant for mutant in read_mutants()}
    own = tomllib.loads(OWN.read_text())["mutant"]
    return [*(of_mutants[name] for name in MUTANTS), *(Mutant(**one, tests=[]) for one in own)]


class Planted(importlib.abc.MetaPathFinder):
    """Imports one module of the product with a change."""

    def __init__(self, mutant: Mutant):
        self._mutant = mutant
        self._name = mutant.file.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name != self._name:
            return None
        place = str(ROOT / self._mutant.file)
        return importlib.util.spec_from_file_location(
            name, place, loader=Loader(name, self._mutant)
        )


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, mutant: Mutant):
        super().__init__(name, str(ROOT / mutant.file))
        self._mutant = mutant

    def get_code(self, name: str) -> CodeType:
        source = self._mutant.applied_to(Path(self.path).read_text())
        code: CodeType = compile(source, self.path, "exec")
        return code


def plant() -> None:
    """Plant the fault that the environment names; before the product is imported."""
    if name := os.environ.get(VARIABLE):
        (mutant,) = [one for one in read_planted() if one.name == name]
        sys.meta_path.insert(0, Planted(mutant))


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.planted", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--only", nargs="+")
    arguments = parser.parse_args(given)
    missed = 0
    for mutant in read_planted():
        if arguments.only and mutant.name not in arguments.only:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "tests.virtual", "--seeds", str(arguments.seeds), "--until"],
            cwd=ROOT,
            env={**os.environ, VARIABLE: mutant.name},
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(
            r"^seed (\d+), .*\n(?:    .*\n)*?    WRONG (.*)", done.stdout, re.MULTILINE
        )
        missed += found is None
        after = "not found" if found is None else f"after {int(found[1]) + 1} seeds"
        why = done.stderr[-300:] if found is None else found[2]
        print(f"{mutant.name}: {after} | {mutant.what} | {why[:160]}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
