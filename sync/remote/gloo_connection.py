"""A connection between two processes: calls both ways over a gloo group of two.

    one side                                   other side
    --------                                   ----------
    call(f, x)    -- frame (and tensors) -->   a new thread runs f(x)
    future ends  <-- frame (and tensors) ---   when it is done
    (when idle)       "alive"                  (when idle)

A frame has a fixed size, so that the reader always knows what to receive next. What does not fit
into it follows, then each tensor, from the memory where it lies, in pieces of 16 MiB. Each side has
two threads: one reads, one writes. A group of two has no third member that could break it:
connections fail one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sync.remote.engine import PeerDied
from sync.remote.pickled_calls import CallOutcome, Packed, pack, run, tell

FRAME_BYTES = 4096
_HEAD = struct.Struct("<4q")  # kind, ticket, bytes of the pickle, number of tensors
_ROOM = FRAME_BYTES - _HEAD.size
_CALL, _ANSWER, _ALIVE, _BYE = range(4)
_MESSAGES, _PROBE = range(2)  # tags
_CLOSE_S = 2.0
_GOODBYE_S = 0.5
_PIECE_BYTES = 16 << 20
_MOST_DEVICES = 4
_turns = itertools.count()


class _Frame(NamedTuple):
    kind: int
    ticket: int = 0
    packed: Packed = Packed(b"", [])

    def parts(self) -> list[Tensor]:
        """The frame, what of the pickle does not fit into it, and the tensors."""
        data, tensors = self.packed
        data = struct.pack(f"<{len(tensors)}q", *(t.numel() for t in tensors)) + data
        frame = bytearray(FRAME_BYTES)
        _HEAD.pack_into(frame, 0, self.kind, self.ticket, len(data), len(tensors))
        frame[_HEAD.size : _HEAD.size + min(len(data), _ROOM)] = data[:_ROOM]
        parts = [torch.frombuffer(frame, dtype=torch.uint8)]
        if len(data) > _ROOM:
            parts.append(torch.frombuffer(bytearray(data[_ROOM:]), dtype=torch.uint8))
        return [*parts, *tensors]


class GlooConnection:
    """One end. `other` is the rank of the other side in this group, and `whose` is its name.

    silence_s: after so many seconds without any sign of life the other side counts as gone. A
        piece of a large block is one.
    ended: set when nothing more can be sent or received; `why` says what ended it.
    """

    def __init__(self, group: Any, other: int, whose: str, *, silence_s: float):
        self.whose = whose
        self.ended = threading.Event()
        self.why = ""
        self._group, self._other = group, other
        self._silence = timedelta(seconds=silence_s)
        self._outgoing: queue.SimpleQueue[_Frame] = queue.SimpleQueue()
        self._calls: dict[int, Future[Any]] = {}  # those without an answer, by their tickets
        self._tickets = itertools.count()
        self._reader = threading.Thread(target=self._read, name="lockstep-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name="lockstep-write", daemon=True)
        self._reader.start()
        self._writer.start()

    # -- calls

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have the other side run `function(*args)` in a thread."""
        future: Future[Any] = Future()
        ticket = next(self._tickets)
        packed = pack((function, args))
        self._calls[ticket] = future  # before it is sent: the answer may come at once
        self._outgoing.put(_Frame(_CALL, ticket, packed))
        if self.ended.is_set():  # `_end` may have looked for calls before this one was there
            self._fail_calls()
        return future

    # -- the writing thread

    def _write(self) -> None:
        idle_s = self._silence.total_seconds() / 4
        while True:
            try:
                message = self._outgoing.get(timeout=idle_s)
            except queue.Empty:
                message = _Frame(_ALIVE)
            if self.ended.is_set():
                return
            try:
                parts = message.parts()
                pieces = [piece for part in parts for piece in _pieces(part)]
                sent = [self._group.send([piece], self._other, _MESSAGES) for piece in pieces]
                for work in sent:  # the memory must stay until then
                    work.wait(self._silence)
            except Exception as error:  # noqa: BLE001 - no other thread would hear of it
                self._end(_reason(error, self._silence.total_seconds()))
            del message

    # -- the reading thread

    def _read(self) -> None:
        try:
            while self._read_message():
                pass
        except Exception as error:  # noqa: BLE001 - no other thread would hear of it
            self._end(_reason(error, self._silence.total_seconds()))

    def _read_message(self) -> bool:
        frame = self._receive(FRAME_BYTES)
        kind, ticket, length, num_tensors = _HEAD.unpack(frame[: _HEAD.size].numpy().tobytes())
        data = frame[_HEAD.size : _HEAD.size + min(length, _ROOM)].numpy().tobytes()
        if length > _ROOM:
            data += self._receive(length - _ROOM).numpy().tobytes()
        sizes = struct.unpack_from(f"<{num_tensors}q", data)
        data = data[8 * num_tensors :]
        tensors = [self._receive(size) for size in sizes]
        if kind == _CALL:
            serve = threading.Thread(
                target=self._serve, args=(ticket, data, tensors), name="lockstep-serve", daemon=True
            )
            serve.start()
        elif kind == _ANSWER:
            tell(self._calls.pop(ticket), data, tensors, self.whose)
        elif kind == _BYE:
            self._end("it left")
        return kind != _BYE

    def _receive(self, nbytes: int) -> Tensor:
        memory = torch.from_numpy(_recycled(nbytes))
        pieces = _pieces(memory)  # all are asked for at once: no piece waits for this thread
        coming = [self._group.recv([piece], self._other, _MESSAGES) for piece in pieces]
        for work in coming:
            work.wait(self._silence)
        return memory

    def _serve(self, ticket: int, data: bytes, tensors: list[Tensor]) -> None:
        def answer(done: Future[CallOutcome]) -> None:
            self._outgoing.put(_Frame(_ANSWER, ticket, done.result().packed()))

        run(data, tensors).add_done_callback(answer)

    # -- the end

    def _end(self, why: str) -> None:
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
        self._fail_calls()
        self._outgoing.put(_Frame(_ALIVE))  # wakes the writing thread

    def _fail_calls(self) -> None:
        while self._calls:
            with contextlib.suppress(KeyError, InvalidStateError):
                future = self._calls.pop(next(iter(self._calls)))
                future.set_exception(PeerDied(f"{self.whose} is gone: {self.why}"))

    def say_goodbye(self) -> None:
        """Tell the other side, which answers by closing."""
        if not self.ended.is_set():
            self._outgoing.put(_Frame(_BYE))

    def close(self, deadline: float | None = None) -> None:
        """Say goodbye and stop both threads, whether the other side listens or not.

        deadline: until when to wait for the other side, by `time.monotonic()`.
        """
        if deadline is None:
            self.say_goodbye()
            deadline = time.monotonic() + _GOODBYE_S
        self.ended.wait(max(0.0, deadline - time.monotonic()))
        self._end("the connection was closed here")
        others = {self._reader, self._writer} - {threading.current_thread()}
        if any(thread.is_alive() for thread in others):
            # A wait in gloo cannot be cancelled; but one that is overdue closes the whole group.
            with contextlib.suppress(RuntimeError):
                probe = torch.empty(1, dtype=torch.uint8)
                self._group.recv([probe], self._other, _PROBE).wait(timedelta(milliseconds=1))
        for thread in others:
            thread.join(_CLOSE_S)


def close_together(connections: Collection[GlooConnection]) -> None:
    """Close them all within the time that one takes."""
    for connection in connections:
        connection.say_goodbye()
    deadline = time.monotonic() + _GOODBYE_S
    for connection in connections:
        connection.close(deadline)


_MOST_SPARE = 4
_spare: list[mmap.mmap] = []  # of this process


def _recycled(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory to receive into; a large piece is used again once nothing refers to it any more.

    New memory costs a page fault for every 4 KiB, which takes longer than receiving into it.
    """
    if nbytes < _PIECE_BYTES:
        return np.empty(nbytes, np.uint8)
    fitting = [region for region in list(_spare) if len(region) == nbytes]
    region = fitting[0] if fitting else mmap.mmap(-1, nbytes)
    with contextlib.suppress(ValueError):
        _spare.remove(region)
    array = np.frombuffer(region, np.uint8)
    weakref.finalize(array, _keep, region)
    return array


def _keep(region: mmap.mmap) -> None:
    _spare.append(region)
    del _spare[:-_MOST_SPARE]


def _pieces(memory: Tensor) -> Iterable[Tensor]:
    """What one transfer sends or receives: `silence_s` limits each, and not the whole block."""
    return memory.split(_PIECE_BYTES) if memory.numel() else ()


def _reason(error: Exception, silence_s: float) -> str:
    text = str(error)
    if not isinstance(error, RuntimeError):
        return f"{type(error).__name__}: {text}"
    if "Timed out" in text or "timeout" in text:
        return f"it gave no sign of life for {silence_s:g} s"
    if "closed by peer" in text or "reset" in text:
        return "it closed the connection, as a process does that is killed"
    return text.splitlines()[0]


def make_group(store: Any, name: str, rank: int, address: str, timeout_s: float) -> Any:
    """A gloo group of two, bound to `address`, with the same `name` in `store` on both sides."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_device(os.getpid(), address, next(_turns) % _MOST_DEVICES)]
    options._threads = 1  # sending and receiving uses none of them
    return dist.ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)


@cache
def _device(pid: int, address: str, number: int) -> Any:
    """What groups share: a thread that sends and receives, and wakes every 10 ms even if idle."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        raise ValueError(f"address={address!r} is not of this machine: {error}") from None
