"""The base of sender wrappers: channels around another channel."""

from __future__ import annotations

from typing import Any

from sync.channel import Answer, SenderChannel
from sync.model.layout import Layout


class SenderWrapper(SenderChannel):
    """The caller writes into private blocks. Other calls go to the inner channel.

    layout: of these blocks; that of the inner channel may differ.
    """

    def __init__(self, inner: SenderChannel, layout: Layout | None = None):
        super().__init__(layout or inner.layout, inner.num_workers)
        self.inner = inner
        self.handout = inner.handout
        self.mechanism = inner.mechanism

    def poll(self) -> list[Answer]:
        return self.inner.poll()

    def fds(self) -> list[int]:
        return self.inner.fds()

    def close(self) -> None:
        self.inner.close()

    def busy(self) -> bool:
        return self.inner.busy()

    def due_ns(self) -> int | None:
        return self.inner.due_ns()

    def expect(self, worker: int) -> None:
        self.inner.expect(worker)

    def rendezvous_pending(self, worker: int) -> bool:
        return self.inner.rendezvous_pending(worker)

    def describe(self, worker: int) -> str:
        return self.inner.describe(worker)

    def hint(self, worker: int) -> str:
        return self.inner.hint(worker)

    def stats(self, worker: int) -> dict[str, Any]:
        return self.inner.stats(worker)

    def moved(self) -> dict[str, dict[str, int]]:
        return self.inner.moved()
