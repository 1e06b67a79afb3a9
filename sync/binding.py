"""A model bound to a layout: packed into blocks on one side, loaded from them on the other.

Everything that needs a name is done once, here. A publish or an apply then walks plain lists, after
checking that the tensors in them are still the ones the model uses.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sync.layout import Layout
from sync.raw import Bytes, copy, raw
from sync.snapshot import PIECEWISE_BYTES, OneThread, Snapshot, pieces
from sync.strategy import Flat, Slot, Weights, WeightStrategy, check_extra, set_extra_state

_UNKNOWN: list[Bytes] = []  # whether the memory can be had


class Binding:
    """Fast, checked access to the tensors of one module, TensorDict or dict."""

    def __init__(
        self,
        target: Weights,
        strategy: WeightStrategy,
        layout: Layout | None = None,
        *,
        any_extra: bool = False,
    ):
        """`any_extra`: take whatever extra state comes, for a target that has no owners of it."""
        self.target = target
        self._any_extra = any_extra
        self._strategy = strategy
        self._whose = f"the {type(target).__name__}"
        flat = strategy.flatten(target)
        self.layout = layout or Layout.of(flat.tensors, dump_extra(flat.extra))
        self._moved_in: list[Tensor] | None = None
        self._index(flat)

    def _index(self, flat: Flat) -> None:
        known = {leaf.name for leaf in self.layout.leaves}  # a forward pass may make more, to keep
        flat.slots = [slot for slot in flat.slots if slot.lasting or slot.name in known]
        self.layout.check(flat.tensors, whose=self._whose)
        slots = {slot.name: slot for slot in flat.slots}
        self._slots = [slots[leaf.name] for leaf in self.layout.leaves]
        with torch.inference_mode(False):
            self._leaves = [slot.tensor.detach() for slot in self._slots]
        self._pieces: list[Tensor] | None = None
        self._raw: list[Bytes] | None = _UNKNOWN
        self._places = [_place(slot) for slot in self._slots]
        self._flat = flat
        self._sizes = list(map(len, flat.keys))
        self._weights: Any = None
        devices = {leaf.device for leaf in self._leaves}
        self.device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self._staging: tuple[Tensor, list[Tensor]] | None = None

    def leaves(self) -> list[Tensor]:
        """The model's tensors in layout order, found again if the model replaced or added any."""
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

    def pack(self, snapshot: Snapshot, version: int, *, check_finite: bool) -> None:
        """Write the model into `snapshot` as `version`."""
        leaves, extra = self.leaves(), self.extra()
        if (memory := self._raw_of(leaves)) is not None:
            snapshot.write_raw(memory, extra, version, check_finite=check_finite)
        elif self.device.type == "cpu":
            source = self._pieces_of(leaves)
            snapshot.write(source, extra, version, check_finite=check_finite)
        else:  # gather on the device, then cross to the host once
            buffer, views = self._device_block()
            torch._foreach_copy_(views, leaves)
            snapshot.write(buffer, extra, version, check_finite=check_finite)

    def extra(self) -> bytes:
        """The model's extra state as it is now."""
        if not self._flat.extra_owners:
            return b""
        return dump_extra(self._strategy.flatten(self.target).extra)

    def load(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` into the model's own memory: addresses stay, nothing is shared."""
        leaves = self.leaves()
        self._load_extra(snapshot)
        if not leaves:
            return
        memory = self._raw_of(leaves)
        if memory is not None and snapshot.raw is not None:
            copy(memory, snapshot.raw)
            increment_version(leaves)
        elif self.device.type == "cpu":
            with OneThread(self.layout.nbytes):
                torch._foreach_copy_(leaves, snapshot.views)
        else:  # cross to the device once, then scatter there
            buffer, views = self._device_block()
            buffer.copy_(snapshot.buffer)
            torch._foreach_copy_(leaves, views)
            torch.accelerator.synchronize(self.device)

    def _pieces_of(self, leaves: list[Tensor]) -> list[Tensor]:
        if self._pieces is None:
            if not all(leaf.is_contiguous() for leaf in leaves):
                return pieces(leaves, self.layout)  # copies, so it cannot be kept
            self._pieces = pieces(leaves, self.layout)
        return self._pieces

    def _raw_of(self, leaves: list[Tensor]) -> list[Bytes] | None:
        """The memory of a small model's leaves."""
        if self._raw is _UNKNOWN:
            self._raw = raw(leaves) if self.layout.nbytes < PIECEWISE_BYTES else None
        return self._raw

    def point_at(self, snapshot: Snapshot) -> None:
        """Make `snapshot` the memory of the model's parameters; copy its buffers.

        Buffers are copied because a forward pass may write to them (running statistics, noise).
        """
        self.leaves()
        self._pieces, self._raw = None, _UNKNOWN
        self._load_extra(snapshot)
        for i, (slot, view) in enumerate(zip(self._slots, snapshot.views, strict=True)):
            if self._is_parameter(slot.tensor):
                slot.tensor.data = self._leaves[i] = view
                self._places[i] = _place(slot)
            else:
                self._leaves[i].copy_(view)
        increment_version([slot.tensor for slot in self._slots])

    def points_at(self, snapshot: Snapshot) -> bool:
        """Whether the memory of the model's parameters is that of `snapshot`."""
        start = snapshot.buffer.data_ptr()
        memory = range(start, start + snapshot.layout.nbytes)
        owned = [slot.tensor for slot in self._slots if self._is_parameter(slot.tensor)]
        return all(tensor.data_ptr() in memory for tensor in owned if tensor.numel())

    def detach_from_snapshots(self) -> None:
        """Give every parameter memory of its own again."""
        for slot in self._slots:
            if self._is_parameter(slot.tensor):
                slot.tensor.data = slot.tensor.data.clone()
        self._index(self._strategy.flatten(self.target))

    def move_into(self, block: Snapshot) -> bool:
        """Make `block` the memory of all that the model has, and whoever writes it its author.

        False if that cannot be: for what is no module, has extra state or no tensors, or shares
        memory with something else.
        """
        leaves = self.leaves()
        if not isinstance(self.target, nn.Module) or self._flat.extra_owners or not leaves:
            return False
        if self._raw_of(leaves) is None or not _apart(self.target):
            return False
        torch._foreach_copy_(block.views, leaves)
        for slot, view in zip(self._slots, block.views, strict=True):
            slot.tensor.data = view
        self._index(self._strategy.flatten(self.target))
        self._moved_in = self._leaves
        return True

    def lives_there(self) -> bool:
        """Whether everything is still where `move_into` put it."""
        return self.leaves() is self._moved_in

    def was_written(self) -> None:
        """Tell torch that somebody wrote the block."""
        increment_version(self._leaves)

    def move_out(self, values: list[Tensor] | None = None) -> None:
        """Give everything memory of its own again, also in a model that fits the layout no more.

        values: what was in the block, if somebody may be writing to it now.
        """
        with torch.inference_mode(False):
            for i, slot in enumerate(self._slots):
                slot.tensor.data = slot.tensor.data.clone() if values is None else values[i]
        self._moved_in = None

    def copies(self) -> list[Tensor]:
        """What the model holds, as `move_out` takes it."""
        with torch.inference_mode(False):
            return [slot.tensor.data.clone() for slot in self._slots]

    def weights(self) -> Any:
        """The weights in the strategy's form; the model's own tensors, so they stay current."""
        if self._weights is None:
            self._weights = self._strategy.assemble(self._flat.tensors, self._flat.extra)
        return self._weights

    def _is_parameter(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or not isinstance(self.target, nn.Module)

    def _load_extra(self, snapshot: Snapshot) -> None:
        extra = load_extra(snapshot.extra)
        if self._any_extra:
            self._flat.extra, self._weights = extra, None
        elif extra or self._flat.extra_owners:
            current = self._strategy.flatten(self.target)
            check_extra(current.extra_owners, extra)
            set_extra_state(current, extra)
            self._flat.extra, self._weights = extra, None

    def _device_block(self) -> tuple[Tensor, list[Tensor]]:
        if self._staging is None:
            buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self.device)
            self._staging = buffer, self.layout.views(buffer)
        return self._staging


def _place(slot: Slot) -> tuple[Any, str, Tensor, int, tuple[int, ...], tuple[int, ...]]:
    """Where the model keeps a tensor, and where that keeps its numbers."""
    tensor = slot.tensor
    return slot.owner, slot.key, tensor, tensor.data_ptr(), tensor.shape, tensor.stride()


def _apart(module: nn.Module) -> bool:
    """Whether each of its tensors has memory that nobody else has, and may be moved."""
    tensors = [*module.parameters(), *module.buffers()]
    memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(memories) == len(tensors) and not any(
        tensor.is_inference() or tensor.is_shared() for tensor in tensors
    )


def dump_extra(extra: dict[str, Any]) -> bytes:
    """Extra state as a snapshot carries it."""
    return pickle.dumps(extra) if extra else b""


def load_extra(data: bytes) -> dict[str, Any]:
    """The opposite of `dump_extra`."""
    extra: dict[str, Any] = pickle.loads(data) if data else {}
    return extra
