"""Policies of every form act as they would by hand, and bad ones are told what is wrong."""

from __future__ import annotations

import re
from functools import partial

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
    interaction_type,
    set_interaction_type,
)
from torch import nn

from collectors import Collector, MultiSyncCollector
from collectors.rollout.policy import _takes_tensordict, warn_of_training_mode
from sync import HogwildWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.collectors.support import (
    NUM_ACTIONS,
    Checker,
    CodeEnv,
    CodePolicy,
    build,
    make_env,
    same_bits,
)

KIND = "sync_same_step"


def collect(policy, batches=4, **options):
    """What a collector of three environments gets with this policy, verified."""
    checker = Checker([3], policy=False)
    options.setdefault("frames_per_batch", 30)
    with Collector(lambda: make_env(KIND), policy, **options) as collector:
        collector.set_seed(0)
        found = [collector.next() for _ in range(batches)]
    for batch in found:
        checker.check(batch)
    return torch.cat(found, 1)


def by_sum(observation):
    return observation.abs().sum(-1).long() % NUM_ACTIONS


class BySum(nn.Module):
    def forward(self, observation):
        return by_sum(observation)


class TakesTensorDict:
    def __call__(self, td):
        return td.set("action", by_sum(td["observation"]))


def annotated(data: TensorDict) -> TensorDict:
    return data.set("action", by_sum(data["observation"])).set("extra", data["observation"][:, :2])


FORMS = {
    "module": BySum(),
    "TensorDictModule": TensorDictModule(BySum(), ["observation"], ["action"]),
    "TensorDictSequential": TensorDictSequential(
        TensorDictModule(lambda o: o.abs(), ["observation"], ["size"]),
        TensorDictModule(by_sum, ["size"], ["action"]),
    ),
    "function": by_sum,
    "lambda": lambda observation: by_sum(observation),
    "takes a TensorDict by name": TakesTensorDict(),
    "takes a TensorDict by annotation": annotated,
    "gives a dict": lambda observation: {"action": by_sum(observation)},
    "gives a tuple": lambda observation: (by_sum(observation),),
    "gives its actions as a column": lambda observation: by_sum(observation)[:, None],
    "gives its actions in few bits": lambda observation: by_sum(observation).to(torch.int8),
}


@pytest.mark.parametrize("form", FORMS)
def test_policies_of_every_form_act(form):
    batch = collect(FORMS[form])
    assert torch.equal(batch["action"], by_sum(batch["observation"]))


def test_all_outputs_of_a_policy_are_in_the_batch():
    batch = collect(FORMS["TensorDictSequential"])
    assert torch.equal(batch["size"], batch["observation"].abs())
    batch = collect(annotated)
    assert torch.equal(batch["extra"], batch["observation"][..., :2])


def test_outputs_may_be_nested_and_of_any_type():
    class Rich(nn.Module):
        out_keys = ("action", ("deep", "half"), ("deep", "flag"), "_")

        def forward(self, observation):
            half = observation.to(torch.bfloat16)
            return by_sum(observation), half, observation > 1, observation

    batch = collect(Rich())
    assert torch.equal(batch["deep", "half"], batch["observation"].to(torch.bfloat16))
    assert torch.equal(batch["deep", "flag"], batch["observation"] > 1)
    assert "_" not in batch.keys()  # noqa: SIM118


def test_hooks_of_a_module_are_called():
    module, calls = TensorDictModule(BySum(), ["observation"], ["action"]), []
    module.register_forward_hook(lambda *_: calls.append(1))
    collect(module, batches=1, weight_sync_schemes={})
    assert len(calls) == 10


def test_a_hook_that_the_first_call_registers_is_called_from_then_on():
    class Watched(nn.Module):
        out_keys = ("action", "calls")

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)
            self.calls = None

        def forward(self, observation):
            self.layer(observation)
            if self.calls is None:
                self.calls = 0
                self.layer.register_forward_hook(self.count)
            action = torch.zeros(len(observation), dtype=torch.int64)
            return action, torch.full_like(action, self.calls)

        def count(self, *_):
            self.calls += 1

    with MultiSyncCollector(CodeEnv, Watched(), frames_per_batch=20) as collector:
        assert collector.next()["calls"].flatten().tolist() == list(range(20))


def patched():
    """A policy's module, and what of torch it calls, as somebody has patched it."""
    nn.Linear.forward = lambda self, given: given.new_full((len(given), 1), 42.0)
    policy = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    policy.out_keys = ("value",)

    class Acts(nn.Module):
        out_keys = ("action", "value")

        def __init__(self):
            super().__init__()
            self.net = policy

        def forward(self, observation):
            value = self.net(observation)
            return torch.zeros_like(value).long(), value

    return Acts()


def test_a_patched_forward_of_a_layer_takes_effect_in_the_rollout(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # put back afterwards
    with MultiSyncCollector(
        CodeEnv, patched(), policy_factory=patched, frames_per_batch=20
    ) as collector:
        assert (collector.next()["value"] == 42).all()


class Dropping(nn.Module):
    """Shows whether its dropout is active."""

    out_keys = ("action", "kept")

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5))

    def forward(self, observation):
        return by_sum(observation), self.body[1](torch.ones(len(observation), 64)).mean(-1)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_copy_keeps_the_mode_that_the_policy_had_when_the_collector_was_made(kind, recwarn):
    policy = Dropping().eval()
    with kind(CodeEnv, policy, frames_per_batch=20) as collector:
        policy.train()
        collector.update_policy_weights_()
        assert (collector.next()["kept"] == 1).all()
    assert not [one for one in recwarn if "training mode" in str(one.message)]
    with (
        pytest.warns(UserWarning, match=r"training mode: body.1 \(Dropout\)\. .*policy.eval"),
        kind(CodeEnv, policy, frames_per_batch=20) as collector,
    ):
        assert (collector.next()["kept"] != 1).any()


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.LSTM(5, 5, num_layers=2, dropout=0.1), r"itself \(LSTM\)"),
        (nn.Sequential(nn.BatchNorm1d(5)), r"0 \(BatchNorm1d\)"),
        (nn.Sequential(nn.Dropout(0.0), nn.LayerNorm(5)), None),
    ],
)
def test_modules_that_act_otherwise_in_training_are_named(module, named, recwarn):
    warn_of_training_mode(module)
    found = [str(one.message) for one in recwarn]
    assert bool(found) == (named is not None)
    assert named is None or re.search(named, found[0])
    module.eval()
    recwarn.clear()
    warn_of_training_mode(module)
    assert not recwarn


def test_trust_policy_hands_a_tensordict_to_whatever_it_is():
    given = []

    def policy(anything):
        given.append(type(anything))
        return TensorDict(action=by_sum(anything["observation"]), batch_size=[3])

    batch = collect(policy, batches=1, trust_policy=True)
    assert torch.equal(batch["action"], by_sum(batch["observation"]))
    assert set(given) == {TensorDict}


def probabilistic():
    def logits(observation):
        return torch.eye(NUM_ACTIONS)[by_sum(observation)]

    return TensorDictSequential(
        TensorDictModule(logits, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


@pytest.mark.parametrize("how", ["mode", "deterministic", InteractionType.MODE])
def test_probabilistic_modules_act_by_their_mode_when_told_to(how):
    batch = collect(probabilistic(), exploration_type=how)
    assert torch.equal(batch["action"], by_sum(batch["observation"]))


def test_probabilistic_modules_sample_by_default():
    batch = collect(probabilistic())
    share = (batch["action"] == by_sum(batch["observation"])).float().mean()
    assert 0.1 < share < 0.6  # e / (e + 6) is 0.31
    expected = batch["logits"].log_softmax(-1).gather(-1, batch["action"][..., None]).squeeze(-1)
    assert torch.allclose(batch["action_log_prob"], expected)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((Collector, name) for name in ("random", "mode", "mean", "deterministic")),
        (MultiSyncCollector, "mean"),
    ],
)
def test_a_policy_can_ask_how_to_explore(name, make):
    class Telling(nn.Module):
        out_keys = ("action", "how")

        def forward(self, observation):
            number = list(InteractionType).index(interaction_type())
            return by_sum(observation), torch.full((len(observation),), number)

    with make(CodeEnv, Telling(), frames_per_batch=10, exploration_type=name) as collector:
        batch = collector.next()
    expected = list(InteractionType).index(InteractionType.from_str(name))
    assert (batch["how"] == expected).all()


def test_no_gradients_are_recorded_and_modes_are_put_back():
    def policy(observation):
        assert not torch.is_grad_enabled()
        return by_sum(observation)

    with set_interaction_type(InteractionType.MEAN):
        collect(policy)
        assert interaction_type() is InteractionType.MEAN
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("form", ["lambda", "local class"])
def test_lambdas_and_local_classes_travel_to_workers(form):
    class Local(nn.Module):
        def forward(self, observation):
            return by_sum(observation)

    policy = Local if form == "local class" else lambda: FORMS[form]
    collector, checker = build("sync", KIND, policy=policy)
    with collector:
        for _ in range(3):
            batch = collector.next()
            checker.check(batch)
            assert torch.equal(batch["action"], by_sum(batch["observation"]))


class Wrapped:
    """Explores around a module, and is none itself."""

    def __init__(self):
        self.net = CodePolicy()

    def __call__(self, observation):
        action, _, weights = self.net(observation)
        return {"action": action, "weights": weights}


@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], ids=["single", "sync"])
def test_a_policy_whose_weights_nobody_sends_is_not_published_in_silence(make):
    with (
        make(CodeEnv, Wrapped(), frames_per_batch=10) as collector,
        pytest.raises(ValueError, match=r"the policy is a Wrapped, not an nn.Module"),
    ):
        collector.update_policy_weights_()
    policy, schemes = Wrapped(), {"net": SharedMemWeightSyncScheme()}
    with make(CodeEnv, policy, frames_per_batch=10, weight_sync_schemes=schemes) as collector:
        with torch.no_grad():
            policy.net.number += 4
        collector.update_policy_weights_()
        batch = collector.next()
    assert (batch["weights"] == 4).all()
    assert (batch["policy_version"] == 1).all()


def constant(action):
    return lambda: TensorDictModule(
        lambda o: torch.full((len(o),), action), ["observation"], ["action"]
    )


def test_factories_make_the_policy_where_it_acts():
    with Collector(CodeEnv, policy_factory=constant(5), frames_per_batch=10) as collector:
        assert (collector.next()["action"] == 5).all()
    for factory, expected in ((constant(5), [5, 5]), ([constant(1), constant(2)], [1, 2])):
        with MultiSyncCollector(
            CodeEnv, policy_factory=factory, num_workers=2, frames_per_batch=20
        ) as collector:
            batch = collector.next()
        assert batch["action"][:, 0].tolist() == expected
        assert (batch["action"] == batch["action"][:, :1]).all()


@pytest.mark.parametrize("make", [Collector, MultiSyncCollector])
def test_with_a_factory_the_policy_is_the_source_of_weights(make):
    source = CodePolicy()
    with torch.no_grad():
        source.number += 7
    with make(CodeEnv, source, policy_factory=CodePolicy, frames_per_batch=10) as collector:
        assert (collector.next()["weights"] == 7).all()
        with torch.no_grad():
            source.number += 1
        assert (collector.next()["weights"] == 7).all()
        collector.update_policy_weights_()
        assert (collector.next()["weights"] == 8).all()


class Recurrent(nn.Module):
    """Remembers a running sum of what it saw in this episode, and how many steps that was."""

    in_keys = ("observation", "memory", "count", "is_init")
    out_keys = ("action", ("next", "memory"), ("next", "count"))

    def forward(self, observation, memory, count, is_init):
        memory = torch.zeros_like(observation) if memory is None else memory
        count = torch.zeros(len(observation), dtype=torch.int64) if count is None else count
        assert not (is_init & (count != 0)).any()
        memory = 0.5 * memory + observation
        return memory.sum(-1).abs().long() % NUM_ACTIONS, memory, count + 1


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Collector, "one"),
        (Collector, "sync_same_step"),
        (Collector, "native_next_step"),
        (MultiSyncCollector, "native_disabled"),
    ],
)
def test_state_is_carried_and_starts_anew_with_every_episode(make, kind):
    n = 1 if kind == "one" else 3
    with make(
        make_env, Recurrent(), create_env_kwargs={"kind": kind}, frames_per_batch=11 * n
    ) as collector:
        batches = [collector.next() for _ in range(8)]
        collector.reset()
        batches += [collector.next() for _ in range(2)]
    for row in range(n):
        by_hand, count = torch.zeros(5), 0
        for batch in batches:
            frames = batch[row][batch["collector", "mask"][row]]
            for frame in frames:
                if frame["is_init"]:
                    by_hand, count = torch.zeros(5), 0
                assert torch.equal(frame["memory"], by_hand)
                assert frame["count"] == count
                by_hand, count = 0.5 * by_hand + frame["observation"], count + 1
                assert torch.equal(frame["next", "memory"], by_hand)
                assert frame["next", "count"] == count
                assert frame["action"] == by_hand.sum().abs().long() % NUM_ACTIONS


def test_new_episodes_after_a_saved_state_is_loaded_begin_with_a_state_of_zero():
    def make():
        return Collector(
            partial(CodeEnv, endless=True), Recurrent(), frames_per_batch=7, resume_episodes=False
        )

    with make() as first:
        assert first.next()["next", "count"][0, -1] == 7
        state = first.state_dict()
    with make() as second:
        assert second.load_state_dict(state) is False
        assert second.next()["count"].tolist() == [[*range(7)]]


def test_state_may_be_the_first_of_what_a_policy_takes():
    class Counting(nn.Module):
        in_keys = ("count", "observation")
        out_keys = ("action", ("next", "count"))

        def forward(self, td):
            count = td.get("count", torch.zeros(3))
            return td.set("action", by_sum(td["observation"])).set(("next", "count"), count + 1)

    batch = collect(Counting())
    assert torch.equal(batch["count"], batch["observation"][..., 3])


def test_state_of_a_tensordict_module_is_carried_too():
    def remember(observation, memory):
        memory = torch.zeros(len(observation)) if memory is None else memory
        return by_sum(observation), memory + 1

    policy = TensorDictModule(remember, ["observation", "memory"], ["action", ("next", "memory")])
    batch = collect(policy)
    assert torch.equal(batch["memory"], batch["observation"][..., 3])  # the step in its episode


@pytest.mark.parametrize("where", ["in place", "in a buffer"])
def test_state_may_lie_where_the_policy_writes_again(where):
    class Counting(nn.Module):
        in_keys = ("observation", "count")
        out_keys = ("action", ("next", "count"))
        own = torch.zeros(3)

        def forward(self, observation, count):
            count = torch.zeros(3) if count is None else count
            into = count if where == "in place" else self.own
            return by_sum(observation), torch.add(count, 1, out=into)

    with Collector(
        make_env, Counting(), create_env_kwargs={"kind": KIND}, frames_per_batch=30
    ) as collector:
        batch, state = collector.next(), collector.state_dict()
        saved = state["workers"][0]["state"]["count"].clone()
        collector.load_state_dict(state)
        collector.next()
    assert torch.equal(batch["count"], batch["observation"][..., 3])
    assert torch.equal(batch["next", "count"], batch["next", "observation"][..., 3])
    assert torch.equal(state["workers"][0]["state"]["count"], saved)


def test_state_starts_anew_in_a_collector_that_goes_back_to_its_start():
    with Collector(lambda: gym.make("CartPole-v1"), Alternating(), frames_per_batch=7) as collector:
        collector.set_seed(1)
        start = collector.state_dict()
        first = collector.next()
        assert collector.load_state_dict(start)
        assert same_bits(collector.next(), first)


class Alternating(Recurrent):
    """Has two actions only."""

    def forward(self, *inputs):
        action, *state = super().forward(*inputs)
        return action % 2, *state


def test_state_goes_on_in_a_collector_that_goes_on():
    def build():
        return Collector(lambda: gym.make("CartPole-v1"), Alternating(), frames_per_batch=7)

    with build() as first:
        first.set_seed(1)
        first.next()
        state = first.state_dict()
        expected = first.next()
    with build() as second:
        assert second.load_state_dict(state)
        assert same_bits(second.next(), expected)
    assert expected["count"][0, 0] > 0


@pytest.mark.slow
def test_compiled_policies_act_alike():
    policy = BySum()
    try:
        torch.compile(policy)(torch.zeros(3, 5))
    except Exception as error:  # noqa: BLE001 - whatever a missing compiler does
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    for how in (True, {"dynamic": False}):
        batch = collect(policy, compile_policy=how)
        assert torch.equal(batch["action"], by_sum(batch["observation"]))


def is_late(observation):
    """Whether an episode has had a step."""
    return bool((observation[:, 3] > 0).any())


def with_keys(function, **keys):
    class Module(nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    for name, value in keys.items():
        setattr(Module, name, value)
    return Module()


UNKNOWN_INPUT = with_keys(by_sum, in_keys=["pixels"])
ACTION_AND_VALUE = {"out_keys": ["action", "value"]}
OF_THE_WRONG_TYPE = [
    (lambda o: 3, "the policy returned a int"),
    (lambda o: by_sum(o).numpy(), "the policy returned a ndarray"),
]
OF_THE_WRONG_VALUE = [
    (UNKNOWN_INPUT, "the policy needs 'pixels', but the environment has 'observation'"),
    (with_keys(by_sum, out_keys=["logits"]), "the policy returns 'logits', but no 'action'"),
    (lambda o: {"logits": o}, "the policy returned 'logits', but no 'action'"),
    (lambda o: (by_sum(o), o), "the policy returned 2 tensors, but has no out_keys"),
    (
        with_keys(by_sum, **ACTION_AND_VALUE),
        "the policy returned 1 tensors, but has 'action', 'value'",
    ),
    (
        lambda o: by_sum(o)[:1],
        r"output 'action' is \[1\]; the first dimension must be the 3 environments",
    ),
    (
        lambda o: torch.zeros(3, NUM_ACTIONS),
        r"the policy's actions are \[3, 7\]; the action space requires \[3\]",
    ),
    (
        with_keys(lambda o: (by_sum(o), o / 2), out_keys=["action", "observation"]),
        "the policy's output 'observation' has the name of another entry of batches",
    ),
    (
        with_keys(lambda o: (by_sum(o), o[:, 0]), out_keys=["action", ("next", "reward")]),
        "the policy's output 'next/reward' has the name of another entry of batches",
    ),
    (lambda o: by_sum(o.add_(1)), "the policy wrote to an observation"),
    (lambda o: by_sum(o.add_(1) if is_late(o) else o), "the policy wrote to an observation"),
    (lambda o: by_sum(o) + 0.5, "the policy's actions are float32, but the space has int64"),
    (
        lambda o: by_sum(o) + (0.5 if is_late(o) else 0),
        "the policy's actions are float32, but the space has int64",
    ),
    (
        with_keys(lambda o: (by_sum(o), o[: 1 if is_late(o) else 3]), **ACTION_AND_VALUE),
        r"output 'value' has the shape \[1, 5\], but \[3, 5\] at the first call",
    ),
    (
        lambda o: {"action": by_sum(o)} if is_late(o) else {"action": by_sum(o), "value": o},
        "the policy returned 'action', but 'action', 'value' at its first call",
    ),
]


def test_a_policy_that_returns_the_wrong_thing_is_told_so():
    for error, table in ((TypeError, OF_THE_WRONG_TYPE), (ValueError, OF_THE_WRONG_VALUE)):
        for policy, message in table:
            with pytest.raises(error, match=message):
                collect(policy)
    with pytest.raises(RuntimeError, match="the policy needs 'pixels'"):
        build("sync", KIND, policy=lambda: UNKNOWN_INPUT)

    def raising(observation):
        raise ArithmeticError("no idea")

    with pytest.raises(ArithmeticError, match="no idea"):
        collect(raising)


def test_a_policy_without_a_beginning_for_its_state_is_told_of_it():
    policy = TensorDictSequential(
        TensorDictModule(lambda o, m: m + 1, ["observation", "memory"], [("next", "memory")]),
        TensorDictModule(by_sum, ["observation"], ["action"]),
    )
    with pytest.raises(KeyError) as caught:
        collect(policy)
    assert "the shape of 'memory'" in caught.value.__notes__[-1]


def test_actions_that_are_not_numbers_are_told_as_the_policys():
    def policy(observation):
        calls.append(observation)
        return observation[:, :1] * (float("nan") if len(calls) == 4 else 1)

    calls = []
    with (
        Collector(lambda: gym.make("Pendulum-v1"), policy, frames_per_batch=10) as collector,
        pytest.raises(ValueError, match="'action' is NaN in environment 0, at step 3"),
    ):
        collector.next()


def test_actions_may_be_of_a_type_that_numpy_does_not_know():
    def policy(observation):
        return observation[:, :1].bfloat16()

    with Collector(lambda: gym.make("Pendulum-v1"), policy, frames_per_batch=10) as collector:
        batch = collector.next()
    assert batch["action"].dtype == torch.float32
    assert torch.equal(batch["action"], batch["observation"][..., :1].bfloat16().float())


def test_collecting_in_inference_mode_is_collecting():
    with torch.inference_mode():
        inside = collect(CodePolicy())
    assert all(same_bits(a, b) for a, b in zip(inside, collect(CodePolicy()), strict=True))


def test_policy_calls_during_which_hogwild_weights_moved_are_counted():
    calls = []

    class Stepping(nn.Module):
        """Has the trainer step in the middle of every third call."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, observation):
            calls.append(self.bias.item())
            if len(calls) % 3 == 0:
                trained.bias.data += 1
            return by_sum(observation)

    trained, scheme = Stepping(), HogwildWeightSyncScheme(check_every=1)
    schemes = {"policy": scheme}
    with Collector(
        lambda: make_env(KIND), trained, frames_per_batch=30, weight_sync_schemes=schemes
    ) as collector:
        for _ in range(3):
            collector.next()
        found = collector.stats()["sync"]["policy"]["torn"]
    assert calls[-1] > 0  # they are the trainer's own
    assert found["checked"] == len(calls) >= 30
    assert found["torn"] == len(calls) // 3
    assert found["fraction"] == found["torn"] / found["checked"]


def test_a_trainers_policy_that_is_nan_is_refused_under_every_scheme():
    schemes = (NoWeightSyncScheme, SharedMemWeightSyncScheme, HogwildWeightSyncScheme)
    for scheme in schemes:
        policy = nn.Linear(4, 2)
        direct = scheme is NoWeightSyncScheme
        make, workers = (Collector, {}) if direct else (MultiSyncCollector, {"num_workers": 1})
        with make(
            lambda: gym.make("CartPole-v1"),
            Chosen(policy),
            frames_per_batch=8,
            weight_sync_schemes={"policy": scheme()},
            **workers,
        ) as collector:
            collector.next()
            before = collector.policy_version
            nn.init.constant_(policy.weight, torch.nan)
            with pytest.raises(ValueError, match=r"send refused: 'layer.weight' holds 8 NaN"):
                collector.update_policy_weights_()
            assert collector.policy_version == before


class Chosen(nn.Module):
    """Acts by the larger output of a layer."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, observation):
        return self.layer(observation).argmax(-1)


def of_type(note):
    def policy(frame): ...

    policy.__annotations__["frame"] = note
    return policy


@pytest.mark.parametrize(
    ("policy", "takes"),
    [
        (of_type(TensorDict), True),
        (of_type(TensorDictBase), True),
        (of_type("tensordict.TensorDictBase"), True),
        (of_type("TensorDict"), True),
        (of_type(torch.Tensor), False),
        (of_type("torch.Tensor"), False),
        (lambda td: td, True),
        (lambda tensordict: tensordict, True),
        (lambda frame: frame, False),
        (lambda td, tensordict: td, False),
    ],
)
def test_a_policy_takes_a_tensordict_by_its_name_or_its_annotation(policy, takes):
    assert _takes_tensordict(policy) == takes
