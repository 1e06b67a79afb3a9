"""Advantages within groups, by worked examples; and small runs of the language task."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from harness.algorithms.grpo import GRPO, GRPOConfig
from harness.algorithms.interface import Setup
from harness.algorithms.returns import Steps
from harness.command import main
from harness.models.encoders import MLPConfig
from harness.run.checkpoints import Checkpoints
from harness.run_comparison import compare_records, compare_weights

NUMBERS = Box(0, 9, (2,), np.int64)


def advantages(prompts, returns, ends=None, **options) -> torch.Tensor:
    """Of frames of episodes of two steps, one a row; their first observations are `prompts`."""
    n = len(prompts)
    grpo = GRPO(GRPOConfig(**options), Setup(NUMBERS, Discrete(2), MLPConfig(), total_frames=100))
    observation = torch.zeros(n, 2, 2, dtype=torch.long)
    observation[:, 0, 0], observation[:, 1, 0] = torch.tensor(prompts), torch.arange(n)
    done = torch.tensor([[False, True]] * n if ends is None else ends)
    batch = TensorDict(
        {
            "observation": observation,
            "is_init": torch.tensor([[True, False]] * n),
            ("next", "done"): done,
            ("collector", "traj_ids"): torch.arange(7, 7 + n)[:, None].expand(n, 2),
        },
        [n, 2],
    )
    reward = torch.zeros(n, 2)
    reward[:, 0], reward[:, 1] = 0.25, torch.tensor(returns) - 0.25
    mask = torch.ones(n, 2, dtype=torch.bool)
    nothing = torch.zeros(n, 2)
    steps = Steps(reward, nothing, nothing, done, mask, mask)
    result = grpo.returns(batch, steps, nothing).advantages
    assert torch.equal(result[:, 0], result[:, 1])
    return result[:, 0]


def test_a_return_is_compared_with_those_of_its_group():
    result = advantages([3, 3, 5, 3, 5], [1.0, 0.0, 4.0, 0.5, 2.0], scale=False)
    assert result.tolist() == pytest.approx([0.5, -0.5, 1, 0, -1])
    result = advantages([3, 3, 5, 3, 5], [1.0, 0.0, 4.0, 0.5, 2.0])
    expected = [1, -1, 1 / math.sqrt(2), 0, -1 / math.sqrt(2)]  # spreads 0.5 and the root of 2
    assert result.tolist() == pytest.approx(expected, abs=1e-3)


def test_a_return_is_compared_with_those_of_the_others():
    options = {"baseline": "leave_one_out", "scale": False}
    result = advantages([3, 3, 5, 3, 5], [1.0, 0.0, 4.0, 0.5, 2.0], **options)
    assert result.tolist() == pytest.approx([1 - 0.25, 0 - 0.75, 4 - 2, 0.5 - 0.5, 2 - 4])


def test_the_spread_of_a_group_is_the_same_whatever_its_returns_are_compared_with():
    """RLOO over the standard deviation: n / (n - 1) times the advantage of the group's mean."""
    returns = [1.0, 0.0, 0.5, 0.25, 2.0, 3.5, 3.0]
    result = advantages([3, 3, 3, 3, 5, 5, 5], returns, baseline="leave_one_out")
    expected = []
    for group in (np.array(returns[:4]), np.array(returns[4:])):
        others = (group.sum() - group) / (len(group) - 1)
        expected += ((group - others) / group.std(ddof=1)).tolist()
    assert result.tolist() == pytest.approx(expected, rel=1e-3)


def test_where_no_two_episodes_begin_alike_nothing_could_be_learned_and_it_is_said():
    whole = [[False, True]] * 3
    expected = "none of the 2 in this batch begins as another one does"
    with pytest.raises(ValueError, match=expected):
        advantages([3, 4, 3], [1.0, 0.0, 2.0], [*whole[:2], [False, False]])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("env.kwargs={task: sort, length: 3, group_size: 1}", "env.kwargs.group_size=1"),
        ("~env.kwargs.group_size", "env.kwargs.group_size=1"),
        ("env.vectorisation=sync", "env.vectorisation=sync"),
    ],
)
def test_an_environment_without_groups_is_refused_before_the_run(tmp_path, capsys, given, named):
    into = f"hydra.run.dir={tmp_path / 'run'}"
    assert main(["algo=grpo", "env=tokens", "model=transformer", given, into]) == 2
    assert f"{named} algo=grpo: no two episodes would begin alike" in capsys.readouterr().err


def test_without_a_critic_nothing_is_reported_of_values(tmp_path):
    for record in run(tmp_path / "run", "collector=single"):
        assert "train/policy_loss" in record
        assert not {"train/explained_variance", "train/value_loss"} & set(record)


def test_groups_of_one_and_episodes_in_part_have_no_advantage():
    ends = [[False, True], [False, True], [False, False], [False, True]]
    result = advantages([3, 3, 3, 4], [1.0, 0.0, 9.0, 5.0], ends, scale=False)
    assert result.tolist() == [0.5, -0.5, 0, 0]


def test_a_batch_without_a_whole_episode_is_an_error():
    with pytest.raises(
        ValueError, match=r"none of the 2 in this batch is: collector\.frames_per_bat"
    ):
        advantages([1, 1], [0.0, 1.0], [[False, False]] * 2)


TOKENS = (
    *(
        "experiment=grpo_tokens",
        "total_frames=192",
        "collector.frames_per_batch=48",
        "logger=jsonl",
    ),
    *("env.num_envs=16", "env.kwargs={task: sort, length: 3, group_size: 4}", "seed=1"),
    *("model.hidden_sizes=[16]", "model.width=8", "model.heads=2", "evaluation.every_frames=null"),
    *("evaluation.num_episodes=2", "algo.minibatch_size=24"),
)


def run(directory, *overrides) -> list[dict[str, float]]:
    assert main([*TOKENS, *overrides, f"hydra.run.dir={directory}"]) == 0
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        ("collector=single",),
        ("collector=multi_sync", "collector.num_workers=1", "sync.state_on_update=zero"),
        ("collector=multi_async", "collector.num_workers=2", "algo.objective=gspo"),
        ("collector=simulated", "collector.num_workers=2", "sync.lag=1", "sync.apply_at=step"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_small_run_under_each_collector(overrides, tmp_path):
    records = run(tmp_path, *overrides)
    learned = [record for record in records if "train/policy_loss" in record]
    assert learned
    assert all(0 <= record["episode/return"] <= 1 for record in learned)
    assert any(record["train/grad_norm"] > 0 for record in learned)


def test_a_recorded_run_of_texts_is_replayed_to_the_bit(tmp_path):
    recorded = tmp_path / "recorded"
    run(
        recorded,
        "collector=multi_async",
        "collector.num_workers=2",
    )
    assert main(["reproduce", str(recorded)]) == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("collector=single", "sync.lag=1"),
        ("collector=multi_sync", "collector.num_workers=1", "sync.state_on_update=zero"),
        ("collector=simulated", "collector.num_workers=2"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_resumed_run_of_texts_is_the_uninterrupted_one(overrides, tmp_path):
    """Also where it goes on in the middle of an answer, with the cache of what was read."""
    given = (*overrides, "env.kwargs={task: sort, length: 4, group_size: 4}", "sync.apply_at=step")
    whole, again = tmp_path / "whole", tmp_path / "again"
    for folder in (whole, again):
        run(
            folder,
            *given,
            "total_frames=480",
            "collector.frames_per_batch=96",
            "checkpoint.every_frames=96",
            "checkpoint.keep=9",
        )
    for file in Checkpoints(again / "checkpoints").files()[3:]:
        file.unlink()
    assert main([f"resume={again}"]) == 0
    assert (compare_records(whole, again) or compare_weights(whole, again)) is None


@pytest.mark.parametrize(
    ("objective", "is_same"), [("behaviour", True), ("vespo", True), ("decoupled", False)]
)
def test_four_steps_on_a_batch_are_steps_of_their_own_with_a_lag_that_grows(
    objective, is_same, tmp_path
):
    """Only an objective that knows the learner at the start of an update can see a difference."""
    one_step = 16 * 3  # an answer of each environment
    common = (
        *("algo.epochs=1", f"algo.minibatch_size={one_step}", "algo.shuffle=false"),
        *("model.sequence_length=3", f"algo.objective={objective}", "algo.learning_rate=1e-2"),
        *("collector=single", "sync=shared_mem", f"total_frames={8 * one_step}"),
    )
    reuse, lag = tmp_path / "reuse", tmp_path / "lag"
    run(reuse, *common, f"collector.frames_per_batch={4 * one_step}")
    cycle = "sync.lag={kind: cycle, values: [0, 1, 2, 3]}"
    records = run(lag, *common, f"collector.frames_per_batch={one_step}", cycle)
    ages = [x["policy/lag_steps_mean"] for x in records if "policy/lag_steps_mean" in x]
    assert ages == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (compare_weights(reuse, lag) is None) is is_same
