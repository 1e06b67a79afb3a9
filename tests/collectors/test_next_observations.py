"""Batches with next observations only where no later frame of the row shows them.

`test_data_truth.py` rebuilds all next observations of such batches, however they were collected.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from collectors import Collector, next_observations, next_values
from tests.collectors.support import COLLECTORS, CodeEnv, CodePolicy, build, same_bits


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


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_each_part_of_an_observation_has_finals(kind):
    keys = ["code", "none", ("more", "image")]
    given = {"frames_per_batch": 22, "num_workers": 2} if kind == "sync" else {}
    whole, finals = (
        COLLECTORS[kind](Parts, None, next_observation=how, **{"frames_per_batch": 11, **given})
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


def test_rows_that_hold_the_frames_of_several_workers_keep_what_followed_each():
    collector, checker = build("sync", steps=5, cat_results=1, next_observation="final")
    with collector:
        for _ in range(6):
            batch = collector.next()
            batch["next", "observation"] = next_observations(batch)
            del batch["next", "finals"]
            checker.check(torch.cat(list(batch.split(5, 1)), 0))


def test_batches_stacked_by_worker_keep_what_followed_each():
    collector, checker = build("sync", steps=5, cat_results="stack", next_observation="final")
    with collector:
        for _ in range(6):
            batch = collector.next()
            assert torch.equal(
                next_observations(batch, batch["collector", "mask"]),
                next_observations(batch).flatten(0, 2),
            )
            batch["next", "observation"] = next_observations(batch)
            del batch["next", "finals"]
            checker.check(batch.flatten(0, 1))


def test_values_of_what_followed_are_those_of_the_frames_and_of_the_finals():
    collector, _ = build("single", "native_next_step", next_observation="final")
    with collector:
        for _ in range(4):
            batch = collector.next()
            values = batch["observation"].sum(-1)
            final_values = batch["next", "finals", "observation"].sum(-1)
            following = next_values(batch, values, final_values)
            assert torch.equal(following, next_observations(batch).sum(-1))


def test_rows_of_a_batch_keep_what_followed_and_parts_of_rows_say_what_they_lack():
    collector, _ = build("single", "one", steps=12, next_observation="final")
    with collector:
        for _ in range(20):
            batch = collector.next()
            cut = int((batch["next", "final"][0] < 0).nonzero()[0])
            assert torch.equal(next_observations(batch[0:1]), next_observations(batch))
            with pytest.raises(ValueError, match=r"was cut behind a frame.*keep rows whole"):
                next_observations(batch[:, : cut + 1])


def test_a_batch_that_holds_all_next_observations_is_asked_for_them_alike():
    collector, _ = build("single")
    with collector:
        batch = collector.next()
        assert next_observations(batch) is batch["next", "observation"]
        mask = batch["next", "done"]
        assert torch.equal(next_observations(batch, mask), batch["next", "observation"][mask])
    collector, _ = build("single", next_observation="final", storing_device="meta")
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


def test_batches_of_images_take_half_the_memory():
    class Images(CodeEnv):
        observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)

        def _observe(self, action):
            return np.zeros((84, 84, 4), np.uint8)

    def nbytes(how):
        with Collector(
            lambda: Images(endless=True), frames_per_batch=100, next_observation=how
        ) as collector:
            return sum(t.numel() * t.element_size() for t in collector.next().values(True, True))

    assert nbytes("final") < 0.52 * nbytes("all")
