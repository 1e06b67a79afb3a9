"""A weight-sync scheme of your own, complete: the bytes of every version go through a Unix socket.

A scheme is two halves (`sync/channel_interface.py`): a sender's and a worker's. Versions, waiting,
timeouts, failures, statistics, wire formats and slow links come with the base classes.
"""

import contextlib
import os
import secrets
import socket
import threading
from multiprocessing.connection import Connection

import torch

from sync import Answer, ReceiverChannel, SenderChannel, Snapshot, WeightSyncScheme, register
from sync.channel_interface import JOINED, LATER, LEFT, LOST


class SocketSender(SenderChannel):
    mechanism = "unix socket"

    def __init__(self, layout, num_workers):
        super().__init__(layout, num_workers)
        self.handout = f"\0own-scheme-{secrets.token_hex(16)}"  # where workers connect
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(self.handout)
        self.listener.listen()
        self.peers = {}  # which worker is behind a connection; None until it says so
        self.waiting, self.unanswered = {}, set()

    def publish(self, block, workers):
        self.waiting |= dict.fromkeys(workers, block.buffer.numpy().tobytes())
        self.send_next()

    def send_next(self):
        for connection, worker in self.peers.items():
            if worker in self.waiting and worker not in self.unanswered:
                self.unanswered.add(worker)
                data = self.waiting.pop(worker)
                threading.Thread(target=send, args=(connection, data), daemon=True).start()
                self.count_moved(len(data))

    def poll(self):
        answers = []
        with contextlib.suppress(BlockingIOError):
            while True:
                self.peers[Connection(self.listener.accept()[0].detach())] = None
        for connection in list(self.peers):
            try:
                while connection.poll():
                    answer = connection.recv()
                    if answer.kind == JOINED:
                        if answer.worker in self.peers.values():
                            raise EOFError("another process serves as this worker")
                        self.waiting.pop(answer.worker, None)
                    self.peers[connection] = None if answer.kind == LEFT else answer.worker
                    self.unanswered.discard(answer.worker)
                    answers.append(answer)
            except (EOFError, OSError):
                if (worker := self.peers.pop(connection)) is not None:
                    answers.append(Answer(worker, LOST, text="its connection broke"))
        self.send_next()
        return answers

    def due_ns(self):
        return LATER if self.waiting else None

    def fds(self):
        return [self.listener.fileno(), *(connection.fileno() for connection in self.peers)]

    def close(self):
        self.listener.close()
        self.peers.clear()  # which closes a connection, unless a thread still sends there


def send(connection, data):  # in a thread: a worker may read slowly
    with contextlib.suppress(OSError):  # `poll` finds out that nobody is there
        connection.send_bytes(data)


class SocketReceiver(ReceiverChannel):
    newest, gone = None, ""

    def open(self):
        (connected := socket.socket(socket.AF_UNIX)).connect(self.handout)
        self.connection = Connection(connected.detach())
        self.answer(Answer(self.worker, JOINED, pid=os.getpid()))

    def has_news(self):
        try:
            while not self.gone and self.connection.poll():
                self.newest = bytearray(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.gone = "the sender is gone"
        return self.newest is not None

    def take(self):
        data, self.newest = self.has_news() and self.newest, None
        return Snapshot(self.layout, torch.frombuffer(data, dtype=torch.uint8)) if data else None

    def answer(self, answer):
        with contextlib.suppress(OSError):
            self.connection.send(answer)

    def fds(self):
        return [self.connection.fileno()]

    def sender_gone(self):
        return "" if self.has_news() else self.gone

    def close(self):
        self.answer(Answer(self.worker, LEFT))
        self.connection.close()


@register("own")
class SocketWeightSyncScheme(WeightSyncScheme):
    sender_channel, receiver_channel = SocketSender, SocketReceiver
