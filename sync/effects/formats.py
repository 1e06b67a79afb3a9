"""What every wire format implements: an encoder at the sender, a decoder at each worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sync.channel import Answer
from sync.model.block import Layout, Snapshot


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
