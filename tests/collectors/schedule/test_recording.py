"""What a file of a schedule may hold, and what is said of one that holds something else."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from collectors.schedule.recording import (
    EndOfSchedule,
    PlannedBatch,
    RecordedSchedule,
    Recorder,
    runs,
)

HEADER = {"num_workers": 2, "num_steps": 8, "num_envs": 1, "seed": 3}


def stamps(*versions):
    return torch.tensor([versions])


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def batch(**changed):
    line = {"worker": 0, "generation": 0, "versions": [[0, 3]], "made_s": 0.1, "at_s": 0.2}
    return line | changed


def filled(worker, generation, versions, newest):
    frames = SimpleNamespace(stamps=lambda steps: versions[:, :steps])
    return SimpleNamespace(
        worker=worker,
        generation=generation,
        frames=frames,
        steps=versions.shape[1],
        made_s=0.5,
        newest=newest,
    )


def test_runs_of_versions():
    assert runs(stamps(-1, -1, 4, 4, 4, 6)) == [[0, -1], [2, 4], [5, 6]]
    assert runs(stamps(0)) == [[0, 0]]


def test_a_recording_is_read_as_it_was_written(tmp_path):
    recorder = Recorder(tmp_path / "schedule.jsonl", [1, 1], frames=8, group_size=1, seed=3)
    recorder.note(filled(1, 0, stamps(0, 0, 2), 3))
    recorder.note(filled(0, 1, stamps(1, 1, 1), None))
    schedule = RecordedSchedule(tmp_path / "schedule.jsonl")
    assert schedule.header.num_workers == 2
    assert schedule.header.seed == 3
    assert schedule.oldest_needed() == 0
    assert schedule.next_batch() == PlannedBatch(1, 0, ((0, 0), (2, 2)), newest=3)
    assert schedule.oldest_needed() == 1
    assert schedule.counts() == {"collected": 8, "dropped": 0, "in_flight": 0, "restarts": 0}
    assert schedule.next_batch() == PlannedBatch(0, 1, ((0, 1),))
    with pytest.raises(EndOfSchedule, match="ends after 2 batches"):
        schedule.next_batch()
    again = RecordedSchedule(tmp_path / "schedule.jsonl")
    again.load_state_dict({"next": 1})
    assert again.next_batch() == PlannedBatch(0, 1, ((0, 1),))


def test_a_seed_may_be_zero_but_no_number_of_a_header_is_negative(tmp_path):
    header = {"format": 1, **HEADER, "seed": 0}
    path = write(tmp_path / "schedule.jsonl", header, batch())
    assert RecordedSchedule(path).header.seed == 0
    for name in HEADER:
        path = write(tmp_path / "schedule.jsonl", header | {name: -1}, batch())
        with pytest.raises(ValueError, match="expected whole numbers"):
            RecordedSchedule(path)


def test_the_half_line_of_a_killed_process_is_left_out(tmp_path):
    path = write(tmp_path / "schedule.jsonl", {"format": 1, **HEADER}, batch(), batch(worker=1))
    path.write_bytes(path.read_bytes()[:-9])
    assert [plan.worker for plan in RecordedSchedule(path).batches] == [0]


@pytest.mark.parametrize(
    "changed",
    [
        {"worker": 2},
        {"worker": -1},
        {"worker": True},
        {"generation": -1},
        {"versions": []},
        {"versions": [[1, 3]]},
        {"versions": [[0, 3], [0, 4]]},
        {"versions": [[0, 3], [8, 4]]},
        {"versions": [[0, -2]]},
        {"versions": [[0, 1.5]]},
        {"versions": [[0]]},
        {"versions": 3},
        {"at_s": "soon"},
    ],
)
def test_a_line_that_is_no_batch_is_named(tmp_path, changed):
    path = write(tmp_path / "schedule.jsonl", {"format": 1, **HEADER}, batch(), batch(**changed))
    with pytest.raises(ValueError, match=r"schedule.jsonl, line 3: this is no batch"):
        RecordedSchedule(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"[]\n", "line 1: expected an object"),
        (b"{\n", "line 1: expected an object"),
        (b'{"format": 2}\n', "of format 1"),
        (b'{"format": 1}\n', "expected whole numbers for num_workers"),
    ],
)
def test_a_file_that_is_no_schedule_is_named(tmp_path, content, why):
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        RecordedSchedule(path)


def test_a_recording_in_two_pieces_cannot_be_followed(tmp_path):
    header = {"format": 1, **HEADER}
    path = write(tmp_path / "schedule.jsonl", header, batch(), header, batch())
    with pytest.raises(ValueError, match="line 3: the run was resumed here"):
        RecordedSchedule(path)
