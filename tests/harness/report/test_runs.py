"""Run directories are read as they are: whole, cut off, damaged or hostile."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from harness.report.runs import read_runs
from harness.report.scores import TRAINED, WANTED, summaries, with_clocks
from tests.harness.report.synthetic import make_run, make_sweep


def read(*places) -> list[pd.Series]:
    """The rows of the runs."""
    return [run for _, run in read_runs(places, WANTED).runs.iterrows()]


def read_one(place) -> pd.Series:
    (run,) = read(place)
    return run


def records_of(*places) -> pd.DataFrame:
    return read_runs(places, WANTED).records


def test_a_whole_run_is_read_without_problems(tmp_path):
    run = read_one(make_run(tmp_path / "run", seed=7))
    assert (run["name"], run.state, run.seed, run.problems) == ("run", "done", 7, [])
    assert run.options["sync.name"] == "shared_mem"
    assert run["summary.frames"] == run.frames == 2000
    assert records_of(tmp_path)["step"].tolist() == list(range(100, 2100, 100))


def test_a_sweep_is_read_in_order_at_whatever_depth(tmp_path):
    make_sweep(tmp_path / "day" / "sweep", schemes={"a": 1, "b": 2}, seeds=range(2))
    names = [run["name"] for run in read(tmp_path / "day")]
    assert names == [
        "day/sweep/sync=a,seed=0",
        "day/sweep/sync=a,seed=1",
        "day/sweep/sync=b,seed=0",
        "day/sweep/sync=b,seed=1",
    ]


def test_a_run_is_found_however_deep_it_lies(tmp_path):
    make_run(tmp_path / "near" / "run")
    make_run(tmp_path / "a" / "b" / "c" / "d" / "e" / "f" / "g" / "run")
    assert len(read(tmp_path)) == 2


def test_a_run_named_twice_counts_once(tmp_path):
    make_run(tmp_path / "sweep" / "run")
    assert len(read(tmp_path / "sweep", tmp_path / "sweep" / "run")) == 1


def test_earlier_attempts_links_and_reports_are_no_runs(tmp_path):
    make_run(tmp_path / "run")
    make_run(tmp_path / ".earlier" / "run-1")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").touch()
    assert [run["name"] for run in read(tmp_path)] == [f"{tmp_path.name}/run"]


def test_an_empty_folder_beside_runs_is_a_lost_run(tmp_path):
    make_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (_, lost) = read(tmp_path)
    assert lost.state == "unknown"
    assert lost.problems == ["it has no file of a run"]


def test_two_places_of_one_name_are_told_apart(tmp_path):
    make_run(tmp_path / "x" / "sweep" / "run")
    make_run(tmp_path / "y" / "sweep" / "run")
    first, second = read(tmp_path / "x" / "sweep", tmp_path / "y" / "sweep")
    assert first.source != second.source


def test_a_place_without_runs_is_an_error_that_says_what_a_run_holds(tmp_path):
    with pytest.raises(ValueError, match=r"a run directory has status\.json"):
        read(tmp_path)
    with pytest.raises(ValueError, match="is not there"):
        read(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no directory"):
        read(tmp_path / "file")


@pytest.mark.parametrize(
    "name", ["status.json", "config.yaml", "metrics.jsonl", "summary.json", "manifest.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[1, 2]",
        b"null",
        b"[" * 100_000,
        b"9" * 10_000,
        b"{a: &a [1], b: *a}",
    ],
    ids=["missing", "empty", "binary", "cut", "list", "null", "deep", "digits", "reference"],
)
def test_a_damaged_file_is_named_and_the_rest_is_read(tmp_path, name, content):
    directory = make_run(tmp_path / "run")
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    run = read_one(directory)
    assert any(name in problem for problem in run.problems)
    assert run.seed == 1  # the config and the manifest both know it
    assert bool(run.options) == (name != "config.yaml")
    assert bool(run.frames > 0) == (name != "metrics.jsonl")
    assert ("summary.fps" in run) == (name != "summary.json")


def test_a_run_that_did_not_finish_may_lack_what_it_had_not_come_to(tmp_path):
    failed = make_run(tmp_path / "failed", state="failed")
    (failed / "metrics.jsonl").write_text("")
    killed = make_run(tmp_path / "killed", state="interrupted")
    (killed / "summary.json").unlink()
    assert read_one(failed).problems == read_one(killed).problems == []


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    directory = make_run(tmp_path / "run")
    (directory / "metrics.jsonl").unlink()
    os.mkfifo(directory / "metrics.jsonl")
    assert read_one(directory).problems == ["metrics.jsonl is no file"]


def test_cut_and_foreign_lines_are_counted_and_the_others_kept(tmp_path):
    directory = make_run(tmp_path / "run")
    with (directory / "metrics.jsonl").open("a") as stream:
        stream.write('{"no": "step"}\n\n[]\n{"step": -5}\n{"step": 2100, "episode/return": 4')
    run = read_one(directory)
    assert run.problems == ["metrics.jsonl: 4 damaged lines were left out"]
    assert len(records_of(directory)) == 20


def test_what_is_no_finite_number_is_no_value(tmp_path):
    directory = make_run(tmp_path / "run")
    summary = {"fps": math.nan, "frames": math.inf, "wall_s": "5", "flag": True, "x": 10**400}
    (directory / "summary.json").write_text(json.dumps({**summary, "updates": 3}))
    records = ['{"step": 1, "episode/return": NaN}', '{"step": 2, "episode/return": 5}']
    (directory / "metrics.jsonl").write_text("\n".join(records))
    runs, records = read_runs([directory], WANTED)
    assert summaries(runs).loc[0].to_dict() == {"updates": 3}
    assert records[["step", TRAINED]].dropna().to_numpy().tolist() == [[2, 5]]


def test_records_are_read_in_the_order_of_their_frames(tmp_path):
    directory = make_run(tmp_path / "run")
    (directory / "metrics.jsonl").write_text('{"step": 20}\n{"step": 10}\n')
    assert records_of(directory)["step"].tolist() == [10, 20]


def test_yaml_cannot_make_objects(tmp_path):
    directory = make_run(tmp_path / "run")
    made = tmp_path / "made"
    (directory / "config.yaml").write_text(f"a: !!python/object/apply:os.mkdir ['{made}']")
    assert "config.yaml is damaged: not plain YAML" in read_one(directory).problems
    assert not made.exists()


def test_interpolations_stay_text(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "told")
    directory = make_run(tmp_path / "run", note="${oc.env:SECRET}")
    assert read_one(directory).options["note"] == "${oc.env:SECRET}"


def test_a_living_run_is_running_and_a_vanished_one_was_interrupted(tmp_path):
    alive = read_one(make_run(tmp_path / "alive", state="running"))
    assert alive.state == "running"
    assert "summary.fps" not in alive  # it would be of an earlier part
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = read_one(make_run(tmp_path / "dead", state="running", pid=gone.pid))
    assert dead.state == "interrupted"
    assert "reported no reason" in dead.error
    there = make_run(tmp_path / "there", state="running", pid=gone.pid, host="elsewhere")
    assert read_one(there).state == "running"  # nobody here can tell


def test_seconds_are_those_in_the_loop(tmp_path):
    records = records_of(make_run(tmp_path / "run"))
    assert with_clocks(records)["seconds"][:3].tolist() == [1, 2, 3]  # four phases of a quarter
    records = pd.DataFrame({"run": 0, "step": [1, 2, 3], "time": [5.0, 7.0, 8.0]})
    assert with_clocks(records)["seconds"].tolist() == [0, 2, 3]


def cut(directory: Path, first: int, last: int) -> Path:
    """The records of a run without those outside of these places."""
    file = directory / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[first:last]))
    return directory


def test_a_finished_run_whose_records_are_not_all_there_is_damaged(tmp_path):
    end = cut(make_run(tmp_path / "end"), 0, 12)
    assert read_one(end).damage == "metrics.jsonl ends at frame 1200 of 2000"
    (end / "summary.json").write_text("{")
    assert read_one(end).damage == "metrics.jsonl ends at frame 1200 of 2000"
    begin = cut(make_run(tmp_path / "begin", log_every_frames=50), 10, 20)
    assert read_one(begin).damage == "metrics.jsonl has no record of frames 0 to 1100"
    inside = make_run(tmp_path / "inside")
    lines = (inside / "metrics.jsonl").read_text().splitlines()
    lines[7] = lines[7][:30]
    (inside / "metrics.jsonl").write_text("\n".join(lines))
    assert read_one(inside).damage == "metrics.jsonl: 1 damaged lines were left out"
    none = make_run(tmp_path / "none")
    (none / "metrics.jsonl").unlink()
    assert read_one(none).damage == "metrics.jsonl is missing"


def test_a_run_whose_records_are_all_there_is_not_damaged(tmp_path):
    whole = make_run(tmp_path / "whole", log_every_frames=100)
    with (whole / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 20')  # cut while it was written, after the last record of the run
    (whole / "summary.json").unlink()
    failed = cut(make_run(tmp_path / "failed", state="failed"), 0, 5)
    assert read_one(whole).damage == read_one(failed).damage == ""
    assert read_one(whole).problems


def test_rows_of_all_runs_are_numbered_through_and_reading_says_how_far_it_is(
    tmp_path, monkeypatch
):
    steps: list[str] = []
    monkeypatch.setattr("harness.report.runs.show_progress", steps.append)
    for seed in (1, 2):
        make_run(tmp_path / f"run{seed}", seed=seed)
    tables = read_runs([tmp_path], None)
    assert steps == ["reading 1/2: run1", "reading 2/2: run2"]
    assert tables.records.index.tolist() == list(range(40))
    assert tables.records["run"].tolist() == [0] * 20 + [1] * 20
