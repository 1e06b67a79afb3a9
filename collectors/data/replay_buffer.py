"""A ring of frames that a collector fills and a learner samples from, at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from torch import Tensor

from collectors.option_checks import is_whole
from collectors.rollout.spaces import key_of, name_of


class ReplayBuffer:
    """The last `capacity` frames, in preallocated memory.

    capacity: how many frames are kept; the oldest make room.
    batch_size: of `sample()`, unless that says.
    device: where the frames lie.
    seed: of the sampling; without one, sampling draws from torch's global stream.

    `extend` and `sample` take turns, so that no sample holds a frame that is being written.
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int | None = None,
        device: Any = None,
        seed: int | None = None,
    ):
        if not is_whole(capacity) or capacity < 1:
            raise ValueError(f"capacity={capacity!r}: a whole number of frames, at least 1")
        if batch_size is not None and (not is_whole(batch_size) or batch_size < 1):
            raise ValueError(f"batch_size={batch_size!r}: a whole number of frames, at least 1")
        self.capacity = int(capacity)
        self.batch_size = batch_size
        self.device = None if device is None else torch.device(device)
        self.written = 0  # frames that ever came
        self._storage: dict[Any, Tensor] = {}
        self._news = threading.Condition()
        self._failure: BaseException | None = None
        self._fillers = 0  # collectors that fill it
        self._ended = False  # nobody fills it any more
        self._generator: torch.Generator | None = None
        if seed is not None:
            self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    def extend(self, frames: TensorDictBase) -> Tensor:
        """Add frames of any batch shape, oldest first; the places they went to.

        What a batch masks as padding is left out.
        """
        flat = _flat(frames)
        count = flat.batch_size[0]
        with self._news:
            if not self._storage:
                self._allocate(flat)
            self._check(flat)
            flat = flat[max(0, count - self.capacity) :]
            skipped = count - flat.batch_size[0]
            first = (self.written + skipped) % self.capacity
            places = (first + torch.arange(flat.batch_size[0])) % self.capacity
            room = self.capacity - first
            for key, storage in self._storage.items():
                values = flat.get(key)
                storage[first : first + len(values[:room])] = values[:room].to(storage.device)
                if len(values) > room:
                    storage[: len(values) - room] = values[room:].to(storage.device)
            self.written += count
            self._news.notify_all()
        return places

    def sample(self, batch_size: int | None = None, *, places: Tensor | None = None) -> TensorDict:
        """Frames drawn evenly, with replacement, in memory of their own.

        places: take what lies there now, drawn by somebody else. Frame `n` of all that ever came
            goes to place `n % capacity`, which `extend` returns.
        """
        size = batch_size if batch_size is not None else self.batch_size
        if batch_size is not None and places is not None:
            raise ValueError("sample() takes a batch_size or places, not both")
        if size is None and places is None:
            raise ValueError("sample() needs a batch_size, here or when the buffer is made")
        if size is not None and (not is_whole(size) or size < 0):
            raise ValueError(f"batch_size={size!r}: a whole number of frames")
        with self._news:
            self._raise_failure()
            if not len(self):
                raise RuntimeError("the replay buffer is empty: there is nothing to sample yet")
            if places is None:
                places = torch.randint(len(self), (size,), generator=self._generator)  # type: ignore[arg-type]
            elif not bool(((places >= 0) & (places < len(self))).all()):
                raise IndexError(f"places: the frames lie in places 0 to {len(self) - 1}")
            return self._gather(places.to(self.device) if self.device else places)

    def __getitem__(self, index: Any) -> TensorDict:
        """Frames by age: the first is the oldest, whatever place it has in the ring."""
        with self._news:
            places = torch.arange(len(self))[index]
            oldest = self.written % self.capacity if self.written > self.capacity else 0
            places = (places + oldest) % self.capacity
            return self._gather(places.to(self.device) if self.device else places)

    def wait(self, frames: int, timeout: float | None = None) -> int:
        """Wait until so many frames ever came; how many did, fewer if no more will come.

        Raises what ended the collector.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._news:
            while self.written < frames:
                self._raise_failure()
                if self._ended:
                    break
                remaining = 1.0 if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._news.wait(min(remaining, 1.0))
            return self.written

    def fail(self, error: BaseException) -> None:
        """Have everybody who waits or samples get this error: no more frames will come."""
        with self._news:
            self._failure = error
            self._news.notify_all()

    def begin(self) -> None:
        """A collector starts to fill it."""
        with self._news:
            self._fillers += 1
            self._ended, self._failure = False, None

    def end(self) -> None:
        """A collector has ended; if it was the last, those who wait for frames go on."""
        with self._news:
            self._fillers = max(0, self._fillers - 1)
            self._ended = not self._fillers
            self._news.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """The frames, oldest last overwritten, and where the ring goes on."""
        with self._news:
            state: dict[str, Any] = {"capacity": self.capacity, "written": self.written}
            state["frames"] = {
                name_of(key): storage[: len(self)].clone() for key, storage in self._storage.items()
            }
            if self._generator is not None:
                state["generator"] = self._generator.get_state()
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take another buffer's frames and place in its ring."""
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"this buffer holds {self.capacity} frames, the saved one {state['capacity']}"
            )
        with self._news:
            self.written = int(state["written"])
            self._storage = {}
            for name, values in state["frames"].items():
                storage = values.new_empty((self.capacity, *values.shape[1:]), device=self.device)
                storage[: len(values)] = values
                self._storage[unravel_key(key_of(name))] = storage
            if "generator" in state:
                self._generator = torch.Generator()
                self._generator.set_state(state["generator"])
            self._news.notify_all()

    def _allocate(self, flat: TensorDictBase) -> None:
        for key in flat.keys(True, True):
            value = flat.get(key)
            device = self.device or value.device
            shape = (self.capacity, *value.shape[1:])
            self._storage[key] = torch.empty(shape, dtype=value.dtype, device=device)

    def _check(self, flat: TensorDictBase) -> None:
        given, known = set(flat.keys(True, True)), set(self._storage)
        if given != known:
            odd = sorted(map(str, given ^ known))
            raise ValueError(f"these frames and those in the buffer differ in {', '.join(odd)}")
        for key, storage in self._storage.items():
            value = flat.get(key)
            if value.shape[1:] != storage.shape[1:] or value.dtype != storage.dtype:
                raise ValueError(
                    f"{key!r} is {value.dtype} {list(value.shape[1:])}, in the buffer it is "
                    f"{storage.dtype} {list(storage.shape[1:])}"
                )

    def _gather(self, places: Tensor) -> TensorDict:
        sampled = TensorDict({}, batch_size=places.shape)
        for key, storage in self._storage.items():
            sampled.set(key, storage[places])
        return sampled

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _flat(frames: TensorDictBase) -> TensorDictBase:
    """The frames in one row, each environment's in the order of time, without padding."""
    if not isinstance(frames, TensorDictBase):
        raise TypeError(
            f"a replay buffer takes frames as a TensorDict, got {type(frames).__name__}"
        )
    mask = frames.get(("collector", "mask"), None)
    if mask is None:
        return frames.reshape(-1)
    return frames.reshape(-1) if bool(mask.all()) else frames[mask]
