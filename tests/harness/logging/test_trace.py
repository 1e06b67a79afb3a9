"""Timelines of real runs."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

import run
from harness.files import read_json
from harness.logging import RunInfo
from harness.logging.trace import FIRST_WORKER, LEARNER, WORK, TraceConfig, TraceLogger
from harness.run_directory import RunDir
from tests.harness.logging.trace_file import read_trace
from tests.harness.small import SMALL

pytestmark = pytest.mark.usefixtures("here")

TICK = 1e-3  # of a microsecond: what is written is rounded to it


def traced(*overrides: str, status: int = 0) -> tuple[list[dict], dict]:
    """The events of a small run, and its summary."""
    arguments = [*SMALL, "total_frames=1024", "logger=trace", *overrides, "hydra.run.dir=run"]
    assert run.main(arguments) == status
    json.loads(Path("run/trace.json").read_text())  # whole, with its closing bracket
    return read_trace(Path("run/trace.json")), read_json(Path("run/summary.json"))


def start(folder: Path, *, most_bytes: int) -> TraceLogger:
    return TraceLogger(TraceConfig(max_mb=most_bytes / 2**20), RunDir(folder), RunInfo("a-run", {}))


def named(events: list[dict], name: str, kind: str = "X") -> list[dict]:
    return [event for event in events if event["ph"] == kind and event["name"] == name]


def check_tracks(events: list[dict]) -> None:
    """Within a track, what takes time begins when the one before has ended."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - TICK


@pytest.mark.parametrize("collector", ["single", "multi_sync", "multi_async"])
def test_a_run_has_a_timeline(collector):
    events, summary = traced(f"collector={collector}")
    check_tracks(events)
    # A checkpoint before the last evaluation, which may fail, and one with its result.
    for phase, count in (("update", summary["updates"]), ("evaluate", 1), ("checkpoint", 2)):
        assert len(named(events, phase)) == count
    assert named(events, "collect")
    assert named(events, "log")
    versions = [event["args"]["version"] for event in named(events, "publish")]
    assert versions == list(range(1, summary["policy/version"] + 1))


@pytest.mark.parametrize("collector", ["multi_sync", "multi_async"])
def test_batches_and_applied_versions_are_on_tracks_of_their_worker(collector):
    events, summary = traced(f"collector={collector}", "collector.num_workers=2")
    batches, applies = named(events, "batch"), named(events, "apply")
    assert {event["pid"] for event in batches} == {FIRST_WORKER, FIRST_WORKER + 1}
    assert sum(event["args"]["frames"] for event in batches) >= summary["frames"]
    published = {event["args"]["version"]: event["ts"] for event in named(events, "publish")}
    for apply in applies:
        version = apply["args"]["version"]
        assert 0 <= version <= summary["policy/version"]
        assert version == 0 or apply["ts"] >= published[version]
    arrows = len(named(events, "version", "s"))
    assert arrows == len(named(events, "version", "f")) > 0
    names = {event["args"]["name"] for event in named(events, "process_name", "M")}
    assert names == {"learner", "worker 0", "worker 1"}


def test_simulated_workers_have_virtual_time():
    events, summary = traced("collector=simulated", "collector.num_workers=3")
    check_tracks(events)
    end_us = summary["sim/time_s"] * 1e6
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {LEARNER, *range(FIRST_WORKER, FIRST_WORKER + 3)}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(end_us)
    versions = [event["args"]["version"] for event in named(events, "publish")]
    assert versions == list(range(1, summary["policy/version"] + 1))
    assert len(named(events, "evaluate", "i")) == 1
    assert len(named(events, "update")) == summary["updates"]
    assert {event["args"]["version"] for event in named(events, "apply", "i")} <= set(versions)


def test_a_replayed_run_has_the_learners_own_time():
    assert run.main([*SMALL, "collector=multi_async", "hydra.run.dir=recorded"]) == 0
    events, summary = traced(
        "collector=simulated",
        "collector.replay=recorded",
        "total_frames=256",
        "collector.num_workers=2",
    )
    check_tracks(events)
    assert len(named(events, "update")) == summary["updates"]


def test_a_resumed_run_begins_a_trace_of_its_own():
    traced()
    first = Path("run/trace.json").read_bytes()
    assert run.main(["resume=run", "total_frames=2048"]) == 0
    assert Path("run/trace.json").read_bytes() == first
    assert len(named(read_trace(Path("run/trace-2.json")), "update")) == 8


def test_the_policy_of_a_single_collector_is_worker_0():
    events, _ = traced("collector=single")
    names = {event["args"]["name"] for event in named(events, "process_name", "M")}
    assert names == {"learner", "worker 0"}


def test_a_trace_does_not_outgrow_its_bound(tmp_path, caplog):
    logger = start(tmp_path, most_bytes=1000)
    for second in range(100):
        logger.log(second, {}, {})
    logger.finish({}, 0)
    file = tmp_path / "trace.json"
    assert file.stat().st_size < 1200
    assert 2 < len(named(read_trace(file), "frames", "C")) < 50
    assert caplog.text.count("trace.json is full") == 1


@pytest.mark.parametrize("cut", [1, 20, 60, 10_000])
def test_a_trace_of_a_killed_run_can_be_read(tmp_path, cut):
    logger = start(tmp_path, most_bytes=10_000)
    for step in range(5):
        logger.log(step, {}, {})
    file = tmp_path / "trace.json"  # as it is now, without an end
    whole = read_trace(file)
    assert [event["args"]["value"] for event in named(whole, "frames", "C")] == list(range(5))
    data = file.read_bytes()
    file.write_bytes(data[: max(2, len(data) - cut)])
    assert read_trace(file) == whole[: len(read_trace(file))]
    logger.finish({}, 0)


def test_what_workers_do_is_on_the_learners_track_only_for_the_learner():
    events, _ = traced("collector=multi_async")
    learners = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == LEARNER}
    assert learners == {"collect", "update", "publish", "log", "evaluate", "checkpoint"}
    assert {e["tid"] for e in named(events, "batch")} == {WORK}
