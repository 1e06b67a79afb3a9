"""What happens to a version before it travels: lag, tearing, and then the wire format.

    Sender: pack version 5      5, for workers 0 and 1
      due(lag)                  3 for worker 0, 4 for worker 1
      compose(tear)             3 with parts of 2 for worker 0, 4 with parts of 3 for worker 1
      encode each into a block of the channel
    if nothing was refused: remember 5, and publish the blocks

Which version a worker gets, and what it is torn with, follow from what was published to the worker
and from draws by number. Without these and a wire format, models are packed straight into the
channel's blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lockstep_check.ages import of_age
from sync.channel_interface import SenderChannel
from sync.effects.exact_lag import Lag, due
from sync.effects.rounding import RoundedFormat
from sync.effects.tearing import Tear, compose, older_part
from sync.model.block import NEVER, CheckFinite, Layout, Snapshot, free_private


class Parcel(NamedTuple):
    """A whole model, and the workers that are to get it."""

    block: Snapshot
    workers: list[int]


class Outgoing(NamedTuple):
    """A block of the channel, ready to be published, and the model that was written into it.

    max_error, relative_error: the error of a lossy wire format.
    """

    block: Snapshot
    parcel: Parcel
    max_error: float = 0.0
    relative_error: float = 0.0


class Pipeline:
    """What workers get in the place of what is published, and the channel that brings it.

    layout: of whole models.
    encoder: writes them into the blocks of the channel; None if they are copied.
    first_version: the number of this scheme's version 0 in the count of the whole run.
    is_direct: whether models are packed straight into the channel's blocks. If not, a version may
        still be refused when it is packed, and a worker may get none of it.
    """

    def __init__(
        self,
        channel: SenderChannel,
        layout: Layout,
        *,
        lag: Lag | None = None,
        tear: Tear | None = None,
        encoder: RoundedFormat | None = None,
        first_version: int = 0,
    ):
        self.channel = channel
        self.is_direct = lag is None and tear is None and encoder is None
        self._layout, self._lag, self._tear, self._encoder = layout, lag, tear, encoder
        self._first_version = first_version
        self._pool: list[Snapshot] = []
        # By worker: what was published to it, as far back as it is needed, and what it got last.
        self._past: list[deque[Snapshot]] = [deque() for _ in range(channel.num_workers)]
        self._delivered = [NEVER] * channel.num_workers

    def finite_check(self, check: CheckFinite) -> CheckFinite:
        """What to check while a model is packed: an encoder may check parameters itself."""
        is_repeated = check is True and self._encoder is not None and self._encoder.checks_finite
        return False if is_repeated else check

    def taken(self, last: Iterable[Snapshot]) -> list[Snapshot]:
        """The blocks that must not be overwritten; `last`: those that workers may get again."""
        return [*last, *(block for past in self._past for block in past)]

    def free_block(self, taken: list[Snapshot]) -> Snapshot:
        """A block for a whole model; from now on it is among `taken`."""
        if self.is_direct:
            block = self.channel.free_block(taken)
        else:
            block = free_private(self._pool, self._layout, taken)
        taken.append(block)
        return block

    def prepare(self, parcels: list[Parcel], taken: list[Snapshot]) -> list[Outgoing]:
        """Write the blocks to be published, or raise `ValueError` and change nothing."""
        outgoing: list[Outgoing] = []
        for parcel, source in self._chosen(parcels, taken).values():
            try:
                outgoing.append(self.write(parcel, outgoing))
            except ValueError:  # the wire format would refuse it again
                for past in self._past:
                    if source in past:
                        past.remove(source)
                raise
        if self._lag is not None or self._tear is not None:
            self._remember(parcels, outgoing)
        return outgoing

    def _chosen(
        self, parcels: list[Parcel], taken: list[Snapshot]
    ) -> dict[tuple[int, int], tuple[Parcel, Snapshot]]:
        """What is delivered in the place of these parcels, and the version that it is."""
        lag, tear = self._lag, self._tear
        chosen: dict[tuple[int, int], tuple[Parcel, Snapshot]] = {}
        for block, workers in parcels:
            for worker in workers:
                past = [*self._past[worker], block]
                number = self._first_version + block.version
                wait = 0 if lag is None else lag.draw(number, worker)
                newest = due(past, self._delivered[worker], wait)
                if newest is None:
                    continue
                older = newest if tear is None else older_part(past, newest, tear.span)
                pair = id(newest), id(older)
                if pair not in chosen:
                    whole = newest
                    if tear is not None and older is not newest:
                        whole = self.free_block(taken)
                        compose(tear, self._first_version + newest.version, newest, older, whole)
                    chosen[pair] = Parcel(whole, []), newest
                chosen[pair][0].workers.append(worker)
        return chosen

    def _remember(self, parcels: list[Parcel], outgoing: list[Outgoing]) -> None:
        for block, workers in parcels:
            for worker in workers:
                self._past[worker].append(block)
        span, older = (0, 0) if self._tear is None else (self._tear.span, 1)  # one to tear with
        for one in outgoing:
            for worker in one.parcel.workers:
                past, version = self._past[worker], one.block.version
                self._delivered[worker] = version
                while len(past) > older and past[older].version <= of_age(span, version):
                    past.popleft()

    def write(self, parcel: Parcel, others: Sequence[Outgoing] = ()) -> Outgoing:
        """Write a whole model into a block of the channel, other than those of `others`."""
        if self.is_direct:
            return Outgoing(parcel.block, parcel)
        block = self.channel.free_block([one.block for one in others])
        if self._encoder is None:
            block.become(parcel.block)
            return Outgoing(block, parcel)
        return Outgoing(block, parcel, *self._encoder.encode(parcel.block, block))
