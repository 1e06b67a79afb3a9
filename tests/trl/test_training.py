"""TRL's own trainer with an exact lag, and a free run that is recorded and replayed."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed: `make trl` makes an environment for it")

from datasets import Dataset
from transformers import AutoTokenizer

from examples import trl_lag
from lockstep_check.check import check
from lockstep_check.rules import Limit
from lockstep_trl import Lag, Tear
from lockstep_trl.sampler import Sampler
from lockstep_trl.transfer import Transfer
from tests.trl.conftest import UPDATES, Trained

PER_UPDATE = 2  # batches of the schedule


def test_an_exact_lag_is_the_age_at_use_and_gives_the_same_bits_twice(run):
    first, second = run("first", lag=4), run("second", lag=4)
    ages = [min(4, update) for update in range(UPDATES)]
    assert first.each("policy/lag_mean") == first.each("policy/lag_max") == ages
    assert first.each("trl/staleness_mean") == ages
    assert first.acted == [[[0, max(0, u - 4)]] for u in range(UPDATES) for _ in range(PER_UPDATE)]
    assert first.weights == second.weights
    assert first.weights != run("other", lag=3).weights


def test_without_lag_every_answer_is_of_the_weights_that_train_on_it(run):
    fresh = run("fresh", lag=0)
    assert fresh.each("policy/lag_max") == fresh.each("trl/staleness_max") == [0] * UPDATES
    # The ratio of new weights to those that wrote is 1, up to the rounding of two programs.
    assert max(map(abs, fresh.each("policy/kl"))) < 1e-5


def test_prompts_of_several_lengths_and_answers_that_end_early_are_scored_alike(run):
    """What TRL's trainer computes of an answer, without padding, is what the worker wrote."""
    rows = [
        row
        for pair in zip(*(trl_lag.make_prompts(n, 8, n) for n in (2, 7)), strict=True)
        for row in pair
    ]
    texts = Dataset.from_list(rows)
    mixed = run("mixed", lag=0, prompts=texts, digits=9, learning_rate=1e-2)
    assert len({*mixed.each("episode/length")}) > 1
    assert max(map(abs, mixed.each("policy/kl"))) < 1e-5


def test_conversations_are_written_by_the_chat_template(run, model, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %} ="
    tokenizer.save_pretrained(folder)
    texts = [row["prompt"].removesuffix(" =") for row in trl_lag.make_prompts(4, 8, 0)]
    rows = [{"prompt": [{"role": "user", "content": text}], "key": text} for text in texts]
    seen = []

    def reward(prompts, completions, completion_ids, key):
        seen.append((prompts[0], completions[0], key[0]))
        return [float(len(ids)) for ids in completion_ids]

    options = {"prompts": Dataset.from_list(rows), "reward": reward, "updates": 2}
    run("chat", model=str(folder), **options)
    prompt, completion, key = seen[0]
    assert prompt[0]["content"] == key == texts[0]
    assert completion[0]["role"] == "assistant"


def test_accelerate_looks_ahead_and_the_figure_of_trl_is_one_update_too_low(run):
    stale = run("stale", lag=0, look_ahead=True, max_staleness=0)
    assert stale.each("policy/lag_mean") == [0] + [1] * (UPDATES - 1)
    assert stale.each("trl/staleness_max") == [0] * UPDATES
    assert stale.record.counts["dropped"] == 0


def test_a_free_run_is_recorded_and_its_replay_has_the_same_bits(run):
    free = run("free", free=True)
    replay = run("replay", replay=free.path)
    assert replay.weights == free.weights
    for metric in ("policy/lag_mean", "trl/staleness_mean", "train/policy_loss", "step"):
        assert replay.each(metric) == free.each(metric), metric
    assert free.record.lags.all.total() == free.record.counts["used"]
    said = np.mean(free.each("trl/staleness_mean"))
    assert said < np.mean(free.each("policy/lag_mean")) <= said + 1


def test_an_exact_run_is_replayed_too_with_another_learner(run):
    exact = run("exact", lag=2, updates=6)
    assert run("replay", replay=exact.path, updates=6).weights == exact.weights
    other = run("other", replay=exact.path, updates=6, learning_rate=1e-3)
    assert other.each("policy/lag_mean") == exact.each("policy/lag_mean")
    assert other.weights != exact.weights


def test_weights_taken_within_an_answer_are_recorded_token_by_token(run, monkeypatch):
    with monkeypatch.context() as patch:
        publish_within_batch_4(patch)
        free = run("free", free=True, apply_at="token", digits=24, trace=True, updates=8)
    assert run("replay", replay=free.path, digits=24, updates=8).weights == free.weights
    assert len(free.acted[4]) > 1


def publish_within_batch_4(patch) -> None:
    """Its 12th token waits for the next weights; the four batches before it are two updates."""
    published, send, write = threading.Semaphore(0), Transfer.send_weights, Sampler.answer

    def sending(transfer, iterator):
        send(transfer, iterator)
        published.release()

    def writing(sampler, rows, writing, number, take):
        def waiting(step):
            if number == 4 and step == 0:
                while published.acquire(blocking=False):
                    pass
            if number == 4 and step == 12:
                assert published.acquire(timeout=100)
            take(step)

        return write(sampler, rows, writing, number, waiting)

    patch.setattr(Transfer, "send_weights", sending)
    patch.setattr(Sampler, "answer", writing)


@pytest.mark.parametrize(
    "lag",
    [
        Lag("cycle", values=(0, 3, 1)),
        Lag("uniform", low=1, high=3, seed=5),
        Lag("two_point", low=0, high=4, share=0.5, seed=2),
    ],
)
def test_a_drawn_lag_is_that_of_the_sync_package(run, lag):
    drawn = run("drawn", lag=lag)
    expected, has = [], 0
    for version in range(UPDATES):  # never back to older weights
        has = max(has, version - lag.draw(version, 0)) if version else 0
        expected.append(version - has)
    assert drawn.each("policy/lag_mean") == expected


def test_lag_counts_syncs_and_optimiser_steps(run):
    rare = run("rare", lag=1, weight_sync_steps=3)
    assert rare.each("policy/lag_mean") == [min(1, u // 3) for u in range(UPDATES)]
    ages = [u if u < 3 else 3 + u % 3 for u in range(UPDATES)]
    assert rare.each("policy/lag_updates_mean") == ages


def test_lag_is_exact_with_gradient_accumulation(run):
    parts = run("parts", lag=2, batch=8, gradient_accumulation_steps=2, updates=6)
    assert parts.each("policy/lag_mean") == parts.each("policy/lag_max") == [0, 1, 2, 2, 2, 2]


def test_a_free_run_with_a_token_budget_and_drops_is_replayed(run):
    options = {"token_budget": 60, "max_staleness": 1, "updates": 8}
    free = run("free", free=True, **options)
    replay = run("replay", replay=free.path, **options)
    assert replay.weights == free.weights
    assert replay.record.counts == free.record.counts
    assert free.record.lags.all.total() == free.record.counts["used"]


def test_torn_and_rounded_weights_act_as_in_the_sync_package(run):
    plain = run("plain", lag=1, updates=4)
    torn = run("torn", lag=1, updates=4, tear=Tear(0.5), trace=True)
    rounded = run("rounded", lag=1, updates=4, wire="int8")
    assert len({plain.weights, torn.weights, rounded.weights}) == 3
    assert torn.weights == run("again", lag=1, updates=4, tear=Tear(0.5)).weights
    events = [json.loads(line) for line in (torn.path / "events.jsonl").read_text().splitlines()]
    sums = {
        kind: {one["version"]: one["checksum"] for one in events if one["event"] == kind}
        for kind in ("publish", "applied")
    }
    assert sums["applied"][0] == sums["publish"][0]
    assert sums["applied"][2] != sums["publish"][2]


def test_a_resumed_run_has_the_bits_of_one_that_went_through(run, tmp_path):
    whole = run("whole", lag=3, save_strategy="steps", save_steps=6)
    resumed = run(
        "whole",
        lag=3,
        save_strategy="steps",
        save_steps=6,
        resume=str(whole.path / "trl" / "checkpoint-6"),
    )
    assert resumed.weights == whole.weights
    assert resumed.each("policy/lag_mean") == [min(3, update) for update in range(UPDATES)]
    summary = json.loads((whole.path / "summary.json").read_text())
    assert summary["frames"] == resumed.record.counts["used"] == whole.record.counts["used"]


def test_a_run_directory_is_read_by_the_report(run):
    from harness.report.runs import read_run

    prompts = trl_lag.make_prompts(4, 20, seed=1)
    scored = run("scored", lag=2, eval_prompts=prompts, eval_every=5)
    wanted = ("eval/return", "eval/return_sampled", "episode/return", "policy/lag_mean")
    read = read_run(scored.path, wanted, name="scored", source="trl")
    assert read.problems == []
    assert (read.state, read.seed, read.options["sync.lag"]) == ("done", 1, 2)
    assert read.records["eval/return"].notna().sum() == 4  # after 0, 5, 10 and 12 updates
    assert {"eval/return", "policy/lag_mean", "episode/return"} <= {*read.summary}
    assert read.summary["collector/collected"] == read.summary["collector/delivered"]


def test_an_evaluation_changes_nothing_of_the_training(run):
    prompts = trl_lag.make_prompts(4, 20, seed=1)
    often = run("often", lag=2, eval_prompts=prompts, eval_every=2)
    assert often.weights == run("never", lag=2).weights


def test_the_checker_finds_nothing_in_an_exact_run_and_names_the_figure_of_trl(run):
    def broken(trained: Trained, most: int) -> list[str]:
        result = check(trained.path / "events.jsonl", Limit(most))
        return [finding.rule.__name__ for finding in result.broken]

    assert broken(run("exact", lag=2, trace=True), 2) == []
    ahead = run("ahead", lag=0, look_ahead=True, max_staleness=0, trace=True)
    assert broken(ahead, 1) == ["ReportedAge"]
    assert broken(ahead, 0) == ["AgeLimit", "ReportedAge"]
