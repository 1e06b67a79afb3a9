"""A sync scheme: the bytes of every version go through a Unix socket (Linux).

    trainer                                        worker
    -------                                        ------
    listen                                 <---    connect, JOINED
    send the newest version, in a thread   --->    apply it
    send the next one                      <---    APPLIED or FAILED
                                           <---    LEFT, close

A scheme is two halves, one for the sender and one for a worker. Versions, waiting, timeouts,
failures, statistics, wire formats and slow links come with the base classes.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from harness.options.sync import SendingConfig
from harness.registry import schemes
from sync import Answer, ReceiverChannel, SenderChannel, Snapshot, WeightSyncScheme
from sync.channel_interface import JOINED, LATER, LEFT, LOST


@dataclass
class UnixSocketConfig(SendingConfig):
    """Each version is sent to each worker through a Unix socket."""

    name: str = "unix_socket"


class UnixSocketSender(SenderChannel):
    """Has one version at a time on the way to each worker; a newer one replaces one that waits."""

    mechanism = "unix socket"

    def __init__(self, layout: Any, num_workers: int):
        super().__init__(layout, num_workers)
        self.handout = f"\0my-project-{secrets.token_hex(16)}"  # the address, in no file system
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(self.handout)
        self.listener.listen()
        self.peers: dict[Connection, int | None] = {}  # worker by connection; None before JOINED
        self.waiting: dict[int, bytes] = {}  # the newest version of each worker that lacks it
        self.unanswered: set[int] = set()

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        self.waiting |= dict.fromkeys(workers, block.buffer.numpy().tobytes())
        self._send_next()

    def _send_next(self) -> None:
        for connection, worker in self.peers.items():
            if worker is not None and worker in self.waiting and worker not in self.unanswered:
                data = self.waiting.pop(worker)
                self.unanswered.add(worker)
                threading.Thread(target=_send, args=(connection, data), daemon=True).start()
                self.count_moved(len(data))

    def poll(self) -> list[Answer]:
        with suppress(BlockingIOError):
            while True:
                self.peers[Connection(self.listener.accept()[0].detach())] = None
        answers = []
        for connection in list(self.peers):
            try:
                while connection.poll():
                    answers.append(self._note(connection, connection.recv()))
            except (EOFError, OSError):
                if (worker := self.peers.pop(connection)) is not None:
                    answers.append(Answer(worker, LOST, text="its connection broke"))
        self._send_next()
        return answers

    def _note(self, connection: Connection, answer: Answer) -> Answer:
        if answer.kind == JOINED:
            if answer.worker in self.peers.values():
                raise EOFError("another process serves as this worker")
            self.waiting.pop(answer.worker, None)
        self.peers[connection] = None if answer.kind == LEFT else answer.worker
        self.unanswered.discard(answer.worker)
        return answer

    def due_ns(self) -> int | None:
        return LATER if self.waiting else None

    def fds(self) -> list[int]:
        return [self.listener.fileno(), *(connection.fileno() for connection in self.peers)]

    def close(self) -> None:
        self.listener.close()
        self.peers.clear()  # closes each connection, once no thread sends there


def _send(connection: Connection, data: bytes) -> None:
    """In a thread, since a worker may read slowly. `poll` notices a connection that is broken."""
    with suppress(OSError):
        connection.send_bytes(data)


class UnixSocketReceiver(ReceiverChannel):
    """Keeps the newest version that has come."""

    newest: bytearray | None = None
    gone = ""

    def open(self) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(self.handout)
        self.connection = Connection(connected.detach())
        self.answer(Answer(self.worker, JOINED, pid=os.getpid()))

    def has_news(self) -> bool:
        try:
            while not self.gone and self.connection.poll():
                self.newest = bytearray(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.gone = "the sender is gone"
        return self.newest is not None

    def take(self) -> Snapshot | None:
        self.has_news()
        data, self.newest = self.newest, None
        return Snapshot(self.layout, torch.frombuffer(data, dtype=torch.uint8)) if data else None

    def answer(self, answer: Answer) -> None:
        with suppress(OSError):
            self.connection.send(answer)

    def fds(self) -> list[int]:
        return [self.connection.fileno()]

    def sender_gone(self) -> str:
        return "" if self.has_news() else self.gone

    def close(self) -> None:
        self.answer(Answer(self.worker, LEFT))
        self.connection.close()


@schemes.register("unix_socket", options=UnixSocketConfig)
class UnixSocketWeightSyncScheme(WeightSyncScheme):
    """Sends weights through Unix sockets."""

    sender_channel, receiver_channel = UnixSocketSender, UnixSocketReceiver
