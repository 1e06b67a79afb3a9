"""What happens to a version before it travels: a list of effects, and then the wire format.

    Sender: pack version 5        [Parcel(5, workers 0 and 1)]
      Tearing.choose              [Parcel(5 with parts of 4, workers 0 and 1)]
      Lagging.choose              [Parcel(3 with parts of 2, worker 0), Parcel(4 ..., worker 1)]
      encode each into a block of the channel
    if nothing was refused: commit every effect, and publish the blocks

`choose` changes nothing, so a version that is refused leaves no trace. Without effects and wire
format, models are packed straight into the channel's blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from sync.channel import Answer, SenderChannel
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


class Effect(ABC):
    """One step: it decides which models workers get in the place of those that were published."""

    @abstractmethod
    def choose(self, parcels: Sequence[Parcel], new: Callable[[], Snapshot]) -> list[Parcel]:
        """What is delivered in the place of `parcels`. It changes nothing of the effect.

        new: returns a block to write into.
        """

    @abstractmethod
    def commit(self, parcels: Sequence[Parcel], chosen: Sequence[Parcel]) -> None:
        """`choose` returned `chosen` for `parcels`, and it is published now."""

    @abstractmethod
    def kept(self) -> list[Snapshot]:
        """The blocks that later choices may need."""

    def refused(self, block: Snapshot) -> None:
        """The wire format refused this block, and would do so again."""


class Encoder(ABC):
    """Writes whole models into encoded blocks.

    layout: of the encoded blocks.
    checks_finite: whether `encode` refuses NaN and infinity in parameters, because the format
        cannot represent them.
    """

    layout: Layout
    checks_finite = False

    @abstractmethod
    def encode(
        self, whole: Snapshot, block: Snapshot, workers: Sequence[int]
    ) -> tuple[float, float]:
        """Write the model in `whole` into `block`, so that all `workers` can decode it.

        The caller stamps the block. Returns the largest absolute error, and the relative error of
        the worst tensor. What cannot be represented is a `ValueError`.
        """

    def checksums(self, whole: Snapshot) -> list[int]:
        """The checksums of the model that workers decode; empty if `whole` has none.

        Call it after `encode`. For an exact format they are those of the model itself.
        """
        return whole.checksums

    # To be overridden by a format whose blocks depend on what a worker already has.

    def split(self, workers: Sequence[int]) -> list[Sequence[int]]:
        """Group the workers that can decode the same block."""
        return [workers]

    def published(self, whole: Snapshot, block: Snapshot, workers: Sequence[int]) -> None:
        """`block`, encoded from `whole`, is about to be published to these workers."""

    def heard(self, answer: Answer) -> None:
        """The channel reports an answer of a worker."""

    def bases(self) -> list[Snapshot]:
        """The whole models that later blocks may build on; they must not be overwritten."""
        return []


class Decoder(ABC):
    """Turns encoded blocks back into whole models.

    layout: of the encoded blocks.
    """

    layout: Layout

    def whole(self, block: Snapshot) -> Snapshot:
        """The whole model, with the stamp of the block. It stays valid until the next call."""
        whole = self.decode(block)
        copy_stamp(block, whole, block.checksums)
        return whole

    @abstractmethod
    def decode(self, block: Snapshot) -> Snapshot:
        """The numbers of the whole model, for `whole`."""


def copy_stamp(source: Snapshot, target: Snapshot, checksums: Sequence[int]) -> None:
    """Stamp `target` like `source`, with these checksums of its numbers."""
    target.stamp(source.version, source.extra, source.published_ns)
    if checksums:
        target.seal(checksums)


class Pipeline:
    """The effects and the wire format of one sender, and its channel.

    layout: of whole models.
    encoder: writes them into the blocks of the channel; None if they are copied.
    is_direct: whether models are packed straight into these blocks. If not, a version may still be
        refused when it is packed, and a worker may get none of it.
    """

    def __init__(
        self,
        channel: SenderChannel,
        layout: Layout,
        effects: Sequence[Effect] = (),
        encoder: Encoder | None = None,
    ):
        self.channel = channel
        self._layout = layout
        self._effects = effects
        self._encoder = encoder
        self.is_direct = not effects and encoder is None
        self._pool: list[Snapshot] = []

    def finite_check(self, check: CheckFinite) -> CheckFinite:
        """What to check while a model is packed: an encoder may check parameters itself."""
        is_repeated = check is True and self._encoder is not None and self._encoder.checks_finite
        return False if is_repeated else check

    def taken(self, last: Iterable[Snapshot]) -> list[Snapshot]:
        """The blocks that must not be overwritten; `last`: those that workers may get again."""
        bases = [] if self._encoder is None else self._encoder.bases()
        return [*last, *bases, *(block for effect in self._effects for block in effect.kept())]

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
        steps: list[tuple[Effect, list[Parcel], list[Parcel]]] = []
        for effect in self._effects:
            chosen = effect.choose(parcels, partial(self.free_block, taken))
            steps.append((effect, parcels, chosen))
            parcels = chosen
        outgoing: list[Outgoing] = []
        for parcel in parcels:
            outgoing += self.write(parcel, outgoing)
        for effect, before, after in steps:
            effect.commit(before, after)
        return outgoing

    def write(self, parcel: Parcel, others: Sequence[Outgoing] = ()) -> list[Outgoing]:
        """Write a whole model into blocks of the channel, other than those of `others`."""
        if self.is_direct:
            return [Outgoing(parcel.block, parcel)]
        encoder, written = self._encoder, list(others)
        groups = [parcel.workers] if encoder is None else encoder.split(parcel.workers)
        for group in groups:
            block = self.channel.free_block([one.block for one in written])
            errors = self._encode(parcel.block, block, group)
            written.append(Outgoing(block, Parcel(parcel.block, list(group)), *errors))
        return written[len(others) :]

    def _encode(
        self, whole: Snapshot, block: Snapshot, workers: Sequence[int]
    ) -> tuple[float, float]:
        """Write a whole model into a block of the channel; returns the error of the wire format."""
        if self._encoder is None:
            block.become(whole)
            return 0.0, 0.0
        block.mark(builds_on=NEVER, is_base=False, filled=0)
        try:
            errors = self._encoder.encode(whole, block, workers)
        except ValueError:
            for effect in self._effects:
                effect.refused(whole)
            raise
        copy_stamp(whole, block, self._encoder.checksums(whole))
        return errors

    def publish(self, outgoing: Outgoing) -> None:
        whole, workers = outgoing.parcel
        if self._encoder is not None:
            self._encoder.published(whole, outgoing.block, workers)
        self.channel.publish(outgoing.block, workers)

    def poll(self) -> list[Answer]:
        """The channel's answers, of which the encoder takes note."""
        answers = self.channel.poll()
        if self._encoder is not None:
            for answer in answers:
                self._encoder.heard(answer)
        return answers


def grouped(pairs: Iterable[tuple[Snapshot, int]]) -> list[Parcel]:
    """One parcel for each block, from pairs of a block and a worker."""
    parcels: dict[int, Parcel] = {}
    for block, worker in pairs:
        parcels.setdefault(id(block), Parcel(block, [])).workers.append(worker)
    return list(parcels.values())
