"""Policies of any form, called with tensors.

A policy says by `in_keys` what it is given and by `out_keys` what it puts out. State that it
carries from step to step is what it puts out as ("next", key) and is given as key. Each episode
starts it with zeros; to learn their shape, it is given None once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor, nn

from collectors.rollout.device_transfer import DeviceTransfer, device_of
from collectors.rollout.spaces import Key, Leaf

ACTION: Key = ("action",)
IS_INIT: Key = ("is_init",)
NEXT = "next"
_DISCARDED: Key = ("_",)  # tensordict's way of naming an output that nobody wants
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Whoever acts beside a collector that runs free may explore otherwise; tensordict 0.14 knows one
# way for all threads.
_PER_THREAD = "thread_local" in inspect.signature(set_interaction_type).parameters


class PolicyCaller:
    """One policy, ready to be called: tensors of `in_keys` in, tensors of `out_keys` out."""

    def __init__(
        self,
        policy: Any,
        observations: Sequence[Leaf],
        *,
        device: torch.device | None = None,
        trusted: bool = False,
        compile_policy: bool | Mapping[str, Any] = False,
        cudagraph: bool = False,
    ):
        self.policy = policy
        if device is None:
            device = device_of(policy)
        self.device = device if device is not None and device.type != "cpu" else None
        self._transfer = None if self.device is None else DeviceTransfer(self.device)
        names = [leaf.key for leaf in observations]
        if hasattr(policy, "in_keys"):
            self.in_keys = [as_key(k) for k in policy.in_keys]
        else:
            self.in_keys = names if trusted else _named_arguments(policy, names)
        self.out_keys: list[Key] | None = None
        if hasattr(policy, "out_keys"):
            self.out_keys = [as_key(k) for k in policy.out_keys]
        self.state_keys = [
            key[1:] for key in self.out_keys or () if key[0] == NEXT and key[1:] in self.in_keys
        ]
        known = {*names, IS_INIT, *self.state_keys}
        if missing := [key for key in self.in_keys if key not in known]:
            raise ValueError(
                f"the policy wants {shown(missing)}; the environment gives {shown(names)}"
            )
        if self.out_keys is not None and ACTION not in self.out_keys:
            raise ValueError(f"the policy puts out {shown(self.out_keys)}, but no 'action'")
        self.call = self._calling(policy, trusted)
        self.compiles = bool(compile_policy)  # in its first call
        if compile_policy:
            options = dict(compile_policy) if isinstance(compile_policy, Mapping) else {}
            self.call = torch.compile(self.call, **options)
        if cudagraph:
            from tensordict.nn import CudaGraphModule

            self.call = CudaGraphModule(self.call)

    def __call__(self, inputs: Sequence[Tensor]) -> dict[Key, Tensor]:
        """What the policy puts out for these inputs, by key, in the host's memory."""
        if self._transfer is None:
            return self.read(self.call(*inputs))
        outputs = self.read(self.call(*self._transfer.to_device(inputs)))
        return dict(zip(outputs, self._transfer.to_host([*outputs.values()]), strict=True))

    def read(self, result: Any) -> dict[Key, Tensor]:
        """What a call returned, by key."""
        if type(result) is tuple or type(result) is list:
            if self.out_keys is None and len(result) == 1:
                return {ACTION: result[0]}
            return self._named(result)
        if isinstance(result, Tensor):
            if self.out_keys is not None and len(self.out_keys) != 1:
                self._named((result,))
            return {ACTION: result}
        return self._unpacked(result)

    def _calling(self, policy: Any, trusted: bool) -> Callable[..., Any]:
        if isinstance(policy, TensorDictModuleBase):
            # What a plain TensorDictModule would do, without a TensorDict a step.
            hooked = isinstance(policy, nn.Module) and (
                policy._forward_hooks or policy._forward_pre_hooks
            )
            if type(policy) is TensorDictModule and not hooked and _is_positional(policy):
                module: Callable[..., Any] = policy.module
                return module
            return self._with_tensordict(policy)
        if not callable(policy):
            raise TypeError(f"the policy must be callable, got {type(policy).__name__}")
        if trusted or _takes_tensordict(policy):
            return self._with_tensordict(policy)
        called: Callable[..., Any] = policy
        return called

    def _with_tensordict(self, policy: Callable[[TensorDictBase], Any]) -> Callable[..., Any]:
        in_keys = [key if len(key) > 1 else key[0] for key in self.in_keys]

        def call(*inputs: Tensor) -> Any:
            given = {k: t for k, t in zip(in_keys, inputs, strict=True) if t is not None}
            tensordict = TensorDict(given, batch_size=next(iter(given.values())).shape[:1])
            return policy(tensordict)

        return call

    def _named(self, values: Sequence[Tensor]) -> dict[Key, Tensor]:
        if self.out_keys is None or len(self.out_keys) != len(values):
            expected = "no out_keys" if self.out_keys is None else shown(self.out_keys)
            raise ValueError(
                f"the policy returned {len(values)} tensors and has {expected}: give it an "
                "attribute `out_keys` with a name for each"
            )
        named = dict(zip(self.out_keys, values, strict=True))
        named.pop(_DISCARDED, None)
        return named

    def _unpacked(self, result: Any) -> dict[Key, Tensor]:
        if isinstance(result, TensorDictBase):
            given = {as_key(k): v for k, v in result.items(True, True)}
        elif isinstance(result, Mapping):
            given = {as_key(k): v for k, v in result.items()}
        else:
            raise TypeError(
                f"the policy returned a {type(result).__name__}; expected a tensor, a tuple of "
                "them, a dict or a TensorDict"
            )
        keys = self.out_keys
        if keys is None:
            keys = [k for k in given if k not in self.in_keys]
        if ACTION not in keys or ACTION not in given:
            raise ValueError(f"the policy put out {shown(list(given))}, but no 'action'")
        named: dict[Key, Any] = {key: given[key] for key in keys}
        return named


def warn_of_training_mode(policy: Any) -> None:
    """Say so if the policy would act with dropout, or normalise by the batch at hand."""
    modules = policy.named_modules() if isinstance(policy, nn.Module) else ()
    active = [f"{name or 'itself'} ({type(m).__name__})" for name, m in modules if _is_noisy(m)]
    if active:
        warnings.warn(
            f"the policy acts in training mode: {', '.join(active[:5])}"
            f"{', …' if len(active) > 5 else ''}. Collectors leave the mode as it is; if that is "
            "not wanted, call policy.eval() before the collector copies the policy, and "
            "policy.train() for updates",
            stacklevel=2,
        )


def _is_noisy(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DROPOUTS) else getattr(module, "dropout", 0)
    drops = isinstance(rate, int | float) and rate > 0
    return module.training and (drops or isinstance(module, _BATCH_NORMS))


def interaction_type(name: str | InteractionType) -> InteractionType:
    """The tensordict constant for an exploration type."""
    if isinstance(name, InteractionType):
        return name
    try:
        return InteractionType.from_str(str(name).lower())
    except (ValueError, NotImplementedError, KeyError):
        raise ValueError(
            f"exploration_type={name!r}: it is one of random, mode, mean, deterministic"
        ) from None


def exploring(how: InteractionType) -> set_interaction_type:
    """The context in which the policies that this thread calls explore like that."""
    return (
        set_interaction_type(how, thread_local=True) if _PER_THREAD else set_interaction_type(how)
    )


def as_key(key: str | Sequence[str]) -> Key:
    """A key as batches nest it."""
    return (key,) if isinstance(key, str) else tuple(key)


def _is_positional(module: TensorDictModule) -> bool:
    """Whether it hands its inputs on by position, and nothing else."""
    extras = ("_kwargs", "method_kwargs", "_get_kwargs")
    method = getattr(module, "method", None)
    return method in (None, "forward", "__call__") and not any(
        getattr(module, name, None) for name in extras
    )


def _parameters(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """What it says that it takes; nothing, if it cannot say."""
    call = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return []


def _named_arguments(policy: Callable[..., Any], names: list[Key]) -> list[Key]:
    """The observations that its arguments are named after; all, if none of them is."""
    if len(names) == 1 or _takes_tensordict(policy):
        return names
    wanted: list[Key] = [
        (parameter.name,)
        for parameter in _parameters(policy)
        if (parameter.name,) in names
        or (parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD)
    ]
    if wanted and set(wanted) <= set(names):
        return wanted
    if known := set(wanted) & set(names):
        raise ValueError(
            f"the policy's arguments are {shown(wanted)}, of which only {shown(sorted(known))} is "
            f"named after an observation; the observations are {shown(names)}: name all arguments "
            "after them, or say by an attribute `in_keys` which the policy is given"
        )
    return names


def _takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether it says, by name or annotation of its one argument, that it takes a TensorDict."""
    parameters = _parameters(policy)
    if len(parameters) != 1:
        return False
    (parameter,) = parameters
    note = parameter.annotation
    if isinstance(note, type) and issubclass(note, TensorDictBase):
        return True
    return parameter.name in ("td", "tensordict") or (
        isinstance(note, str) and note.rpartition(".")[2] in ("TensorDict", "TensorDictBase")
    )


def shown(keys: Iterable[Key]) -> str:
    """Keys as a user writes them."""
    return ", ".join(repr(key[0] if len(key) == 1 else key) for key in keys) or "nothing"
