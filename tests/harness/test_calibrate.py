"""Costs read off a run: a simulated one, whose costs are known."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace

import numpy as np
import pytest

from collectors.simulation.costs import Cost, Costs
from collectors.simulation.simulator import Simulator
from harness.calibrate import calibrate, drive, main, spread
from harness.config.plan import plan_run
from harness.files import to_yaml
from harness.measures.lags import lag_figures
from sync import Link

STEPS, ENVS, WORKERS, BATCHES = 64, 8, 3, 300


class Run:
    """The directory of a run, as the simulator makes it."""

    def __init__(self, path, costs, *overrides, batches=BATCHES, **options):
        self.path = path
        path.mkdir()
        frames = STEPS * ENVS
        plan = plan_run([f"collector.num_workers={WORKERS}", *overrides])
        self.write("config.yaml", to_yaml(plan.options))
        interval = plan.config.sync.interval
        simulator = Simulator(num_workers=WORKERS, num_steps=STEPS, costs=costs, **options)
        recorded = [
            {"format": 1, "num_workers": WORKERS, "num_steps": STEPS, "num_envs": ENVS, "seed": 1}
        ]
        records, sent = [], 0
        made_s = STEPS * (costs.step_ms.mean + costs.policy_ms.mean) / 1e3

        def publish(*args):
            nonlocal sent
            sent += 1
            type(simulator).publish(simulator, *args)

        def next_batch():
            batch = type(simulator).next_batch(simulator)
            number = len(recorded)
            recorded.append(
                {
                    "worker": batch.worker,
                    "generation": batch.generation,
                    "versions": batch.versions,
                    "made_s": made_s,
                    "at_s": simulator.time_s,
                }
            )
            records.append(
                {
                    "step": number * frames,
                    "time/collect_s": simulator.waited_s + costs.take_ms.mean / 1e3,
                    "time/train_s": costs.update_ms.mean / 1e3,
                    "time/sync_s": costs.publish_ms.mean / 1e3 / interval,
                    "time/log_s": costs.log_ms.mean / 1e3,
                    "sync/bytes": 20_000 * (number // interval),
                }
            )
            return batch

        simulator.publish, simulator.next_batch = publish, next_batch
        driven = drive(simulator, batches, interval, 20_000)
        self.lags, self.fps = driven.lags, frames / driven.batch_s
        self.write("metrics.jsonl", *map(json.dumps, records))
        self.write("schedule.jsonl", *map(json.dumps, recorded))
        self.write("summary.json", json.dumps(lag_figures(self.lags)))
        self.write("status.json", json.dumps({"state": "done"}))
        self.write("manifest.json", "{}")

    def write(self, name, *lines):
        (self.path / name).write_text("".join(f"{line}\n" for line in lines))

    def lines(self, name="schedule.jsonl"):
        return (self.path / name).read_text().splitlines()


LEARNER_BOUND = Costs(
    step_ms=Cost(0.8),
    take_ms=Cost(2),
    update_ms=Cost(25),
    publish_ms=Cost(1.5),
    log_ms=Cost(0.5),
)
WORKER_BOUND = Costs(step_ms=Cost(3.0), take_ms=Cost(2), update_ms=Cost(25), publish_ms=Cost(1.5))


@pytest.mark.parametrize(
    ("costs", "overrides", "options"),
    [
        (LEARNER_BOUND, [], {}),
        (WORKER_BOUND, [], {}),
        (LEARNER_BOUND, ["sync.interval=4", "collector.batches_ahead=3"], {"batches_ahead": 3}),
        (WORKER_BOUND, ["sync.apply_at=batch"], {"apply_at": "batch"}),
        (LEARNER_BOUND, ["sync.max_lag=3", "sync.on_stale=wait"], {"max_lag": 3}),
        (
            LEARNER_BOUND,
            ["sync.link.latency_ms=30", "sync.link.bandwidth_mbps=20"],
            {"link": Link(latency_ms=30, bandwidth_mbps=20, seed=1)},
        ),
        (LEARNER_BOUND, ["sync.blocking=true"], {"blocking": True}),
    ],
)
def test_the_costs_of_a_run_predict_its_lag_and_its_speed(tmp_path, costs, overrides, options):
    run = Run(tmp_path / "run", costs, *overrides, **options)
    found = calibrate(run.path)
    assert found.nbytes == 20_000
    assert found.costs.step_ms.mean == pytest.approx(costs.step_ms.mean)
    assert found.costs.update_ms.mean == pytest.approx(costs.update_ms.mean)
    predicted, measured = found.predict(BATCHES), lag_figures(run.lags)
    assert predicted.lag_mean == pytest.approx(measured["policy/lag_mean"], rel=0.02)
    assert predicted.lag_p95 == measured["policy/lag_p95"]
    assert predicted.fps == pytest.approx(run.fps, rel=0.02)


@pytest.mark.parametrize("costs", [LEARNER_BOUND, WORKER_BOUND], ids=["learner", "workers"])
def test_what_no_phase_accounts_for_is_the_taking(tmp_path, costs):
    found = calibrate(Run(tmp_path / "a", costs).path)
    assert found.costs.take_ms.mean == pytest.approx(2.0, rel=0.05)


def test_workers_explain_why_the_learner_waits(tmp_path):
    costs = replace(WORKER_BOUND, step_ms=Cost(20.0), take_ms=Cost(0.0))
    found = calibrate(Run(tmp_path / "a", costs).path)
    assert found.costs.take_ms.mean == pytest.approx(0.0, abs=0.1)


def test_costs_that_vary_are_spread_as_widely():
    cost = spread(Cost(7.0, "gamma", 0.4).draw(np.random.default_rng(0), 20_000), 0.5)
    assert asdict(cost) == {
        "mean": pytest.approx(3.5, rel=0.02),
        "kind": "lognormal",
        "cv": pytest.approx(0.4, rel=0.03),
        "each": "batch",
    }


def test_evaluations_and_the_warm_up_are_no_costs(tmp_path):
    run = Run(tmp_path / "run", LEARNER_BOUND)
    records = [json.loads(line) for line in run.lines("metrics.jsonl")]
    records[0]["time/train_s"] = 60.0
    records[40] |= {"time/log_s": 90.0, "eval/return": 12.0}
    run.write("metrics.jsonl", *map(json.dumps, records))
    recorded = [json.loads(line) for line in run.lines()]
    recorded[1]["made_s"] = 60.0
    for batch in recorded[42:]:  # after the evaluation with the 41st
        batch["at_s"] += 90.0
    run.write("schedule.jsonl", *map(json.dumps, recorded))
    found = calibrate(run.path).costs
    assert found.step_ms.mean == pytest.approx(0.8)
    assert found.update_ms.mean == pytest.approx(25)
    assert found.log_ms.mean == pytest.approx(0.5)
    assert found.take_ms.mean == pytest.approx(2.0, rel=0.05)


def test_the_command_prints_overrides(tmp_path, capsys):
    run = Run(tmp_path / "run", LEARNER_BOUND, "collector.batches_ahead=2")
    assert main([str(run.path), "--lines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "collector=simulated",
        "collector.num_workers=3",
        "collector.frames_per_batch=512",
        "collector.batches_ahead=2",
    ]
    assert "collector.costs.update_ms=25" in lines
    assert main([str(run.path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert shlex.split(line) == lines


def damaged(run, name, change):
    lines = run.lines(name)
    change(lines)
    run.write(name, *lines)


def without_time(lines):
    lines[5] = lines[5].replace("made_s", "made")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("schedule.jsonl", lambda lines: lines.clear(), "schedule.jsonl is empty"),
        ("schedule.jsonl", lambda lines: lines.pop(0), "line 1: expected the header"),
        ("schedule.jsonl", lambda lines: lines.__setitem__(5, "{"), "line 6: expected an object"),
        ("schedule.jsonl", lambda lines: lines.__setitem__(5, "[]"), "line 6: expected an object"),
        ("schedule.jsonl", lambda lines: lines.__setitem__(5, "{}"), "line 6: this is no batch"),
        ("schedule.jsonl", without_time, "its times are damaged"),
        ("schedule.jsonl", lambda lines: lines.insert(9, lines[0]), "line 10: the run was resumed"),
        ("schedule.jsonl", lambda lines: lines.__delitem__(slice(20, None)), "19 batches are too"),
        (
            "metrics.jsonl",
            lambda lines: lines.clear(),
            "metrics.jsonl has no values of time/train_s",
        ),
        ("config.yaml", lambda lines: lines.clear(), "holds no options"),
        (
            "config.yaml",
            lambda lines: lines.__setitem__(slice(None), ["collector: {name: single}", "sync: {}"]),
            "only collector=multi_async",
        ),
    ],
)
def test_a_damaged_run_is_one_line_on_stderr(tmp_path, capsys, name, change, words):
    run = Run(tmp_path / "run", LEARNER_BOUND, batches=40)
    damaged(run, name, change)
    assert main([str(run.path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_run_without_a_schedule_and_a_link_to_one_are_refused(tmp_path, capsys):
    run = Run(tmp_path / "run", LEARNER_BOUND, batches=40)
    (run.path / "schedule.jsonl").rename(tmp_path / "elsewhere")
    assert main([str(run.path)]) == 2
    assert "there is no schedule.jsonl" in capsys.readouterr().err
    (run.path / "schedule.jsonl").symlink_to(tmp_path / "elsewhere")
    assert main([str(run.path)]) == 2
    assert "is a link" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is not a run directory" in capsys.readouterr().err
