"""The search: its trials, what a killed one leaves, and the spaces that can be searched."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import run
from harness.callbacks import Pruned
from harness.config.compose import compose_run
from harness.config.plan import plan_run
from harness.errors import ConfigError
from harness.files import read_json, write_json
from harness.run.run_lifetime import execute
from harness.sweep.search import Search, SearchConfig, Trial, split
from tests.harness.config.composed import config_of
from tests.harness.small import SMALL, Command, states, wait_until

pytestmark = pytest.mark.usefixtures("here")

OPTUNA = "hydra/sweeper=optuna"
RATES = "algo.learning_rate=tag(log,interval(1e-4,1e-2))"
SPACE = {"x": FloatDistribution(0.0, 1.0)}


def search(num_trials: int, **options) -> Search:
    return Search(SearchConfig("s", Path("s"), **options), num_trials=num_trials)


def end(found: Search, number: int, state: str, value: float = 0.0) -> None:
    """Leave what a trial's run would."""
    directory = found.directory(number)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "status.json", {"state": state, "pid": None})
    write_json(directory / "summary.json", {"eval/return": value})
    found.settle([number])


def outcomes(found: Search) -> list[str]:
    return [trial.state.name for trial in found.study.trials]


# -- as a user runs it


def test_a_search_runs_its_trials_and_says_how_to_run_the_best(capsys):
    assert run.main(["-m", *SMALL, "algo.learning_rate=1e30", "sweep=mine"]) == 1
    capsys.readouterr()
    given = ("-m", *SMALL, OPTUNA, RATES, "model=mlp,lstm", "hydra.sweeper.n_trials=2")
    assert run.main([*given, "sweep=mine"]) == 0
    done = {"trial-0000": "done", "trial-0001": "done"}
    assert states("mine") == {"seed=1": "failed"} | done
    out = capsys.readouterr().out
    assert "search mine: 2 done" in out
    assert "outputs/mine: 2 done\n" in out  # its own jobs alone
    study = optuna.load_study(study_name="mine", storage="sqlite:///outputs/mine/study.db")
    best = study.best_trial
    summary = read_json(Path(f"outputs/mine/trial-{best.number:04d}/summary.json"))
    assert best.value == summary["eval/return"]
    assert set(best.params) == {"algo.learning_rate", "model"}
    command = next(line for line in out.splitlines() if line.startswith("  python run.py "))
    assert f"algo.learning_rate={best.params['algo.learning_rate']}" in command
    assert "sweep=" not in command
    # Started again, it has nothing left to do; with more trials wanted, it goes on.
    assert run.main([*given, "sweep=mine"]) == 0
    assert len(states("mine")) == 1 + 2
    assert run.main([*given, "sweep=mine", "hydra.sweeper.n_trials=3"]) == 0
    assert len(states("mine")) == 1 + 3


def test_a_trial_that_fails_is_recorded_and_the_search_goes_on_as_long_as_it_may(capsys):
    given = ("-m", *SMALL, OPTUNA, "algo.learning_rate=1e30,1e31", "hydra.sweeper.n_trials=3")
    assert run.main([*given, "stop_after_failures=1", "sweep=mine"]) == 1
    assert states("mine") == {"trial-0000": "failed"}
    assert "stop_after_failures=1: 2 trials were not started" in capsys.readouterr().out
    assert run.main([*given, "sweep=mine"]) == 1
    assert list(states("mine").values()) == ["failed"] * 3
    captured = capsys.readouterr()
    assert "search mine: 3 failed" in captured.out
    assert "failed: outputs/mine/trial-0001" in captured.err


def test_a_search_of_what_cannot_be_is_refused_before_it_starts(capsys):
    assert run.main(["-m", *SMALL, OPTUNA, "algo.lr=interval(0.1,0.2)"]) == 2
    assert "did you mean algo.learning_rate?" in capsys.readouterr().err
    assert run.main(["-m", *SMALL, OPTUNA]) == 2
    assert "has nothing to search" in capsys.readouterr().err
    assert run.main(["-m", *SMALL, OPTUNA, RATES, "hydra.sweeper.pruner=x"]) == 2
    assert "hydra.sweeper.pruner=x: expected one of median" in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize("experiment", ["ppo_search", "sac_search"])
def test_every_corner_of_the_committed_spaces_is_a_run_that_can_be(experiment):
    composed = compose_run([f"experiment={experiment}"])
    found = list(split(composed.hydra.sweeper.params, [f"experiment={experiment}"]).corners())
    assert len(found) > 8
    for corner in found:
        config_of(*corner)


def test_an_interrupted_search_keeps_what_it_was_at(tmp_path):
    endless = (*SMALL, "total_frames=100_000_000", RATES, "sweep=mine")
    process = Command("-m", *endless, OPTUNA, folder=tmp_path)
    metrics = Path("outputs/mine/trial-0000/metrics.jsonl")
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert states("mine") == {"trial-0000": "interrupted"}
    found = Search(SearchConfig("mine", Path("outputs/mine")), num_trials=2)
    assert outcomes(found) == ["FAIL", "WAITING"]
    assert found.num_left == 2


def test_a_run_that_its_search_has_seen_enough_of_ends_as_pruned():
    class Enough:
        def report(self, step: int, value: float, *, final: bool) -> None:
            raise Pruned("enough")

    plan = plan_run([*SMALL, "evaluation.every_frames=128", "hydra.run.dir=pruned"])
    plan.trial = Enough()
    outcome = execute(plan)
    assert (outcome.exit_status, outcome.state) == (0, "pruned")
    assert math.isnan(outcome.objective)
    status = read_json(Path("pruned/status.json"))
    assert (status["state"], status["error"]) == ("pruned", "Pruned: enough")
    assert len(Path("pruned/metrics.jsonl").read_text().splitlines()) == 1


# -- trials


def test_ended_trials_are_told_to_the_study_by_their_directories():
    found = search(4)
    found.ask(4, SPACE)
    for number, state in enumerate(["done", "pruned", "failed"]):
        end(found, number, state, value=float(number))
    end(found, 3, "done", value=math.nan)
    assert outcomes(found) == ["COMPLETE", "PRUNED", "FAIL", "FAIL"]
    assert found.num_left == 0
    assert found.result() == "search s: 1 done, 1 pruned, 2 failed"


def test_what_a_killed_search_was_at_is_tried_again_with_the_same_options():
    killed = search(2)
    (trial,) = killed.ask(1, SPACE)
    resumed = search(2)
    assert outcomes(resumed) == ["FAIL", "WAITING"]
    (again, other) = resumed.ask(5, SPACE)
    assert again.params == trial.params != other.params
    assert resumed.num_left == 0


def test_a_trial_that_runs_still_is_left_alone():
    first = search(2)
    first.ask(1, SPACE)
    first.directory(0).mkdir()
    write_json(first.directory(0) / "status.json", {"state": "running", "pid": os.getppid()})
    assert outcomes(search(2)) == ["RUNNING"]


def test_a_search_that_goes_on_draws_what_it_would_have_drawn():
    def drawn(found: Search, count: int) -> list[float]:
        values = []
        for trial in (found.ask(1, SPACE)[0] for _ in range(count)):
            values.append(trial.params["x"])
            end(found, trial.number, "done", value=trial.params["x"])
        return values

    whole = drawn(Search(SearchConfig("s", Path("whole")), num_trials=14), 14)
    half = drawn(Search(SearchConfig("s", Path("half")), num_trials=14), 12)
    rest = drawn(Search(SearchConfig("s", Path("half")), num_trials=14), 2)
    assert half + rest == whole
    assert len(set(whole)) == 14


def test_a_trial_behind_the_others_is_pruned_and_one_ahead_is_not():
    found = search(7)
    trials = found.ask(7, SPACE)
    for trial in trials[:5]:
        Trial(found.config, trial.number).report(100, 10.0)
        end(found, trial.number, "done", value=10.0)
    ahead, behind = (Trial(found.config, trial.number) for trial in trials[5:])
    ahead.report(100, 11.0)
    with pytest.raises(Pruned, match="at 100 frames, a return of 9 is behind other trials"):
        behind.report(100, 9.0)
    behind.report(200, 1.0, final=True)  # what is over cannot be cut short


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "up"}, "hydra.sweeper.direction=up: expected one of maximize, minimize"),
        ({"sampler": "grid"}, "hydra.sweeper.sampler=grid: expected one of tpe, random"),
        ({"pruner": "x"}, "hydra.sweeper.pruner=x: expected one of median, hyperband, none"),
    ],
)
def test_options_that_are_not_known_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        search(1, **options)


# -- spaces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tag(log,interval(1e-5,1e-2))", FloatDistribution(1e-5, 1e-2, log=True)),
        ("interval(0.5,1)", FloatDistribution(0.5, 1.0)),
        ("int(interval(2,10))", IntDistribution(2, 10)),
        ("range(2,10,2)", IntDistribution(2, 8, step=2)),
        ("range(0.8,1.0,0.05)", FloatDistribution(0.8, 0.95, step=0.05)),
        ("64,128", CategoricalDistribution(["64", "128"])),
        ("choice([64,64],[256])", CategoricalDistribution(["[64,64]", "[256]"])),
    ],
)
def test_a_space_is_written_as_overrides(text, expected):
    space = split({"++a.b": text}, ["seed=3"])
    assert space.fixed == ["seed=3"]
    assert space.distributions == {"a.b": expected}


def test_the_command_line_fixes_or_changes_what_the_config_searches():
    for before in ("", "+", "++"):
        params = {f"{before}a": "1,2", f"{before}b": "interval(0,1)"}
        for prefix in ("", "+", "++"):
            space = split(params, [f"{prefix}a=5", f"{prefix}b=3,4"])
            assert space.fixed == [f"{prefix}a=5"]
            assert space.distributions == {"b": CategoricalDistribution(["3", "4"])}
            assert space.overrides({"b": "3"}) == [f"{prefix}a=5", f"{prefix}b=3"]


def test_a_space_without_extent_is_refused():
    with pytest.raises(ConfigError, match=r"a=tag\(log,interval\(0,1\)\)"):
        split({}, ["a=tag(log,interval(0,1))"])
