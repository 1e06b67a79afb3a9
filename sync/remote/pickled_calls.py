"""Calls as bytes: plain objects, with their arrays beside the pickle, and how a call ended."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from sync.local.memory import tensor_over


class Packed(NamedTuple):
    """An object as bytes, and the memory of its arrays: flat uint8 tensors."""

    data: bytes
    tensors: list[Tensor]


def pack(obj: Any) -> Packed:
    """Pickle `obj` without copying its arrays. Functions are those of modules."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return Packed(data, [as_tensor(buffer.raw()) for buffer in buffers])


def unpack(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """The object again; its arrays are views of `tensors`."""
    return pickle.loads(data, buffers=[tensor.numpy() for tensor in tensors])


def run(data: bytes, tensors: Sequence[Tensor]) -> Future[CallOutcome]:
    """Run a call that was packed as (function, args); the future ends when the call does."""
    ended: Future[CallOutcome] = Future()
    outcome = CallOutcome.of(_run, (data, tensors))
    if outcome.fine and isinstance(outcome.value, Future):
        outcome.value.add_done_callback(
            lambda done: ended.set_result(CallOutcome.of(done.result, ()))
        )
    else:
        ended.set_result(outcome)
    return ended


def _run(data: bytes, tensors: Sequence[Tensor]) -> Any:
    function, args = unpack(data, tensors)
    return function(*args)


def as_tensor(memory: Any) -> Tensor:
    """A uint8 tensor over memory, which is only to be read if the memory is read-only."""
    array = np.asarray(memory, np.uint8)
    return tensor_over(array) if array.size else torch.empty(0, dtype=torch.uint8)


class CallOutcome(NamedTuple):
    """How a call ended: its result, or its exception and the traceback."""

    fine: bool
    value: Any
    traceback: str = ""

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any]) -> CallOutcome:
        """Call the function; whatever it raises is the caller's to handle."""
        try:
            return cls(True, function(*args))
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's process
            return cls(False, _portable(error), traceback.format_exc())

    def tell(self, future: Future[Any], whose: str) -> None:
        """End the caller's future as the call ended."""
        if self.fine:
            future.set_result(self.value)
            return
        self.value.add_note(f"in {whose}:\n{self.traceback.rstrip()}")
        future.set_exception(self.value)

    def packed(self) -> Packed:
        """The outcome as bytes and tensors; a result that cannot be pickled becomes an error."""
        try:
            return pack(self)
        except Exception as error:  # noqa: BLE001 - any user's class, whatever is wrong with it
            return pack(CallOutcome(False, _portable(error), traceback.format_exc()))


def tell(future: Future[Any], data: bytes, tensors: Sequence[Tensor], whose: str) -> None:
    """End the caller's future with the outcome that arrived, unless it has ended already."""
    with contextlib.suppress(InvalidStateError):
        try:
            outcome: CallOutcome = unpack(data, tensors)
        except Exception as error:  # noqa: BLE001 - its class cannot be loaded here, say
            future.set_exception(error)
        else:
            outcome.tell(future, whose)


def _portable(error: BaseException) -> Exception:
    """The exception, or one with the same text if its class cannot be pickled and loaded."""
    try:
        copy = pickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - any user's exception class, whatever is wrong with it
        copy = None
    if isinstance(copy, Exception) and str(copy) == str(error):
        return copy
    return RuntimeError(f"{type(error).__name__}: {error}")
