"""The batches of a collector that fills the replay buffer in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tensordict import TensorDictBase

from collectors import BaseCollector, ReplayBuffer
from sync.local.waiting import awake_s

LOOK_EVERY_S = 0.2


class Following(NamedTuple):
    """The batch that follows.

    frames: how many are seen then.
    overwritten: how many frames of the batch are missing, since newer ones took their places.
    """

    batch: TensorDictBase
    frames: int
    overwritten: int


@dataclass(eq=False)
class BackgroundBatches:
    """The frames that a collector puts into a replay buffer, a batch at a time.

    In the order in which they came. overwrite: workers may overwrite frames that were not shown
    yet; else they wait.
    """

    collector: BaseCollector
    replay: ReplayBuffer
    frames_per_batch: int
    timeout_s: float
    overwrite: bool = False

    def __post_init__(self) -> None:
        self._started = False

    def next(self, seen: int) -> Following | None:
        """The batch after the first `seen` frames. Waits for it; None if there will be no more."""
        if not self._started:
            self._keep_from(seen)
            self.collector.start()
            self._started = True
        wanted = seen + self.frames_per_batch
        before, deadline = -1, 0.0
        while (written := self.replay.wait(wanted, LOOK_EVERY_S)) < wanted:
            if not self.collector.running:
                wanted = min(wanted, self.replay.written)  # all that there will be
                break
            if (collected := self.collector.counts()["collected"]) != before:
                before, deadline = collected, awake_s() + self.timeout_s
            elif awake_s() > deadline:
                raise TimeoutError(
                    f"{written - seen} of {self.frames_per_batch} frames came within "
                    f"{self.timeout_s:g} s of the last that was made"
                )
        if wanted <= seen:
            return None
        batch = self._between(seen, wanted)
        self._keep_from(wanted)
        return Following(batch, wanted, wanted - seen - len(batch))

    def _keep_from(self, frame: int) -> None:
        if not self.overwrite:
            self.replay.keep_from(frame, self.frames_per_batch)

    def _between(self, first: int, last: int) -> TensorDictBase:
        """Frames by when they came, as far as the ring still holds them."""
        while True:
            gone = self._gone()
            frames = self.replay[max(first - gone, 0) : max(last - gone, 0)]
            if self._gone() == gone:  # else the ring moved on in between
                return frames

    def _gone(self) -> int:
        return max(0, self.replay.written - self.replay.capacity)
