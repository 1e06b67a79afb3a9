"""A plain run has every test but the dear ones, and of these what notices a change."""

from __future__ import annotations

import pytest

from tests.mutants.table import read_mutants
from tests.selection import is_left_out, read_dear

DEAR_TESTS = read_dear()
NAMED = {test for mutant in read_mutants() for test in mutant.tests}


def test_a_new_test_runs_and_a_dear_one_only_if_it_states_a_promise():
    dear = next(test for test in DEAR_TESTS if not {test, test.partition("::")[0]} & NAMED)
    promise = next(test for test in DEAR_TESTS if test.startswith("tests/promises/"))
    cases = ["tests/test_new.py::test_it", f"{dear}[a]", f"{dear}[b]", f"{promise}[a]"]
    assert is_left_out(cases) == [False, True, True, False]


@pytest.mark.parametrize(("recorded", "left_out"), [(None, [False, True]), ("b", [True, False])])
def test_of_a_dear_test_the_case_runs_that_noticed_a_change(recorded, left_out, monkeypatch):
    test = next(test for test in DEAR_TESTS if test in NAMED and "promises" not in test)
    names = [mutant.name for mutant in read_mutants() if test in mutant.tests]
    witnesses = {name: f"{test}[{recorded}]" for name in names if recorded}
    monkeypatch.setattr("tests.selection.read_witnesses", lambda: witnesses)
    assert is_left_out([f"{test}[a]", f"{test}[b]"]) == left_out
