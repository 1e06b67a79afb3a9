"""The common part of schemes within one machine: connecting workers, answers, noticing deaths.

Blocks lie in a pool of shared memory, which workers map read-only. A scheme adds how a worker
learns of a version: `schemes/shared_mem.py` and `schemes/multiprocess.py`.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterable

from sync.channel_interface import (
    APPLIED,
    FAILED,
    JOINED,
    LEFT,
    LOST,
    Answer,
    ReceiverChannel,
    SenderChannel,
    now_ns,
)
from sync.local.memory import BlockPool
from sync.local.unix_connection import (
    CLOSE,
    DONE,
    FAIL,
    LEAVE,
    MOST_FDS,
    REFUSED,
    WELCOME,
    Address,
    Connection,
    Listener,
    Message,
    connect,
)
from sync.local.waiting import Watch
from sync.model.block import Layout

_DYING_S = 1.0  # how long a process may take to end after its connection has


class LocalSender(SenderChannel):
    """Connects workers, receives their answers and notices their deaths.

    blocks_per_worker: the largest number of blocks that one worker can protect from being written.
    segfault_hint: what to add to the error if a worker died of one.
    """

    segfault_hint = ""

    def __init__(self, layout: Layout, num_workers: int, blocks_per_worker: int):
        super().__init__(layout, num_workers)
        self.blocks = BlockPool(layout, blocks_per_worker * num_workers + 2)
        self._listener = Listener()
        self.handout = self._listener.address
        self._unidentified: dict[int, Connection] = {}  # by descriptor, before HELLO
        self._workers: dict[int, Connection] = {}
        # Workers whose connection has ended, and when they count as lost although they live.
        self._dying: dict[int, int] = {}
        self._closed = False
        self._poll = select.poll()
        self._polled: set[int] = set()
        self._start_polling([self._listener.fd])
        _SENDERS.add(self)

    # -- what a scheme defines

    @abstractmethod
    def _shared_fds(self) -> list[int]:
        """The descriptors that a worker receives when it connects."""

    @abstractmethod
    def _reset(self, worker: int) -> None:
        """Another process becomes this worker: forget what was announced or sent to the old one."""

    def _answered(self, answer: Answer) -> None:
        """The worker applied a version, or could not."""

    # -- the same for all

    def fds(self) -> list[int]:
        return list(self._polled)

    def poll(self) -> list[Answer]:
        answers: list[Answer] = []
        if self._closed:
            return answers
        ready = {fd for fd, _ in self._poll.poll(0)}
        if self._listener.fd in ready:
            for unidentified in self._listener.accept():
                self._unidentified[unidentified.fd] = unidentified
                self._start_polling([unidentified.fd])
                ready.add(unidentified.fd)
        for worker, connection in list(self._workers.items()):
            fds = connection.fd, connection.process.fd
            if worker in self._dying or not ready.isdisjoint(fds):
                self._read_worker(worker, ready, answers)
        for fd in ready & set(self._unidentified):
            self._meet(fd, answers)
        return answers

    def due_ns(self) -> int | None:
        return min(self._dying.values(), default=None)

    def _read_worker(self, worker: int, ready: set[int], answers: list[Answer]) -> None:
        """Read a worker's messages, then check whether its process still runs."""
        connection = self._workers[worker]
        process = connection.process
        if process.fd in ready:
            process.notice(ready)
        if not connection.ended and (connection.fd in ready or process.gone):
            for message in connection.receive():
                self._to_answer(worker, message, answers)
            if connection.ended:
                patience_s = _DYING_S if process.pid else 0.0
                self._dying[worker] = now_ns() + int(patience_s * 1e9)
                self._stop_polling([connection.fd])
        if connection.has_left or process.gone:
            self._drop(worker)
            self._reset(worker)
            lost = Answer(worker, LOST, text=self._ending(process))
            answers.append(Answer(worker, LEFT) if connection.has_left else lost)
        elif now_ns() >= self._dying.get(worker, now_ns() + 1):
            self._lose_connection(worker, answers)

    def _lose_connection(self, worker: int, answers: list[Answer]) -> None:
        """Its process lives, and may still read: its blocks stay protected until it is replaced."""
        self._drop(worker)
        answers.append(Answer(worker, LOST, text="its connection ended"))

    def _to_answer(self, worker: int, message: Message, answers: list[Answer]) -> None:
        numbers = message.numbers
        if message.kind == DONE:
            version, published, seen, applied, retries, verified = numbers
            times = published, seen, applied
            answers.append(
                Answer(worker, APPLIED, version, *times, retries, verified_calls=verified)
            )
        elif message.kind == FAIL:
            answers.append(Answer(worker, FAILED, numbers[0], text=message.text))
        else:
            return
        self._answered(answers[-1])

    def _ending(self, process: Watch) -> str:
        return process.ending + (self.segfault_hint if "SIGSEGV" in process.ending else "")

    def _drop(self, worker: int) -> None:
        connection = self._workers.pop(worker)
        self._dying.pop(worker, None)
        self._stop_polling([connection.fd, connection.process.fd])
        connection.close()

    def _start_polling(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self._polled.add(fd)
            self._poll.register(fd, select.POLLIN)

    def _stop_polling(self, fds: Iterable[int]) -> None:
        for fd in self._polled.intersection(fds):
            self._polled.remove(fd)
            self._poll.unregister(fd)

    def _meet(self, fd: int, answers: list[Answer]) -> None:
        """Accept a process that says which worker it is."""
        connection = self._unidentified[fd]
        messages = connection.receive()
        if not messages and not connection.ended:
            return
        del self._unidentified[fd]
        self._stop_polling([fd])
        if not messages:
            connection.close()
            return
        hello = messages[0]
        if hello.numbers[0] in self._workers:
            self._look_at(hello.numbers[0], answers)  # it may have left since this poll began
        if why := self._refusal(hello):
            self._refuse(connection, why)
            return
        try:
            connection.watch()
        except OSError as error:
            self._refuse(connection, f"the sender cannot watch it: {str(error.strerror).lower()}")
            return
        worker = hello.numbers[0]
        self._reset(worker)
        self._workers[worker] = connection
        connection.send(WELCOME, fds=self._shared_fds())
        self._start_polling([fd, *connection.process.fds()])
        answers.append(Answer(worker, JOINED, pid=connection.pid))
        for message in messages[1:]:
            self._to_answer(worker, message, answers)
        self._read_worker(worker, {fd}, answers)

    def _look_at(self, worker: int, answers: list[Answer]) -> None:
        connection = self._workers[worker]
        connection.process.look()
        self._read_worker(worker, {connection.fd}, answers)
        if connection.ended and self._workers.get(worker) is connection:
            self._lose_connection(worker, answers)  # another process has come in its place

    def _refuse(self, connection: Connection, why: str) -> None:
        connection.send(REFUSED, text=why)
        connection.close()

    def _refusal(self, hello: Message) -> str:
        """Why the process that sent this cannot serve as a worker; empty if it can."""
        worker = hello.numbers[0]
        if not self._listener.is_known(hello) or worker not in range(self.num_workers):
            return "the sender does not know this process"
        if (serving := self._workers.get(worker)) is not None:
            who = f" (pid {serving.pid})" if serving.pid else ""
            return f"worker {worker} is already served by a live process{who}"
        return ""

    def close(self) -> None:
        if self._closed:
            return
        for connection in self._workers.values():
            connection.send(CLOSE)
        self.release()
        self.blocks.close()

    def release(self) -> None:
        """Close every socket without telling the other side."""
        self._closed = True
        self._listener.close()
        for connection in (*self._workers.values(), *self._unidentified.values()):
            connection.close()
        self._workers.clear()
        self._unidentified.clear()
        self._polled.clear()


_SENDERS: weakref.WeakSet[LocalSender] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child is not a sender, and must not keep its parent's connections open."""
    for sender in list(_SENDERS):
        sender.release()


os.register_at_fork(after_in_child=_release_in_child)


class LocalReceiver(ReceiverChannel):
    """A worker's connection to a sender of this machine."""

    handout: Address

    def __init__(self, handout: Address, layout: Layout, worker: int):
        super().__init__(handout, layout, worker)
        self._connection: Connection | None = None
        self._fds: list[int] = []  # of the connection, and of the sender's process
        self._gone = ""
        self._reading = threading.Lock()  # a background thread may read as well

    # -- what a scheme defines

    @abstractmethod
    def _map(self, fds: list[int]) -> None:
        """Open the memory that the sender shares."""

    def _on_message(self, message: Message) -> None:
        """Handle a message that only this scheme has."""

    # -- the same for all

    def open(self) -> None:
        self.close()
        self._gone = ""
        self._connection = connect(self.handout, self.worker)
        self._connection.watch()
        if self._connection.process.gone:
            self._gone = "the sender is gone"
        self._fds = [self._connection.fd, *self._connection.process.fds()]
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)

    def listen(self) -> None:
        """Read the sender's messages, and notice its end."""
        with self._reading:
            if self._gone or self._connection is None or not (ready := self._poll.poll(0)):
                return
            if self._connection.fd in (fd for fd, _ in ready):
                self._read(self._connection)
            else:
                self._gone = "the sender is gone"

    def _read(self, connection: Connection) -> None:
        for message in connection.receive(0 if connection.fds else MOST_FDS):
            if message.kind == WELCOME:
                self._map(connection.fds)
            elif message.kind == REFUSED:
                self._gone = message.text
            elif message.kind == CLOSE:
                self._gone = "the sender is gone"
            else:
                self._on_message(message)
        if connection.ended:
            self._gone = self._gone or "the sender is gone"

    def answer(self, answer: Answer) -> None:
        assert self._connection is not None, "open() comes first"
        if answer.kind == APPLIED:
            published = answer.published_ns
            # Published while the receiver looked, it came after the look at the clock.
            seen = max(published, answer.seen_ns)
            times = published, seen, answer.applied_ns
            counts = answer.retries, answer.verified_calls
            self._connection.send(DONE, answer.version, *times, *counts)
        else:
            self._connection.send(FAIL, answer.version, text=answer.text)

    def fds(self) -> list[int]:
        return [] if self._connection is None else self._fds

    def sender_gone(self) -> str:
        self.listen()
        return self._gone

    def close(self) -> None:
        if self._connection is not None:
            self._connection.send(LEAVE)
            self._connection.close()
            self._connection = None
