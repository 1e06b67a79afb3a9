"""A line between two processes: calls both ways over a gloo group of two.

    one side                                  other side
    --------                                  ----------
    call(f, x)  -- frame (and tensors) -->    a thread runs f(x)
    future ends <-- frame (and tensors) --    how it ended
    (now and then)     "alive"                (now and then)

A frame is a fixed number of bytes, so that the reader always knows what to wait for; what does not
fit into it follows, and so does each tensor, from where it lies to where it will stay. A group of
two has no third that could break it: lines fail one by one.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sync.remote.engine import PeerDied
from sync.remote.recycled import Recycled
from sync.remote.wire import Outcome, Packed, pack, tell, unpack

FRAME_BYTES = 2048
_HEAD = struct.Struct("<4q")  # kind, ticket, bytes of the pickle, number of tensors
_ROOM = FRAME_BYTES - _HEAD.size
_CALL, _ANSWER, _ALIVE, _BYE = range(4)
_POOL_THREADS = 64


class Line:
    """One end. `other` is this group's rank of the other side, and `whose` is its name.

    silence_s: after so many seconds without any sign of life the other side counts as gone.
    """

    def __init__(self, group: Any, other: int, whose: str, *, silence_s: float):
        self.whose = whose
        self.ended = threading.Event()
        self.why = ""
        self._group, self._other = group, other
        self._silence = timedelta(seconds=silence_s)
        self._sending = threading.Lock()
        self._memory = Recycled()
        self._calls: dict[int, tuple[Future[Any], list[Any]]] = {}
        self._tickets = 0
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="lockstep-serve")
        self._reader = threading.Thread(target=self._read, name="lockstep-line", daemon=True)
        self._beat = threading.Thread(
            target=self._beat_until_end, args=(silence_s / 4,), name="lockstep-alive", daemon=True
        )
        self._reader.start()
        self._beat.start()

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have the other side run `function(*args)`."""
        future: Future[Any] = Future()
        packed = pack((function, args))
        try:
            with self._sending:
                self._tickets += 1
                ticket = self._tickets
                self._calls[ticket] = future, []
                sent = self._post(_CALL, ticket, packed)
                if ticket in self._calls:  # the memory must stay until there is an answer
                    self._calls[ticket] = future, sent
        except RuntimeError as error:
            self._end(str(error))
        if self.ended.is_set():  # perhaps after whoever ended it had looked
            self._fail_calls()
        return future

    def _post(self, kind: int, ticket: int, packed: Packed | None = None) -> list[Any]:
        """Begin to send; returns what must be kept until the other side has it all."""
        data, tensors = packed if packed is not None else (b"", [])
        data = struct.pack(f"<{len(tensors)}q", *(t.numel() for t in tensors)) + data
        frame = bytearray(FRAME_BYTES)
        _HEAD.pack_into(frame, 0, kind, ticket, len(data), len(tensors))
        frame[_HEAD.size : _HEAD.size + min(len(data), _ROOM)] = data[:_ROOM]
        parts = [torch.frombuffer(frame, dtype=torch.uint8)]
        if len(data) > _ROOM:
            parts.append(torch.frombuffer(bytearray(data[_ROOM:]), dtype=torch.uint8))
        parts += [tensor for tensor in tensors if tensor.numel()]
        return [(self._group.send([part], self._other, 0), part) for part in parts]

    def _read(self) -> None:
        try:
            while True:
                frame = self._take(FRAME_BYTES)
                head = frame[: _HEAD.size].numpy().tobytes()
                kind, ticket, length, num_tensors = _HEAD.unpack(head)
                data = frame[_HEAD.size : _HEAD.size + min(length, _ROOM)].numpy().tobytes()
                if length > _ROOM:
                    data += self._take(length - _ROOM).numpy().tobytes()
                sizes = struct.unpack_from(f"<{num_tensors}q", data)
                tensors = [self._take(size) for size in sizes]
                if kind == _BYE:
                    self._end("it left")
                    return
                if kind == _CALL:
                    self._pool.submit(self._serve, ticket, data[8 * num_tensors :], tensors)
                elif kind == _ANSWER:
                    self._hear(ticket, data[8 * num_tensors :], tensors)
        except RuntimeError as error:
            self._end(_in_words(str(error), self._silence.total_seconds()))

    def _take(self, nbytes: int) -> Tensor:
        memory = self._memory.take(nbytes)
        if nbytes:
            self._group.recv([memory], self._other, 0).wait(self._silence)
        return memory

    def _serve(self, ticket: int, data: bytes, tensors: list[Tensor]) -> None:
        outcome = Outcome.of(_run, (data, tensors))
        del tensors
        self._send_and_wait(_ANSWER, ticket, outcome.packed())

    def _send_and_wait(self, kind: int, ticket: int = 0, packed: Packed | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # nobody is there: the reader finds that out too
            with self._sending:
                sent = self._post(kind, ticket, packed)
            for work, _ in sent:
                work.wait(self._silence)

    def _hear(self, ticket: int, data: bytes, tensors: list[Tensor]) -> None:
        future, _ = self._calls.pop(ticket)
        tell(future, data, tensors, self.whose)

    def _beat_until_end(self, every_s: float) -> None:
        while not self.ended.wait(every_s):
            self._send_and_wait(_ALIVE)

    def _end(self, why: str) -> None:
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
        self._fail_calls()
        self._pool.shutdown(wait=False)

    def _fail_calls(self) -> None:
        while self._calls:
            with contextlib.suppress(KeyError, InvalidStateError):
                future, _ = self._calls.pop(next(iter(self._calls)))
                future.set_exception(PeerDied(f"{self.whose} is gone: {self.why}"))

    def close(self) -> None:
        """Take leave, and stop reading, whether the other side listens or not."""
        if not self.ended.is_set():
            with contextlib.suppress(RuntimeError), self._sending:
                goodbye = self._post(_BYE, 0)  # noqa: F841 - what is sent must stay until it is
            self.ended.wait(0.5)  # the other side answers by closing
        self._end("the line was closed here")
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            # A wait in gloo cannot be called off; but one that is overdue closes the whole group.
            with contextlib.suppress(RuntimeError):
                probe = torch.empty(1, dtype=torch.uint8)
                self._group.recv([probe], self._other, 1).wait(timedelta(milliseconds=1))
            self._reader.join(2.0)
        self._beat.join(2.0)


def _run(data: bytes, tensors: list[Tensor]) -> Any:
    function, args = unpack(data, tensors)
    return function(*args)


def _in_words(error: str, silence_s: float) -> str:
    if "Timed out" in error or "timeout" in error:
        return f"it gave no sign of life for {silence_s:g} s"
    if "closed by peer" in error or "reset" in error:
        return "it closed the connection, as a process does that is killed"
    return error.splitlines()[0]


def make_group(store: Any, name: str, rank: int, address: str, timeout_s: float) -> Any:
    """A gloo group of two, bound to `address`, named in `store` alike on both sides."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
