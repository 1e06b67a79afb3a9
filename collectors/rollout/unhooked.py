"""A worker's own policy, whose modules are called without a look for hooks.

nn.Module looks for hooks whenever it is called, which takes longer than a small layer itself does.
Here they are looked for once: a module that has none is called as its `forward` from then on. What
is computed stays the same, to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_WAYS = {
    "__init_subclass__",
    "__reduce__",
    "__reduce_ex__",
    "__getnewargs_ex__",
    "__getnewargs__",
}


def unhook(policy: Any) -> None:
    """Spare the calls of a policy, which nobody else has, the look for hooks."""
    if not isinstance(policy, nn.Module) or torch_module._has_any_global_hook():
        return
    if any(_is_compiled(module) for module in policy.modules()):
        return
    for module in policy.modules():
        if _calls_forward(module):
            module.__class__ = _unhooked(type(module))  # type: ignore[arg-type]


def _is_compiled(module: nn.Module) -> bool:
    """Whether somebody has looked at its class, and acts by what was found."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
    )


def _calls_forward(module: nn.Module) -> bool:
    """Whether nothing happens in its call but its `forward`, and its class can be another."""
    return (
        type(module).__call__ is nn.Module.__call__
        and not isinstance(
            module, TensorDictModuleBase
        )  # told apart by its class, see PolicyCaller
        and not any(_OWN_WAYS & vars(kind).keys() for kind in type(module).__mro__[:-1])
        and not any(getattr(module, hooks) for hooks in _HOOKS)
        and "forward" not in module.__dict__
    )


@functools.cache
def _unhooked(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like `kind`, whose instances are copied and pickled as instances of `kind`."""

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return kind.__new__, (kind,), object.__reduce_ex__(self, 2)[2]

    members = {
        "__call__": _linear if kind is nn.Linear else kind.forward,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), members)


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    """Its forward, which finds the parameters sooner if they are where they used to be."""
    parameters = layer._parameters
    try:
        return linear(input, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]
    except KeyError:
        return layer.forward(input)
