"""Wire formats and slow links through the command: taken, refused, measured, and the same twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import run
from harness.config.help import page
from harness.files import read_json
from harness.options.sync import LinkConfig
from harness.run.build import make_scheme
from sync import PRESETS, WIRES, Link
from tests.harness.config.composed import config_of, error_of
from tests.harness.config.experiments import jobs_of_experiment

SMALL = (
    "total_frames=384",
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "algo.minibatch_size=64",
    "algo.epochs=1",
    "model.hidden_sizes=[16]",
    "evaluation.at_end=false",
    "logger=jsonl",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished(*overrides: str) -> Path:
    """The directory of a small run, done."""
    directory = Path(f"run-{len(list(Path().glob('run-*')))}")
    assert run.main([*SMALL, *overrides, f"hydra.run.dir={directory}"]) == 0
    return directory


def records(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# -- what may be said


@pytest.mark.parametrize("wire", WIRES)
def test_a_wire_is_taken_from_the_command_line(wire):
    scheme = make_scheme(config_of(f"sync.wire={wire}"))
    assert scheme.wire == wire


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_may_be_changed_in_part(preset):
    overrides = [f"sync.link.preset={preset}", "sync.link.loss=0.25", "seed=9"]
    scheme = make_scheme(config_of(*overrides))
    known = PRESETS[preset]
    assert scheme.link == Link(known.latency_ms, known.jitter_ms, known.bandwidth_mbps, 0.25, 9)


def test_a_link_of_which_nothing_is_said_is_none():
    assert LinkConfig().make() is None
    assert LinkConfig(latency_ms=0.0, seed=7).make() is None
    assert make_scheme(config_of()).link is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sync.wire=int9"], "sync.wire=int9: expected one of .*did you mean int8"),
        (["sync.wires=int8"], "did you mean sync.wire"),
        (["sync.link.preset=moon"], "expected one of lan, datacenter, wan or null"),
        (
            ["sync.link.latency_ms=-1"],
            "latency_ms=-1: expected a number .0 or more. or",
        ),
        (
            ["sync.link.latency_ms=fast"],
            "latency_ms=fast: expected a number",
        ),
        (
            ["sync.link.bandwidth_mbps=0"],
            "sync.link.bandwidth_mbps=0: expected a number",
        ),
        (["sync.link.loss=1"], "sync.link.loss=1.0: expected a share of packets"),
        (["sync.latency_ms=5"], "did you mean sync.link.latency_ms"),
        (
            ["sync=hogwild", "sync.wire=int8"],
            "sync=hogwild has no such option; it is one of sync=shared_mem",
        ),
        (
            ["sync=hogwild", "sync.link.loss=0.1"],
            "sync=hogwild has no such option; it is one of sync=shared_mem",
        ),
        (
            ["sync=none", "collector=single", "sync.wire=int8"],
            "sync=none has no such option",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(overrides, said):
    assert re.search(said, error_of(*overrides))


def test_the_help_page_of_sync_lists_wires_and_links():
    text = page("sync")
    for option in ("sync.wire=float32", "sync.link.preset=null", "sync.link.loss=null"):
        assert option in text


@pytest.mark.parametrize(("experiment", "jobs"), [("link_ablation", 24), ("wire_ablation", 20)])
def test_the_ablations_are_sweeps_of_sound_jobs(experiment, jobs):
    found = jobs_of_experiment(experiment)
    assert len(found) == jobs
    for job in found[:: jobs // 4]:
        config_of(*job)


# -- what comes of it


@pytest.mark.parametrize(
    ("sync", "wire"),
    [
        *(("shared_mem", wire) for wire in WIRES),
        ("multiprocess", "int8"),
        *(
            pytest.param("multiprocess", wire, marks=pytest.mark.slow)
            for wire in WIRES
            if wire != "int8"
        ),
    ],
)
def test_a_run_logs_what_its_wire_costs_and_saves(folder, sync, wire):
    directory = finished("collector=multi_sync", f"sync={sync}", f"sync.wire={wire}")
    assert yaml.safe_load((directory / "config.yaml").read_text())["sync"]["wire"] == wire
    summary = read_json(directory / "summary.json")
    exact = wire == "float32"
    assert (summary["sync/wire_error"] == 0) == exact
    assert (summary["sync/bytes_saved"] > 0) == (wire != "float32")
    last = records(directory)[-1]
    assert ("sync/wire_error" in last) == (wire != "float32")
    if not exact:
        assert 0 < last["sync/wire_error"] < 0.02
        assert last["sync/wire_error_max"] > 0


def test_a_run_logs_its_link_and_what_happened_on_it(folder):
    directory = finished("sync.link.latency_ms=3", "sync.link.jitter_ms=1", "sync.link.loss=0.2")
    last = records(directory)[-1]
    for name in ("in_flight", "coalesced", "retransmitted"):
        assert last[f"sync/link_{name}"] >= 0
    summary = read_json(directory / "summary.json")
    assert summary["sync/ack_ms_p50"] >= 6
    assert summary["workers"]["0"]["link"]["delay_ms"]["p50"] >= 3


def test_links_change_nothing_about_a_run_whose_workers_wait(folder):
    """With `multi_sync` and `single` every batch is made with the weights it was promised."""
    learned = {}
    for name, options in {
        "plain": [],
        "linked": ["sync.link.latency_ms=5", "sync.link.jitter_ms=5", "sync.link.loss=0.1"],
    }.items():
        found = records(finished("collector=multi_sync", *options))
        learned[name] = [
            {k: v for k, v in record.items() if k.startswith(("train/", "episode/", "policy/"))}
            for record in found
        ]
    assert learned["plain"] == learned["linked"]


def test_a_link_works_with_one_process(folder):
    directory = finished("collector=single", "sync.link.latency_ms=2", "sync.wire=int8")
    assert read_json(directory / "summary.json")["policy/lag_max"] == 0
