"""Which environments are taken, in what form their data comes, and what is said of bad ones."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

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

SAME_STEP = AutoresetMode.SAME_STEP
FORMS = [None, *AutoresetMode]  # one environment, or a vector of this mode
CARTPOLE = gym.make("CartPole-v1").unwrapped.observation_space
BOX = spaces.Box(-1, 1, (2,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)


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


def check(make, batches=5, envs=1, frames=30):
    """Verify batches of coding environments; the checker."""
    checker = Checker([envs])
    with Collector(make, CodePolicy(), frames_per_batch=frames) as collector:
        for _ in range(batches):
            checker.check(collector.next())
    return checker


def members_of(mode, *args, **kwargs):
    """Environments of spaces, and what holds them: themselves, or a vector of this mode."""
    members = [SpaceEnv(*args, **kwargs) for _ in range(1 if mode is None else 2)]
    if mode is None:
        return members, members[0]
    return members, SyncVectorEnv([lambda m=m: m for m in members], autoreset_mode=mode)


# What is taken


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


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_are_recorded_as_the_environment_was_told(name):
    space, dtype, shape = ACTIONS[name]
    for mode in (None, AutoresetMode.NEXT_STEP):
        members, env = members_of(mode, action=space)
        batch = collect(env, frames=20 * len(members))
        assert batch["action"].dtype == dtype
        assert batch["action"].shape == (len(members), 20, *shape)
        for row, member in zip(batch["action"], members, strict=True):
            assert np.array_equal(row.numpy(), np.stack([np.asarray(a) for a in member.told]))
        assert len(batch["action"].reshape(20 * len(members), -1).unique(dim=0)) > 1


def nested(space):
    """An observation space's keys, as a batch has them, and how to find each in a sample."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces
        return {
            (str(name), *key): (lambda value, name=name, find=find: find(value[name]))
            for name, part in (parts.items() if isinstance(parts, dict) else enumerate(parts))
            for key, find in nested(part).items()
        }
    return {(): lambda value: value}


OBSERVATIONS = {
    "Box": spaces.Box(-1, 1, (3,), np.float32),
    "float64 Box": spaces.Box(-1, 1, (2, 2), np.float64),
    "image": IMAGE,
    "Discrete": spaces.Discrete(9),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(5),
    "Dict": spaces.Dict(image=IMAGE, where=BOX),
    "nested Dict": spaces.Dict(
        a=spaces.Dict(b=spaces.Discrete(3), c=spaces.Dict(d=IMAGE)), e=spaces.MultiBinary(2)
    ),
    "Tuple": spaces.Tuple([spaces.Discrete(5), BOX]),
    "Dict of Tuple": spaces.Dict(x=spaces.Tuple([spaces.Discrete(5), IMAGE])),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, None) for name in OBSERVATIONS),
        *((name, mode) for name in ("nested Dict", "Tuple") for mode in AutoresetMode),
    ],
)
def test_observations_are_recorded_as_they_were_shown(name, mode):
    members, env = members_of(mode, OBSERVATIONS[name])
    batch = collect(env, frames=20 * len(members))
    for path, find in nested(OBSERVATIONS[name]).items():
        key = path or ("observation",)
        for row, member in enumerate(members):
            shown = [find(one) for one in member.shown]
            # every episode of 5 steps shows 6 observations
            before = [np.asarray(o) for i, o in enumerate(shown) if i % 6 != 5][:20]
            after = [np.asarray(o) for i, o in enumerate(shown) if i % 6 != 0][:20]
            assert np.array_equal(batch[key][row].numpy(), np.stack(before)), key
            assert np.array_equal(batch[("next", *key)][row].numpy(), np.stack(after)), key
        assert batch[key].numpy().dtype == np.asarray(shown[0]).dtype


class Mission(spaces.Space):
    """A space of strings that is no `Text`, like MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "get the key"

    def contains(self, x):
        return isinstance(x, str)


WHERE = {"where": spaces.Discrete(5)}
WITH_TEXT = [
    (spaces.Dict(mission=spaces.Text(9), **WHERE), "mission", "where"),
    (spaces.Dict(mission=Mission(), **WHERE), "mission", "where"),
    (spaces.Dict(told=spaces.Dict(mission=spaces.Text(9)), **WHERE), "told/mission", "where"),
    (spaces.Tuple([spaces.Text(9), spaces.Discrete(5)]), "0", "1"),
]


@pytest.mark.parametrize(("case", "mode"), zip(WITH_TEXT, FORMS, strict=True))
def test_text_among_other_observations_is_left_out_by_name(case, mode):
    space, text, key = case
    members, env = members_of(mode, space)
    with pytest.warns(UserWarning, match=f"SpaceEnv|SyncVectorEnv.*left out of batches: '{text}'"):
        batch = collect(env, lambda where: where % 2, frames=20 * len(members))
    assert set(batch.keys()) >= {key}
    assert not {"mission", "told", "0"} & set(batch.keys())
    assert torch.equal(batch["action"], batch[key] % 2)
    find = nested(space)[(key,)]
    for row, member in zip(batch[key].tolist(), members, strict=True):
        shown = [int(find(one)) for one in member.shown]
        assert row == [one for i, one in enumerate(shown) if i % 6 != 5][:20]


def test_one_of_several_workers_says_what_is_left_out_and_bytes_stay_bytes(capfd):
    def make():
        parts = spaces.Dict(mission=spaces.Text(9), image=IMAGE)
        return NormalizeReward(SpaceEnv(parts))

    # What is forked would write, or record, where its parent did when it was started.
    options = {"num_workers": 2, "frames_per_batch": 20, "start_method": "spawn"}
    with MultiSyncCollector(make, None, **options) as collector:
        image = collector.next()["image"]
    assert (image.dtype, image.shape) == (torch.uint8, (2, 10, 8, 8, 3))
    assert len(image.unique()) > 200
    told = capfd.readouterr().err
    assert told.count("left out of batches: 'mission'") == 1
    assert told.count("the statistics of NormalizeReward differ between workers") == 1


STATISTICS = [
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
]


def test_wrappers_whose_statistics_are_each_workers_own_are_named():
    for wrap, names in STATISTICS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            collect(wrap())
        told = [str(one.message) for one in caught if "statistics of" in str(one.message)]
        assert len(told) == len(names)
        for text, name in zip(told, names, strict=True):
            assert f"statistics of {name} differ" in text
            assert "algo.normalise_observations=true" in text


def test_wrappers_are_obeyed():
    batch = collect(TimeLimit(CodeEnv(endless=True), 4), CodePolicy())
    assert batch["next", "truncated"][0].nonzero().flatten().tolist() == [3, 7, 11, 15, 19]
    assert not batch["next", "terminated"].any()
    batch = collect(FlattenObservation(SpaceEnv(OBSERVATIONS["Dict"])))
    assert batch["observation"].shape == (1, 20, 8 * 8 * 3 + 2)
    seen = []

    def policy(observation):
        seen.append(observation.clone())
        return torch.zeros(1, dtype=torch.int64)

    batch = collect(NormalizeObservation(gym.make("CartPole-v1")), policy)
    assert torch.equal(batch["observation"][0], torch.cat(seen)[:20])


@pytest.mark.parametrize("mode", FORMS)
def test_statistics_wrappers_do_not_disturb_the_data(mode):
    if mode is None:
        check(lambda: RecordEpisodeStatistics(CodeEnv()))
        return
    members = [partial(CodeEnv, 0, i) for i in range(3)]
    vector = partial(SyncVectorEnv, members, autoreset_mode=mode)
    check(lambda: vector_wrappers.RecordEpisodeStatistics(vector()), envs=3)


@pytest.mark.parametrize("how", ["sync", "vector_entry_point"])
def test_vectors_that_gymnasium_makes_are_taken(how):
    make = partial(gym.make_vec, "CartPole-v1", num_envs=4, vectorization_mode=how)
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
        super().__init__(spaces.Dict({"position": BOX, "desired": BOX, "achieved": BOX}))


def farther(position, desired):
    return (position[:, 0] > desired[:, 0]).long()


def test_a_policy_of_several_observations_names_its_inputs():
    in_order = partial(farther)
    in_order.in_keys = ["position", "desired"]
    for policy in (
        in_order,
        lambda td: td.set("action", farther(td["position"], td["desired"])),
    ):
        batch = collect(Goals(), policy)
        expected = (batch["position"] > batch["desired"])[..., 0].long()
        assert torch.equal(batch["action"], expected)
    module = nn.Module()
    module.forward = farther
    for policy in (farther, module):
        with pytest.raises(ValueError, match=r"'achieved', 'desired', 'position': .*`in_keys`"):
            collect(Goals(), policy)


TURN_AND_FIRE = {"turn": BOX, "fire": spaces.Discrete(3)}


@pytest.mark.parametrize(
    "space", [spaces.Dict(TURN_AND_FIRE), spaces.Tuple(TURN_AND_FIRE.values())]
)
def test_actions_of_several_parts_can_be_flattened_as_the_error_says(space):
    env = SpaceEnv(action=space)
    with pytest.raises(TypeError, match=r"flatten.*TransformAction.*flatten_space") as refused:
        collect(env)
    told = str(refused.value).partition("gymnasium.wrappers.")[2]
    names = {"TransformAction": TransformAction, "spaces": spaces, "env": env}
    names["space"] = env.action_space
    batch = collect(eval(told, names), lambda _: torch.tensor([[0.5, 1, 0, 0, 1]]))
    assert batch["action"].shape == (1, 20, 5)
    assert len(env.told) == 20


def test_environments_are_made_with_their_arguments():
    checker = Checker([2, 3])
    kwargs = [
        {"kind": "native_same_step", "num_envs": 2, "worker": 0},
        {"num_envs": 3, "worker": 1},
    ]
    with MultiSyncCollector(
        [make_env, lambda **kwargs: make_env("sync_disabled", **kwargs)],
        CodePolicy(),
        create_env_kwargs=kwargs,
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
BEYOND = np.array([0, 1e300, 0])  # float32's range
WRONG = [
    ({"observation": NAN}, r"'observation' is NaN in environment 0, at step 2"),
    ({"observation": np.zeros(4, np.float32)}, r"'observation' as float32 \[4\].*\[3\]"),
    ({"observation": np.zeros(3, complex)}, r"as complex128 \[3\].*float32 \[3\]"),
    ({"observation": "three"}, r"'observation' as <U5 \[\]; its space declares"),
    ({"observation": None}, r"'observation' as object \[\]; its space declares"),
    ({"reward": np.nan}, r"'reward' is NaN in environment 0, at step 2"),
    ({"reward": np.zeros(2)}, r"the reward array\(\[0., 0.\]\), not a number"),
    ({"reward": None}, "'reward' is NaN"),
    ({"observation": BEYOND}, r"'observation' is infinite in float32 in environment 0, at step 2"),
    ({"reward": -np.inf}, r"'reward' is infinite in float32 in environment 0, at step 2"),
    ({"reward": 1e39}, r"'reward' is infinite .* \(worker 0, Bad.*, seed \d+\)"),
    ({"start": np.zeros(2, np.float32)}, r"'observation' as float32 \[2\]"),
    ({"start": NAN}, r"'observation' is NaN in environment 0"),
]


def test_values_that_are_not_as_the_space_says_are_an_error_that_says_so():
    for wrong, message in WRONG:
        with pytest.raises((ValueError, TypeError), match=message):
            collect(Bad(**wrong), frames=10)
    wrong, message = WRONG[0]
    with (
        MultiSyncCollector(lambda: Bad(**wrong), None, frames_per_batch=10) as collector,
        pytest.raises(RuntimeError, match=rf"(?s)worker 0 \(cpu, Bad.*{message}"),
    ):
        collector.next()


HELD = {
    "plain": lambda make: make(),
    "AsyncVectorEnv": lambda make: AsyncVectorEnv([make] * 2, context="fork"),
    "wrapped": lambda make: vector_wrappers.RecordEpisodeStatistics(SyncVectorEnv([make] * 2)),
    **{
        mode.name: (lambda make, mode=mode: SyncVectorEnv([make] * 2, autoreset_mode=mode))
        for mode in AutoresetMode
    },
}


class Wide(Bad):
    def step(self, action):
        observation, *rest = super().step(action)
        return observation.astype(np.float64) + 0.1, *rest


class Broken(Bad):
    observation_space = spaces.Box(-1, 1, (3,), np.int64)

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return np.zeros(3, np.int64), {}

    def step(self, action):
        observation, *rest = super().step(action)
        return observation + 0.5, *rest


@pytest.mark.parametrize("form", HELD)
def test_observations_of_another_width_are_cast_and_those_of_another_kind_refused(form):
    batch = collect(HELD[form](Wide), frames=10)
    assert batch["next", "observation"].dtype == torch.float32
    assert (batch["next", "observation"] == np.float32(0.1)).all()
    if form != "AsyncVectorEnv":  # it casts everything in its own processes, unseen
        with pytest.raises((ValueError, TypeError), match=r"float32.*int64|[Cc]annot cast"):
            collect(HELD[form](Broken), frames=10)


OLD_STEPS = [
    (lambda full: full[:3] + full[4:], r"4 values.*\(observation, reward, term"),
    (lambda full: full[0], r"returned .*array.*\(observation, reward, terminated"),
    (lambda full: None, r"returned None.*\(observation, reward, terminated"),
    (lambda full: (*full[:2], None, *full[3:]), "returned terminated=None"),
    (lambda full: (*full[:3], None, full[4]), "returned truncated=None"),
    (lambda full: (*full[:3], {}, full[4]), "returned truncated={}"),
]
OLD_RESETS = [lambda full: full[0], lambda full: (*full, None)]


@pytest.mark.parametrize("base", [CodeEnv, CodeVector])
def test_values_that_step_and_reset_return_in_another_form_are_shown(base):
    def make(method, change):
        def call(self, *args, **kwargs):
            return change(getattr(base, method)(self, *args, **kwargs))

        old = type("Old", (base,), {method: call})
        return old() if base is CodeEnv else old(0, 3, SAME_STEP)

    for change, message in OLD_STEPS:
        with pytest.raises((ValueError, TypeError), match=rf"(?s)Old.*{message}"):
            collect(make("step", change), frames=12)
    for change in OLD_RESETS:
        with pytest.raises(TypeError, match=r"(?s)Old.*reset.*returned.*\(observation, info\)"):
            collect(make("reset", change), frames=12)


def changed(change):
    """A vector whose steps return what `change` makes of them."""

    class Changed(CodeVector):
        def step(self, actions):
            return change(*super().step(actions))

    return Changed


def test_vectors_that_return_too_little_are_told_so():
    for change, message in (
        (lambda o, *rest: (o[:, :4], *rest), r"'observation' as float32 \[3, 4\].*\[3, 5\]"),
        (
            lambda *rest: (*rest[:3], rest[3].any(), rest[4]),
            r"of shape \[\], not one for each of 3",
        ),
        (lambda *rest: (*rest[:4], {}), "no 'final_obs'"),
    ):
        with pytest.raises(ValueError, match=message):
            collect(changed(change)(0, 3, SAME_STEP), frames=60)


@pytest.mark.parametrize(
    ("mode", "kind"), zip(AutoresetMode, [np.uint8, np.float32, list], strict=True)
)
def test_ends_may_be_told_in_other_types(mode, kind):
    made = changed(lambda o, r, *rest: (o, r, kind(rest[0]), kind(rest[1]), rest[2]))
    check(lambda: made(0, 3, mode), batches=2, envs=3, frames=90)

    class Numbered(CodeEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, np.int64(terminated), np.array(truncated), info

    counts = check(Numbered, batches=1, frames=60).counts
    assert counts["terminated"]
    assert counts["truncated"]


def test_a_missing_part_of_an_observation_is_named():
    class Forgetful(Goals):
        def _show(self):
            shown = super()._show()
            return shown if self.t < 3 else {"position": shown["position"]}

    with pytest.raises(ValueError, match="an observation lacks 'achieved', which its space has"):
        collect(Forgetful())


class Thrifty(gym.Wrapper):
    """Shows the same array again and again, and writes into actions."""

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


class Constant(nn.Module):
    """Hands out the memory of its parameter as actions."""

    in_keys, out_keys = ("observation",), ("action", "value")

    def __init__(self, count):
        super().__init__()
        self.value = nn.Parameter(torch.full((count, 1), 2.0))

    def forward(self, observation):
        return self.value[:], self.value.clone()


@pytest.mark.parametrize("mode", FORMS)
def test_environments_may_show_the_same_array_again_and_write_into_actions(mode):
    members = [lambda i=i: Thrifty(CodeEnv(0, i)) for i in range(3 if mode else 1)]
    make = partial(SyncVectorEnv, members, autoreset_mode=mode) if mode else members[0]
    checker = Checker([len(members)], policy=False)
    with Collector(make, Constant(len(members)), frames_per_batch=60) as collector:
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


def test_a_vector_must_say_how_it_resets():
    why = r"CodeVector has metadata\['autoreset_mode'\] = .*SAME_STEP.*create_env_fn"
    for told in ({}, {"autoreset_mode": "same_step"}):
        env = CodeVector(0, 3, SAME_STEP)
        env.metadata = told
        with pytest.raises(ValueError, match=why):
            collect(env)


def test_a_vectors_own_attribute_comes_before_metadata_that_classes_share():
    """As ale-py's AtariVectorEnv does: it writes into the metadata of all vectors."""

    def make(mode, other):
        env = CodeVector(0, 3, mode)
        env.autoreset_mode = mode
        env.metadata = {"autoreset_mode": other}
        return env

    for mode, other in itertools.permutations(AutoresetMode, 2):
        check(partial(make, mode, other), batches=1, envs=3, frames=90)


REFUSED_SPACES = [
    (spaces.Text(5), spaces.Discrete(2), "Text spaces have no fixed array form"),
    (spaces.Dict(a=spaces.Sequence(BOX)), BOX, "Sequence spaces have no fixed array form"),
    (
        spaces.Dict(a=spaces.Text(5), b=spaces.Tuple([spaces.Text(2)])),
        spaces.Discrete(2),
        "holds nothing.*only text: a, b/0",
    ),
    (CARTPOLE, spaces.Dict(a=spaces.Discrete(2)), "Dict action spaces are not supported"),
    (CARTPOLE, spaces.Tuple([spaces.Discrete(2)]), "Tuple action spaces are not supported"),
    (CARTPOLE, spaces.Text(3), "Text spaces have no fixed array form"),
    (spaces.Dict(), spaces.Discrete(2), "the observation space holds nothing"),
]
RESERVED = ("action", "next", "collector", "is_init", "policy_version", "reward", "done")


def test_spaces_that_do_not_fit_in_batches_are_refused():
    for observation, action, message in REFUSED_SPACES:
        with pytest.raises(TypeError, match=message):
            collect(SpaceEnv(observation, action))
    for name in RESERVED:
        with pytest.raises(ValueError, match=f"observation key '{name}'.*rename it"):
            collect(SpaceEnv(spaces.Dict({name: spaces.Discrete(2)})))


def test_factories_that_make_no_environment_are_refused():
    def fails():
        raise OSError("no such level")

    for made in (None, 3, "CartPole-v1", CodeEnv):
        with pytest.raises(TypeError, match=r"must return a gymnasium.Env.*it returned a"):
            Collector(lambda made=made: made, None, frames_per_batch=10)
    for given in ("CartPole-v1", CodeEnv(), None):
        with pytest.raises(TypeError, match="create_env_fn must be a function"):
            Collector(given, None, frames_per_batch=10)
    with pytest.raises(OSError, match="no such level"):
        Collector(fails, None, frames_per_batch=10)


@pytest.mark.parametrize(
    ("make", "close_env"),
    [
        (Collector, True),
        (Collector, False),
        (MultiSyncCollector, True),
        (MultiAsyncCollector, False),
    ],
)
def test_environments_are_closed_once_unless_told_otherwise(make, close_env, tmp_path):
    class Closing(CodeEnv):
        def close(self):
            (tmp_path / str(self.worker)).touch(exist_ok=False)

    workers = {} if make is Collector else {"num_workers": 2}
    kwargs = [{"worker": worker} for worker in range(workers.get("num_workers", 1))]
    options = {"create_env_kwargs": kwargs if workers else kwargs[0], **workers}
    collector = make(Closing, frames_per_batch=10, **options)
    collector.next()
    collector.shutdown(close_env=close_env)
    collector.shutdown()
    closed = sorted(int(path.name) for path in tmp_path.iterdir())
    assert closed == (list(range(len(kwargs))) if close_env else [])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_wide_unsigned_integers_are_collected_as_they_are(dtype):
    class Depth(gym.Env):
        observation_space = action_space = gym.spaces.Box(0, 60_000, (2,), dtype)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.observations = iter(range(50_000, 60_000, 7))
            return np.full(2, next(self.observations), dtype), {}

        def step(self, action):
            observation = np.full(2, next(self.observations), dtype)
            return observation, float(action[0]), observation[0] % 3 == 0, False, {}

    with Collector(Depth, None, frames_per_batch=20) as collector:
        batch = collector.next()
    assert batch["observation"].dtype == batch["action"].dtype == getattr(torch, dtype.__name__)
    observations = batch["observation"].long()
    assert observations.min() >= 50_000
    following = batch["next", "observation"].long()
    assert (following - observations == 7).all()
    assert torch.equal(batch["action"][..., 0].float(), batch["next", "reward"])
