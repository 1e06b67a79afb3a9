"""A model bound to a layout: packed into blocks by the sender, loaded from them by a receiver.

Names are looked up once, when the model is bound. After that, a publish or an apply walks plain
lists and only checks that the model still uses the tensors in them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sync.model.block import CheckFinite, Layout, Snapshot, checksum
from sync.model.copying import (
    CudaCopies,
    copy_leaf,
    copy_leaves,
    may_be_infinite,
    require_finite,
)
from sync.model.strategy import (
    Flat,
    Slot,
    Weights,
    WeightStrategy,
    check_extra,
    check_movable,
    check_whole,
    check_writable,
    flatten,
    set_extra_state,
)


class Binding:
    """Fast, checked access to the tensors of one module, TensorDict or dict.

    layout: what the tensors must match; by default, the layout of the target itself.
    any_extra: accept any extra state, for a target that has no module to take it.
    """

    def __init__(
        self,
        target: Weights,
        strategy: WeightStrategy,
        layout: Layout | None = None,
        *,
        any_extra: bool = False,
    ):
        self.target = target
        self._any_extra = any_extra
        self._strategy = strategy
        self._cuda = CudaCopies()
        flat = strategy.flatten(target)
        buffers = {slot.name for slot in flat.slots if slot.is_buffer}
        self.layout = layout or Layout.of(flat.tensors, dump_extra(flat.extra), buffers=buffers)
        check_whole(target, flat)
        if isinstance(target, nn.Module):  # workers have copies of it, which are written in place
            check_writable(flat)
        # Which leaves must be finite, by the option `check_finite`.
        self._checked = {one: self.layout.checked(one) for one in (False, True, "all")}
        self._index(flat)

    def _index(self, flat: Flat) -> None:
        # A forward pass may add non-persistent buffers, which the model keeps for itself.
        names = {leaf.name for leaf in self.layout.leaves}
        flat.slots = [slot for slot in flat.slots if slot.persistent or slot.name in names]
        self.layout.check(flat.tensors, whose=f"the {type(self.target).__name__}")
        slots = {slot.name: slot for slot in flat.slots}
        self._slots = [slots[leaf.name] for leaf in self.layout.leaves]
        with torch.inference_mode(False):
            self._leaves = [slot.tensor.detach() for slot in self._slots]
        self._places = [_place(slot) for slot in self._slots]
        self._flat = flat
        self._sizes = list(map(len, flat.keys))
        self._weights: Any = None
        self._detached: list[Tensor] = []  # the tensors in it, in layout order
        self._devices = {leaf.device for leaf in self._leaves if leaf.device.type != "cpu"}
        self._cuda_devices = {device for device in self._devices if device.type == "cuda"}

    @property
    def accelerator(self) -> torch.device | None:
        """A device other than the CPU that holds tensors of the model, if there is one."""
        return next(iter(self._devices), None)

    def leaves(self) -> list[Tensor]:
        """The model's tensors in layout order, looked up again if the model replaced or added any.

        Raises if the model no longer fits the layout.
        """
        if self._has_changed():
            self._index(self._strategy.flatten(self.target))
        return self._leaves

    def _has_changed(self) -> bool:
        if list(map(len, self._flat.keys)) != self._sizes:
            return True
        for owner, key, child in self._flat.children:
            if owner.get(key) is not child:
                return True
        for owner, key, tensor, pointer, shape, stride in self._places:
            moved = tensor.data_ptr() != pointer or tensor.stride() != stride
            if moved or tensor.shape != shape or owner.get(key) is not tensor:
                return True
        return False

    # -- packing and loading

    def check(self, check_finite: CheckFinite) -> None:
        """Raise if the model, as it is now, cannot be sent."""
        leaves, checked = self.leaves(), self._checked[check_finite]
        if extra := self.extra():
            self.layout.check_extra(extra)
        if may_be_infinite(compress(leaves, checked)):
            for leaf, tensor in compress(zip(self.layout.leaves, leaves, strict=True), checked):
                require_finite(leaf.name, tensor)

    def pack(self, snapshot: Snapshot, version: int, check_finite: CheckFinite = False) -> None:
        """Write the model into `snapshot` as `version`, or raise if it cannot be sent.

        Until done, the block holds no version. What is refused is in the block all the same, since
        checking and copying are one pass over memory. Nobody sees it: the block is free, that is,
        it is announced to no worker, and no successor of a worker is sent it.
        """
        leaves, extra = self.leaves(), self.extra()
        snapshot.begin()
        if self._cuda_devices:
            self.check(check_finite)
            self._cuda.copy(snapshot, snapshot.views, leaves)
        else:
            checks = self._checked[check_finite]
            for slot, view, tensor, check in zip(
                self._slots, snapshot.views, leaves, checks, strict=True
            ):
                if not copy_leaf(view, tensor, check=check):
                    require_finite(slot.name, tensor)  # a sum of finite numbers may overflow
        snapshot.stamp(version, extra)
        if self.layout.checksum_room:
            snapshot.seal()

    def load(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` into the model's own memory. Addresses stay the same."""
        leaves = self.leaves()
        self._load_extra(snapshot)
        if self._cuda_devices:
            self._cuda.copy(snapshot, leaves, snapshot.views)
        else:
            copy_leaves(leaves, snapshot.views)

    def after_use(self) -> None:
        """Let the next `load` wait for the work that this thread has queued on the devices.

        For a model that one thread uses and another one loads; a no-op on the CPU.
        """
        self._cuda.after_use(self._cuda_devices)

    def differing(self, checksums: Sequence[int], *, buffers: bool) -> list[str]:
        """The names of the tensors with other checksums. `buffers`: whether to check buffers."""
        leaves = self.leaves()
        return [
            slot.name
            for slot, tensor, expected in zip(self._slots, leaves, checksums, strict=False)
            if (buffers or not slot.is_buffer) and checksum(tensor) != expected
        ]

    # -- extra state

    def extra(self) -> bytes:
        """The model's extra state as it is now."""
        if not self._flat.extra_owners:
            return b""
        return dump_extra(self._strategy.flatten(self.target).extra)

    def _load_extra(self, snapshot: Snapshot) -> None:
        extra = load_extra(snapshot.extra)
        if self._any_extra:
            self._flat.extra, self._weights = extra, None
        elif extra or self._flat.extra_owners:
            current = self._strategy.flatten(self.target)
            check_extra(current.extra_owners, extra)
            set_extra_state(current, extra)
            self._flat.extra, self._weights = extra, None

    def weights(self) -> Any:
        """The weights in the strategy's form, sharing the model's memory, so they stay current."""
        if self._weights is None:
            self._detached = [slot.tensor.detach() for slot in self._slots]
            names = [slot.name for slot in self._slots]
            tensors = dict(zip(names, self._detached, strict=True))
            self._weights = self._strategy.assemble(tensors, self._flat.extra)
        return self._weights

    # -- memory that is not the model's own

    def point_at(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the memory of the model's parameters; copy its buffers.

        Buffers are copied because a forward pass may write to them (running statistics, noise).
        """
        self.leaves()
        self._load_extra(snapshot)
        for i, (slot, view) in enumerate(zip(self._slots, snapshot.views, strict=True)):
            if slot.is_buffer:
                copy_leaves([self._leaves[i]], [view])
            else:
                slot.tensor.data = self._leaves[i] = view
                self._places[i] = _place(slot)
                if self._weights is not None:
                    self._detached[i].data = view
        increment_version([slot.tensor for slot in self._slots])

    def points_at(self, snapshot: Snapshot) -> bool:
        """Whether the memory of the model's parameters is that of `snapshot`."""
        memory = _addresses(snapshot)
        owned = [slot.tensor for slot in self._slots if not slot.is_buffer]
        return all(tensor.data_ptr() in memory for tensor in owned if tensor.numel())

    def check_movable(self, snapshot: Snapshot) -> None:
        """Raise if `point_at` would separate a parameter from what shares its memory."""
        check_movable(flatten(self.target), _addresses(snapshot))

    def detach_from_snapshots(self) -> None:
        """Give every parameter memory of its own again."""
        for slot in self._slots:
            if not slot.is_buffer:
                slot.tensor.data = slot.tensor.data.clone()
        self._places.clear()  # so that `leaves` looks everything up again, and checks it
        self._sizes, self._weights = [], None

    def forbid_use(self, why: str) -> None:
        """Take the parameters away; whoever uses one gets a `RuntimeError`."""
        with torch.inference_mode(False):
            for slot in self._slots:
                if not slot.is_buffer:
                    slot.tensor.data = slot.tensor.data.new_empty(0)
                    if isinstance(slot.owner, dict):
                        slot.owner[slot.key] = _Forbidden(why)


class _Forbidden:
    """Stands in the place of a parameter that must not be used."""

    def __init__(self, why: str):
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._why)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        forbidden = next(one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls))
        raise RuntimeError(forbidden._why)


def _addresses(snapshot: Snapshot) -> range:
    start = snapshot.buffer.data_ptr()
    return range(start, start + snapshot.layout.nbytes)


def _place(slot: Slot) -> tuple[Any, str, Tensor, int, tuple[int, ...], tuple[int, ...]]:
    """Where the model keeps a tensor, and the memory of the tensor."""
    tensor = slot.tensor
    return slot.owner, slot.key, tensor, tensor.data_ptr(), tensor.shape, tensor.stride()


def dump_extra(extra: dict[str, Any]) -> bytes:
    """Extra state in the form in which a snapshot stores it."""
    return pickle.dumps(extra) if extra else b""


def load_extra(data: bytes) -> dict[str, Any]:
    """The opposite of `dump_extra`."""
    extra: dict[str, Any] = pickle.loads(data) if data else {}
    return extra
