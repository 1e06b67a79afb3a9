"""`--against`: planted differences between two traces that should have the same training."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_check.__main__ import main
from lockstep_check.same import first_difference
from tests.lockstep_check.traces import Event, Plant, change, remove, sound, write

PLANTED: list[tuple[Plant, int, str]] = [
    (change("publish", {"version": 4}, checksum="x"), 3, "the checksum of the weights is c4 in"),
    (
        change("train", {"update": 3, "epoch": 0, "worker": 1}, length=8),
        2,
        "update 3: the length of what is trained on is 32 in",
    ),
    (
        change("act", {"worker": 0, "sample": 4, "version": 3}, version=4),
        4,
        "update 5: the set of versions that acted is [2, 3] in",
    ),
    (remove("train", update=2, epoch=0, worker=0), 1, "update 2: the length of what is trained on"),
]


def pair(folder: Path, events: list[Event]) -> tuple[Path, Path]:
    return write(folder / "one.jsonl", sound()), write(folder / "other.jsonl", events)


@pytest.mark.parametrize(("plant", "same", "words"), PLANTED)
def test_a_planted_difference_is_named_with_its_update(
    plant: Plant, same: int, words: str, tmp_path: Path
) -> None:
    events = sound()
    if words.startswith("update 5"):  # both samples, or the set stays as it is
        change("act", {"worker": 1, "sample": 4, "version": 3}, version=4)(events)
    plant(events)
    count, difference = first_difference(*pair(tmp_path, events))
    assert count == same
    assert words in difference


def test_what_one_of_them_does_not_record_is_no_difference(tmp_path: Path) -> None:
    events = sound()
    for event in events:
        if event["event"] == "publish":
            del event["checksum"]
    assert first_difference(*pair(tmp_path, events)) == (6, "")


def test_the_order_of_workers_and_the_times_are_no_difference(tmp_path: Path) -> None:
    events = [
        {**event, "worker": 1 - event["worker"]} if "worker" in event else event
        for event in sound()
    ]
    assert first_difference(*pair(tmp_path, events)) == (6, "")


def test_traces_without_an_update_are_not_the_same_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [event for event in sound() if event["event"] == "publish"]
    one, other = write(tmp_path / "one.jsonl", events), write(tmp_path / "other.jsonl", events)
    assert main([str(one), "--against", str(other)]) == 0
    assert "the same training      not checked" in capsys.readouterr().out
