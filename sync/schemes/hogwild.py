"""Weights without synchronisation: workers read the trainer's own parameters while it writes them.

This breaks promises 1 and 2 on purpose. For ablations, it is a lower bound of the cost of
synchronisation and an upper bound of the damage without it.

    trainer: optimizer.step()  --writes-->  one block  <--reads--  worker: policy(observation)
    trainer: send()            stamps a version; copies buffers and extra state, nothing else
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from sync.model.binding import Binding
from sync.model.block import HEADER_BYTES, CheckFinite, Layout, Snapshot
from sync.model.strategy import WeightStrategy, check_movable, flatten
from sync.scheme import WeightSyncScheme
from sync.schemes import register
from sync.schemes.shared_mem import SharedMemReceiver, SharedMemSender
from sync.sender_form import SenderForm


class HogwildSender(SharedMemSender):
    """Has one block, which is the memory of the trainer's parameters."""

    mechanism = "the trainer's own memory"
    keeps_last = False

    def __init__(self, layout: Layout, num_workers: int):
        super().__init__(layout, num_workers, zero_copy=True)
        self._shared: Binding | None = None
        self._nbytes = 0

    def free_block(self, keep: Collection[Snapshot]) -> Snapshot:
        return self.blocks[0]

    def pack(
        self, binding: Binding, block: Snapshot, version: int, check: CheckFinite, *, own: bool
    ) -> None:
        """Copy what is not yet in the block, and make the block the model's memory."""
        moves = own and not (self._shared is binding and binding.points_at(block))
        if moves:
            binding.check_movable(block)
        self._nbytes = 0
        with torch.no_grad():
            for leaf, view in zip(binding.leaves(), block.views, strict=True):
                if leaf.data_ptr() != view.data_ptr() or not view.numel():
                    view.copy_(leaf)
                    self._nbytes += view.nbytes
        block.stamp(version, binding.extra())
        if moves:
            binding.point_at(block)  # also when the trainer has replaced parameters
            self._shared = binding

    def moved_bytes(self, block: Snapshot) -> int:
        return self._nbytes

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.detach_from_snapshots()
            self._shared = None


class HogwildReceiver(SharedMemReceiver):
    """Points at the one block, which is written all the time."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._before: torch.Tensor | None = None

    def _check(self, block: Snapshot, version: int) -> None:
        """Its version may be newer than the announced one."""

    def begin_use(self) -> None:
        """Remember the weights as they are now."""
        if self._before is None:
            self._before = self._live().clone()
        else:
            self._before.copy_(self._live())

    def end_use(self) -> None:
        """Count a use, and whether the weights changed during it."""
        assert self._before is not None, "begin_use() comes first"
        self.row.count_use(torn=not torch.equal(self._before, self._live()))

    def _live(self) -> torch.Tensor:
        return self._blocks[0].buffer[HEADER_BYTES:].view(torch.int64)


@register("hogwild")
class HogwildWeightSyncScheme(WeightSyncScheme):
    """The trainer's parameters live in a single block that all workers point at.

    There is only one set of weights, so `send(other_weights)` overwrites the trainer's own.

    check_every: in one of this many uses, in `reading()` and in the policy calls of collectors,
        compare the weights before and after. `torn` counts the uses during which they changed. A
        check takes two passes over the weights. With a prime number, every step of a batch is
        checked at some time.
    """

    sender_channel = HogwildSender
    receiver_channel = HogwildReceiver
    moves_weights = False
    zero_copy = True

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        check_every: int = 17,
        **options: Any,
    ):
        super().__init__(strategy, sync=sync, **options)
        if type(check_every) is not int or check_every < 1:
            raise ValueError(f"check_every={check_every!r}: expected a number of uses, 1 or more")
        self.check_every = check_every
        self._unchecked = 0  # uses since a check was due

    def _check_form(self, form: SenderForm) -> None:
        if not form.same_for_all:
            raise ValueError("hogwild workers all read the trainer's own weights")
        assert form.source is not None
        check_movable(flatten(form.source), range(0))

    def _check_by_worker(self) -> None:
        raise ValueError("hogwild workers all read the trainer's own weights")

    def _check_ready(self) -> None:
        devices = {slot.tensor.device.type for slot in self.strategy.flatten(self.model).slots} - {
            "cpu"
        }
        if devices:
            where = ", ".join(sorted(devices))
            raise ValueError(f"hogwild needs a CPU model; this one is on {where}")

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        with super().reading() as version, self._checking():
            yield version

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*inputs: Any) -> Any:
            with self._checking():
                return call(*inputs)

        return checked

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        """Check a use; one that raises is not counted."""
        is_due, self._unchecked = self._unchecked == 0, (self._unchecked + 1) % self.check_every
        if not is_due:
            yield
            return
        channel = self._need_receiver("reading").channel
        assert isinstance(channel, HogwildReceiver)
        channel.begin_use()
        yield
        channel.end_use()

    @property
    def torn(self) -> dict[str, float]:
        """How many uses were checked, and how many of those were torn.

        A receiver counts its own uses; the sender counts those of all workers.
        """
        if self._is_sender:
            return _shares(self._uses())
        channel = self._need_receiver("torn").channel
        assert isinstance(channel, HogwildReceiver)
        return _shares([channel.row.uses])

    def _uses(self) -> list[tuple[int, int]]:
        channel = self._need_sender("torn").channel
        assert isinstance(channel, HogwildSender)
        return [row.uses for row in channel.board.rows]

    @property
    def stats(self) -> dict[str, Any]:
        """Also the counts of `torn`, in total and for each worker."""
        summary = super().stats
        summary["torn"] = self.torn
        for worker, uses in enumerate(self._uses()):
            summary["workers"][worker]["torn"] = _shares([uses])
        return summary


def _shares(uses: Sequence[tuple[int, int]]) -> dict[str, float]:
    checked, torn = (sum(counts) for counts in zip(*uses, strict=True))
    return {"checked": checked, "torn": torn, "fraction": torn / checked if checked else 0.0}
