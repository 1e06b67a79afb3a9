"""A channel in memory: both ends in one process, every version delivered in order."""

from __future__ import annotations

from sync.channel_interface import JOINED, Answer, ReceiverChannel, SenderChannel
from sync.model.block import private_snapshot


class FakeSender(SenderChannel):
    """Publishes into one list for each worker, and polls a list, all of which tests may change."""

    mechanism = "lists"

    def __init__(self, layout, num_workers):
        super().__init__(layout, num_workers)
        self.handout = "address"
        self.published = {worker: [] for worker in range(num_workers)}
        self.joining = {}
        self.said = []
        self.closed = False

    def free_block(self, keep):
        return private_snapshot(self.layout)

    def publish(self, block, workers):
        for worker in workers:
            self.published[worker].append(block)

    def poll(self):
        answers = list(self.said)
        self.said.clear()
        for answer in answers:
            if answer.kind == JOINED:
                self.published[answer.worker] = self.joining[answer.worker]
        return answers

    def fds(self):
        return []

    def close(self):
        self.closed = True


class FakeReceiver(ReceiverChannel):
    """Takes the versions that were published after the sender polled its JOINED.

    decoder: of the wire format, with which a `Receiver` decodes what was taken.
    """

    def __init__(self, sender, worker, decoder=None):
        super().__init__(None, sender.layout, worker)
        self._decoder = decoder
        self._sender = sender
        self._inbox = []

    def open(self):
        self._sender.joining[self.worker] = self._inbox
        self._sender.said.append(Answer(self.worker, JOINED, pid=1))

    def take(self):
        block = self._inbox.pop(0) if self._inbox else None
        return block if block is None or self._decoder is None else self._decoder.decode(block)

    def answer(self, answer):
        self._sender.said.append(answer)

    def has_news(self):
        return bool(self._inbox)

    def fds(self):
        return []

    def sender_gone(self):
        return "closed" if self._sender.closed else ""

    def close(self):
        self._inbox.clear()
