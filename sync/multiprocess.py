"""Weights by message: each worker is sent every version over a line of its own, and copies it.

    trainer: send()                           worker: receive()
    ---------------                           -----------------
    write the message's block  (one pass)
    line 0: "version v lies in block b"  -->  copy b into the model's own memory
    line 1: "version v lies in block b"  -->
    wait for all                         <--  "done: v"

A worker whose small model rests is sent no message: the sender makes that worker's copy itself
(`home.py`), when all that it was told before is done.

A message is taken out of the line only when it has been dealt with, and put in again when it may
not have been sent: an interrupt (Ctrl-C) anywhere may repeat a message, and loses none. Both sides
know a repeated one by its version.

One message at a time is on the way to a worker. A version that is published meanwhile waits with
the sender, and a newer one takes its place; a feeder thread sends it when the worker has answered.
Blocks are used again as soon as nobody has a message about them, so with workers that keep up there
is one copy of the weights beside the model's own, however many workers there are.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import time
import traceback
from collections.abc import Collection
from functools import partial
from typing import Any, Self

import torch

from sync.binding import Binding
from sync.board import Event, Word, now_ns
from sync.channel import CLOSE, DONE, FAIL, GREET, LEAVE, SNAPSHOT, Channel
from sync.errors import WorkerDied
from sync.home import AWAY, IN_USE, RESTING, Home
from sync.layout import Layout
from sync.memory import Doorbell, Watch, wait_for
from sync.scheme import WeightSyncScheme
from sync.sender import SenderEnd
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.strategy import Weights, WeightStrategy
from sync.transport import Transport


class MPTransport(Transport):
    """One worker's line.

    weight_queue: a `Channel`, whose messages speak of blocks in shared slots and which carries the
        answers too; or any queue with `put` and `get`, whose messages carry the bytes themselves.
    ack_queue: where the worker answers, if `weight_queue` is a plain queue; without one, sends are
        not waited for.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0):
        super().__init__(timeout=timeout)
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self._sender_pid = os.getpid()

    def alone(self) -> Self:
        twin = super().alone()
        twin.weight_queue = copy.copy(self.weight_queue)  # which is turned around
        return twin

    def _forget(self) -> None:
        super()._forget()
        self._peer = 0
        self._on_the_way: tuple[int, int] | None = None
        self._sent = False  # whether what is on the way is in the line for certain
        self._next: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None
        self._last_answer: tuple[int, int, tuple[int, ...], str] | None = None
        self._closed = False
        self._sender: Watch | None = None
        self._brought: int | None = None  # the slot of what was put into its model last
        self._lives_at_home = False
        self._seen = self._word = 0  # of what was put there
        self._in_use = NEVER

    # -- the sender's end

    def offer(self, slot: int, version: int) -> None:
        self.address(slot, version)
        self.bring()

    def address(self, slot: int, version: int) -> None:
        """Say what is next, once it is known what the worker has answered to."""
        if not self._plain and self.weight_queue.has_mail():
            self.collect()
        self._next = self._last = (version, slot)
        self.addressed = version
        self.stats.addressed += 1

    def bring(self) -> None:
        """Put what is next into the model, if that rests, or send it as soon as that can be."""
        if self._on_the_way is None and self._next is not None and self.put_home(self._next[1]):
            self._next = None
        self.feed()

    def put_home(self, slot: int) -> bool:
        """Put what is offered into the model of a worker that rests; False if it does not."""
        if self._line_says_no(RESTING) or self.watch is None or self.watch.gone:
            return False
        assert self.slots is not None
        event = self.slots.put_home(self.worker_idx, slot, partial(self._may_put, slot))
        if event is not None:
            self.heard(event)
        return event is not None

    def _line_says_no(self, *homes: int) -> bool:
        """It is not at home so, or there may be a message, as of another in its place."""
        line = self.weight_queue
        return self._plain or line.home not in homes or line.has_mail()

    def _may_put(self, slot: int, home: Snapshot) -> bool:
        if self._line_says_no(IN_USE, RESTING):
            return False
        # Before it is written: where it comes from is known, should it not be written to its end.
        self.weight_queue.tell_brought(Word(self.addressed, slot).packed())
        if self.weight_queue.home == AWAY:  # moved out meanwhile, to where the last one came from
            return False
        self._brought = slot
        return True

    def feed(self) -> None:
        """Send what is next, unless the worker still has a message to answer."""
        if self._on_the_way is None:
            if self._next is None or not self._peer:
                return
            self._sent = False
            self._on_the_way = self._next
            self._next = None
        if not self._sent:
            self._sent = self.weight_queue.put(SNAPSHOT, *self._on_the_way, self._peer)

    @property
    def hungry(self) -> bool:
        """A version waits for the worker's answer to an older one."""
        return self._next is not None and self._on_the_way is not None

    def held(self) -> set[int]:
        held = {place[1] for place in (self._on_the_way, self._next) if place is not None}
        return held if self._brought is None else held | {self._brought}

    def kept(self) -> set[int]:
        return self.held() | ({self._last[1]} if self._last is not None else set())

    def collect(self) -> None:
        while (message := self.weight_queue.peek()) is not None:
            self._book(*message)
            self.weight_queue.drop()
            self.feed()

    def _book(self, kind: int, numbers: tuple[int, ...], text: str) -> None:
        """Note what a message says; twice is as good as once."""
        if kind == GREET:
            pid, peer = numbers[:2]
            if peer != self._peer:
                self._on_the_way = self._brought = None
                self._next = self._last if self._last_is_there() else None
                self.greeted(pid)
                self._peer = peer
        elif kind == LEAVE:
            self.left()
        else:
            version = numbers[0]
            if self._on_the_way is not None and version in (self._on_the_way[0], NEVER):
                self._on_the_way = None
            if kind == DONE:
                self.heard(Event(*numbers))
            else:
                self.failed(version, text)

    def judge(self) -> None:
        super().judge()
        if isinstance(self.failure, WorkerDied):
            self._peer, self._on_the_way, self._next, self._brought = 0, None, None, None

    def offer_again(self) -> bool:
        if not self._last_is_there():
            return False
        if not self._peer:
            self._next = self._last
        return True

    def retract(self) -> None:
        self._next = self._last = None

    def _last_is_there(self) -> bool:
        """So that a newcomer can read it."""
        assert self.slots is not None
        if self._last is None:
            return False
        block = self.slots[self._last[1]]
        return block.version == self._last[0] and block.builds_on == NEVER

    def news_fds(self) -> list[int]:
        return [self.weight_queue.fd]

    def close(self) -> None:
        self.weight_queue.put(CLOSE)

    # -- the receiver's end

    def become_receiver(self) -> None:
        super().become_receiver()
        self.weight_queue.turn_around()

    def greet(self) -> None:
        self._sender = Watch(self._sender_pid)
        self._closed, self._last_answer = False, None
        self.weight_queue.tell_home(AWAY)
        self._lives_at_home, self._in_use = False, NEVER
        self._peer = now_ns()  # a name for this rendezvous: older messages do not have it
        self.weight_queue.put(GREET, os.getpid(), self._peer)

    def newest(self) -> tuple[Snapshot, int] | None:
        assert self.slots is not None
        self._word = 0
        while (message := self.weight_queue.peek()) is not None:
            if message.kind == CLOSE:
                self._closed = True
                self.weight_queue.leave()  # there it wakes every later wait
                break
            version, slot, peer = message.numbers[:3]
            if self._last_answer is not None and self._last_answer[0] == version:
                self._reply()
            elif peer != self._peer or version < self._in_use:  # a predecessor's, or overtaken
                self.weight_queue.drop()
            else:
                snapshot = self.slots[slot]
                assert snapshot.version == version, "a block on the way was written"
                return snapshot, 0
        return self._brought_anew()

    def _brought_anew(self) -> tuple[Snapshot, int] | None:
        """What was put into the model, or was to be, from where it was published."""
        word = self.weight_queue.brought
        if not self._lives_at_home or word == self._seen:
            return None
        version, slot = Word.unpack(word)
        if version <= self._in_use:
            self._seen = word
            return None
        assert self.slots is not None
        snapshot = self.slots[slot]
        assert snapshot.version == version, "a block that may be asked for was written"
        self._word = word
        return snapshot, 0

    def home(self) -> Home | None:
        if self._plain or self.slots is None:
            return None
        self._lives_at_home, self._seen = True, self.weight_queue.brought
        return self.slots.home(self.worker_idx, self.weight_queue.tell_home)

    def found_at_home(self, block: Snapshot) -> bool:
        self._word = self.weight_queue.brought
        news = self._word not in (0, self._seen) and Word.unpack(self._word).version
        if news != block.version or news <= self._in_use:
            self._word = 0
        return self._word != 0

    def look_again(self) -> None:
        self._seen = 0

    def has_news(self) -> bool:
        line = self.weight_queue
        return bool(line.has_mail() or (self._lives_at_home and line.brought != self._seen))

    def applied(self, event: Event) -> None:
        self._in_use = event.version
        if self._word:  # there was no message, and the sender knows
            self._seen, self._word = self._word, 0
            return
        self._last_answer = event.version, DONE, tuple(event), ""
        self._reply()

    def refused(self, version: int, text: str) -> None:
        if self._word or version == NEVER:  # it is no answer to a message
            self._seen, self._word = self._word or self._seen, 0
            self.weight_queue.put(FAIL, version, text=text)
        else:
            self._last_answer = version, FAIL, (version,), text
            self._reply()

    def _reply(self) -> None:
        """Answer to the message that was peeked at, perhaps once more, and be done with it."""
        assert self._last_answer is not None
        _, kind, numbers, text = self._last_answer
        self.weight_queue.put(kind, *numbers, text=text)
        self.weight_queue.drop()

    def offer_fds(self) -> list[int]:
        return [self.weight_queue.fd, *(self._sender.fds() if self._sender is not None else ())]

    def sender_gone(self) -> bool:
        return self._closed or (self._sender is not None and self._sender.look())

    def leave(self) -> None:
        self.weight_queue.put(LEAVE)

    # -- over plain queues, without a scheme

    @property
    def _plain(self) -> bool:
        return not isinstance(self.weight_queue, Channel)

    def setup_connection_and_weights_on_sender(self) -> None:
        if not self._plain:
            super().setup_connection_and_weights_on_sender()

    def send_weights_async(self, weights: Weights) -> None:
        if not self._plain:
            super().send_weights_async(weights)
            return
        if self._binding is None or self._binding.target is not weights:
            self._binding = Binding(weights, self.strategy)
        layout = self._binding.layout
        snapshot = Snapshot(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
        self.addressed += 1
        self._binding.pack(snapshot, self.addressed, check_finite=True)
        _drain(self.weight_queue)  # nobody has read it: the new one takes its place
        self.weight_queue.put((layout, snapshot.buffer.numpy().tobytes()))

    def wait_ack(self) -> None:
        if not self._plain:
            super().wait_ack()
            return
        deadline = time.monotonic() + self.timeout
        while self.ack_queue is not None and self.waiting:
            try:
                kind, version, text = self.ack_queue.get(timeout=deadline - time.monotonic())
            except (queue.Empty, ValueError):
                raise self.overdue(self.timeout) from None
            if kind == FAIL and version == self.addressed:
                self.failed(version, text)
                assert self.failure is not None
                raise self.failure
            self.connected, self.acknowledged = True, version

    def setup_connection_and_weights_on_receiver(self, **kwargs: Any) -> Any:
        if not self._plain:
            return super().setup_connection_and_weights_on_receiver(**kwargs)
        self.worker_idx = kwargs.pop("worker_idx")
        return self.receive_weights(self.timeout, **kwargs)

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any:
        if not self._plain:
            return super().receive_weights(timeout, **into)
        newest = _drain(self.weight_queue, timeout)
        if newest is None:
            return None
        layout, data = newest
        snapshot = Snapshot(layout, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        try:
            binding = self._bound(
                snapshot, into.get("weights"), into.get("model"), into.get("strategy")
            )
            binding.load(snapshot)
        except Exception:
            self._answer(FAIL, snapshot.version, traceback.format_exc())
            raise
        self._answer(DONE, snapshot.version, "")
        return binding.weights()

    def _answer(self, kind: int, version: int, text: str) -> None:
        if self.ack_queue is not None:
            self.ack_queue.put((kind, version, text))


def _drain(plain_queue: Any, timeout: float | None = None) -> Any:
    """The newest item of a queue, the older ones dropped; None if there is none in time."""
    newest = None
    with contextlib.suppress(queue.Empty):
        newest = plain_queue.get(timeout=timeout) if timeout else plain_queue.get_nowait()
        while True:
            newest = plain_queue.get_nowait()
    return newest


class MPSenderEnd(SenderEnd):
    """Has a feeder as soon as a version must wait for a worker's answer."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._feeder: Feeder | None = None

    def _offer(self, transports: Collection[Transport], slot: int, version: int) -> None:
        lines = [t for t in transports if isinstance(t, MPTransport)]
        try:
            for line in lines:
                line.address(slot, version)
            for line in lines:
                line.bring()
        except BaseException:  # an interrupt, which may have left a model half written
            for line in lines:
                line.feed()
            raise
        finally:
            if any(line.hungry for line in lines):
                if self._feeder is None:
                    self._feeder = Feeder(self)
                self._feeder.wake()

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.stop()
        super().close()


class Feeder:
    """A thread that sends waiting versions as workers answer; asleep while none wait."""

    def __init__(self, sender: SenderEnd):
        self._sender = sender
        self._bell = Doorbell()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lockstep-feed", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._bell.ring()

    def stop(self) -> None:
        self._stopping = True
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping:
            hungry = [t for t in list(self._sender.transports.values()) if t.hungry]
            wait_for([self._bell.fd, *(fd for t in hungry for fd in t.wait_fds())], 60.0)
            self._bell.silence()
            with self._sender.lock:
                for transport in hungry:
                    transport.collect()
                    if transport.watch is not None:
                        transport.watch.look()
                    transport.judge()


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Every worker copies every version it takes into memory of its own, told by message.

    Initial weights that differ by worker (`params_map`, `device_map_fn`) are made when their worker
    is there to take them, one after the other.
    """

    _sender_end = MPSenderEnd

    def __init__(
        self, strategy: str | WeightStrategy = "tensordict", sync: bool = True, **options: Any
    ):
        super().__init__(strategy, sync=sync, **options)

    def _open(self, layout: Layout, num_workers: int) -> tuple[Slots, dict[int, Transport]]:
        # A worker can have one message on the way and one waiting, and look at what was put into
        # its model; one more each can be written.
        slots = Slots(layout, 4 * num_workers, homes=num_workers)
        transports: dict[int, Transport] = {}
        for worker in range(num_workers):
            transport = MPTransport(Channel(), timeout=self.timeout)
            transport.slots = slots
            transports[worker] = transport
        return slots, transports
