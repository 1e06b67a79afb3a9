from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest

from harness.errors import ConfigError
from harness.files import plain, read_json, write_atomic, write_json
from harness.logging.run_log import run_log
from harness.run.provenance import command, manifest
from harness.run_directory import RunDir, RunDirInUse
from tests.harness.small import little_room


def opened(path, config="seed: 1\n", **options):
    manifest = {"started": "now", "ended": None}
    return RunDir.open(path, config=config, manifest=manifest, **options)


def test_a_new_run_has_its_files_and_is_running(tmp_path):
    run_dir = opened(tmp_path / "run")
    assert sorted(file.name for file in run_dir.path.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "status.json",
    ]
    assert run_dir.read_status()["state"] == "running"


def test_an_ended_run_says_how(tmp_path):
    run_dir = opened(tmp_path / "run")
    try:
        raise ValueError("too many frames")
    except ValueError as error:
        run_dir.end("failed", summary={"frames": 5}, error=error)
    status = run_dir.read_status()
    assert (status["state"], status["error"]) == ("failed", "ValueError: too many frames")
    assert "test_run_dir.py" in status["traceback"]
    assert read_json(run_dir.summary) == {"frames": 5}
    assert read_json(run_dir.manifest)["ended"] is not None


def test_an_unfinished_run_in_the_way_is_moved_aside(tmp_path):
    for number in range(3):
        opened(tmp_path / "run").end("failed", summary={"number": number}, error=None)
    kept = sorted((tmp_path / ".earlier").iterdir())
    assert [read_json(folder / "summary.json")["number"] for folder in kept] == [0, 1]


def test_a_living_run_in_the_way_is_left_alone(tmp_path):
    with living_run(tmp_path / "run"):
        assert opened(tmp_path / "run").path.name == "run-2"
        with pytest.raises(RunDirInUse, match="still alive"):
            RunDir.reopen(tmp_path / "run", config="")
    assert RunDir.reopen(tmp_path / "run", config="").read_status()["state"] == "running"


class living_run:
    """A process whose run directory this is."""

    def __init__(self, path):
        self.run_dir = opened(path)

    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        status = self.run_dir.read_status() | {"pid": self.process.pid}
        write_atomic(self.run_dir.status, json.dumps(status))

    def __exit__(self, *exception):
        self.process.communicate(b"\n", timeout=20)


def test_only_a_finished_run_of_the_same_config_counts_as_done(tmp_path):
    run_dir = opened(tmp_path / "run")
    assert not run_dir.is_done_with("seed: 1\n")
    run_dir.end("done", summary={}, error=None)
    assert run_dir.is_done_with("seed: 1\n")
    assert not run_dir.is_done_with("seed: 2\n")


def test_going_on_takes_back_the_records_after_the_checkpoint(tmp_path):
    run_dir = opened(tmp_path / "run")
    records = [{"step": step} for step in (10, 20, 30)]
    records[2:2] = [{"step": 20, "eval/return": 1.0}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    run_dir.metrics.write_text(text + '{"step": 4')
    assert run_dir.cut_metrics(20, 20) == 2
    assert run_dir.cut_metrics(20, 10) == 1
    assert run_dir.metrics.read_text() == '{"step": 10}\n{"step": 20}\n'


def test_what_is_logged_and_warned_of_is_in_the_log(tmp_path):
    run_dir = opened(tmp_path / "run")
    with run_log(run_dir.log):
        logging.getLogger("somewhere").info("a fact")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("a doubt", stacklevel=1)
    logging.getLogger("somewhere").error("too late")
    text = run_dir.log.read_text()
    assert "a fact" in text
    assert "a doubt" in text
    assert "too late" not in text


def test_the_manifest_says_where_the_run_came_from():
    found = manifest(seed=3, overrides=["seed=3"])
    assert found["seed"] == 3
    assert found["packages"]["torch"]
    assert found["hardware"]["cores"] >= 1
    assert found["git"] is None or len(found["git"]["sha"]) == 40
    json.dumps(found)


def test_what_finds_no_room_is_named_and_the_old_file_stays(tmp_path):
    file = tmp_path / "summary.json"
    write_atomic(file, "old")
    with little_room(10), pytest.raises(OSError, match=f"{re.escape(repr(str(file)))}$"):
        write_atomic(file, 100 * "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_json_knows_what_python_knows():
    assert plain({"a": float("nan"), "b": float("inf"), 1: (2,)}) == {
        "a": None,
        "b": "inf",
        "1": [2],
    }


@pytest.fixture
def full_disk(monkeypatch):
    """From when it is called, no new file can be written, but what is there can be overwritten."""

    def fill() -> None:
        def refuse(file, content):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("harness.files.write_atomic", refuse)

    return fill


def test_on_a_full_disk_the_status_takes_the_room_of_the_one_before(tmp_path, full_disk):
    run_dir = opened(tmp_path / "run")
    full_disk()
    with pytest.raises(OSError, match="No space left"):
        run_dir.end("failed", summary={}, error=RuntimeError("a message " + 10_000 * "x"))
    assert run_dir.status.stat().st_size <= 512
    assert run_dir.read_status()["state"] == "failed"


def test_a_run_whose_end_cannot_be_written_is_not_done(tmp_path, full_disk):
    run_dir = opened(tmp_path / "run")
    full_disk()
    with pytest.raises(OSError, match="No space left"):
        run_dir.end("done", summary={}, error=None)
    status = run_dir.read_status()
    assert status["state"] == "failed"
    assert "No space left" in status["error"]


@pytest.mark.parametrize("trouble", ["a full disk", "it cannot be opened"])
def test_a_log_that_cannot_be_written_is_said_once_and_stops_nobody(tmp_path, capsys, trouble):
    run_dir = opened(tmp_path / "run")
    run_dir.log.symlink_to("/dev/full" if trouble == "a full disk" else tmp_path)
    with run_log(run_dir.log):
        logging.getLogger("harness").info("one")
        logging.getLogger("harness").info("two")
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 1
    assert "Traceback" not in said


def test_what_a_killed_run_was_writing_is_removed_when_it_goes_on(tmp_path):
    run_dir = opened(tmp_path / "run")
    run_dir.end("failed", summary={}, error=None)
    left = (".summary.json.17", ".status-17", "checkpoints/.writing-17", "checkpoints/.tmp1OCyTw")
    for name in left:
        (run_dir.path / name).write_text("half of it")
    RunDir.reopen(run_dir.path, config="seed: 1\n")
    assert not list(run_dir.path.rglob(".*"))


def test_the_command_is_what_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/env/bin/python3.11")
    monkeypatch.setattr(sys, "argv", ["/env/bin/lockstep", "seed=1"])
    assert command() == "lockstep seed=1"
    monkeypatch.setattr(sys, "argv", ["run.py", "algo.epochs=${zip:1,2}"])
    assert command() == "python3.11 run.py 'algo.epochs=${zip:1,2}'"


def test_a_finished_run_in_the_way_stays_unless_it_is_to_be_replaced(tmp_path):
    place = tmp_path / "run"
    opened(place).end("done", summary={}, error=None)
    with pytest.raises(ConfigError, match="of this config: skip_done=true keeps it, replace_done"):
        opened(place)
    with pytest.raises(ConfigError, match="of another config: replace_done=true moves it"):
        opened(place, config="seed: 2\n")
    RunDir.record_failure(place, config="", error=ValueError("no such thing"))
    assert RunDir(place).is_done()
    assert not (tmp_path / ".earlier").exists()
    assert opened(place, replace_done=True).path == place
    assert RunDir(tmp_path / ".earlier" / "run-1").is_done()


def test_a_manifest_of_a_user_without_a_name_has_the_number(monkeypatch):
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert manifest(seed=1, overrides=[])["user"] == str(os.getuid())


def test_a_run_of_another_machine_that_has_not_ended_is_left_alone(tmp_path):
    place = tmp_path / "run"
    RunDir.open(place, config="", manifest={"host": "node17"})
    gone = read_json(place / "status.json") | {"pid": 1 << 30}  # no process of this machine
    write_json(place / "status.json", gone)
    assert opened(place).path.name == "run-2"
    with pytest.raises(RunDirInUse, match=r"host node17.* delete .*status\.json"):
        RunDir.reopen(place, config="")
    (place / "status.json").unlink()
    RunDir.reopen(place, config="")
