"""Which environments are taken, in what form their data comes, and what is said of bad ones."""

from __future__ import annotations

import functools
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import (
    FlattenObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformAction,
)
from gymnasium.wrappers import vector as vector_wrappers
from torch import nn

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from tests.collectors.support import (
    NUM_ACTIONS,
    Checker,
    CodeEnv,
    CodePolicy,
    CodeVector,
    make_env,
)

CARTPOLE = gym.make("CartPole-v1").unwrapped.observation_space


class SpaceEnv(gym.Env):
    """Shows samples of any space and remembers what it was told to do."""

    def __init__(self, observation=CARTPOLE, action=None, length=5):
        self.observation_space = observation
        self.action_space = action if action is not None else spaces.Discrete(2)
        self.length = length
        self.told, self.shown = [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self._show(), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, type(action))
        self.told.append(action)
        self.t += 1
        return self._show(), float(self.t), self.t == self.length, False, {}

    def _show(self):
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]


def collect(env, policy=None, frames=20, **options):
    with Collector(lambda: env, policy, frames_per_batch=frames, **options) as collector:
        collector.set_seed(0)
        return collector.next()


ACTIONS = {
    "Discrete": (spaces.Discrete(4), torch.int64, ()),
    "Discrete from -2": (spaces.Discrete(4, start=-2), torch.int64, ()),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 5]), torch.int64, (2,)),
    "MultiBinary": (spaces.MultiBinary(3), torch.int8, (3,)),
    "Box": (spaces.Box(-2, 2, (3,), np.float32), torch.float32, (3,)),
    "Box of no dimension": (spaces.Box(0, 1, (), np.float32), torch.float32, ()),
    "open Box": (spaces.Box(-np.inf, np.inf, (2,), np.float32), torch.float32, (2,)),
    "half open Box": (spaces.Box(1, np.inf, (2,), np.float64), torch.float64, (2,)),
    "integer Box": (spaces.Box(-3, 3, (2, 2), np.int32), torch.int32, (2, 2)),
}


@pytest.mark.parametrize("vector", [False, True], ids=["plain", "vector"])
@pytest.mark.parametrize("name", ACTIONS)
def test_actions_are_recorded_as_the_environment_was_told(name, vector):
    space, dtype, shape = ACTIONS[name]
    envs = [SpaceEnv(action=space) for _ in range(3 if vector else 1)]
    env = SyncVectorEnv([lambda e=e: e for e in envs]) if vector else envs[0]
    batch = collect(env, frames=20 * len(envs))
    assert batch["action"].dtype == dtype
    assert batch["action"].shape == (len(envs), 20, *shape)
    for row, member in zip(batch["action"], envs, strict=True):
        assert np.array_equal(row.numpy(), np.stack([np.asarray(a) for a in member.told]))
    assert len(batch["action"].reshape(20 * len(envs), -1).unique(dim=0)) > 1


def nested(space):
    """An observation space's keys, as a batch has them, and how to find each in a sample."""
    if isinstance(space, spaces.Dict):
        return {
            (name, *key): (lambda value, name=name, find=find: find(value[name]))
            for name, part in space.spaces.items()
            for key, find in nested(part).items()
        }
    if isinstance(space, spaces.Tuple):
        return {
            (str(i), *key): (lambda value, i=i, find=find: find(value[i]))
            for i, part in enumerate(space.spaces)
            for key, find in nested(part).items()
        }
    return {(): lambda value: value}


IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
OBSERVATIONS = {
    "Box": spaces.Box(-1, 1, (3,), np.float32),
    "float64 Box": spaces.Box(-1, 1, (2, 2), np.float64),
    "image": IMAGE,
    "Discrete": spaces.Discrete(9),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(5),
    "Dict": spaces.Dict(image=IMAGE, where=spaces.Box(-1, 1, (2,), np.float32)),
    "nested Dict": spaces.Dict(
        a=spaces.Dict(b=spaces.Discrete(3), c=spaces.Dict(d=IMAGE)), e=spaces.MultiBinary(2)
    ),
    "Tuple": spaces.Tuple([spaces.Discrete(5), spaces.Box(0, 1, (2,), np.float32)]),
    "Dict of Tuple": spaces.Dict(x=spaces.Tuple([spaces.Discrete(5), IMAGE])),
}


@pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=lambda m: "plain" if not m else m.name)
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_are_recorded_as_they_were_shown(name, mode):
    space = OBSERVATIONS[name]
    envs = [SpaceEnv(space) for _ in range(2 if mode else 1)]
    env = SyncVectorEnv([lambda e=e: e for e in envs], autoreset_mode=mode) if mode else envs[0]
    batch = collect(env, frames=20 * len(envs))
    for path, find in nested(space).items():
        key = path or ("observation",)
        first = batch["observation"] if not path else batch[key]
        for row, member in enumerate(envs):
            shown = [find(one) for one in member.shown]
            # every episode of 5 steps shows 6 observations
            before = [np.asarray(o) for i, o in enumerate(shown) if i % 6 != 5][:20]
            after = [np.asarray(o) for i, o in enumerate(shown) if i % 6 != 0][:20]
            assert np.array_equal(first[row].numpy(), np.stack(before)), key
            assert np.array_equal(batch[("next", *key)][row].numpy(), np.stack(after)), key
        assert first.numpy().dtype == np.asarray(shown[0]).dtype


class Mission(spaces.Space):
    """A space of strings that is no `Text`, like MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "get the key"

    def contains(self, x):
        return isinstance(x, str)


WITH_TEXT = {
    "Dict": spaces.Dict(mission=spaces.Text(9), where=spaces.Discrete(5)),
    "of its own": spaces.Dict(mission=Mission(), where=spaces.Discrete(5)),
    "nested": spaces.Dict(told=spaces.Dict(mission=spaces.Text(9)), where=spaces.Discrete(5)),
    "Tuple": spaces.Tuple([spaces.Text(9), spaces.Discrete(5)]),
}


@pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=lambda m: "plain" if not m else m.name)
@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("Dict", "mission", "where"),
        ("of its own", "mission", "where"),
        ("nested", "told/mission", "where"),
        ("Tuple", "0", "1"),
    ],
)
def test_text_among_other_observations_is_left_out_by_name(name, text, key, mode):
    envs = [SpaceEnv(WITH_TEXT[name]) for _ in range(2 if mode else 1)]
    env = SyncVectorEnv([lambda e=e: e for e in envs], autoreset_mode=mode) if mode else envs[0]
    with pytest.warns(UserWarning, match=f"SpaceEnv|SyncVectorEnv.*left out of batches: '{text}'"):
        batch = collect(env, lambda where: where % 2, frames=20 * len(envs))
    assert set(batch.keys()) >= {key}
    assert not {"mission", "told", "0"} & set(batch.keys())
    assert torch.equal(batch["action"], batch[key] % 2)
    find = nested(WITH_TEXT[name])[(key,)]
    for row, member in zip(batch[key].tolist(), envs, strict=True):
        shown = [int(find(one)) for one in member.shown]
        assert row == [one for i, one in enumerate(shown) if i % 6 != 5][:20]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_of_several_workers_one_says_what_is_left_out(kind, capfd):
    def make():
        return NormalizeReward(SpaceEnv(WITH_TEXT["Dict"]))

    # What is forked would write, or record, where its parent did when it was started.
    with kind(make, None, num_workers=2, frames_per_batch=20, start_method="spawn") as collector:
        for _ in range(4):
            collector.next()
    told = capfd.readouterr().err
    assert told.count("left out of batches: 'mission'") == 1
    assert told.count("the statistics of NormalizeReward differ between workers") == 1


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda: NormalizeObservation(TimeLimit(CodeEnv(), 9)), ["NormalizeObservation"]),
        (
            lambda: TimeLimit(NormalizeReward(NormalizeObservation(CodeEnv())), 9),
            ["NormalizeObservation", "NormalizeReward"],
        ),
        (lambda: SyncVectorEnv([lambda: NormalizeReward(CodeEnv())] * 2), ["NormalizeReward"]),
        (
            lambda: vector_wrappers.NormalizeObservation(SyncVectorEnv([CodeEnv] * 2)),
            ["NormalizeObservation"],
        ),
        (lambda: RecordEpisodeStatistics(CodeEnv()), []),
    ],
)
def test_wrappers_whose_statistics_are_each_workers_own_are_named(wrap, names, recwarn):
    collect(wrap())
    told = [str(one.message) for one in recwarn if "statistics of" in str(one.message)]
    assert len(told) == len(names)
    for text, name in zip(told, names, strict=True):
        assert f"statistics of {name} differ" in text
        assert "algo.normalise_observations=true" in text


def test_images_in_bytes_stay_bytes_through_workers():
    def make():
        return SpaceEnv(IMAGE)

    with MultiSyncCollector(make, None, num_workers=2, frames_per_batch=20) as collector:
        batch = collector.next()
    assert batch["observation"].dtype == torch.uint8
    assert batch["observation"].shape == (2, 10, 8, 8, 3)
    assert len(batch["observation"].unique()) > 200


def test_wrapped_environments_end_as_their_wrappers_say():
    batch = collect(TimeLimit(CodeEnv(endless=True), 4), CodePolicy())
    ends = batch["next", "truncated"][0].nonzero().flatten().tolist()
    assert ends == [3, 7, 11, 15, 19]
    assert not batch["next", "terminated"].any()


def test_normalised_observations_are_those_that_the_policy_saw():
    seen = []

    def policy(observation):
        seen.append(observation.clone())
        return torch.zeros(1, dtype=torch.int64)

    batch = collect(NormalizeObservation(gym.make("CartPole-v1")), policy)
    assert torch.equal(batch["observation"][0], torch.cat(seen)[:20])


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_vector_wrappers_do_not_disturb_the_data(mode):
    def make():
        members = [lambda i=i: CodeEnv(0, i) for i in range(3)]
        return vector_wrappers.RecordEpisodeStatistics(SyncVectorEnv(members, autoreset_mode=mode))

    checker = Checker([3])
    with Collector(make, CodePolicy(), frames_per_batch=30) as collector:
        for _ in range(10):
            checker.check(collector.next())


def test_statistics_wrappers_do_not_disturb_the_data():
    checker = Checker([1])
    env = RecordEpisodeStatistics(CodeEnv())
    with Collector(lambda: env, CodePolicy(), frames_per_batch=30) as collector:
        for _ in range(5):
            checker.check(collector.next())
        assert collector.getattr_env("episode_count") == [env.episode_count]


def test_flattened_dicts_come_as_one_observation():
    batch = collect(FlattenObservation(SpaceEnv(OBSERVATIONS["Dict"])))
    assert batch["observation"].shape == (1, 20, 8 * 8 * 3 + 2)


@pytest.mark.parametrize("how", ["sync", "vector_entry_point"])
def test_vectors_that_gymnasium_makes_are_taken(how):
    def make():
        return gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode=how)

    with Collector(make, None, frames_per_batch=200) as collector:
        for _ in range(5):
            batch = collector.next()
            mask = batch["collector", "mask"]
            done = batch["next", "done"] & mask
            starts = batch["is_init"][:, 1:] & mask[:, 1:]
            assert torch.equal(starts, done[:, :-1] & mask[:, 1:])
            going = mask[:, 1:] & ~batch["is_init"][:, 1:]
            follows = batch["next", "observation"][:, :-1]
            assert torch.equal(batch["observation"][:, 1:][going], follows[going])
            assert done.any()
            # at the end a cart or pole is out of its bounds, so it is the final observation
            ends = batch["next", "observation"][batch["next", "terminated"] & mask]
            assert ((ends[:, 0].abs() > 2.4) | (ends[:, 2].abs() > 0.2094)).all()


class Goals(SpaceEnv):
    """Its observations are alike in form, and gymnasium sorts them."""

    def __init__(self):
        box = spaces.Box(-1, 1, (2,), np.float32)
        super().__init__(spaces.Dict({"position": box, "desired": box, "achieved": box}))


POLICIES = {
    "some": lambda position, desired: (position[:, 0] > desired[:, 0]).long(),
    "with a default": lambda position, desired, low=0: (
        position[:, 0] > desired[:, 0] + low
    ).long(),
    "by no names": lambda first, second, third: (third[:, 0] > second[:, 0]).long(),
    "a TensorDict": lambda td: td.set("action", (td["position"] > td["desired"])[:, 0].long()),
}


@pytest.mark.parametrize("how", POLICIES)
def test_a_function_is_given_the_observations_that_its_arguments_are_named_after(how):
    batch = collect(Goals(), POLICIES[how])
    expected = (batch["position"] > batch["desired"])[..., 0].long()
    assert torch.equal(batch["action"], expected)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (lambda obs, position: obs, "'obs', 'position'"),
        (lambda position, *rest: position, "'position', 'rest'"),
        (lambda desired, wanted, low=0: desired, "'desired', 'wanted'"),
    ],
)
@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_arguments_of_which_only_some_are_named_after_observations_are_refused(
    policy, names, module
):
    if module:
        function, policy = policy, nn.Module()
        policy.forward = function
    message = rf"arguments are {names}.*'achieved', 'desired', 'position'.*in_keys"
    with pytest.raises(ValueError, match=message):
        collect(Goals(), policy)


ACTS_BY_PARTS = {
    "Dict": spaces.Dict(turn=spaces.Box(-1, 1, (2,), np.float32), fire=spaces.Discrete(3)),
    "Tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)]),
}


@pytest.mark.parametrize("name", ACTS_BY_PARTS)
def test_actions_of_several_parts_can_be_flattened_as_the_error_says(name):
    env = SpaceEnv(action=ACTS_BY_PARTS[name])
    with pytest.raises(TypeError, match=r"flatten.*TransformAction.*flatten_space") as refused:
        collect(env)
    told = str(refused.value).partition("gymnasium.wrappers.")[2]
    names = {"TransformAction": TransformAction, "spaces": spaces, "env": env}
    names["space"] = env.action_space
    batch = collect(eval(told, names), lambda _: torch.tensor([[0.5, 1, 0, 0, 1][:5]]))
    assert batch["action"].shape == (1, 20, 5)
    assert len(env.told) == 20


def test_environments_are_made_with_their_arguments():
    checker = Checker([2, 3])
    with MultiSyncCollector(
        [make_env, lambda **kwargs: make_env("sync_disabled", **kwargs)],
        CodePolicy(),
        create_env_kwargs=[
            {"kind": "native_same_step", "num_envs": 2, "worker": 0},
            {"num_envs": 3, "worker": 1},
        ],
        frames_per_batch=[10, 15],
    ) as collector:
        for _ in range(5):
            checker.check(collector.next())


# What is refused


class Bad(gym.Env):
    """Goes wrong at its third step, in a way that is asked for."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, **wrong):
        self.wrong = wrong

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.wrong.get("start", np.zeros(3, np.float32)), {}

    def step(self, action):
        self.t += 1
        now = self.wrong if self.t == 3 else {}
        observation = now.get("observation", np.zeros(3, np.float32))
        return observation, now.get("reward", 0.0), False, False, {}


NAN = np.array([0, np.nan, 0], np.float32)
WRONG = {
    "shape": ({"observation": np.zeros(4, np.float32)}, r"'observation' as float32 \[4\].*\[3\]"),
    "dtype": ({"observation": np.zeros(3, complex)}, r"as complex128 \[3\].*float32 \[3\]"),
    "type": ({"observation": "three"}, r"'observation' as <U5 \[\]; its space declares"),
    "None": ({"observation": None}, r"'observation' as object \[\]; its space declares"),
    "NaN": ({"observation": NAN}, r"'observation' is NaN in environment 0, at step 2"),
    "NaN reward": ({"reward": np.nan}, r"'reward' is NaN in environment 0, at step 2"),
    "reward of a shape": ({"reward": np.zeros(2)}, r"the reward array\(\[0., 0.\]\), not a number"),
    "reward None": ({"reward": None}, "'reward' is NaN"),
    "start of a shape": ({"start": np.zeros(2, np.float32)}, r"'observation' as float32 \[2\]"),
    "start at NaN": ({"start": NAN}, r"'observation' is NaN in environment 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_as_the_space_says_is_an_error_that_says_so(case):
    wrong, message = WRONG[case]
    with (
        Collector(lambda: Bad(**wrong), None, frames_per_batch=10) as collector,
        pytest.raises((ValueError, TypeError), match=message),
    ):
        collector.next()


def vector_of(make, mode):
    return SyncVectorEnv([make] * 2, autoreset_mode=mode)


FORMS = {
    "plain": lambda make: make(),
    "AsyncVectorEnv": lambda make: AsyncVectorEnv([make] * 2, context="fork"),
    **{mode.name: functools.partial(vector_of, mode=mode) for mode in AutoresetMode},
    "wrapped": lambda make: vector_wrappers.RecordEpisodeStatistics(SyncVectorEnv([make] * 2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_observations_of_another_width_are_cast_to_what_their_space_says(form):
    class Wide(Bad):
        def step(self, action):
            observation, *rest = super().step(action)
            return observation.astype(np.float64) + 0.1, *rest

    batch = collect(FORMS[form](Wide), frames=10)
    assert batch["next", "observation"].dtype == torch.float32
    assert (batch["next", "observation"] == np.float32(0.1)).all()


# AsyncVectorEnv casts everything in its own processes, where nobody can see it.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "AsyncVectorEnv"])
def test_observations_of_another_kind_are_refused(form):
    class Broken(Bad):
        observation_space = spaces.Box(-1, 1, (3,), np.int64)

        def reset(self, **kwargs):
            super().reset(**kwargs)
            return np.zeros(3, np.int64), {}

        def step(self, action):
            observation, *rest = super().step(action)
            return observation + 0.5, *rest

    with pytest.raises((ValueError, TypeError), match=r"float32.*int64|[Cc]annot cast"):
        collect(FORMS[form](Broken), frames=10)


OLD = {
    "a four-tuple": (lambda full: full[:3] + full[4:], r"4 values.*\(observation, reward, term"),
    "one value": (lambda full: full[0], r"returned .*array.*\(observation, reward, terminated"),
    "nothing": (lambda full: None, r"returned None.*\(observation, reward, terminated"),
    "terminated None": (lambda full: (*full[:2], None, *full[3:]), "returned terminated=None"),
    "truncated None": (lambda full: (*full[:3], None, full[4]), "returned truncated=None"),
    "truncated a dict": (lambda full: (*full[:3], {}, full[4]), "returned truncated={}"),
}


@pytest.mark.parametrize("vector", [False, True], ids=["plain", "vector"])
@pytest.mark.parametrize("case", OLD)
def test_what_step_returns_in_another_form_is_shown(case, vector):
    change, message = OLD[case]

    class Old(CodeVector if vector else CodeEnv):
        def step(self, action):
            return change(super().step(action))

    env = Old(0, 3, AutoresetMode.SAME_STEP) if vector else Old()
    with pytest.raises((ValueError, TypeError), match=rf"(?s)Old.*{message}"):
        collect(env, frames=12)


@pytest.mark.parametrize("reset", ["observation", "three"])
@pytest.mark.parametrize("vector", [False, True], ids=["plain", "vector"])
def test_what_reset_returns_in_another_form_is_shown(reset, vector):
    class Old(CodeVector if vector else CodeEnv):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            return observation if reset == "observation" else (observation, info, None)

    env = Old(0, 3, AutoresetMode.SAME_STEP) if vector else Old()
    with pytest.raises(TypeError, match=r"(?s)Old.*reset.*returned.*\(observation, info\)"):
        collect(env, frames=12)


def test_ends_may_be_numbers_of_numpy():
    class Numbered(CodeEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, np.int64(terminated), np.array(truncated), info

    checker = Checker([1])
    with Collector(Numbered, CodePolicy(), frames_per_batch=60) as collector:
        checker.check(collector.next())
    assert checker.counts["terminated"]
    assert checker.counts["truncated"]


def test_what_an_observation_lacks_is_named():
    class Forgetful(Goals):
        def _show(self):
            shown = super()._show()
            return shown if self.t < 3 else {"position": shown["position"]}

    with pytest.raises(ValueError, match="an observation lacks 'achieved', which its space has"):
        collect(Forgetful())


@pytest.mark.parametrize("case", ["shape", "NaN", "reward of a shape"])
def test_in_a_worker_the_error_comes_with_the_environments_name(case):
    wrong, message = WRONG[case]
    with (
        MultiSyncCollector(lambda: Bad(**wrong), None, frames_per_batch=10) as collector,
        pytest.raises(RuntimeError, match=rf"(?s)worker 0 \(cpu, Bad.*{message}"),
    ):
        collector.next()


def test_the_shape_of_what_a_vector_returns_is_checked_too():
    class Wrong(CodeVector):
        def step(self, actions):
            observation, *rest = super().step(actions)
            return observation[:, :4], *rest

    env = Wrong(0, 3, AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=r"'observation' as float32 \[3, 4\].*\[3, 5\]"):
        collect(env, frames=12)

    class Together(CodeVector):
        def step(self, actions):
            *rest, truncated, info = super().step(actions)
            return *rest, truncated.any(), info

    env = Together(0, 3, AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=r"truncated of shape \[\], not one for each of 3"):
        collect(env, frames=12)


@pytest.mark.parametrize("kind", [np.uint8, np.float32, list], ids=["byte", "float", "list"])
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_a_vector_may_say_in_other_types_who_ended(mode, kind):
    class Numbered(CodeVector):
        def step(self, actions):
            observation, reward, *ends, info = super().step(actions)
            return observation, reward, *(kind(end) for end in ends), info

    with Collector(lambda: Numbered(0, 3, mode), CodePolicy(), frames_per_batch=90) as collector:
        checker = Checker([3])
        for _ in range(2):
            checker.check(collector.next())


@pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=lambda m: "plain" if not m else m.name)
def test_environments_may_show_the_same_array_again_and_write_into_actions(mode):
    class Thrifty(gym.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.action_space = spaces.Box(0, NUM_ACTIONS, (1,), np.float32)
            self.shown = np.zeros(5, np.float32)

        def reset(self, **kwargs):
            self.shown[:], info = self.env.reset(**kwargs)
            return self.shown, info

        def step(self, action):
            self.shown[:], *rest = self.env.step(int(action[0]))
            action[:] = -1
            return self.shown, *rest

    def make():
        members = [lambda i=i: Thrifty(CodeEnv(0, i)) for i in range(3)]
        return SyncVectorEnv(members, autoreset_mode=mode) if mode else members[0]()

    class Constant(nn.Module):
        """Hands out the memory of its parameter as actions."""

        in_keys, out_keys = ("observation",), ("action", "value")

        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.full((3 if mode else 1, 1), 2.0))

        def forward(self, observation):
            return self.value[:], self.value.clone()

    checker = Checker([3 if mode else 1], policy=False)
    with Collector(make, Constant(), frames_per_batch=60) as collector:
        for _ in range(2):
            batch = collector.next()
            assert (batch["value"] == 2).all()
            batch["action"] = batch["action"].long().squeeze(-1)
            checker.check(batch)


def test_a_random_stream_of_another_kind_is_taken():
    class Ported(CodeEnv):
        def reset(self, *, seed=None, options=None):
            self.np_random = np.random.RandomState(seed)
            return super().reset(seed=None, options=options)

    with Collector(Ported, CodePolicy(), frames_per_batch=30) as collector:
        Checker([1]).check(collector.next())
        assert collector.load_state_dict(collector.state_dict()) is False  # it cannot be repeated


@pytest.mark.parametrize("told", [{}, {"autoreset_mode": "same_step"}], ids=["nothing", "other"])
def test_a_vector_that_does_not_say_how_it_resets_is_refused(told):
    env = CodeVector(0, 3, AutoresetMode.SAME_STEP)
    env.metadata = told
    with pytest.raises(
        ValueError,
        match=r"CodeVector has metadata\['autoreset_mode'\] = .*SAME_STEP.*create_env_fn",
    ):
        collect(env)


def test_a_vectors_own_attribute_says_its_mode_whatever_is_in_metadata_that_classes_share():
    """As ale-py's AtariVectorEnv does: it writes into the metadata of all vectors."""

    def make(mode, other):
        env = CodeVector(0, 3, mode)
        env.autoreset_mode = mode
        env.metadata = {"autoreset_mode": other}
        return env

    for mode, other in itertools.permutations(AutoresetMode, 2):
        made = functools.partial(make, mode, other)
        with Collector(made, CodePolicy(), frames_per_batch=90) as collector:
            Checker([3]).check(collector.next())


def test_a_vector_without_final_observations_is_refused_where_they_are_due():
    class Forgetful(CodeVector):
        def step(self, actions):
            return *super().step(actions)[:4], {}

    env = Forgetful(0, 3, AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="no 'final_obs'"):
        collect(env, frames=60)


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Text(5), spaces.Discrete(2), "Text spaces have no fixed array form"),
        (
            spaces.Dict(a=spaces.Sequence(spaces.Discrete(2))),
            spaces.Discrete(2),
            "Sequence spaces have no fixed array form",
        ),
        (
            spaces.Dict(a=spaces.Text(5), b=spaces.Tuple([spaces.Text(2)])),
            spaces.Discrete(2),
            "holds nothing.*only text: a, b/0",
        ),
        (CARTPOLE, spaces.Dict(a=spaces.Discrete(2)), "Dict action spaces are not supported"),
        (CARTPOLE, spaces.Tuple([spaces.Discrete(2)]), "Tuple action spaces are not supported"),
        (CARTPOLE, spaces.Text(3), "Text spaces have no fixed array form"),
        (spaces.Dict(), spaces.Discrete(2), "the observation space holds nothing"),
    ],
)
def test_spaces_that_do_not_fit_in_arrays_are_refused(observation, action, message):
    with pytest.raises(TypeError, match=message):
        collect(SpaceEnv(observation, action))


@pytest.mark.parametrize(
    "name", ["action", "next", "collector", "is_init", "policy_version", "reward", "done"]
)
def test_observation_keys_that_batches_use_themselves_are_refused(name):
    with pytest.raises(ValueError, match=f"observation key '{name}'.*rename it"):
        collect(SpaceEnv(spaces.Dict({name: spaces.Discrete(2)})))


@pytest.mark.parametrize("made", [None, 3, "CartPole-v1", CodeEnv])
def test_what_is_no_environment_is_refused(made):
    with pytest.raises(TypeError, match=r"must return a gymnasium.Env.*it returned a"):
        Collector(lambda: made, None, frames_per_batch=10)


@pytest.mark.parametrize("given", ["CartPole-v1", CodeEnv(), None])
def test_what_makes_no_environment_is_refused(given):
    with pytest.raises(TypeError, match="create_env_fn must be a function"):
        Collector(given, None, frames_per_batch=10)


def test_what_the_factory_raises_is_raised():
    def make():
        raise OSError("no such level")

    with pytest.raises(OSError, match="no such level"):
        Collector(make, None, frames_per_batch=10)


def test_environments_are_closed_unless_told_otherwise():
    class Closing(CodeEnv):
        closed = 0

        def close(self):
            self.closed += 1

    for close_env in (True, False):
        env = Closing()
        collector = Collector(lambda env=env: env, CodePolicy(), frames_per_batch=10)
        collector.next()
        collector.shutdown(close_env=close_env)
        collector.shutdown()
        assert env.closed == close_env


@pytest.mark.parametrize("make", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("close_env", [True, False])
def test_workers_close_their_environments_unless_told_otherwise(make, close_env, tmp_path):
    class Closing(CodeEnv):
        def close(self):
            (tmp_path / str(self.worker)).touch()

    each = [{"worker": worker} for worker in range(2)]
    collector = make(Closing, num_workers=2, create_env_kwargs=each, frames_per_batch=10)
    collector.next()
    collector.shutdown(close_env=close_env)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["0", "1"] if close_env else [])
