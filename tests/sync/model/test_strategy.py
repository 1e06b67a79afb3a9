"""Models turned into weights and weights put back, whatever form either has."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from sync.model.strategy import EXTRA_STATE, WeightStrategy
from tests.sync.support import FORMS, Counting, bits, fill, inside, policy

BOTH = pytest.mark.parametrize("form", ["tensordict", "state_dict"])


DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
}


class Everything(nn.Module):
    """Parameters and buffers of every kind that a policy may have."""

    def __init__(self, value: float = 0.0):
        super().__init__()
        for name, dtype in DTYPES.items():
            self.register_parameter(name, nn.Parameter(torch.full((2, 3), value, dtype=dtype)))
        self.scalar = nn.Parameter(torch.tensor(value))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.full((4, 3), value).t())
        self.frozen = nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_parameter("absent", None)
        self.activation = nn.Sequential(nn.ReLU(), nn.Flatten())  # modules of no parameters
        self.register_buffer("steps", torch.full((2,), int(value)))
        self.register_buffer("mask", torch.full((3,), value > 0))
        self.register_buffer("scratch", torch.full((3,), value), persistent=False)
        self.register_buffer("unset", None)


def in_form(form, value):
    return FORMS[form](policy(value))


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "replaced"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_goes_into_every_form_of_destination(form, inplace):
    for frm, to in ((form, form), (form, "module"), ("flat_dict", form)):
        source, destination = in_form(frm, 3), in_form(to, 1)
        if frm != to:
            source, destination = inside(source), inside(destination)
        for _ in range(2):  # the second time does no harm
            WeightStrategy().apply_weights(destination, source, inplace)
            assert bits(inside(destination)) == bits(inside(source)) == bits(policy(3))


@pytest.mark.parametrize("to", FORMS)
def test_in_place_the_destination_keeps_its_memory_and_otherwise_gets_its_own(to):
    destination, source = in_form(to, 1), in_form(to, 3)
    before = memory(destination)
    WeightStrategy().apply_weights(destination, source, inplace=True)
    assert memory(destination) == before
    WeightStrategy().apply_weights(destination, source, inplace=False)
    after = memory(destination)
    assert not any(after[name] in (before[name], memory(source)[name]) for name in after)


def test_what_cannot_be_written_in_place_is_left_as_it_was():
    destination = {"a": torch.zeros(3), "b": torch.zeros(1).expand(3)}
    source = {"a": torch.ones(3), "b": torch.ones(3)}
    with pytest.raises(ValueError, match=r"'b' is expanded, .*clone\(\) it first"):
        WeightStrategy().apply_weights(destination, source)
    assert destination["a"].sum() == 0
    WeightStrategy().apply_weights(destination, source, inplace=False)
    assert destination["a"].sum() == destination["b"].sum() == 3


def test_one_number_that_is_expanded_to_itself_can_be_written_in_place():
    destination = {"a": torch.zeros(()).expand(1)}
    assert destination["a"].stride() == (0,)
    WeightStrategy().apply_weights(destination, {"a": torch.ones(1)})
    assert destination["a"].item() == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_torchscript_module_is_refused_with_what_can_be_sent():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2)))
    with pytest.raises(TypeError, match="TorchScript cannot be sent; send the module that was"):
        WeightStrategy().extract_weights(model)


def memory(source):
    flat = WeightStrategy().flatten(source)
    return {slot.name: slot.tensor.data_ptr() for slot in flat.slots}


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "replaced"])
def test_parameters_stay_the_same_objects_for_their_optimiser(inplace):
    model = policy(1)
    before = list(model.parameters())
    WeightStrategy().apply_weights(model, policy(3), inplace)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.requires_grad and p.is_leaf for p in before)


def test_only_the_tensordict_strategy_carries_non_persistent_buffers():
    assert "scratch" in WeightStrategy("tensordict").extract_weights(Everything())
    assert "scratch" not in WeightStrategy("state_dict").extract_weights(Everything())


class Parts(nn.Module):
    """Modules whose names in a state dict are not obvious."""

    def __init__(self) -> None:
        super().__init__()
        self.params = TensorDictParams(TensorDict(a=torch.ones(2), b={"c": torch.ones(3)}))
        self.list = nn.ParameterList([torch.ones(1), torch.ones(2)])
        self.dict = nn.ParameterDict({"x": torch.ones(1)})
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
        self.shared = self.again = nn.Linear(2, 3)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.shared.weight
        self.counting = Counting({"seen": 1})


def test_names_and_values_are_those_of_the_state_dict():
    for module in (Parts(), policy(), Everything(), nn.Identity()):
        weights = WeightStrategy("state_dict").extract_weights(module)
        expected = module.state_dict()
        assert weights.keys() == expected.keys()
        assert bits(without_extra(weights)) == bits(without_extra(expected))


def without_extra(weights):
    return {name: value for name, value in weights.items() if EXTRA_STATE not in name}


@BOTH
def test_extracted_weights_load_back_and_share_the_models_memory(form):
    model = policy(2)
    weights = WeightStrategy(form).extract_weights(model)
    kept = copy.deepcopy(bits(weights))
    fill(model, 5)
    assert bits(weights) == bits(model) != kept


def test_a_compiled_modules_wrapper_is_no_part_of_its_names():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    plain, wrapped = policy(3), torch.compile(policy(1), backend="eager")
    assert "_orig_mod.0.weight" in wrapped.state_dict()
    WeightStrategy().apply_weights(wrapped, plain)
    assert bits(wrapped._orig_mod) == bits(plain)
    WeightStrategy().apply_weights(Outer(plain), Outer(torch.compile(policy(4), backend="eager")))
    assert bits(plain) == bits(policy(4))


WRONG = {
    "missing": (KeyError, "lacks '2.bias'", lambda w: w.pop("2.bias")),
    "surplus": (KeyError, "has '3.weight'", lambda w: w.update({"3.weight": torch.ones(1)})),
    "misshapen": (
        ValueError,
        r"'2.bias' has shape \[3\], expected \[2\]",
        lambda w: w.update({"2.bias": torch.ones(3)}),
    ),
    "wrong_dtype": (
        ValueError,
        r"'2.bias' is torch.float64, expected torch.float32",
        lambda w: w.update({"2.bias": torch.ones(2).double()}),
    ),
    "not_a_tensor": (
        TypeError,
        "'2.bias' is a list, not a tensor",
        lambda w: w.update({"2.bias": [1.0, 2.0]}),
    ),
}


@pytest.mark.parametrize(
    ("wrong", "to"),
    [*((wrong, "module") for wrong in WRONG), *(("misshapen", form) for form in FORMS)],
)
def test_a_wrong_key_is_named_and_nothing_changes(wrong, to):
    error, says, spoil = WRONG[wrong]
    weights = dict(policy(3).state_dict())
    spoil(weights)
    destination = inside(in_form(to, 1))
    before, where = bits(destination), memory(destination)
    for inplace in (True, False):
        with pytest.raises(error, match=says):
            WeightStrategy().apply_weights(destination, weights, inplace)
        assert (bits(destination), memory(destination)) == (before, where)


def test_what_is_no_weights_is_refused_by_name_or_type():
    with pytest.raises(ValueError, match=r"'a\.b' occurs twice"):
        WeightStrategy().extract_weights({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(TypeError, match="not list"):
        WeightStrategy().extract_weights([torch.ones(1)])
    with pytest.raises(ValueError, match="'pickle': expected 'tensordict' or 'state_dict'"):
        WeightStrategy("pickle")


def test_a_locked_tensordict_that_cannot_take_new_tensors_is_left_as_it_was():
    destination = TensorDict({"a": torch.zeros(2), "b": torch.zeros(3)}).lock_()
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    with pytest.raises(RuntimeError, match="lock"):
        WeightStrategy().apply_weights(destination, weights, inplace=False)
    assert bits(destination) == bits({"a": torch.zeros(2), "b": torch.zeros(3)})
    WeightStrategy().apply_weights(destination, weights, inplace=True)
    assert bits(destination) == bits(weights)


def test_tied_parameters_stay_tied():
    source, destination = Parts(), Parts()
    with torch.no_grad():
        source.shared.weight.fill_(7)
    for inplace in (True, False):
        WeightStrategy().apply_weights(destination, source, inplace)
        assert destination.tied.weight is destination.shared.weight is destination.again.weight
        assert (destination.tied.weight == 7).all()


def test_a_lazy_module_is_refused_by_the_name_of_its_parameter():
    ready, lazy = {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, nn.LazyLinear(3)
    for call in (
        lambda: WeightStrategy().extract_weights(nn.Sequential(lazy)),
        lambda: WeightStrategy().apply_weights(nn.Sequential(lazy), ready),
        lambda: WeightStrategy().apply_weights(ready, nn.Sequential(lazy)),
    ):
        with pytest.raises(ValueError, match=r"'0\.weight' is not initialised"):
            call()


@BOTH
def test_extra_state_of_any_type_travels(form):
    strategy, destination = WeightStrategy(form), Counting("before")
    for extra in (None, 3, "text", {"deep": {"er": [None]}}, [1, 2], (1,), b"bytes"):
        strategy.apply_weights(destination, strategy.extract_weights(Counting(extra)))
        assert destination.extra == extra
        assert type(destination.extra) is type(extra)
    strategy.apply_weights(destination, strategy.extract_weights(Counting(torch.arange(3.0))))
    assert torch.equal(destination.extra, torch.arange(3.0))


@BOTH
def test_extra_state_goes_through_weights_that_are_no_module(form):
    strategy = WeightStrategy(form)
    between = strategy.extract_weights(nn.Sequential(Counting("old")))
    strategy.apply_weights(between, nn.Sequential(Counting("new")))
    destination = nn.Sequential(Counting())
    strategy.apply_weights(destination, between)
    assert destination[0].extra == "new"


def test_missing_and_surplus_extra_state_is_named_and_nothing_changes():
    plain = {"weight": torch.ones(2)}
    destination = Counting("before")
    with pytest.raises(KeyError, match="lack '_extra_state'"):
        WeightStrategy().apply_weights(destination, plain)
    assert destination.extra == "before"
    assert (destination.weight == 0).all()
    with pytest.raises(KeyError, match="have '_extra_state', which is not expected"):
        WeightStrategy().apply_weights(plain, destination)
    assert (plain["weight"] == 1).all()


def test_an_owner_that_refuses_its_extra_state_leaves_all_others_unchanged():
    destination = nn.Sequential(Counting("a"), Counting("b", refuses=True), Counting("c"))
    before = bits(destination)
    source = nn.Sequential(*(Counting("new") for _ in range(3)))
    with torch.no_grad():
        source[0].weight.fill_(9)
    with pytest.raises(RuntimeError, match="this owner refuses"):
        WeightStrategy().apply_weights(destination, source)
    assert [module.extra for module in destination] == ["a", "b", "c"]
    assert bits(destination) == before
