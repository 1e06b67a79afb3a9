"""Mistakes in a user's own code: named before workers start, or shown where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import run
from harness.registry import callbacks, models, objectives
from tests.harness.small import SMALL

pytestmark = pytest.mark.usefixtures("here")

ENV = "env.id=tests.harness.own_code:Own-v0"
PLUGIN = "plugins=[tests.harness.own_code]"
INTO = "hydra.run.dir=run"


@pytest.fixture(autouse=True)
def registered_for_a_test(monkeypatch):
    for registry in (objectives, callbacks, models):
        monkeypatch.setattr(registry, "_parts", {**registry._parts})
    yield
    sys.modules.pop("tests.harness.own_code", None)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("shape", "returned an observation of the shape [4]; observation_space has [3]"),
        ("four values", "step(action) returned 4 values; expected 5: (observation, reward, term"),
        ("no info", "reset(seed=...) returned a ndarray; expected 2: (observation, info)"),
        ("reset", "reset(seed=...) raised KeyError: 'goal'"),
        ("exit", "reset(seed=...) raised SystemExit: 3"),
        ("interrupt", "env.id=tests.harness.own_code:Own-v0 raises KeyboardInterrupt"),
        ("reward", "returned the reward array([0., 0.]); expected a number"),
    ],
)
def test_what_is_wrong_with_an_own_environment_is_named_before_workers_start(mistake, said, capsys):
    assert run.main([*SMALL, ENV, f"+env.kwargs.mistake='{mistake}'", INTO]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not Path("run").exists()


def test_an_own_environment_that_hangs_is_named_before_workers_start(monkeypatch, capsys):
    monkeypatch.setattr("harness.run.build.TRIAL_S", 0.2)
    assert run.main([*SMALL, ENV, "+env.kwargs.mistake=hang", INTO]) == 2
    assert "one reset and one step took more than 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize("collector", ["single", "multi_sync"])
def test_an_error_in_own_code_shows_where_it_is_once(collector, capsys):
    given = (*SMALL, ENV, "+env.kwargs={mistake: late, after: 20}", f"collector={collector}")
    assert run.main([*given, INTO]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("lockstep: failed: ")
    assert sum("own_code.py" in line and "in _explode" in line for line in lines) == 1
    assert sum("ZeroDivisionError: the goal is where the agent is" in line for line in lines) == 1
    assert not any("rollout/rollout.py" in line for line in lines)
    assert len(lines) < 14
    assert lines[-1] == f"lockstep: the traceback is in {Path('run/traceback.txt').absolute()}"
    whole = Path("run/traceback.txt").read_text()
    assert "rollout/rollout.py" in whole


def test_a_callback_that_fails_shows_its_own_lines(capsys):
    given = (*SMALL, PLUGIN, "callbacks=[stumbling]", "collector=single", INTO)
    assert run.main(given) == 1
    error = capsys.readouterr().err
    assert "in on_update" in error
    assert "in _look_up" in error
    assert "runner.py" not in error


def test_an_objective_that_returns_a_tensor_is_told_what_to_return(capsys):
    given = (*SMALL, PLUGIN, "algo.objective=loss_itself", "collector=single", INTO)
    assert run.main(given) == 1
    error = capsys.readouterr().err
    assert (
        "the objective loss_itself returned a Tensor; expected Gain(gain, log_ratio, bou" in error
    )


RESTLESS = (*SMALL[:6], *SMALL[7:], PLUGIN, "model=restless", "collector=multi_sync", INTO)


@pytest.mark.parametrize("by", ["add", "mul"])
def test_a_model_that_writes_to_its_parameters_is_named_before_workers_start(by, capsys):
    assert run.main([*RESTLESS, f"model.by={by}"]) == 2
    error = capsys.readouterr().err
    assert "writes to its parameter" in error
    assert "inputs.weight" in error
    assert error.endswith("use sync.zero_copy=false\n")
    assert not Path("run").exists()


def test_a_model_that_writes_to_its_parameters_may_do_so_in_memory_of_its_own(capsys):
    assert run.main([*RESTLESS, "sync.zero_copy=false"]) == 0
    assert "sync: shared memory, copied, 2 workers" in capsys.readouterr().out
