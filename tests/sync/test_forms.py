"""The ways of saying what is sent and to whom; each goes end to end, every other is refused."""

from __future__ import annotations

import itertools
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightStrategy
from sync.sender_form import resolve_model
from tests.sync.support import KINDS, bits, fill, held, policy, receive, running

CPU = torch.device("cpu")


class Collector:
    """As much of a collector as a scheme looks at."""

    def __init__(self, model, num_workers=1, **more):
        self.model, self.num_workers = model, num_workers
        self.__dict__.update(more)

    def get_model(self, model_id):
        return {"policy": self.model}[model_id]


class Nest:
    """Models within reach of dotted names."""

    def __init__(self, model):
        self.agents = [SimpleNamespace(actor=nn.ModuleDict({"net": model}).net)]


def multiplied(worker, weights):
    """A mapping that gives each worker weights of its own."""
    flat = WeightStrategy("state_dict").extract_weights(weights)
    return {name: tensor * (worker + 2) for name, tensor in flat.items()}


FORMS = {
    "get_model": lambda m: {"model_id": "policy", "context": Collector(m)},
    "dotted": lambda m: {"model_id": "agents.0.actor", "context": Nest(m)},
    "params_map": lambda m: {"params_map": {0: m, 1: m}},
    "model_devices": lambda m: {"model": m, "devices": [CPU]},
    "weights_devices": lambda m: {"weights": shared_weights(m), "devices": ["cpu", None]},
    "model_mapped": lambda m: {"model": m, "device_map_fn": multiplied, "num_workers": 1},
    "weights_mapped": lambda m: {
        "weights": shared_weights(m),
        "device_map_fn": multiplied,
        "num_workers": 2,
    },
}


def shared_weights(model):
    return WeightStrategy().extract_weights(model)


@pytest.mark.parametrize(("form", "kind"), [*zip(FORMS, itertools.cycle(KINDS), strict=False)])
def test_every_form_brings_weights_to_the_workers_it_speaks_of(form, kind):
    model = policy(1)
    given = FORMS[form](model)
    scheme = KINDS[kind]()
    scheme.init_on_sender(**given)
    with running(scheme, background=True) as workers:
        for value in (1, 3):
            if value != 1:
                fill(model, value)
                scheme.send()
            for worker, process in enumerate(workers):
                expected = value * (worker + 2) if "device_map_fn" in given else value
                assert process.do(held) == bits(policy(expected))


NAMES = (
    "context",
    "weights",
    "model",
    "params_map",
    "devices",
    "device_map_fn",
    "num_workers",
)
ACCEPTED = [
    {"params_map"},
    {"weights", "devices"},
    {"model", "devices"},
    {"weights", "device_map_fn", "num_workers"},
    {"model", "device_map_fn", "num_workers"},
]


def arguments(names):
    model = policy(1)
    return {
        name: {
            "context": Collector(model),
            "weights": dict(model.state_dict()),
            "model": model,
            "params_map": {0: model},
            "devices": ["cpu"],
            "device_map_fn": multiplied,
            "num_workers": 1,
        }[name]
        for name in names
    }


@pytest.mark.parametrize("count", range(len(NAMES) + 1))
def test_every_other_mix_is_refused_and_the_clash_is_named(count):
    scheme = SharedMemWeightSyncScheme()
    for mix in itertools.combinations(NAMES, count):
        for model_id in (None, "policy"):
            if set(mix) in ACCEPTED or (model_id and mix == ("context",)):
                continue
            with pytest.raises(ValueError, match="init_on_sender got") as refusal:
                scheme.init_on_sender(model_id=model_id, **arguments(mix))
            said = str(refusal.value)
            assert "is missing" in said or "does not go with it" in said
            assert all(name in said for name in mix)
            assert "It takes one of: " in said
            assert not scheme.initialized_on_sender


@pytest.mark.parametrize("names", [tuple(sorted(mix)) for mix in ACCEPTED], ids="+".join)
def test_a_model_id_may_name_the_model_of_any_form(names):
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", **arguments(names))
        assert scheme.model_id == "policy"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": True, "devices": []}, "at least one worker"),
        ({"model": True, "device_map_fn": multiplied, "num_workers": 0}, "at least one worker"),
        ({"model": True, "device_map_fn": multiplied, "num_workers": 1.5}, "a whole number"),
        ({"model": True, "devices": 0}, r"0 is one device; .* devices=\[0\] for one"),
        ({"model": True, "devices": "cpu"}, r"is one device; .* devices=\['cpu'\] for one"),
        ({"model": True, "devices": CPU}, r"is one device; .* devices=\['cpu'\] for one"),
        ({"model_id": "policy", "context": Collector(policy(1), 0)}, "at least one worker"),
        ({"params_map": [policy(1)]}, "a dict of weights by worker.* it is a list"),
        ({"params_map": {}}, "one entry for each worker 0, 1"),
        ({"params_map": {1: policy(1)}}, r"it has \[1\]"),
        ({"params_map": {0: policy(1), 2: policy(1)}}, r"it has \[0, 2\]"),
    ],
)
def test_a_form_without_a_worker_for_every_index_is_refused(given, says):
    if "model" in given:
        given = {**given, "model": policy(1)}
    with pytest.raises(ValueError, match=says):
        SharedMemWeightSyncScheme().init_on_sender(**given)


def test_weights_for_workers_that_differ_in_more_than_values_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'weight' has shape \[3, 4\], expected \[3, 2\]"):
        SharedMemWeightSyncScheme().init_on_sender(
            params_map={0: nn.Linear(2, 3), 1: nn.Linear(4, 3)}
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"params_map": {0: None}}, "a dict of tensors, not NoneType"),
        ({"weights": {0: policy(1)}, "devices": ["cpu"]}, "Sequential, not a tensor; .*params_map"),
    ],
)
def test_what_is_no_weights_is_refused_with_its_type(given, says):
    with pytest.raises(TypeError, match=says):
        SharedMemWeightSyncScheme().init_on_sender(**given)


def test_a_context_without_that_model_is_refused_with_what_is_missing():
    scheme = SharedMemWeightSyncScheme()
    with pytest.raises(ValueError, match=r"'agents\.0\.critic': Nest has no 'critic' there"):
        scheme.init_on_sender(model_id="agents.0.critic", context=Nest(policy(1)))
    with pytest.raises(ValueError, match=r"'agents\.7\.actor': Nest has no '7' there"):
        scheme.init_on_sender(model_id="agents.7.actor", context=Nest(policy(1)))


def test_dotted_names_reach_into_attributes_lists_and_modules():
    model = policy(1)
    assert resolve_model(Nest(model), "agents.0.actor") is model
    assert resolve_model(Nest(model), "agents.0.actor.0") is model[0]
    assert resolve_model(Collector(model), "policy") is model


def test_a_context_says_how_many_workers_there_are_and_where():
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", context=Collector(policy(1), 3))
        assert scheme.num_workers == 3
        here = Collector(policy(1), 2, policy_device=["cpu", "meta"])
        scheme.init_on_sender(model_id="policy", context=here)
        assert [str(scheme.worker(w)) for w in range(2)] == [
            "worker 0 (cpu)",
            "worker 1 (meta)",
        ]
        odd = Collector(policy(1), 3, policy_device=["cpu"] * 2)
        with pytest.raises(ValueError, match="3 workers but 2 policy devices"):
            scheme.init_on_sender(model_id="policy", context=odd)


def test_a_context_is_not_kept_alive():
    context = Collector(policy(1))
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", context=context)
        assert scheme.context is context
        del context
        assert scheme.context is None


def test_cuda_workers_are_not_forked():
    model = policy(1)
    scheme = SharedMemWeightSyncScheme()
    with pytest.raises(ValueError, match="CUDA workers cannot be forked"):
        scheme.init_on_sender(
            model=model, devices=["cuda:0"], ctx=multiprocessing.get_context("fork")
        )
    for method in ("spawn", "forkserver"):
        ctx = multiprocessing.get_context(method)
        scheme.init_on_sender(model=model, devices=["cuda:0"], ctx=ctx)
    scheme.init_on_sender(model=model, devices=["cpu"], ctx=multiprocessing.get_context("fork"))
    scheme.shutdown()


def test_weights_that_are_sent_by_worker_are_mapped_too():
    def add_worker(worker, weights):
        return {name: tensor.detach() + worker for name, tensor in weights.items()}

    scheme = MultiProcessWeightSyncScheme()
    zeros = dict.fromkeys(["weight"], torch.zeros(1, 1))
    scheme.init_on_sender(weights=zeros, device_map_fn=add_worker, num_workers=2)
    with running(scheme, lambda: nn.Linear(1, 1, bias=False)) as workers:
        scheme.send_async({0: zeros, 1: zeros})
        for number, worker in enumerate(workers):
            assert worker.do(receive, 20)
            assert worker.do(lambda s, m: m.weight.item()) == number
