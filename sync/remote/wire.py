"""What travels in a call: any object with its tensors beside it, and how the call ended.

A post is the call that has to be quick: a function of Lockstep's own, a block, and arguments that
plain pickle knows. Its function waits for nobody; what takes waiting it leaves for `Later`.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor


class Packed(NamedTuple):
    """An object as bytes, and the memory of its tensors, flat (uint8), in order."""

    data: bytes
    tensors: list[Tensor]


def pack(thing: Any) -> Packed:
    """Pickle `thing` (cloudpickle, so lambdas travel) without copying its dense CPU tensors."""
    file, tensors = io.BytesIO(), list[Tensor]()
    _Pickler(file, tensors).dump(thing)
    return Packed(file.getvalue(), tensors)


def unpack(data: bytes, tensors: Sequence[Tensor]) -> Any:
    """The object again; its tensors look into `tensors`."""
    return _Unpickler(io.BytesIO(data), tensors).load()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]):
        super().__init__(file)
        self._tensors = tensors
        self._known: dict[int, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._alive: list[Tensor] = []  # as long as they are, their ids are theirs

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        if id(obj) not in self._known:
            flat = obj.detach().contiguous().reshape(-1).view(torch.uint8)
            self._known[id(obj)] = len(self._tensors), obj.dtype, tuple(obj.shape)
            self._tensors.append(flat)
            self._alive.append(obj)
        return self._known[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        place, dtype, shape = pid
        return self._tensors[place].view(dtype).view(shape)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


class Post(NamedTuple):
    """A function and the arguments that follow its block."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def packed(self) -> bytes:
        return pickle.dumps(tuple(self), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def run(cls, data: bytes, block: Tensor) -> Any:
        function, args = pickle.loads(data)
        return function(block, *args)


class Later(NamedTuple):
    """Instead of a result: call it for the result, in a thread that can wait."""

    result: Callable[[], Any]


class Outcome(NamedTuple):
    """How a call ended: what it returned, or what it raised and the traceback."""

    fine: bool
    value: Any
    traceback: str = ""

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any]) -> Outcome:
        """Call it, and wait for what comes later; whatever it raises goes to the caller."""
        outcome = cls.now(function, args)
        return cls.of(outcome.value.result, ()) if isinstance(outcome.value, Later) else outcome

    @classmethod
    def now(cls, function: Callable[..., Any], args: Sequence[Any]) -> Outcome:
        """The same, but what comes later is left so."""
        try:
            return cls(True, function(*args))
        except BaseException as error:  # noqa: BLE001 - the caller must hear of it, whatever it is
            return cls(False, _travelling(error), traceback.format_exc())

    def tell(self, future: Future[Any], whose: str) -> None:
        """End the caller's future as the call ended."""
        if self.fine:
            future.set_result(self.value)
            return
        self.value.add_note(f"in {whose}:\n{self.traceback.rstrip()}")
        future.set_exception(self.value)

    def packed(self) -> Packed:
        try:
            return pack(self)
        except Exception as error:  # noqa: BLE001 - what was returned cannot travel
            return pack(Outcome(False, _travelling(error), traceback.format_exc()))

    def packed_plainly(self) -> Packed:
        """The same, of a post."""
        if not self.fine:  # an error may be of any class
            return self.packed()
        return Packed(pickle.dumps(self, pickle.HIGHEST_PROTOCOL), [])


def tell(future: Future[Any], data: bytes, tensors: Sequence[Tensor], whose: str) -> None:
    """End the caller's future as the outcome says that arrived, unless it has ended meanwhile."""
    with contextlib.suppress(InvalidStateError):
        try:
            outcome: Outcome = unpack(data, tensors)
        except Exception as error:  # noqa: BLE001 - a class that is not there, for instance
            future.set_exception(error)
        else:
            outcome.tell(future, whose)


def _travelling(error: BaseException) -> Exception:
    """The error, or one that says the same if it is not fit to be raised in another process."""
    try:
        copy = pickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - any user's exception class, whatever is wrong with it
        copy = None
    if isinstance(copy, Exception) and str(copy) == str(error):
        return copy
    return RuntimeError(f"{type(error).__name__}: {error}")
