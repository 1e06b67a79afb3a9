"""Random changes are changes, and the same seed draws the same ones."""

from __future__ import annotations

import ast

from tests.mutants.random_changes import ROOT, changes_of, draw


def test_every_change_changes_the_function_that_it_names_and_no_other():
    file = "harness/algorithms/returns.py"
    tree = ast.parse((ROOT / file).read_text())
    changes = changes_of(file)
    assert len({change.name for change in changes}) == len(changes)
    assert {change.kind for change in changes} > {"comparison", "arithmetic", "constant"}
    for change in changes:
        pairs = zip(tree.body, change.applied_to(tree).body, strict=True)
        (changed,) = (old for old, new in pairs if ast.dump(old) != ast.dump(new))
        assert change.function.partition(".")[0] == changed.name  # type: ignore[attr-defined]


def test_a_longer_draw_begins_with_the_shorter_one():
    only = ["harness/algorithms/returns.py", "harness/measures/"]
    assert draw(1, 20, only)[:10] == draw(1, 10, only)
    assert draw(1, 20, only) != draw(2, 20, only)
