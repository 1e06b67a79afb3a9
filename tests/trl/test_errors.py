# ruff: noqa: E402
"""Mistakes end a training with a sentence, in its own thread, and nothing hangs."""

from __future__ import annotations

import json
import threading
import types

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed: `make trl` makes an environment")

from trl.experimental.async_grpo import async_grpo_trainer

from collectors.schedule.recording import EndOfSchedule
from examples import trl_lag
from lockstep_trl import Lag, LockstepRollouts
from lockstep_trl.supported import PROTOCOLS, check_trl, protocol_changes


def no_thread() -> bool:
    return not any(thread.name == "lockstep-rollouts" for thread in threading.enumerate())


def test_a_lag_larger_than_the_run(run):
    with pytest.raises(ValueError, match=r"lag=12: the run publishes 12 versions"):
        run("long", lag=12)


def test_a_lag_that_trl_would_drop(run):
    with pytest.raises(ValueError, match=r"max_staleness=4: .* up to 6; set max_staleness=6"):
        run("dropped", lag=Lag("uniform", low=0, high=6), max_staleness=4)


def test_a_directory_of_a_finished_run(run):
    run("done", lag=0)
    with pytest.raises(ValueError, match=r"run_dir=.*done holds a finished run; name another dir"):
        run("done", lag=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": None}, "would ask a vLLM server for it: set token_budget=-1"),
        ({"token_budget": 64}, "token_budget=64: a sample that does not fit waits"),
        ({"size": 8}, "32 answers are written at once, and an update uses 16"),
    ],
)
def test_batches_that_would_make_answers_older_than_the_lag(run, options, message):
    with pytest.raises(ValueError, match=message):
        run("inexact", lag=1, **options)


def test_a_schedule_that_ends_early(run):
    short = run("short", updates=4, free=True)
    with pytest.raises(EndOfSchedule, match=r"schedule.jsonl ends after \d+ batches"):
        run("replay", updates=12, replay=short.path)
    status = json.loads((short.path.parent / "replay" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["error"].startswith("EndOfSchedule")


def test_a_replay_of_another_model(run, tmp_path):
    recorded = run("recorded", updates=4, free=True)
    other = trl_lag.make_model(tmp_path / "other", 4, pretraining=1)
    with pytest.raises(ValueError, match="the recorded run had the first weights"):
        trl_lag.train(other, replay=recorded.path, updates=4, batch=16, num_generations=4, size=2)


def test_a_replay_with_another_seed_and_with_a_lag(run):
    recorded = run("recorded", updates=4, free=True)
    with pytest.raises(ValueError, match="the recorded run had seed 1, and this one has 2"):
        run("other", updates=4, replay=recorded.path, seed=2)
    with pytest.raises(ValueError, match="leave lag and free out"):
        run("both", updates=4, replay=recorded.path, lag=2)


@pytest.mark.parametrize("options", [{"free": True}, {"lag": 2}])
def test_a_reward_that_raises(run, tmp_path, options):
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(1)
        if len(calls) > 5:
            raise KeyError("no such answer")
        return [0.0] * len(prompts)

    with pytest.raises((RuntimeError, KeyError), match="no such answer"):
        run("raising", reward=reward, **options)
    assert json.loads((tmp_path / "raising" / "status.json").read_text())["state"] == "failed"
    assert no_thread()


def test_a_reward_of_another_length(run):
    with pytest.raises(ValueError, match="returned 1 rewards for 8 answers"):
        run("short", reward=lambda prompts, **columns: [0.0])


def test_a_free_run_is_not_resumed(run, tmp_path):
    run("free", free=True, save_strategy="steps", save_steps=6)
    with pytest.raises(ValueError, match="only a run with an exact lag can go on"):
        run("free", free=True, resume=str(tmp_path / "free" / "trl" / "checkpoint-6"))


def test_a_trainer_that_is_not_attached(model):
    rollouts = LockstepRollouts(model, trl_lag.make_prompts(4, 8, 0), trl_lag.sorted_share)
    with pytest.raises(RuntimeError, match=r"call rollouts\.attach"):
        rollouts.worker.start()
    stranger = types.SimpleNamespace(rollout_worker=None, weight_transfer=None)
    with pytest.raises(ValueError, match=r"rollout_worker=rollouts\.worker"):
        rollouts.attach(stranger)


def test_another_version_of_trl(monkeypatch):
    check_trl()
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(ImportError, match=r"supports trl 1.16, and 1.17.0 is installed: pip "):
        check_trl()


def test_a_change_of_a_protocol_is_named(monkeypatch):
    assert protocol_changes(async_grpo_trainer) == []

    class Changed:
        def start(self, when): ...
        def stop(self): ...
        def update_model_version(self, model_version): ...
        def flush(self): ...

    monkeypatch.setattr(async_grpo_trainer, "RolloutWorkerProtocol", Changed)
    with pytest.raises(ImportError, match="other protocols") as caught:
        check_trl()
    for change in ("check_health is gone", "flush is new", r"start takes ('when',), expected ()"):
        assert f"RolloutWorkerProtocol.{change}" in str(caught.value)
    assert protocol_changes(types.SimpleNamespace()) == [f"{name} is gone" for name in PROTOCOLS]
