"""A worker's policy computes the same, to the bit, when its calls do without a look for hooks."""

import copy
import functools
import pickle
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, from_module
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from collectors import Collector, MultiSyncCollector
from collectors.rollout.unhooked import unhook
from sync import NoWeightSyncScheme


class Actor(nn.Module):
    """Of modules in modules, which look at themselves and draw numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 8, bias=False)),
            nn.Dropout(0.5),
            nn.LayerNorm(8),
        )
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        features, _ = self.memory(self.net(observation).unsqueeze(1))
        return self.head(input=features.squeeze(1))


class Choice(nn.Module):
    """An action for CartPole, and whether the network is called without a look for hooks."""

    out_keys = ("action", "is_spared")

    def __init__(self):
        super().__init__()
        self.actor = Actor()

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = self.actor(observation).argmax(-1)
        return action, torch.full(action.shape, spared(self.actor))


class Counting:
    """A hook that knows how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, given, *result):
        self.calls += 1


def unhooked(policy: nn.Module) -> nn.Module:
    own = copy.deepcopy(policy)
    unhook(own)
    return own


def spared(module: nn.Module) -> bool:
    return type(module).__call__ is not nn.Module.__call__


def same(one: nn.Module, other: nn.Module) -> bool:
    outputs = []
    for policy in (one, other):
        torch.manual_seed(3)
        outputs.append(policy(torch.linspace(-1, 1, 20).reshape(5, 4)))
    return torch.equal(*outputs)


def test_it_computes_the_same_and_is_what_it_was():
    policy = Actor()
    own = unhooked(policy)
    assert all(spared(module) for module in own.modules())
    assert same(policy, own)
    assert same(policy.eval(), own.eval())
    assert isinstance(own, Actor)
    assert isinstance(own.net[0], nn.Linear)
    assert repr(own) == repr(policy)
    assert list(own.state_dict()) == list(policy.state_dict())


def test_gradients_are_the_same():
    policy = Actor().eval()
    own = unhooked(policy)
    for module in (policy, own):
        module(torch.ones(2, 4)).sum().backward()
    for one, other in zip(policy.parameters(), own.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_new_parameters_are_used_however_they_come():
    policy, other = Actor(), Actor()
    own = unhooked(policy)
    own.load_state_dict(other.state_dict())
    assert same(own, other)
    own.net[0].weight = nn.Parameter(torch.zeros(8, 4))
    other.net[0].weight = nn.Parameter(torch.zeros(8, 4))
    assert same(own, other)
    values = dict(policy.named_parameters())
    given = torch.ones(3, 4)
    own.eval(), policy.eval()
    assert torch.equal(torch.func.functional_call(own, values, given), policy(given))
    with from_module(policy).data.to_module(own):
        assert torch.equal(own(given), policy(given))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("name", ["", "net", "net.0", "net.1.1", "head"])
def test_hooks_are_called(register, name):
    policy = Actor()
    hook = Counting()
    getattr(policy.get_submodule(name), register)(hook)
    unhook(policy)
    assert not spared(policy.get_submodule(name))
    assert spared(policy.memory)
    policy(torch.ones(1, 4))
    assert hook.calls == 1


def test_hooks_of_all_modules_are_called():
    policy, hook = nn.Sequential(nn.Linear(4, 2)), Counting()
    handle = register_module_forward_hook(hook)
    try:
        unhook(policy)
        policy(torch.ones(1, 4))
    finally:
        handle.remove()
    assert hook.calls == 2


def test_a_forward_of_its_own_is_called():
    policy = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    policy[1].forward = lambda given: given + 1
    own = unhooked(policy)
    assert same(policy, own)


def test_a_lazy_layer_becomes_what_it_will_be():
    policy = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    unhook(policy)
    assert policy(torch.ones(2, 4)).shape == (2, 3)
    assert type(policy[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_wrapped_parameters_are_computed():
    policy = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.utils.spectral_norm(nn.Linear(8, 2)),
    )
    own = unhooked(policy)
    assert same(policy, own)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_a_compiler_made_is_left_alone():
    inner = nn.Sequential(nn.Linear(4, 2))
    for policy in (
        torch.jit.script(copy.deepcopy(inner)),
        nn.Sequential(torch.compile(copy.deepcopy(inner), backend="eager")),
    ):
        kinds = [type(module) for module in policy.modules()]
        unhook(policy)
        assert [type(module) for module in policy.modules()] == kinds
        assert same(policy, inner)
    compiled = copy.deepcopy(inner)
    compiled.compile(backend="eager")
    unhook(compiled)
    assert type(compiled) is nn.Sequential
    assert same(compiled, inner)


def test_a_class_that_counts_its_kinds_gets_no_other():
    class Registered(nn.Sequential):
        kinds = ()

        def __init_subclass__(cls, *, known_as: str):
            Registered.kinds += (cls,)

    policy = Registered(nn.Linear(4, 2))
    unhook(policy)
    assert type(policy) is Registered
    assert Registered.kinds == ()
    assert spared(policy[0])


def test_tensordict_modules_stay_and_what_they_hold_is_spared():
    one = TensorDictModule(Actor(), in_keys=["observation"], out_keys=["logits"])
    policy = TensorDictSequential(one)
    own = unhooked(policy)
    assert [type(own), type(own.module[0])] == [TensorDictSequential, TensorDictModule]
    assert spared(own.module[0].module)
    given = TensorDict(observation=torch.ones(3, 4), batch_size=3)
    own.eval(), policy.eval()
    assert torch.equal(own(given.clone())["logits"], policy(given.clone())["logits"])


def test_a_copy_is_as_it_was_before():
    own = unhooked(Actor())
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert type(twin) is Actor
        assert type(twin.net[0]) is nn.Linear
        assert not spared(twin)
        assert same(twin, own)


@pytest.mark.parametrize("policy", [None, lambda observation: observation, object()])
def test_what_is_no_module_is_left_alone(policy):
    unhook(policy)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_only_the_workers_own_policy_is_spared(kind):
    policy = Choice()
    make: Any = functools.partial(gym.make, "CartPole-v1")
    with kind(
        make if kind is Collector else [make] * 2, policy, frames_per_batch=16, total_frames=32
    ) as collector:
        assert all(batch["is_spared"].all() for batch in collector)
    assert not any(spared(module) for module in policy.modules())


def test_the_trainers_own_policy_acts_as_it_is():
    policy = Choice()
    with Collector(
        functools.partial(gym.make, "CartPole-v1"),
        policy,
        frames_per_batch=16,
        total_frames=32,
        weight_sync_schemes={"policy": NoWeightSyncScheme()},
    ) as collector:
        assert not any(batch["is_spared"].any() for batch in collector)


def test_a_policy_that_the_factory_gives_to_all_acts_as_it_is():
    policy = Choice()
    with Collector(
        functools.partial(gym.make, "CartPole-v1"),
        policy_factory=lambda: policy,
        frames_per_batch=16,
        total_frames=32,
    ) as collector:
        assert not any(batch["is_spared"].any() for batch in collector)
