"""Policies of any form, called with tensors.

`in_keys` names a policy's inputs and `out_keys` its outputs. State that is carried from step to
step is an output ("next", key) and an input key. It is zero at the start of an episode. To find its
shape, the policy is called once with None.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CudaGraphModule,
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor, nn

from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.device_transfer import DeviceTransfer, device_of
from collectors.rollout.spaces import Key, SpaceLeaf, as_key

ACTION: Key = ("action",)
IS_INIT: Key = ("is_init",)
NEXT = "next"
WARM_UP = 3  # the call that records a CUDA graph: a compiled policy has settled by then
_UNUSED: Key = ("_",)  # tensordict's name for an output to discard
_ALPHA_DROPOUTS = (nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, *_ALPHA_DROPOUTS)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Policies in other threads may explore differently; tensordict 0.14 has one setting for all.
_PER_THREAD = "thread_local" in inspect.signature(set_interaction_type).parameters


class PolicyCaller:
    """One policy, ready to be called: tensors of `in_keys` in, tensors of `out_keys` out."""

    def __init__(
        self,
        policy: Any,
        observations: Sequence[SpaceLeaf],
        options: RolloutOptions = RolloutOptions(),  # noqa: B008 - immutable
        *,
        device: torch.device | None = None,
    ):
        self.policy = policy
        device = device or device_of(policy)
        self.device = device if device is not None and device.type != "cpu" else None
        self._transfer = None if self.device is None else DeviceTransfer(self.device)
        names = [leaf.key for leaf in observations]
        if hasattr(policy, "in_keys"):
            self.in_keys = [as_key(k) for k in policy.in_keys]
        else:
            self.in_keys = names
            if len(names) > 1 and not (options.trust_policy or _takes_tensordict(policy)):
                raise ValueError(
                    f"the environment has the observations {shown(names)}: give the policy an "
                    "attribute `in_keys` that names its inputs in order"
                )
        self.out_keys: list[Key] | None = None
        if hasattr(policy, "out_keys"):
            self.out_keys = [as_key(k) for k in policy.out_keys]
        self.state_keys = [
            key[1:] for key in self.out_keys or () if key[0] == NEXT and key[1:] in self.in_keys
        ]
        inputs = {*names, IS_INIT, *self.state_keys}
        if missing := [key for key in self.in_keys if key not in inputs]:
            raise ValueError(
                f"the policy needs {shown(missing)}, but the environment has {shown(names)}"
            )
        if self.out_keys is not None and ACTION not in self.out_keys:
            raise ValueError(f"the policy returns {shown(self.out_keys)}, but no 'action'")
        self.call = self._calling(policy, options.trust_policy)
        if how := options.compile_policy:
            self.call = torch.compile(self.call, **(how if isinstance(how, Mapping) else {}))
        if options.cudagraph_policy:
            self.call = _as_graph(self.call, self.device)

    def __call__(self, inputs: Sequence[Tensor]) -> dict[Key, Tensor]:
        """The policy's outputs for these inputs, by key, in the CPU's memory."""
        if self._transfer is None:
            return self._read(self.call(*inputs))
        outputs = self._read(self.call(*self._transfer.to_device(inputs)))
        return dict(zip(outputs, self._transfer.to_host([*outputs.values()]), strict=True))

    def _read(self, result: Any) -> dict[Key, Tensor]:
        """What a call returned, by key."""
        if isinstance(result, Tensor):
            result = (result,)
        if isinstance(result, tuple | list):
            keys = self.out_keys or [ACTION]
            if len(keys) != len(result):
                expected = "no out_keys" if self.out_keys is None else shown(self.out_keys)
                raise ValueError(
                    f"the policy returned {len(result)} tensors, but has {expected}: give it an "
                    "attribute `out_keys` with a name for each"
                )
            return {k: v for k, v in zip(keys, result, strict=True) if k != _UNUSED}
        if not isinstance(result, TensorDictBase | Mapping):
            raise TypeError(
                f"the policy returned a {type(result).__name__}; expected a tensor, a tuple of "
                "them, a dict or a TensorDict"
            )
        nested = (True, True) if isinstance(result, TensorDictBase) else ()
        entries = {as_key(key): value for key, value in result.items(*nested)}
        keys = self.out_keys or [key for key in entries if key not in self.in_keys]
        if ACTION not in keys or ACTION not in entries:
            raise ValueError(f"the policy returned {shown(entries)}, but no 'action'")
        return {key: entries[key] for key in keys}

    def _calling(self, policy: Any, trusted: bool) -> Callable[..., Any]:
        if not callable(policy):
            raise TypeError(f"the policy must be callable, got {type(policy).__name__}")
        if _is_plain(policy):
            module: Callable[..., Any] = policy.module  # a TensorDict a step takes 30 µs
            return module
        takes_tensordict = isinstance(policy, TensorDictModuleBase) or _takes_tensordict(policy)
        return self._with_tensordict(policy) if trusted or takes_tensordict else policy

    def _with_tensordict(self, policy: Callable[[TensorDictBase], Any]) -> Callable[..., Any]:
        in_keys = [key if len(key) > 1 else key[0] for key in self.in_keys]

        def call(*inputs: Tensor) -> Any:
            entries = {k: t for k, t in zip(in_keys, inputs, strict=True) if t is not None}
            tensordict = TensorDict(entries, batch_size=next(iter(entries.values())).shape[:1])
            return policy(tensordict)

        return call


def _as_graph(call: Callable[..., Any], device: torch.device | None) -> Callable[..., Any]:
    """The call as one CUDA graph."""

    def with_tensors(*inputs: Tensor) -> Any:
        return call(*inputs)

    # Of a module with `in_keys` it would make a graph that takes a TensorDict.
    return CudaGraphModule(with_tensors, warmup=WARM_UP, device=device)  # type: ignore[arg-type]


def _is_plain(policy: Any) -> bool:
    """Whether it is a TensorDictModule that only calls its module with its inputs by position."""
    return (
        type(policy) is TensorDictModule
        and getattr(policy, "method", None) in (None, "forward", "__call__")
        and not any(
            getattr(policy, name, None)
            for name in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_kwargs",
                "method_kwargs",
                "_get_kwargs",
            )
        )
    )


def shift_worker(policy: Any, by: int) -> None:
    """Tell a policy which worker it acts in, if it or a module inside it has a `worker_idx`."""
    for part in policy.modules() if isinstance(policy, nn.Module) else (policy,):
        if "worker_idx" in getattr(part, "__dict__", ()):
            part.__dict__["worker_idx"] += by


def warn_of_training_mode(policy: Any) -> None:
    """Warn if the policy would act with dropout, or normalise by the batch at hand."""
    modules = policy.named_modules() if isinstance(policy, nn.Module) else ()
    active = [f"{name or 'itself'} ({type(m).__name__})" for name, m in modules if _is_noisy(m)]
    if active:
        warnings.warn(
            f"the policy acts in training mode: {', '.join(active[:5])}"
            f"{', …' if len(active) > 5 else ''}. Collectors do not change the mode: call "
            "policy.eval() before the collector copies the policy, and policy.train() for updates",
            stacklevel=2,
        )


def _is_noisy(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DROPOUTS) else getattr(module, "dropout", 0)
    drops = isinstance(rate, int | float) and rate > 0
    return module.training and (drops or isinstance(module, _BATCH_NORMS))


def exploring(how: InteractionType) -> set_interaction_type:
    """The context in which this thread's policies explore like that."""
    options = {"thread_local": True} if _PER_THREAD else {}
    return set_interaction_type(how, **options)


def _parameters(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """Its parameters; none if they are unknown."""
    call = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether its one argument is a TensorDict, by name or annotation."""
    parameters = _parameters(policy)
    if len(parameters) != 1:
        return False
    name, note = parameters[0].name, parameters[0].annotation
    if isinstance(note, type):
        note = "TensorDict" if issubclass(note, TensorDictBase) else ""
    return name in ("td", "tensordict") or (
        isinstance(note, str) and note.rpartition(".")[2] in ("TensorDict", "TensorDictBase")
    )


def shown(keys: Iterable[Key]) -> str:
    """Keys as a user writes them."""
    return ", ".join(repr(key[0] if len(key) == 1 else key) for key in keys) or "nothing"
