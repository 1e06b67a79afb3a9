"""The table of changes fits the code, so that `make mutants` can run."""

from __future__ import annotations

from tests.mutants.table import ROOT, read_mutants


def test_every_change_fits_its_file_and_names_tests_that_exist():
    mutants = read_mutants()
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names)
    for mutant in mutants:
        mutant.applied_to((ROOT / mutant.file).read_text())
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, function = test.partition("::")
            text = (ROOT / path).read_text()
            found = not function or f"def {function.partition('[')[0]}(" in text
            assert found, f"{mutant.name}: {test}"
