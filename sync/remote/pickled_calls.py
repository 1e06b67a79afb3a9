"""Calls as bytes: any object, with its tensors beside the pickle, and how a call ended."""

from __future__ import annotations

import contextlib
import io
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
    """An object as bytes, and the memory of its tensors and arrays: flat uint8 tensors."""

    data: bytes
    tensors: list[Tensor]


def pack(obj: Any) -> Packed:
    """Pickle `obj` (cloudpickle, so lambdas travel) without copying its dense CPU tensors."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
    return Packed(file.getvalue(), [as_tensor(buffer.raw()) for buffer in buffers])


def unpack(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """The object again; its tensors are views of `tensors`."""
    return pickle.loads(data, buffers=[tensor.numpy() for tensor in tensors])


def unpack_and_run(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """Run a call that was packed as (function, args)."""
    function, args = unpack(data, tensors)
    return function(*args)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return super().reducer_override(obj)
        flat = obj.detach().contiguous().reshape(-1)
        if flat.stride(0) != 1:  # one element, which is contiguous whatever its stride
            flat = flat.clone(memory_format=torch.contiguous_format)
        memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        return _make_tensor, (memory, obj.dtype, tuple(obj.shape))


def _make_tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return as_tensor(memory).view(dtype).view(shape)


def as_tensor(memory: Any) -> Tensor:
    """A uint8 tensor over memory, which is only to be read if the memory is read-only."""
    array = np.asarray(memory, np.uint8)
    return tensor_over(array) if array.size else torch.empty(0, dtype=torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


class Outcome(NamedTuple):
    """How a call ended: its result, or its exception and the traceback."""

    fine: bool
    value: Any
    traceback: str = ""

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any]) -> Outcome:
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

    def packed(self, *, is_plain: bool = False) -> Packed:
        """The outcome as bytes and tensors; a result that cannot be pickled becomes an error.

        is_plain: plain pickle can handle the result, which is faster.
        """
        if is_plain and self.fine:
            return Packed(pickle.dumps(self, pickle.HIGHEST_PROTOCOL), [])
        try:
            return pack(self)
        except Exception as error:  # noqa: BLE001 - any user's class, whatever is wrong with it
            return pack(Outcome(False, _portable(error), traceback.format_exc()))


def pack_post(function: Callable[..., Future[Any]], args: tuple[Any, ...]) -> bytes:
    """A posted function, and the arguments that follow its block."""
    return pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)


def run_post(data: bytes, block: Tensor) -> Future[Outcome]:
    """Run a posted function; the future ends when the one that the function returned does."""
    ended: Future[Outcome] = Future()
    started = Outcome.of(_start_post, (data, block))
    if not started.fine:
        ended.set_result(started)
        return ended
    future: Future[Any] = started.value
    future.add_done_callback(lambda done: ended.set_result(Outcome.of(done.result, ())))
    return ended


def _start_post(data: bytes, block: Tensor) -> Future[Any]:
    function, args = pickle.loads(data)
    future: Future[Any] = function(block, *args)
    return future


def tell(future: Future[Any], data: bytes, tensors: Sequence[Tensor], whose: str) -> None:
    """End the caller's future with the outcome that arrived, unless it has ended already."""
    with contextlib.suppress(InvalidStateError):
        try:
            outcome: Outcome = unpack(data, tensors)
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
