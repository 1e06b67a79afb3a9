"""The conformance kit finds what it should, and nothing else."""

from __future__ import annotations

import json

import pytest

from benchmarks.conformance import __main__ as command
from benchmarks.conformance.protocol import Tally

SMALL = ["--seconds", "0.5", "--width", "16"]


def verdicts(found):
    return {column: finding["verdict"] for column, finding in found.items()}


@pytest.mark.parametrize(
    "scheme",
    ["shared_mem", pytest.param("shared_mem, asynchronous collector", marks=pytest.mark.slow)],
)
def test_lockstep_passes_every_check(scheme, tmp_path, monkeypatch, capsys):
    options = [*SMALL, "--schemes", scheme, "--strict", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["conformance", "benchmarks.conformance.lockstep", *options])
    assert command.main() == 0
    (row,) = json.loads((tmp_path / "conformance.json").read_text())
    assert set(verdicts(row["found"]).values()) == {"pass"}
    assert "WorkerDied: worker 1 " in row["found"]["dead workers"]["numbers"]["error"]
    assert (tmp_path / "conformance.md").read_text() == capsys.readouterr().out


@pytest.mark.slow
def test_a_library_whose_workers_read_the_trainers_memory_fails(monkeypatch, capsys):
    options = [*SMALL, "--strict", "--patience", "15"]
    monkeypatch.setattr("sys.argv", ["conformance", "tests.benchmarks.aliasing_adapter", *options])
    assert command.main() == 1
    _, _, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[3] == "FAIL: 2 of 2 workers see unpublished changes"
    assert cells[4].startswith("FAIL: 1 of 1 other workers changed and the trainer's own weights")
    assert cells[6] == "FAIL: 100 % of stamps wrong"
    assert cells[8] == "FAIL: hangs (ended after 15.5 s)"


def test_an_adapter_that_cannot_be_imported_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["conformance", "no_such_adapter"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no_such_adapter: this adapter could not be imported" in capsys.readouterr().err


def test_a_tally_counts_torn_calls_and_wrong_stamps_of_whole_ones():
    tally = Tally()
    for call in [(3, 3.0, 3.0), (3, 2.0, 3.0), (2, 3.0, 3.0), (None, 4.0, 4.0)]:
        tally.add(*call)
    assert (tally.calls, tally.torn, tally.stamped, tally.wrong_stamps) == (4, 1, 2, 1)
    assert (tally.last, tally.highest) == (4.0, 4.0)
