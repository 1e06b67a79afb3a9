"""A plain run has every test but the dear ones, and of these what notices a change."""

from __future__ import annotations

from tests.mutants.table import read_mutants, read_witnesses
from tests.selection import DEAR, is_left_out


def test_a_new_test_runs_and_a_dear_one_only_if_it_notices_a_change_or_states_a_promise():
    dear = DEAR.read_text().splitlines()
    recorded, mutants = read_witnesses(), read_mutants()
    named = {test for mutant in mutants for test in mutant.tests}
    witness = next(test for test in recorded.values() if test.partition("[")[0] in dear)
    unnamed = next(test for test in dear if not {test, test.partition("::")[0]} & named)
    promise = next(test for test in dear if test.startswith("tests/promises/"))
    cases = ["tests/test_new.py::test_it", witness, f"{unnamed}[a]", f"{unnamed}[b]", promise]
    assert is_left_out(cases) == [False, False, True, True, False]


def test_of_a_change_without_a_record_the_first_case_of_its_test_runs(monkeypatch):
    monkeypatch.setattr("tests.selection.read_witnesses", dict)
    dear = set(DEAR.read_text().splitlines())
    tests = [test for mutant in read_mutants() for test in mutant.tests]
    test = next(test for test in tests if test in dear and "promises" not in test)
    assert is_left_out([f"{test}[a]", f"{test}[b]"]) == [False, True]
