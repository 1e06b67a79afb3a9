"""The conformance kit finds what it should, and nothing else."""

from __future__ import annotations

import json

import pytest

from lockstep_conformance import __main__ as command
from lockstep_conformance.checks import NumberedSystem, check_lag_zero
from lockstep_conformance.lockstep import train
from lockstep_conformance.protocol import Tally
from sync import SharedMemWeightSyncScheme

SMALL = ["--seconds", "0.5", "--width", "16"]


def verdicts(found):
    return {column: finding["verdict"] for column, finding in found.items()}


@pytest.mark.parametrize(
    "scheme",
    ["shared_mem", pytest.param("shared_mem, asynchronous collector", marks=pytest.mark.slow)],
)
def test_lockstep_passes_every_check(scheme, tmp_path, capsys):
    options = [*SMALL, "--schemes", scheme, "--strict", "--output", str(tmp_path)]
    assert command.main(options) == 0
    (row,) = json.loads((tmp_path / "conformance.json").read_text())
    found = verdicts(row["found"])
    assert found.pop("lag zero") == ("pass" if "collector" in scheme else "not offered")
    assert set(found.values()) == {"pass"}
    assert "WorkerDied: worker 1 " in row["found"]["dead workers"]["numbers"]["error"]
    assert (tmp_path / "conformance.md").read_text() == capsys.readouterr().out


@pytest.mark.slow
def test_a_library_whose_workers_read_the_trainers_memory_fails(capsys):
    options = [*SMALL, "--strict", "--patience", "15"]
    assert command.main(["tests.lockstep_conformance.aliasing_adapter", *options]) == 1
    _, _, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[3] == "FAIL: 2 of 2 workers see unpublished changes"
    assert cells[4].startswith("FAIL: 1 of 1 other workers changed and the trainer's own weights")
    assert cells[6] == "FAIL: 100 % of stamps wrong"
    assert cells[9] == "FAIL: hangs (ended after 15.5 s)"


def test_a_tally_counts_torn_calls_and_wrong_stamps_of_whole_ones():
    tally = Tally()
    for call in [(3, 3.0, 3.0), (3, 2.0, 3.0), (2, 3.0, 3.0), (None, 4.0, 4.0)]:
        tally.add(*call)
    assert (tally.calls, tally.torn, tally.stamped, tally.wrong_stamps) == (4, 1, 2, 1)
    assert (tally.last, tally.highest) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("numbers", "verdict", "text"),
    [
        ({"asynchronous": [1, 2, 3]}, "pass", ""),
        ({"asynchronous": [1, 2, 4]}, "FAIL", "the asynchronous trainer differs from update 3 on"),
        ({"asynchronous": [1, 2]}, "FAIL", "the asynchronous trainer differs from update 3 on"),
        ({"again": [2, 2, 3]}, "FAIL", "a second synchronous trainer differs from update 1 on"),
    ],
)
def test_a_trainer_at_lag_zero_is_compared_with_the_synchronous_one(numbers, verdict, text):
    runs = iter([[1, 2, 3], numbers.get("again", [1, 2, 3]), numbers.get("asynchronous")])
    asked = []

    def train(*, asynchronous, updates):
        asked.append(asynchronous)
        return next(runs)

    (finding,) = check_lag_zero(NumberedSystem(None, 1, train), 0.0).values()
    assert (finding["verdict"], finding["text"]) == (verdict, text)
    assert asked == [False, False, True][: len(asked)]


def test_without_such_a_trainer_nothing_is_compared():
    (finding,) = check_lag_zero(NumberedSystem(None, 1), 0.0).values()
    assert finding["verdict"] == "not offered"


def test_an_asynchronous_trainer_at_lag_zero_gives_the_numbers_of_a_synchronous_one():
    held = train(SharedMemWeightSyncScheme, asynchronous=True, updates=6)
    assert held == train(SharedMemWeightSyncScheme, asynchronous=False, updates=6)
