"""Strategies: turn a model into weights, and put weights back into a model.

Weights may be a module, a TensorDict, a nested dict or a flat dict. Inside this package they have
one form: tensors by dotted name, as in a state dict, and extra state kept apart from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sync.model.block import CheckFinite, Signature, check_same
from sync.model.copying import require_finite

EXTRA_STATE = "_extra_state"
_SEVERAL = (
    "; put several modules into an nn.ModuleDict, or use one scheme for each; for other weights "
    "for each worker, use params_map or send({worker: weights})"
)
Weights = nn.Module | TensorDictBase | Mapping[Any, Any]


@dataclass
class Slot:
    """One tensor, and where the model keeps it: `owner[key]`.

    is_buffer: whether it is a buffer of a module. Tensors of a TensorDict or a dict are not.
    persistent: False for a buffer that is not in the state dict.
    """

    name: str
    owner: Any
    key: str
    tensor: Tensor
    is_buffer: bool = False
    persistent: bool = True


@dataclass
class Flat:
    """Weights by dotted name. Tensors are the source's own, not copies.

    children: (owner, key, child) for each nested module or mapping; the child is None where a
        module has registered a name without a value.
    keys: the keys of each owner. These two show whether a source has changed.
    """

    slots: list[Slot] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_owners: dict[str, tuple[Any, str]] = field(default_factory=dict)
    children: list[tuple[Any, str, Any]] = field(default_factory=list)
    keys: list[Collection[Any]] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {slot.name: slot.tensor for slot in self.slots}

    def signature(self) -> Signature:
        return {slot.name: (tuple(slot.tensor.shape), slot.tensor.dtype) for slot in self.slots}


def flatten(source: Weights, *, persistent_only: bool = False) -> Flat:
    """The tensors and the extra state of any accepted form of weights."""
    flat = Flat()
    if is_tensor_collection(source):
        _walk_mapping(source, "", flat)
    elif isinstance(source, nn.Module):
        _walk_module(source, "", flat, persistent_only)
    elif isinstance(source, Mapping):
        _walk_mapping(source, "", flat)
    else:
        raise TypeError(
            "weights must be a module, a TensorDict or a dict of tensors, "
            f"not {type(source).__name__}"
        )
    names: set[str] = set()
    for slot in flat.slots:
        if is_lazy(slot.tensor):
            raise ValueError(
                f"{slot.name!r} is not initialised yet (a lazy module has no shape before its "
                "first forward pass): run the model once first"
            )
        if slot.name in names:
            raise ValueError(f"{slot.name!r} occurs twice, once nested and once with dots")
        names.add(slot.name)
    return flat


def check_whole(source: Weights, flat: Flat) -> None:
    """Raise if `source` is a module with weights in its `state_dict()` that `flat` lacks.

    Quantised layers have such weights, and other modules that override `_save_to_state_dict`.
    """
    if not isinstance(source, nn.Module):
        return
    names = {*flat.extra, *(slot.name for slot in flat.slots)}
    memory = {_address(slot.tensor) for slot in flat.slots} - {None}
    for name, value in source.state_dict().items():
        is_renamed = (  # by torch.compile, for instance
            isinstance(value, Tensor) and (not value.numel() or _address(value) in memory)
        )
        if name not in names and not is_renamed:
            raise ValueError(
                f"{type(source).__name__}: {name!r} is in its state_dict(), but it is no "
                "parameter, buffer or extra state, so it cannot be sent: register it as a buffer, "
                "or return it from get_extra_state()"
            )


def _address(tensor: Tensor) -> int | None:
    """Where the memory begins that the tensor is a view of; None for a tensor without memory."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr() or None


def check_movable(flat: Flat, block: range) -> None:
    """Raise if a parameter shares memory with something that would not move to a block with it.

    block: the addresses of the block, where some parameters may be already.
    """
    owners: dict[int, Slot] = {}  # by address
    for slot in flat.slots:
        tensor, address = slot.tensor, _address(slot.tensor)
        if slot.is_buffer or address is None or tensor.data_ptr() in block:
            continue
        owner = owners.setdefault(address, slot)
        if owner.tensor is not tensor:
            _refuse_to_move(f"{owner.name!r} and {slot.name!r} share memory")
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            _refuse_to_move(
                f"{slot.name!r} is part of a larger tensor or of another scheme's block"
            )
    for slot in flat.slots:
        owner = owners.get(_address(slot.tensor) or 0, slot)
        if slot.is_buffer and owner is not slot:
            _refuse_to_move(f"{owner.name!r} and {slot.name!r} share memory")


def _refuse_to_move(shared: str) -> NoReturn:
    raise ValueError(
        f"hogwild moves each parameter to shared memory on its own, but {shared}, which would no "
        "longer see its changes; give parameters memory of their own, use one scheme for a model, "
        "or use sync=shared_mem"
    )


def _walk_module(module: nn.Module, prefix: str, flat: Flat, persistent_only: bool) -> None:
    # Names are those of state_dict(): a module or parameter reached twice is listed twice.
    if hasattr(module, "_orig_mod"):  # leave the wrapper of torch.compile out of the names
        module = module._orig_mod  # type: ignore[assignment]
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(module).__name__}: modules of TorchScript cannot be sent; send the module that "
            "was scripted, and compile it with torch.compile"
        )
    transient = module._non_persistent_buffers_set
    owners: tuple[Any, ...] = (module._parameters, module._buffers)
    for is_buffer, owner in enumerate(owners):
        flat.keys.append(owner.keys())
        for key, tensor in owner.items():
            if tensor is None:
                flat.children.append((owner, key, None))
            elif (persistent := key not in transient) or not persistent_only:
                slot = Slot(prefix + key, owner, key, tensor, bool(is_buffer), persistent)
                flat.slots.append(slot)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        flat.extra[prefix + EXTRA_STATE] = module.get_extra_state()
        flat.extra_owners[prefix + EXTRA_STATE] = (module, "")
    flat.keys.append(module._modules.keys())
    for key, child in module._modules.items():
        flat.children.append((module._modules, key, child))
        if child is not None:
            _walk_module(child, f"{prefix}{key}.", flat, persistent_only)


def _walk_mapping(source: Any, prefix: str, flat: Flat) -> None:
    flat.keys.append(source.keys())
    for key, value in source.items():
        name = prefix + ".".join(map(str, key if isinstance(key, tuple) else (key,)))
        if name.split(".")[-1] == EXTRA_STATE:
            flat.extra[name] = value.data if isinstance(value, NonTensorData) else value
            flat.extra_owners[name] = (source, key)
        elif isinstance(value, Tensor):
            flat.slots.append(Slot(name, source, key, value))
        elif is_tensor_collection(value) or isinstance(value, Mapping):
            flat.children.append((source, key, value))
            _walk_mapping(value, f"{name}.", flat)
        else:
            hint = _SEVERAL if isinstance(value, nn.Module) else ""
            raise TypeError(f"weights: {name!r} is a {type(value).__name__}, not a tensor{hint}")


class WeightStrategy:
    """Turns a model into weights and back, as a TensorDict or as a state dict.

    `"tensordict"` takes every parameter and buffer; `"state_dict"` takes what `state_dict()`
    returns, which excludes non-persistent buffers. Both include the extra state of modules
    (`get_extra_state`, `set_extra_state`).
    """

    def __init__(self, extract_as: str = "tensordict"):
        if extract_as not in ("tensordict", "state_dict"):
            raise ValueError(f"extract_as={extract_as!r}: expected 'tensordict' or 'state_dict'")
        self.extract_as = extract_as

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r})"

    def flatten(self, source: Weights) -> Flat:
        return flatten(source, persistent_only=self.extract_as == "state_dict")

    def extract_weights(self, source: Weights) -> TensorDictBase | dict[str, Any]:
        """The weights of `source`, sharing its memory: clone them to keep them."""
        flat = self.flatten(source)
        check_whole(source, flat)
        return self.assemble({slot.name: slot.tensor.detach() for slot in flat.slots}, flat.extra)

    def assemble(
        self, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
    ) -> TensorDictBase | dict[str, Any]:
        """Tensors and extra state by dotted name, in the form that this strategy extracts."""
        if self.extract_as == "state_dict":
            return {**tensors, **extra}
        nested: dict[str, Any] = {}
        for name, value in (*tensors.items(), *((k, NonTensorData(v)) for k, v in extra.items())):
            *path, key = name.split(".")
            parent: MutableMapping[str, Any] = nested
            for part in path:
                parent = parent.setdefault(part, {})
            parent[key] = value
        return TensorDict(nested, batch_size=[])

    def apply_weights(self, destination: Weights, weights: Weights, inplace: bool = True) -> None:
        """Put `weights` into `destination`, or raise and leave it unchanged.

        In place, the destination's tensors keep their memory. Otherwise they get new memory, but
        parameters remain the same objects, so optimisers still refer to them.
        """
        source, target = self.flatten(weights), self.flatten(destination)
        for given, flat in ((weights, source), (destination, target)):
            check_whole(given, flat)
        check_same(target.signature(), source.signature(), whose="weights")
        check_extra(target.extra, source.extra)
        if inplace:
            check_writable(target)
        set_extra_state(target, source.extra)
        values = source.tensors
        with torch.no_grad():
            for slot in target.slots:
                if inplace:
                    slot.tensor.copy_(values[slot.name])
                else:
                    value = values[slot.name].detach().to(slot.tensor.device, copy=True)
                    _replace(slot, value)


def refuse_non_finite(flat: Flat, check: CheckFinite) -> None:
    """Raise if a tensor that is to be finite holds NaN or infinity."""
    for slot in flat.slots:
        is_number = slot.tensor.is_floating_point() or slot.tensor.is_complex()
        if check and is_number and (check == "all" or not slot.is_buffer):
            require_finite(slot.name, slot.tensor.detach())


def check_writable(target: Flat) -> None:
    """Raise if a tensor cannot be written in place."""
    for slot in target.slots:
        sizes = zip(slot.tensor.shape, slot.tensor.stride(), strict=True)
        if slot.tensor.numel() and any(size > 1 and step == 0 for size, step in sizes):
            raise ValueError(
                f"{slot.name!r} is expanded, so several of its elements share memory and it cannot "
                "be written in place: clone() it first"
            )


def _replace(slot: Slot, value: Tensor) -> None:
    if isinstance(slot.tensor, nn.Parameter):
        slot.tensor.data = value
    elif isinstance(slot.owner, TensorDictBase):
        slot.owner.set(slot.key, value)
    else:
        slot.owner[slot.key] = value


def check_extra(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise `KeyError` unless both have extra state for the same modules."""
    if missing := sorted(set(expected) - set(found)):
        raise KeyError(f"weights lack {missing[0]!r}")
    if surplus := sorted(set(found) - set(expected)):
        raise KeyError(f"weights have {surplus[0]!r}, which is not expected")


def set_extra_state(target: Flat, extra: Mapping[str, Any]) -> None:
    """Set the extra state of each owner. If one raises, restore that of the others."""
    done: list[str] = []
    try:
        for name, (owner, key) in target.extra_owners.items():
            done.append(name)
            _set_one(owner, key, extra[name])
    except BaseException:
        for name in done[:-1]:
            owner, key = target.extra_owners[name]
            _set_one(owner, key, target.extra[name])
        raise


def _set_one(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, nn.Module):
        owner.set_extra_state(value)
    elif isinstance(owner, TensorDictBase):
        owner.set_non_tensor(key, value)
    else:
        owner[key] = value
