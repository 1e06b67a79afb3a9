"""Versions for virtual workers, which run in the sender's process on a simulated clock.

    send()  ->  SimulatedSender.published    until the owner of the clock takes it
                loader(model)(block)         into the model that acts
                applied(worker, version)     the worker acknowledges

Nothing is sent, and no call waits. Effects, such as a wire format, wrap this mechanism like any
other, so a virtual worker acts with the same numbers as a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sync.channel_interface import APPLIED, JOINED, Answer, ReceiverChannel, SenderChannel, now_ns
from sync.effects.rounding import RoundedFormat
from sync.model.binding import Binding
from sync.model.block import Layout, Snapshot
from sync.model.strategy import Weights
from sync.scheme import WeightSyncScheme


class SimulatedSender(SenderChannel):
    """Keeps published blocks in the form in which they would travel.

    published: blocks that were not taken yet, with the workers they are for.
    kept: the other blocks that must not be overwritten; the owner of the clock fills it.
    """

    mechanism = "simulated"

    def __init__(self, layout: Layout, num_workers: int):
        super().__init__(layout, num_workers)
        self.published: list[tuple[Snapshot, list[int]]] = []
        self.kept: dict[int, Snapshot] = {}
        self._answers = [Answer(worker, JOINED) for worker in range(num_workers)]

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        if block.version == 0:  # what every worker starts with
            for worker in workers:
                self.applied(worker, 0, block.published_ns)
        self.published.append((block, list(workers)))
        self.count_moved(block.nbytes)

    def take_published(self) -> list[tuple[Snapshot, list[int]]]:
        """What was published since the last call."""
        published, self.published = self.published, []
        return published

    def applied(self, worker: int, version: int, published_ns: int) -> None:
        """The worker uses this version from now on."""
        now = now_ns()
        self._answers.append(Answer(worker, APPLIED, version, published_ns, now, now))

    def blocks_in_use(self) -> list[Snapshot]:
        return [*(block for block, _ in self.published), *self.kept.values()]

    def poll(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def fds(self) -> list[int]:
        return []

    def close(self) -> None:
        self.published.clear()
        self.kept.clear()


class SimulatedWeightSyncScheme(WeightSyncScheme):
    """For `SimulatedCollector`, which simulates the workers. It has no receivers."""

    sender_channel = SimulatedSender
    channel: SimulatedSender

    def _make_sender(self, layout: Layout, num_workers: int) -> SenderChannel:
        self.channel = SimulatedSender(layout, num_workers)
        return self.channel

    def _make_receiver(self, handout: Any, layout: Layout, worker: int) -> ReceiverChannel:
        raise RuntimeError("SimulatedWeightSyncScheme has no receivers; use a SimulatedCollector")

    def loader(self, model: Weights) -> Callable[[Snapshot], None]:
        """A function that copies a published block into `model`."""
        layout = self._layout
        assert layout is not None, "init_on_sender() comes first"
        binding = Binding(model, self.strategy, layout)
        decoder = RoundedFormat.of(self.wire, layout, round_buffers=self.round_buffers)

        def load(block: Snapshot) -> None:
            binding.load(block if decoder is None else decoder.decode(block))

        return load
