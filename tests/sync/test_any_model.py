"""Any model, over every mechanism and wire format: workers act with what was published, or the
model is refused by name before anything starts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sync import (
    WIRES,
    HogwildWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)
from sync.schemes.simulated import SimulatedWeightSyncScheme
from tests.sync.remote.support import Threads
from tests.sync.support import Counting, bits, held, in_one_thread, receive, running

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.int16, torch.uint8, torch.bool)
FORMS = ("contiguous", "transposed", "part", "conjugate", "expanded", "sparse")
LOSSY = ("bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Piece:
    """One tensor of a model, or extra state, or a weight that only its state dict has.

    place: the name of its module. of: another piece, whose tensor it is (tied), or whose memory it
    has (view); by its number, modulo the number of tensors before it.
    """

    kind: str  # parameter, buffer, transient, extra or packed
    place: str = ""
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (2, 3)
    form: str = "contiguous"
    magnitude: int = 0  # a power of ten
    of: tuple[str, int] | None = None


class Keeping(Counting):
    """Extra state without a weight."""

    def __init__(self, extra: Any = None):
        super().__init__(extra)
        del self.weight


class Packed(nn.Module):
    """As a quantised layer, it adds a weight to the state dict only."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.ones(2)


def build(pieces: Sequence[Piece]) -> nn.Module:
    """A model of these pieces; all its numbers are zero."""
    model = nn.Module()
    model.a = nn.Module()
    model.a.b = nn.Module()
    tensors: list[Tensor] = []
    for number, piece in enumerate(pieces):
        module = model.get_submodule(piece.place)
        if piece.kind in ("extra", "packed"):
            module.add_module(f"m{number}", Keeping() if piece.kind == "extra" else Packed())
            continue
        tensor = new_tensor(piece)
        if piece.of is not None and tensors:
            relation, index = piece.of
            tensor = tensors[index % len(tensors)]
            if relation == "view":
                tensor = tensor.detach()
                tensor = tensor.view(-1) if tensor.is_contiguous() else tensor
        if piece.kind == "parameter":
            if not isinstance(tensor, nn.Parameter):
                trained = tensor.is_floating_point() or tensor.is_complex()
                tensor = nn.Parameter(tensor, requires_grad=trained)
            module.register_parameter(f"t{number}", tensor)
        else:
            tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
            module.register_buffer(f"t{number}", tensor, persistent=piece.kind == "buffer")
        if tensor.layout == torch.strided:
            tensors.append(tensor)
    return model


def new_tensor(piece: Piece) -> Tensor:
    shape, dtype = piece.shape, piece.dtype
    if piece.form == "transposed" and shape:
        return torch.zeros(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if piece.form == "part":
        return torch.zeros(3, *shape, dtype=dtype)[1]
    if piece.form == "conjugate" and dtype.is_complex:
        return torch.zeros(shape, dtype=dtype).conj()
    if piece.form == "expanded":
        return torch.zeros(1, *shape, dtype=dtype).expand(2, *shape)
    if piece.form == "sparse" and dtype == torch.float32:
        return torch.zeros(shape).to_sparse()
    return torch.zeros(shape, dtype=dtype)


def fill(model: nn.Module, pieces: Sequence[Piece], seed: int) -> None:
    """Set all numbers and the extra state, as training does; buffers may hold NaN and infinity."""
    random = torch.Generator().manual_seed(seed)
    by_name = {f"t{number}": piece for number, piece in enumerate(pieces)}
    for name, tensor in named(model).items():
        piece = by_name[name.split(".")[-1]]
        numbers = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        if tensor.dtype == torch.bool:
            numbers = numbers > 0
        elif not (tensor.is_floating_point() or tensor.is_complex()):
            numbers = (numbers * 50).abs()
        elif tensor.dtype != torch.float8_e4m3fn:
            numbers = numbers * 10.0**piece.magnitude
            if tensor.dim() == 1:
                numbers[64:] *= 1e-3  # another block of int8
        with torch.no_grad():
            tensor.copy_(numbers.to(tensor.dtype))
            alone = len(sharing(model, tensor)) == 1
            if piece.kind != "parameter" and alone and tensor.is_floating_point() and tensor.dim():
                tensor[:1] = torch.tensor([torch.nan, torch.inf, -0.0])[seed % 3]
    for module in model.modules():
        if isinstance(module, Keeping):
            module.extra = {"seed": seed, "tensor": torch.full((2,), float(seed))}


def nudge(model: nn.Module) -> None:
    """Change one number of each tensor, so that little differs from the version before."""
    with torch.no_grad():
        for tensor in named(model).values():
            if tensor.numel():
                tensor[(0,) * tensor.dim()] = 1


def replace(model: nn.Module, names: set[str]) -> None:
    """Give the model a new tensor in the place of the first of these."""
    for name, tensor in named(model).items():
        if name not in names:
            continue
        place, _, key = name.rpartition(".")
        new: Tensor = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        setattr(model.get_submodule(place), key, new)
        return


def ties(model: nn.Module) -> list[list[bool]]:
    """Which of its tensors are one object."""
    tensors = named(model).values()
    return [[one is other for other in tensors] for one in tensors]


def named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def sharing(model: nn.Module, tensor: Tensor) -> list[str]:
    """The names of the tensors that have memory in common with this one."""
    strided = {n: t for n, t in named(model).items() if t.layout == torch.strided and t.numel()}
    address = tensor.untyped_storage().data_ptr()
    return [n for n, t in strided.items() if t.untyped_storage().data_ptr() == address]


def extra_states(model: nn.Module) -> str:
    return str([module.extra for module in model.modules() if isinstance(module, Keeping)])


# -- what is expected


def refusable(model: nn.Module, mechanism: str, sent: set[str]) -> set[str]:
    """The names of what cannot be sent, found apart from the code under test."""
    tensors, parameters = named(model), dict(model.named_parameters(remove_duplicate=False))
    names = {f"{n}.packed" for n, module in model.named_modules() if isinstance(module, Packed)}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or (tensor.numel() and 0 in tensor.stride()):
            names |= {name} & sent
        elif mechanism == "hogwild" and tensor.numel() and name in parameters:
            others = [n for n in sharing(model, tensor) if tensors[n] is not tensor]
            if others or tensor.untyped_storage().nbytes() != tensor.nbytes:
                names |= {name, *others}
    return names


def expected_error(model: nn.Module, name: str, tensor: Tensor, wire: str) -> Tensor:
    """How much each number may be off."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sizes = torch.zeros(tensor.shape, dtype=torch.float64)
    if not tensor.is_floating_point() or not tensor.numel() or wire not in LOSSY:
        return sizes
    if not parameters.keys() & set(sharing(model, tensor)):
        return sizes
    numbers = tensor.detach().double().abs()
    if wire != "int8":
        exact = tensor.element_size() <= 2
        return sizes if exact else numbers * (2**-8 if wire == "bfloat16" else 2**-11) + 2**-25
    if tensor.element_size() == 1:
        return sizes
    if len(sharing(model, tensor)) > 1:  # the last one that is written decides
        largest = [named(model)[n].detach().double().abs().max() for n in sharing(model, tensor)]
        block = torch.stack(largest).max().expand(tensor.shape)
    elif tensor.dim() > 1 and tensor[0].numel() >= 4:
        block = numbers.flatten(1).amax(1).view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape)
    else:
        pieces = numbers.reshape(-1).split(64)
        block = torch.cat([part.amax().expand(part.shape) for part in pieces]).view(tensor.shape)
    return block / 254 * 1.001 + numbers * torch.finfo(tensor.dtype).eps


def check_acts(ours: nn.Module, theirs: nn.Module, sent: set[str], wire: str) -> None:
    """The worker's model holds what the trainer's does."""
    for name, tensor in named(ours).items():
        if name not in sent:
            continue
        found, error = named(theirs)[name], expected_error(ours, name, tensor, wire)
        if error.any():
            assert ((found.detach().double() - tensor.detach().double()).abs() <= error).all(), name
        else:
            assert bits({name: found}) == bits({name: tensor}), name
    assert extra_states(theirs) == extra_states(ours)


# -- the mechanisms, with both ends in this process

MECHANISMS: dict[str, Callable[..., WeightSyncScheme]] = {
    "shared_mem": SharedMemWeightSyncScheme,
    "zero_copy": lambda **options: SharedMemWeightSyncScheme(zero_copy=True, **options),
    "multiprocess": MultiProcessWeightSyncScheme,
    "remote": RPCWeightSyncScheme,
    "hogwild": HogwildWeightSyncScheme,
    "simulated": SimulatedWeightSyncScheme,
}


@contextlib.contextmanager
def acting(scheme: WeightSyncScheme, theirs: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Connects `theirs` to an initialised scheme; yields what publishes the next version to it:
    the weights that are given, or those of the registered model.
    """
    if isinstance(scheme, SimulatedWeightSyncScheme):
        scheme.connect()
        load = scheme.loader(theirs)

        def take() -> None:
            for block, _ in scheme.channel.published:
                load(block)
            scheme.channel.published.clear()

        take()
        yield lambda weights: (scheme.send_async(weights), take())[1]
        return
    with in_one_thread(scheme, make_model=lambda: theirs) as (receiver,):
        use = receiver.watched(len)

        def publish(weights: Any) -> None:
            use([])
            scheme.send_async(weights)
            assert receiver.receive(20.0) is not None
            use([])
            scheme.wait_async(20.0)
            assert receiver.version == scheme.version == scheme.acknowledged[0]

        yield publish


def check(
    pieces: Sequence[Piece], mechanism: str, wire: str, strategy: str, verify: str = "off"
) -> None:
    ours, theirs = build(pieces), build(pieces)
    if wire in LOSSY and any(piece.of is not None for piece in pieces):
        verify = "off"  # tensors that share memory may be rounded in two ways
    transient = {f"t{n}" for n, piece in enumerate(pieces) if piece.kind == "transient"}
    sent = {
        name
        for name in named(ours)
        if strategy == "tensordict" or name.split(".")[-1] not in transient
    }
    cannot = refusable(ours, mechanism, sent)
    engine = Threads()
    options = {"strategy": strategy, "wire": wire, "verify": verify}
    scheme = MECHANISMS[mechanism](connect_timeout=20.0, **options)
    if isinstance(scheme, RPCWeightSyncScheme):
        scheme.attach(engine)
    try:
        if cannot:
            names = "|".join(re.escape(repr(name)) for name in cannot)
            why = "(is expanded|is in its state_dict|is torch.sparse|hogwild moves each|is part of)"
            with pytest.raises(ValueError, match=f"(?s)(({names}).*{why}|{why}.*({names}))"):
                scheme.init_on_sender(model=ours, devices=["cpu"])
            return
        fill(ours, pieces, 0)
        fill(theirs, pieces, 100)
        local = bits({n: t for n, t in named(theirs).items() if n not in sent})
        scheme.init_on_sender(model=ours, devices=["cpu"])
        with acting(scheme, theirs) as publish:
            check_acts(ours, theirs, sent, wire)
            tied = ties(theirs)
            for seed in (1, 2):
                before = bits(theirs)
                fill(ours, pieces, seed)
                assert mechanism == "hogwild" or bits(theirs) == before  # nothing was published
                publish(WeightStrategy(strategy).extract_weights(ours) if seed == 2 else None)
                check_acts(ours, theirs, sent, wire)
            assert ties(theirs) == tied
            kept = {n: t for n, t in named(theirs).items() if n not in sent}
            shared = any(set(sharing(theirs, tensor)) & sent for tensor in kept.values())
            assert shared or bits(kept) == local
            if verify == "off":  # it takes new parameters for a fault
                replace(theirs, sent)
                replace(ours, sent)
            nudge(ours)
            publish(None)
            check_acts(ours, theirs, sent, wire)
    finally:
        scheme.shutdown()
        engine.close()


PIECES = st.builds(
    Piece,
    kind=st.sampled_from(["parameter"] * 4 + ["buffer", "buffer", "transient", "extra"]),
    place=st.sampled_from(["", "a", "a.b"]),
    dtype=st.sampled_from((torch.float32,) * 4 + DTYPES),
    shape=st.sampled_from([(2, 3), (5,), (3, 4), (), (0, 2), (2, 1, 2), (70,), (4, 9), (1, 6)]),
    form=st.sampled_from(("contiguous",) * 6 + FORMS[:4]),
    magnitude=st.sampled_from([0, 0, 3, -6]),
    of=st.none() | st.none() | st.tuples(st.sampled_from(["tied", "view"]), st.integers(0, 9)),
)
UNSENDABLE = st.sampled_from(
    [Piece("packed", "a"), Piece("buffer", "a", form="expanded"), Piece("parameter", form="sparse")]
)
MODELS = st.lists(PIECES, max_size=6).flatmap(
    lambda pieces: st.just(pieces) | st.just(pieces) | UNSENDABLE.map(lambda one: [*pieces, one])
)
WAYS = [
    (mechanism, wire)
    for mechanism in MECHANISMS
    for wire in (WIRES if mechanism not in ("zero_copy", "hogwild") else WIRES[:1])
]
FULL_WAYS = st.sampled_from(WAYS).flatmap(
    lambda way: st.tuples(
        st.just(way[0]),
        st.just(way[1]),
        st.sampled_from(["tensordict", "state_dict"]),
        st.sampled_from(["off"] if way[0] in ("hogwild", "simulated") else ["off", "every"]),
    )
)
PROFILE: Any = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@given(MODELS, FULL_WAYS)
@settings(max_examples=150, **PROFILE)
def test_a_worker_acts_with_what_was_published_or_the_model_is_refused(pieces, way):
    check(pieces, *way)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(MODELS, FULL_WAYS)
@settings(max_examples=2000, **PROFILE)
def test_more_models(pieces, way):
    check(pieces, *way)


VARIED = [
    Piece("parameter", form="transposed"),
    Piece("parameter", "a", of=("tied", 0)),
    Piece("parameter", "a.b", torch.bfloat16, (70,)),
    Piece("buffer", "a", torch.float64, magnitude=-6),
    Piece("transient", "a.b", torch.bool, (4, 9)),
    Piece("extra", "a"),
]


LOCAL = ("shared_mem", "zero_copy", "multiprocess", "hogwild")


@pytest.mark.parametrize(
    ("mechanism", "wire"),
    [(kind, wire) for kind, wire in WAYS if kind in LOCAL and wire == "float32"],
)
def test_a_worker_process_acts_with_what_was_published(mechanism, wire):
    views = [] if mechanism == "hogwild" else [Piece("parameter", of=("view", 2))]
    pieces = [*VARIED, *views]
    ours = build(pieces)
    fill(ours, pieces, 0)
    scheme = MECHANISMS[mechanism](wire=wire)
    scheme.init_on_sender(model=ours, devices=["cpu"])
    with running(scheme, lambda: build(pieces), method="fork") as (worker,):
        for seed in (1, 2):
            fill(ours, pieces, seed)
            scheme.send_async()
            assert worker.do(receive, 20)
            assert worker.do(held) == bits(ours)
            assert worker.do(lambda s, m: extra_states(m)) == extra_states(ours)
