"""Batches that hold next observations only where no later frame of the row shows them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from collectors import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    next_observations,
    next_values,
)
from tests.collectors.support import (
    CAN_RESET_SOME,
    KINDS,
    Checker,
    CodeEnv,
    CodePolicy,
    same_bits,
)
from tests.collectors.test_data_truth import ALL, MULTI, build, mortals

IDS = {"ids": lambda make: make.__name__}


def rebuilt(batch):
    """The batch as it is with next_observation="all", after a look at its form."""
    mask, finals = batch["collector", "mask"], batch["next", "finals", "observation"]
    numbers = batch["next", "final"]
    assert ("next", "observation") not in batch.keys(True)
    assert numbers.dtype == torch.int64
    assert numbers[numbers >= 0].tolist() == list(range(len(finals)))  # each once, in their order
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros(len(mask), 1, dtype=torch.bool)], 1)
    assert torch.equal(numbers >= 0, (batch["next", "done"] & mask) | last)
    assert torch.equal(next_observations(batch, numbers >= 0), finals)
    batch["next", "observation"] = next_observations(batch)
    return batch


def check(collector, checker, batches):
    for _ in range(batches):
        checker.check(rebuilt(collector.next()))


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ALL, **IDS)
def test_the_whole_can_be_rebuilt(make, kind, copy):
    collector, counts, checking = build(make, kind, copy=copy, next_observation="final")
    checker = Checker(counts, **checking)
    with collector:
        check(collector, checker, 16)
    assert checker.counts["terminated"] > 5
    assert checker.counts["truncated"] > 5


@pytest.mark.parametrize("kind", CAN_RESET_SOME)
def test_trajectories_that_were_cut_have_finals(kind):
    collector, counts, checking = build(
        Collector, kind, max_frames_per_traj=3, next_observation="final"
    )
    checker = Checker(counts, **checking)
    with collector:
        check(collector, checker, 12)
    assert checker.counts["too long"] > 5


@pytest.mark.parametrize("make", ALL, **IDS)
def test_the_last_frames_that_set_truncated_marks_have_finals(make):
    collector, counts, checking = build(make, steps=5, set_truncated=True, next_observation="final")
    with collector:
        check(collector, Checker(counts, **checking), 12)


@pytest.mark.parametrize("kind", ["one", "sync_disabled", "native_next_step"])
def test_what_is_reset_in_the_middle_of_a_block_has_finals(kind):
    collector, counts, checking = build(MultiAsyncCollector, kind, next_observation="final")
    checker = Checker(counts, **checking, cuts=True, skips=True)
    with collector:
        for _ in range(16):
            check(collector, checker, 1)
            collector.reset()
    assert checker.counts["cut"] > 0


@pytest.mark.parametrize("make", MULTI, **IDS)
def test_rows_of_different_lengths_have_their_own_last_frames(make):
    collector, counts, checking = build(make, frames_per_batch=[12, 30], next_observation="final")
    with collector:
        check(collector, Checker(counts, **checking), 10)


@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], **IDS)
def test_rows_that_end_early_have_their_own_last_frames(make):
    collector, counts, checking = build(
        make, reset_when_done=False, steps=9, next_observation="final"
    )
    checker = Checker(counts, **checking, skips=True)
    with collector:
        for _ in range(4):
            check(collector, checker, 1)
            collector.reset()


@pytest.mark.parametrize("how", [0, 1, "stack"])
def test_workers_that_are_put_together_keep_what_followed_their_frames(how):
    told = {"steps": 5, "cat_results": how, "next_observation": "final"}
    collector, counts, checking = build(MultiSyncCollector, **told)
    checker = Checker(counts, **checking)
    with collector:
        for _ in range(6):
            batch = collector.next()
            if how == "stack":
                batch = batch.reshape(6, 5)
            batch["next", "observation"] = next_observations(batch)
            if how == 1:
                batch = torch.cat(list(batch.split(5, 1)), 0)
            checker.check(batch)


@pytest.mark.parametrize("make", MULTI, **IDS)
def test_a_replaced_worker_goes_on_with_finals(make, tmp_path):
    path = tmp_path / "kill"
    checker = Checker([3], restarts=True)
    with make(
        mortals,
        CodePolicy(),
        create_env_kwargs={"worker": 0, "path": str(path)},
        frames_per_batch=120,
        on_worker_failure="restart",
        next_observation="final",
    ) as collector:
        check(collector, checker, 2)
        path.touch()
        for _ in range(200):
            check(collector, checker, 1)
            if checker.counts["newcomers"]:
                break
    assert checker.counts["newcomers"] == 3


class Parts(CodeEnv):
    """Shows what it shows in parts, one of which has no numbers."""

    observation_space = gym.spaces.Dict(
        {
            "code": CodeEnv.observation_space,
            "none": gym.spaces.Box(0, 1, (2, 0), np.float32),
            "more": gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (2, 2), np.uint8)}),
        }
    )

    def _observe(self, action):
        code = super()._observe(action)
        image = np.full((2, 2), self.steps, np.uint8)
        return {"code": code, "none": np.zeros((2, 0), np.float32), "more": {"image": image}}


@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], **IDS)
def test_each_part_of_an_observation_has_finals(make):
    keys = ["code", "none", ("more", "image")]
    given = {"frames_per_batch": 22, "num_workers": 2} if make is MultiSyncCollector else {}
    whole, finals = (
        make(Parts, None, next_observation=how, **{"frames_per_batch": 11, **given})
        for how in ("all", "final")
    )
    with whole, finals:
        for collector in (whole, finals):
            collector.set_seed(3)
        for _ in range(4):
            one, other = whole.next(), finals.next()
            for key in keys:
                name = ("next", *((key,) if isinstance(key, str) else key))
                other[name] = next_observations(other, key=key)
                assert torch.equal(one[name], other[name])
            del other["next", "final"]
            del other["next", "finals"]
            assert same_bits(one, other)


def test_values_of_what_followed_are_those_of_the_frames_and_of_the_finals():
    collector, *_ = build(Collector, "native_next_step", next_observation="final")
    with collector:
        for _ in range(4):
            batch = collector.next()
            values = batch["observation"].sum(-1)
            final_values = batch["next", "finals", "observation"].sum(-1)
            following = next_values(batch, values, final_values)
            assert torch.equal(following, next_observations(batch).sum(-1))


def test_rows_of_a_batch_keep_what_followed_and_parts_of_rows_say_what_they_lack():
    collector, *_ = build(Collector, "one", steps=12, next_observation="final")
    with collector:
        for _ in range(20):
            batch = collector.next()
            cut = int((batch["next", "final"][0] < 0).nonzero()[0])
            assert torch.equal(next_observations(batch[0:1]), next_observations(batch))
            with pytest.raises(ValueError, match=r"was cut behind a frame.*keep rows whole"):
                next_observations(batch[:, : cut + 1])


def test_of_a_batch_that_holds_all_they_are_what_it_holds():
    collector, *_ = build(Collector)
    with collector:
        batch = collector.next()
        assert next_observations(batch) is batch["next", "observation"]
        mask = batch["next", "done"]
        assert torch.equal(next_observations(batch, mask), batch["next", "observation"][mask])


def test_finals_go_where_batches_go():
    collector, *_ = build(Collector, next_observation="final", storing_device="meta")
    with collector:
        assert collector.next()["next", "finals", "observation"].device.type == "meta"


class Undefined(CodeEnv):
    def _observe(self, action):
        observation = super()._observe(action)
        if self.over:
            observation[:] = np.nan
        return observation


def test_a_final_observation_that_is_nan_is_an_error():
    with (
        Collector(Undefined, CodePolicy(), frames_per_batch=9, next_observation="final") as made,
        pytest.raises(ValueError, match="'observation' is NaN in environment 0, at step 0"),
    ):
        made.next()


def test_frames_of_images_take_half_the_memory():
    shape = (84, 84, 4)

    class Images(gym.Env):
        observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        action_space = gym.spaces.Discrete(2)
        steps = 0

        def reset(self, **kwargs):
            return np.zeros(shape, np.uint8), {}

        def step(self, action):
            self.steps += 1
            return np.zeros(shape, np.uint8), 0.0, self.steps % 50 == 0, False, {}

    def nbytes(how):
        with Collector(Images, frames_per_batch=500, next_observation=how) as collector:
            return sum(t.numel() * t.element_size() for t in collector.next().values(True, True))

    assert nbytes("final") < 0.52 * nbytes("all")
