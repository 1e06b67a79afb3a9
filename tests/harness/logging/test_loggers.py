from __future__ import annotations

import json
import logging

import pytest

from harness.logging import Logger, Loggers, RunInfo, make_loggers
from harness.measures.meters import Histogram
from harness.run_directory import RunDir
from tests.harness.small import little_room


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.open(tmp_path / "run", config="", manifest={})


def records(run_dir):
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


def test_metrics_jsonl_is_written_whatever_else_logs(run_dir):
    loggers = make_loggers({}, run_dir, RunInfo("run", {}))
    loggers.log(10, {"train/loss": 0.5, "eval/return": float("nan")})
    (record,) = records(run_dir)  # at once, not at the end
    assert (record["step"], record["train/loss"], record["eval/return"]) == (10, 0.5, None)
    assert record["time"] > 0
    loggers.finish({}, 0)


def test_on_a_full_disk_records_wait_until_there_is_room(run_dir, caplog):
    loggers = make_loggers({}, run_dir, RunInfo("run", {}))
    with little_room(100):
        for step in range(1, 5):
            loggers.log(step, {"a": step})
    assert run_dir.metrics.stat().st_size == 100
    loggers.log(5, {"a": 5})
    assert [record["step"] for record in records(run_dir)] == [1, 2, 3, 4, 5]
    assert caplog.text.count("cannot be written") == caplog.text.count("can be written again") == 1
    loggers.finish({}, 0)


def test_records_whose_file_was_removed_are_not_lost_in_silence(run_dir, caplog):
    loggers = make_loggers({}, run_dir, RunInfo("run", {}))
    run_dir.metrics.unlink()
    loggers.log(1, {"a": 1})
    loggers.finish({}, 0)
    assert f"{run_dir.metrics} was removed, and its records are lost" in caplog.text


def test_a_logger_that_fails_is_left_out_and_the_others_go_on(run_dir, caplog):
    class Broken(Logger):
        def log(self, step, metrics, histograms):
            raise OSError("the disk is full")

        def finish(self, summary, exit_code):
            pytest.fail("it is turned off")

    good = make_loggers({}, run_dir, RunInfo("run", {}))
    loggers = Loggers([Broken(), good])
    with caplog.at_level(logging.ERROR):
        loggers.log(1, {"a": 1})
        loggers.log(2, {"a": 2})
    loggers.finish({}, 0)
    assert [record["step"] for record in records(run_dir)] == [1, 2]
    assert caplog.text.count("Broken failed and is turned off: the disk is full") == 1


def test_a_histogram_counts_what_lies_between_its_edges():
    histogram = Histogram.of([0.0, 0.1, 3.0])
    assert sum(histogram.counts) == 3
    assert (histogram.edges[0], histogram.edges[-1]) == (0, 3)
    assert len(histogram.edges) == len(histogram.counts) + 1
