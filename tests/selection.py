"""Which tests a plain `make test` runs: all that are cheap, and the witnesses among the dear ones.

tests/dear.txt lists the dear test functions: those whose cases take more than half a second of
processor time together. `make costs` measures it. Of these, a plain run has only the witnesses:

- the case that notices a change of tests/mutants, which `make mutants` and `make mutants-random`
  record; of a change without a record, the first case of each test that it names;
- tests/promises: each promise by each mechanism;
- a whole run of each algorithm and of each collector.

A function that is not listed runs: a new test is never left out. `--rest` runs what a plain run
leaves out, and `--all` both. A named file, `-k` and `-m` choose among all tests, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.table import RANDOM, read_mutants, read_rows, read_witnesses

HERE = Path(__file__).parent
DEAR = HERE / "dear.txt"
WHOLE = (
    "tests/promises/",
    "tests/harness/test_every_algorithm.py",
    "tests/harness/test_every_collector.py",
)


def is_plain(config: pytest.Config) -> bool:
    """Whether nobody asks for certain tests, or for all."""
    option = config.option
    has_default_marks = f"-m{option.markexpr}" in config.getini("addopts")
    paths = [config.rootpath / argument for argument in config.args]
    return not (option.all or option.keyword) and has_default_marks and paths == [HERE]


def divided(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What a plain run has, and what it leaves out."""
    left_out = is_left_out([item.nodeid for item in items])
    parts: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item, is_out in zip(items, left_out, strict=True):
        parts[is_out].append(item)
    return parts


def is_left_out(nodeids: Sequence[str]) -> list[bool]:
    """Of each case, in the order of collection, whether a plain run leaves it out."""
    dear = set(read_dear())
    recorded = read_witnesses()
    mutants = read_mutants()
    noticing = {recorded[mutant.name] for mutant in mutants if mutant.name in recorded}
    noticing |= {row["noticed_by"] for row in read_rows(RANDOM).values()}
    named = {test for mutant in mutants if mutant.name not in recorded for test in mutant.tests}
    seen: set[str] = set()
    left_out = []
    for nodeid in nodeids:
        function = function_of(nodeid)
        is_first = function not in seen
        seen.add(function)
        is_named = not named.isdisjoint({nodeid, function, function.partition("::")[0]})
        is_witness = nodeid.startswith(WHOLE) or nodeid in noticing
        is_witness = is_witness or (is_named and (is_first or nodeid in named))
        left_out.append(function in dear and not is_witness)
    return left_out


def read_dear() -> list[str]:
    """The dear test functions."""
    return DEAR.read_text().splitlines()


def function_of(nodeid: str) -> str:
    """The test function of a case: what stands before its parameters."""
    return nodeid.partition("[")[0]
