"""Vectors of environments that live on a device: their frames stay there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import DeviceCollector

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
NUM_ENVS, LENGTH = 3, 4


class Counting:
    """Counts the steps of its episodes. Those of member i have LENGTH + i steps.

    Episodes of even members terminate, and those of odd ones are truncated.
    """

    num_envs = NUM_ENVS

    def __init__(self, device: str):
        self.device = torch.device(device)
        self.count = torch.zeros(NUM_ENVS, device=device)
        self.most = LENGTH + torch.arange(NUM_ENVS, device=device)
        self.even = torch.arange(NUM_ENVS, device=device) % 2 == 0
        self.closed = False
        self.actions: list[torch.Tensor] = []

    def shown(self) -> torch.Tensor:
        return self.count.unsqueeze(1)  # a view: what was returned changes with the next step

    def advance(self, action: torch.Tensor) -> torch.Tensor:
        assert action.device.type == self.device.type
        self.actions.append(action)
        self.count += 1
        return self.count >= self.most

    def close(self) -> None:
        self.closed = True


class SameStep(Counting):
    single_observation_space = single_action_space = None
    mode = AutoresetMode.SAME_STEP

    def __init__(self, device: str):
        super().__init__(device)
        self.unwrapped = SimpleNamespace(autoreset_mode=self.mode)
        self.metadata: dict[str, Any] = {}

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.count.zero_()
        return self.shown(), {}

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        ended = self.advance(action)
        final = self.shown().clone()
        self.count[ended] = 0
        ends = ended & self.even, ended & ~self.even
        return self.shown(), torch.ones(NUM_ENVS, device=self.device), *ends, {"final_obs": final}


class NextStep(SameStep):
    mode = AutoresetMode.NEXT_STEP

    def __init__(self, device: str):
        super().__init__(device)
        self.over = torch.zeros(NUM_ENVS, dtype=torch.bool, device=device)

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        ended = self.advance(action) & ~self.over
        self.count[self.over] = 0
        self.over = ended
        ends = ended & self.even, ended & ~self.even
        return self.shown(), torch.ones(NUM_ENVS, device=self.device), *ends, {}


class RslRl(Counting):
    num_actions = 1

    def get_observations(self) -> dict[str, torch.Tensor]:
        return {"policy": self.shown()}

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        ended = self.advance(action)
        self.count = torch.where(ended, 0, self.count)
        extras = {"time_outs": ended & ~self.even}
        return self.get_observations(), torch.ones(NUM_ENVS, device=self.device), ended, extras


class Policy(nn.Module):
    out_keys = ("action", "log_prob")

    def __init__(self, key: str = "observation"):
        super().__init__()
        self.in_keys = [key]
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("bias", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = observation * self.weight + self.bias + torch.randn_like(observation)
        return action, observation.squeeze(1)


KINDS = pytest.mark.parametrize("kind", [SameStep, NextStep, RslRl])


def collector(kind: type[Counting], device: str, steps: int = 12, **options: Any) -> Any:
    policy = Policy("policy" if kind is RslRl else "observation").to(device)
    return DeviceCollector(
        lambda: kind(device), policy, frames_per_batch=steps * NUM_ENVS, **options
    )


@DEVICES
@KINDS
def test_frames_stay_on_the_device_and_have_the_collectors_keys(kind, device):
    with collector(kind, device) as frames:
        batch = frames.next()
    observed = "policy" if kind is RslRl else "observation"
    assert batch.batch_size == (NUM_ENVS, 12)
    assert {value.device.type for value in batch.values(True, True)} == {device}
    assert {observed, "action", "log_prob", "is_init", "policy_version"} <= set(batch.keys())
    assert {observed, "reward", "terminated", "truncated", "done"} == set(batch["next"].keys())
    assert {"traj_ids", "env", "worker", "mask"} == set(batch["collector"].keys())
    assert all(value.shape[:2] == (NUM_ENVS, 12) for value in batch.values(True, True))


@DEVICES
@KINDS
def test_each_frame_has_its_observation_the_true_next_one_and_its_end(kind, device):
    with collector(kind, device, steps=14) as frames:
        batch = frames.next().to("cpu")
    observed = "policy" if kind is RslRl else "observation"
    for member in range(NUM_ENVS):
        row, length = batch[member], LENGTH + member
        row = row[row["collector", "mask"]]
        place = torch.arange(len(row)) % length
        is_last = place == length - 1
        assert row[observed].squeeze(1).tolist() == place.tolist()
        assert row["is_init"].tolist() == (place == 0).tolist()
        following = place + 1
        if kind is RslRl:  # which does not say what came last
            following = torch.where(is_last, place, following)
        assert row["next", observed].squeeze(1).tolist() == following.tolist()
        assert row["next", "done"].tolist() == is_last.tolist()
        end = "terminated" if member % 2 == 0 else "truncated"
        assert row["next", end].tolist() == is_last.tolist()
        ids = row["collector", "traj_ids"]
        assert ids.tolist() == (member + NUM_ENVS * (torch.arange(len(row)) // length)).tolist()


def test_a_step_that_only_resets_is_no_frame():
    with collector(NextStep, "cpu", steps=14, total_frames=60) as frames:
        batches = list(frames)
        assert frames.frames == sum(int(batch["collector", "mask"].sum()) for batch in batches)
    first = batches[0]["collector", "mask"][0].tolist()
    assert first == [True] * 4 + [False] + [True] * 4 + [False] + [True] * 4


@DEVICES
def test_stamps_are_true_and_lag_counts_updates(device):
    with collector(SameStep, device, lag=2) as frames:
        for update in range(5):
            batch = frames.next()
            version = max(0, update - 2)
            assert frames.policy_version == update
            assert batch["policy_version"].unique().tolist() == [version]
            # The weights of that version acted: each is ten times its version.
            noise = batch["action"] - 10.0 * version * batch["observation"]
            assert noise.abs().max() < 6
            frames.policy.weight.data.fill_(10.0 * (update + 1))
            frames.update_policy_weights_()


def test_training_steps_reach_no_frame_before_they_are_published():
    with collector(SameStep, "cpu") as frames:
        frames.policy.weight.data.fill_(1e6)
        frames.policy.bias.fill_(1e6)
        assert frames.next()["action"].abs().max() < 10
        frames.update_policy_weights_()
        assert frames.next()["action"].abs().max() > 1e5  # parameters and buffers


@DEVICES
@KINDS
def test_the_same_seed_gives_the_same_bits_whatever_else_draws(kind, device):
    batches = []
    for draws in (0, 3):
        with collector(kind, device, seed=7) as frames:
            rows = []
            for _ in range(2):
                rows.append(frames.next())
                torch.rand(draws, device=device)  # the learner's
        batches.append(torch.cat(rows, 1))
    assert (batches[0] == batches[1]).all()


def test_a_collector_leaves_the_random_streams_of_its_process_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with DeviceCollector(lambda: SameStep("cpu"), Policy(), frames_per_batch=6, seed=1) as one:
        one.next()
    assert torch.equal(torch.rand(3), expected)


def test_tensordict_modules_act_and_environments_are_closed():
    module = TensorDictModule(nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])
    with DeviceCollector(lambda: SameStep("cpu"), module, frames_per_batch=9) as frames:
        batch = frames.next()
        assert batch["action"].shape == (NUM_ENVS, 3, 1)
        env = frames.environments.env
    assert env.closed


def test_what_does_not_fit_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="frames_per_batch=10: expected a multiple of the 3"):
        DeviceCollector(lambda: SameStep("cpu"), Policy(), frames_per_batch=10)
    with pytest.raises(TypeError, match="dict is no vector of environments: expected gymnasium's"):
        DeviceCollector(dict, Policy(), frames_per_batch=3)
    with pytest.raises(ValueError, match="lag=-1: expected 0 or more"):
        DeviceCollector(lambda: SameStep("cpu"), Policy(), frames_per_batch=3, lag=-1)

    class Arrays(SameStep):
        def shown(self) -> Any:
            return super().shown().numpy()

    with pytest.raises(TypeError, match="'observation' is ndarray, expected a tensor"):
        DeviceCollector(lambda: Arrays("cpu"), Policy(), frames_per_batch=3)

    class Disabled(SameStep):
        mode = AutoresetMode.DISABLED

    with pytest.raises(ValueError, match="autoreset mode DISABLED, expected SAME_STEP"):
        DeviceCollector(lambda: Disabled("cpu"), Policy(), frames_per_batch=3)
