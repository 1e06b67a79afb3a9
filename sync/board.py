"""The notice board of a shared-memory scheme: one row of 64-bit words for each worker.

Every word has one writer, and an aligned 64-bit word is read and written whole. `latest` says which
slot a worker should use and in which version; the two pins say which slots it is looking at, so
that the sender writes elsewhere. `order` stands between a store and a load that must not swap.

    sender                                worker
    ------                                ------
    pick a slot nobody looks at
    write weights and version into it
    latest = (version, slot)   ; order    word = latest
    idle? ring its bell                   pin = slot of word ; order
                                          latest still word? else again
                                          use the slot: copy it, or point at it
                                          done = version ; order
    (awaiting)                 <- ring -- all that are awaited done? ring
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any, NamedTuple

from sync.memory import AnonymousMemory, Doorbell, Order, as_bytes

EVENTS = 64
ERROR_BYTES = 16 * 1024
FREE = -1

_LATEST, _PIN_A, _PIN_B, _PID, _STATE, _IDLE = range(6)
_EVENT_COUNT, _EVENTS_BEFORE, _ERROR_COUNT, _ERROR_LEN, _AWAITED, _DONE, _ERROR_VERSION = range(
    6, 13
)
_GREETINGS, _HOME, _CHECKED, _TORN = range(13, 17)
_ROW_WORDS = 24
_EVENT_WORDS = 5
_EVENT = struct.Struct(f"{_EVENT_WORDS}q")
_RING_WORDS = EVENTS * _EVENT_WORDS
_ROW_STRIDE = (_ROW_WORDS + _RING_WORDS) * 8 + ERROR_BYTES
_CLOSED, _SENDER_PID = range(2)
_HEAD_BYTES = 64

ABSENT, GREETED, LEFT = range(3)

now_ns = time.perf_counter_ns  # of a clock that all processes of the machine share


class Event(NamedTuple):
    """One version taken into use by one worker, in nanoseconds of the machine's one clock."""

    version: int
    published_ns: int
    seen_ns: int
    applied_ns: int
    retries: int


class Word(NamedTuple):
    """What `latest` holds: a version and the slot it lies in, in one 64-bit word."""

    version: int
    slot: int

    def packed(self) -> int:
        return (self.version + 1) << 16 | self.slot

    @classmethod
    def unpack(cls, word: int) -> Word:
        return cls((word >> 16) - 1, word & 0xFFFF)


class Board:
    """Rows for `num_workers` workers, in memory that both sides write.

    The sender has every row and bell; what a worker is handed has that worker's alone.
    """

    def __init__(self, num_workers: int, *, locked: bool | None = None):
        self.num_workers = num_workers
        self.memory = AnonymousMemory(_HEAD_BYTES + num_workers * _ROW_STRIDE)
        self.order = Order(self.memory) if locked is None else Order(self.memory, locked=locked)
        self.sender_bell = Doorbell()
        self.bells = {worker: Doorbell() for worker in range(num_workers)}
        self._map()
        self.head[_SENDER_PID] = os.getpid()
        for row in self.rows.values():
            row.words[_PIN_A] = row.words[_PIN_B] = FREE

    def _map(self) -> None:
        buffer = self.memory.map(0, self.memory.nbytes, writable=True)
        view = as_bytes(buffer)
        self.head = view[:_HEAD_BYTES].cast("q")
        rows = [view[_HEAD_BYTES + i * _ROW_STRIDE :] for i in range(self.num_workers)]
        words = [row[: _ROW_WORDS * 8].cast("q") for row in rows]
        self.rows = {
            i: Row(rows[i], words, i, self.order, bell=bell, sender_bell=self.sender_bell)
            for i, bell in self.bells.items()
        }

    def for_worker(self, worker_idx: int) -> Board:
        """The same board, with one row and one bell."""
        twin = object.__new__(Board)
        twin.__setstate__({**self.__getstate__(), "bells": {worker_idx: self.bells[worker_idx]}})
        return twin

    @property
    def sender_pid(self) -> int:
        return self.head[_SENDER_PID]

    @property
    def closed(self) -> bool:
        return bool(self.head[_CLOSED])

    def close(self) -> None:
        """Tell every worker that no more will come; once."""
        if self.closed:
            return
        self.head[_CLOSED] = 1
        self.order()
        for bell in self.bells.values():
            bell.ring()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["head"], state["rows"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


class Row:
    """One worker's row. Methods are grouped by the side that may call them."""

    def __init__(
        self,
        memory: memoryview,
        words: list[memoryview],
        worker_idx: int,
        order: Order,
        *,
        bell: Doorbell,
        sender_bell: Doorbell,
    ):
        self.words = words[worker_idx]
        self.order = order
        self.bell = bell
        self._all_words = words
        self._ring = memory[_ROW_WORDS * 8 :][: _RING_WORDS * 8]
        self._error = memory[(_ROW_WORDS + _RING_WORDS) * 8 :][:ERROR_BYTES]
        self._sender_bell = sender_bell

    # -- the sender's side

    def announce(self, word: int) -> None:
        self.words[_LATEST] = word

    def wake(self) -> None:
        if self.words[_IDLE]:
            self.bell.ring()

    def expect(self, version: int) -> None:
        """The sender is about to wait for `version` here; NEVER if it is not."""
        self.words[_AWAITED] = version + 1

    def held(self) -> set[int]:
        """The slots this worker looks at or may be about to look at."""
        words = self.words
        held = {words[_PIN_A], words[_PIN_B]}
        if words[_LATEST]:
            held.add(words[_LATEST] & 0xFFFF)
        return held

    @property
    def home(self) -> int:
        """Whether the worker's model is where the sender may write it, and rests (`home.py`)."""
        return self.words[_HOME]

    def said(self) -> bytes:
        """Changes with whatever the worker says."""
        return self.words[_STATE:_HOME].tobytes()

    @property
    def pid(self) -> int:
        return self.words[_PID]

    @property
    def greetings(self) -> int:
        """How often the row was taken over; a process may do so more than once."""
        return self.words[_GREETINGS]

    @property
    def state(self) -> int:
        return self.words[_STATE]

    @property
    def uses(self) -> tuple[int, int]:
        """How many uses of the model were checked, by all who had the row, and how many torn."""
        return self.words[_CHECKED], self.words[_TORN]

    @property
    def event_count(self) -> int:
        return self.words[_EVENT_COUNT]

    @property
    def events_before(self) -> int:
        """How many events are of the worker's predecessors."""
        return self.words[_EVENTS_BEFORE]

    def event(self, number: int) -> Event:
        return Event(*_EVENT.unpack_from(self._ring, number % EVENTS * _EVENT_WORDS * 8))

    @property
    def error_count(self) -> int:
        return self.words[_ERROR_COUNT]

    @property
    def error_version(self) -> int:
        return self.words[_ERROR_VERSION]

    def error(self) -> str:
        return bytes(self._error[: self.words[_ERROR_LEN]]).decode(errors="replace")

    # -- the worker's side

    def greet(self) -> None:
        """Take the row over, also from a worker that died: only now are its pins taken down."""
        self.words[_PIN_A] = self.words[_PIN_B] = FREE
        self.words[_IDLE] = self.words[_HOME] = 0
        self.words[_STATE] = ABSENT
        self.words[_DONE] = 0
        self.order()
        self.words[_EVENTS_BEFORE] = self.words[_EVENT_COUNT]
        self.words[_PID] = os.getpid()
        self.words[_GREETINGS] += 1
        self.order()
        self.words[_STATE] = GREETED
        self._tell()

    def tell_home(self, what: int) -> None:
        self.words[_HOME] = what

    def leave(self) -> None:
        self.words[_PIN_A] = self.words[_PIN_B] = FREE
        self.words[_STATE] = LEFT
        self._tell()

    @property
    def latest(self) -> int:
        return self.words[_LATEST]

    def pin(self, which: int) -> tuple[int, int] | None:
        """Pin the slot of the newest word; gives the word, and how often it moved meanwhile."""
        words, order = self.words, self.order
        for retries in range(1_000_000):
            word = words[_LATEST]
            if not word:
                return None
            words[_PIN_A + which] = word & 0xFFFF
            order()
            if words[_LATEST] == word:
                return word, retries
        raise AssertionError("`latest` moved a million times while one word was read")

    def unpin(self, which: int) -> None:
        self.words[_PIN_A + which] = FREE

    def done(self, event: Event) -> None:
        """Report a version in use. Of all workers that are waited for, the last rings."""
        words = self.words
        offset = words[_EVENT_COUNT] % EVENTS * _EVENT_WORDS * 8
        _EVENT.pack_into(self._ring, offset, *event)
        self.order()
        words[_EVENT_COUNT] += 1
        words[_DONE] = event.version + 1
        self.order()
        if words[_AWAITED] and all(row[_DONE] >= row[_AWAITED] for row in self._all_words):
            self._sender_bell.ring()

    def fail(self, version: int, text: str) -> None:
        """Report an exception; the end of a long traceback is what is kept."""
        data = text.encode()[-ERROR_BYTES:]
        self._error[: len(data)] = data
        self.words[_ERROR_LEN] = len(data)
        self.words[_ERROR_VERSION] = version
        self.order()
        self.words[_ERROR_COUNT] += 1
        self._tell()

    def count_use(self, *, torn: bool) -> None:
        self.words[_CHECKED] += 1
        self.words[_TORN] += torn

    def idle(self, idle: bool) -> None:
        """Say whether it takes a bell to be noticed; what came just before, look for again."""
        self.words[_IDLE] = int(idle)
        if idle:
            self.order()

    def _tell(self) -> None:
        self.order()
        if self.words[_AWAITED]:
            self._sender_bell.ring()
