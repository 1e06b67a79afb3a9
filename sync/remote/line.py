"""A line between two processes: calls both ways over a gloo group of two.

    one side                                  other side
    --------                                  ----------
    call(f, x)  -- frame (and tensors) -->    a thread runs f(x)
    post(f, b)  -- frame, block -->           the thread that reads runs f(b), which does not wait
    future ends <-- frame (and tensors) --    how it ended
    (now and then)     "alive"                (now and then)

A frame is a fixed number of bytes, so that the reader always knows what to wait for; what does not
fit into it follows, and so does each tensor, from where it lies to where it will stay. What gloo
is to bring it asks for first, which takes a round trip; so where two tensors of one size came, the
next is asked for beforehand. A group of two has no third that could break it: lines fail one by
one.
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

from sync import interrupts
from sync.remote.engine import PeerDied
from sync.remote.recycled import Recycled
from sync.remote.wire import Later, Outcome, Packed, Post, pack, tell, unpack

FRAME_BYTES = 2048
_HEAD = struct.Struct("<4q")  # kind, ticket, bytes of the pickle, number of tensors
_ROOM = FRAME_BYTES - _HEAD.size
_CALL, _POST, _ANSWER, _ALIVE, _BYE = range(5)
_FRAMES, _PROBE, _OF_NO_BYTES = range(3)  # tags: one with `n` bytes has the tag `_OF_NO_BYTES + n`
_LARGEST_TAG = 2**31 - 1
_ASKED_AHEAD = 2  # sizes: what was asked for is never given up, and takes memory
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
        self._asked_for: dict[int, tuple[Tensor, Any]] = {}  # tensors to come, by their size
        self._last_size = 0
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
        return self._call(_CALL, pack((function, args)))

    def post(self, function: Callable[..., Any], block: Tensor, *args: Any) -> Future[Any]:
        """The same as a `Post`."""
        return self._call(_POST, Packed(Post(function, args).packed(), [block]))

    def _call(self, kind: int, packed: Packed) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            with interrupts.held(), self._sending:  # half a message would be the last
                self._tickets += 1
                ticket = self._tickets
                self._calls[ticket] = future, []
                sent = self._begin_to_send(kind, ticket, packed)
                if ticket in self._calls:  # the memory must stay until there is an answer
                    self._calls[ticket] = future, sent
        except RuntimeError as error:
            self._end(str(error))
        if self.ended.is_set():  # perhaps after whoever ended it had looked
            self._fail_calls()
        return future

    def _begin_to_send(self, kind: int, ticket: int, packed: Packed | None = None) -> list[Any]:
        """Returns what must be kept until the other side has it all."""
        data, tensors = packed if packed is not None else (b"", [])
        data = struct.pack(f"<{len(tensors)}q", *(t.numel() for t in tensors)) + data
        frame = bytearray(FRAME_BYTES)
        _HEAD.pack_into(frame, 0, kind, ticket, len(data), len(tensors))
        frame[_HEAD.size : _HEAD.size + min(len(data), _ROOM)] = data[:_ROOM]
        parts = [(torch.frombuffer(frame, dtype=torch.uint8), _FRAMES)]
        if len(data) > _ROOM:
            rest = torch.frombuffer(bytearray(data[_ROOM:]), dtype=torch.uint8)
            parts.append((rest, _FRAMES))
        parts += [(tensor, _tag(tensor.numel())) for tensor in tensors if tensor.numel()]
        return [(self._group.send([part], self._other, tag), part) for part, tag in parts]

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
                tensors = [self._take_tensor(size) for size in sizes]
                if kind == _BYE:
                    self._end("it left")
                    return
                if kind == _CALL:
                    self._pool.submit(self._serve, ticket, data[8 * num_tensors :], tensors)
                elif kind == _POST:
                    self._serve_post(ticket, data[8 * num_tensors :], tensors[0])
                elif kind == _ANSWER:
                    self._hear(ticket, data[8 * num_tensors :], tensors)
        except RuntimeError as error:
            self._end(_in_words(str(error), self._silence.total_seconds()))
        except Exception as error:  # noqa: BLE001 - no memory, say: nobody else would hear of it
            self._end(f"{type(error).__name__}: {error}")

    def _take(self, nbytes: int) -> Tensor:
        memory, work = self._ask_for(nbytes, _FRAMES)
        work.wait(self._silence)
        return memory

    def _take_tensor(self, nbytes: int) -> Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        tag = _tag(nbytes)
        if nbytes not in self._asked_for:
            self._asked_for[nbytes] = self._ask_for(nbytes, tag)
        memory, work = self._asked_for.pop(nbytes)
        work.wait(self._silence)
        again, self._last_size = nbytes == self._last_size, nbytes
        if again and tag < _LARGEST_TAG and len(self._asked_for) < _ASKED_AHEAD:
            self._asked_for[nbytes] = self._ask_for(nbytes, tag)
        return memory

    def _ask_for(self, nbytes: int, tag: int) -> tuple[Tensor, Any]:
        memory = self._memory.take(nbytes)
        return memory, self._group.recv([memory], self._other, tag)

    def _serve(self, ticket: int, data: bytes, tensors: list[Tensor]) -> None:
        outcome = Outcome.of(_run, (data, tensors))
        del tensors
        self._send_and_wait(_ANSWER, ticket, outcome.packed())

    def _serve_post(self, ticket: int, data: bytes, block: Tensor) -> None:
        outcome = Outcome.now(Post.run, (data, block))
        if isinstance(outcome.value, Later):
            self._pool.submit(self._serve_later, ticket, outcome.value)
        else:  # here nobody may wait: the other side's reader might do the same
            sent = self._send(_ANSWER, ticket, outcome.packed_plainly())
            self._pool.submit(self._wait_for, sent)

    def _serve_later(self, ticket: int, later: Later) -> None:
        self._send_and_wait(_ANSWER, ticket, Outcome.of(later.result, ()).packed_plainly())

    def _send_and_wait(self, kind: int, ticket: int = 0, packed: Packed | None = None) -> None:
        self._wait_for(self._send(kind, ticket, packed))

    def _send(self, kind: int, ticket: int = 0, packed: Packed | None = None) -> list[Any]:
        with contextlib.suppress(RuntimeError), self._sending:
            return self._begin_to_send(kind, ticket, packed)
        return []  # nobody is there: the reader finds that out too

    def _wait_for(self, sent: list[Any]) -> None:
        with contextlib.suppress(RuntimeError):
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
            goodbye = self._send(_BYE)  # noqa: F841 - what is sent must stay until it is
            self.ended.wait(0.5)  # the other side answers by closing
        self._end("the line was closed here")
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            # A wait in gloo cannot be called off; but one that is overdue closes the whole group.
            with contextlib.suppress(RuntimeError):
                probe = torch.empty(1, dtype=torch.uint8)
                self._group.recv([probe], self._other, _PROBE).wait(timedelta(milliseconds=1))
            self._reader.join(2.0)
        self._beat.join(2.0)


def _tag(nbytes: int) -> int:
    return min(_OF_NO_BYTES + nbytes, _LARGEST_TAG)


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
