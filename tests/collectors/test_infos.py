"""What steps tell by `info`: the entries that a user names arrive with the frames."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from collectors import Collector, ReplayBuffer
from tests.collectors.support import COLLECTORS, CodeEnv


class Telling(CodeEnv):
    """Tells at every step where it is, and at an end that it is one; resets tell other things."""

    def reset(self, **kwargs):
        observation, _ = super().reset(**kwargs)
        return observation, {"code": -1.0, "lives": -1, "place": np.full(2, -1, np.int16)}

    def step(self, action):
        *told, _ = super().step(action)
        place = np.array([self.env, self.steps], np.int16)
        info = {"code": self.episode + self.steps / 8, "lives": self.steps, "place": place}
        if self.over:
            info["won"] = self.episode % 2 == 0
            info["bonus"] = self.steps
        return *told, info


def make(form="one"):
    members = [partial(Telling, 0, env) for env in range(3)]
    if form == "one":
        return Telling()
    kind, _, mode = form.partition(" ")
    chosen = AutoresetMode(mode)
    if kind == "async":
        return AsyncVectorEnv(members, context="fork", autoreset_mode=chosen)
    vector = SyncVectorEnv(members, autoreset_mode=chosen)
    return gym.wrappers.vector.RecordEpisodeStatistics(vector) if kind == "wrapped" else vector


FORMS = ["one", *(f"{kind} {mode.value}" for kind in ("sync", "async") for mode in AutoresetMode)]
FORMS += [f"wrapped {mode.value}" for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)]
CASES = [*(("single", form) for form in FORMS), ("sync", "sync SameStep"), ("async", "one")]
KEYS = {"code": float("nan"), "lives": 0, "place": np.zeros(2, np.int16), "won": False, "bonus": -1}


def check(batch):
    """Every entry is that of its own step; how many ends there were."""
    mask, info = batch["collector", "mask"], batch["next", "info"]
    kinds = {"code": "float32", "lives": "int64", "place": "int16", "won": "bool", "bonus": "int64"}
    assert {name: str(info[name].numpy().dtype) for name in info.keys()} == kinds  # noqa: SIM118
    follows, done = batch["next", "observation"], batch["next", "done"]
    env, episode, steps = (follows[..., i] for i in (1, 2, 3))
    assert torch.equal(info["code"][mask], (episode + steps / 8)[mask])
    assert torch.equal(info["lives"][mask], steps[mask].long())
    assert torch.equal(info["place"][mask], torch.stack([env, steps], -1)[mask].short())
    assert torch.equal(info["won"], done & (episode % 2 == 0) & mask)
    bonus = torch.where(done, steps, -1) * mask
    assert torch.equal(info["bonus"], bonus.long())
    return int(done.sum())


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_named_entries_arrive_with_the_step_that_told_them(kind, form):
    given = {} if kind == "single" else {"num_workers": 2}
    frames = 66 if kind == "sync" else 33
    with COLLECTORS[kind](
        make, frames_per_batch=frames, create_env_kwargs={"form": form}, info_keys=KEYS, **given
    ) as collector:
        assert sum(check(collector.next()) for _ in range(8)) > 10


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_named_entries_come_along_in_whatever_form_frames_have(copy):
    for options in ({}, {"next_observation": "final"}):
        with Collector(make, frames_per_batch=33, info_keys=KEYS, copy=copy, **options) as made:
            batch = made.next()
            assert torch.equal(batch["next", "info", "lives"], batch["observation"][..., 3] + 1)
    buffer = ReplayBuffer(100)
    for options in ({"replay_buffer": buffer}, {"split_trajs": True}):
        with Collector(make, frames_per_batch=33, info_keys=KEYS, **options) as made:
            batch = made.next()
            check((batch if batch is not None else buffer[:]).reshape(1, -1))


@pytest.mark.parametrize("form", ["one", "sync Disabled", "async SameStep"])
def test_entries_that_are_only_named_are_numbers(form):
    with Collector(
        make,
        frames_per_batch=33,
        create_env_kwargs={"form": form},
        info_keys=["lives", "code"],
    ) as collector:
        info = collector.next()["next", "info"]
    assert sorted(info.keys()) == ["code", "lives"]
    assert info["lives"].dtype == info["code"].dtype == torch.float32


class Forgetful(CodeEnv):
    def step(self, action):
        *told, _ = super().step(action)
        return *told, {"there": 1} if self.steps < 2 else {}


def test_an_entry_that_is_only_named_is_nan_where_a_later_step_lacks_it():
    with Collector(Forgetful, frames_per_batch=40, info_keys=["there"]) as collector:
        batch = collector.next()
    there = batch["next", "info", "there"]
    assert torch.equal(there.isnan(), batch["next", "observation"][..., 3] >= 2)
    assert (there[~there.isnan()] == 1).all()


@pytest.mark.parametrize("form", ["one", f"sync {AutoresetMode.SAME_STEP.value}"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["lifes"], r"no 'lifes', it has 'code', 'lives', 'place'.*info_keys={'lifes': False}"),
        (["place"], r"'place' as int16 \[.*2\], but batches have float32 \[.*np.zeros\(3\)"),
        ({"code": 0}, r"'code' as float\d+ \[.*\], but batches have int64"),
    ],
)
def test_entries_that_do_not_come_or_do_not_fit_are_refused(form, keys, message):
    with (
        Collector(
            make, frames_per_batch=33, create_env_kwargs={"form": form}, info_keys=keys
        ) as collector,
        pytest.raises(ValueError, match=message),
    ):
        collector.next()


@pytest.mark.parametrize("keys", ["lives", 3, [3]])
def test_info_keys_that_name_no_entries_are_refused(keys):
    with pytest.raises(TypeError, match=r"info_keys=.*names of entries of info"):
        Collector(make, frames_per_batch=4, info_keys=keys)
    with pytest.raises(TypeError, match="'lives' is 'three', expected a number"):
        Collector(make, frames_per_batch=4, info_keys={"lives": "three"})
    with pytest.raises(TypeError, match="of type float128 do not fit in tensors"):
        Collector(make, frames_per_batch=4, info_keys={"lives": np.longdouble(3)})


def test_an_observation_may_not_be_where_entries_of_info_are():
    class Named(Telling):
        observation_space = gym.spaces.Dict({"info": CodeEnv.observation_space})

    with pytest.raises(ValueError, match="an observation is named 'info'"):
        Collector(Named, frames_per_batch=4, info_keys=["lives"])
