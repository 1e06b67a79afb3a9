"""A ring of frames that a collector fills and a learner samples from, at the same time."""

from __future__ import annotations

import threading
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors.options.check_types import is_whole
from collectors.rollout.spaces import key_of, name_of


class ReplayBuffer:
    """The last `capacity` frames, in preallocated memory.

    capacity: how many frames are kept; new ones replace the oldest.
    batch_size: default of `sample()`.
    device: where the frames are stored.
    seed: of the sampling; without one, it uses torch's global random numbers.

    A lock keeps `extend` and `sample` apart, so that no sample holds half-written frames.
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int | None = None,
        device: Any = None,
        seed: int | None = None,
    ):
        _check_count("capacity", capacity, 1)
        if batch_size is not None:
            _check_count("batch_size", batch_size, 1)
        self.capacity = int(capacity)
        self.batch_size = batch_size
        self.device = None if device is None else torch.device(device)
        self.written = 0  # frames added so far
        self._storage = TensorDict({}, batch_size=[self.capacity])
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._collectors = 0  # that fill it
        self._ended = False  # the last of them has ended
        self._needed: tuple[int, int] | None = None  # the first frame to keep, frames of a batch
        self._generator: torch.Generator | None = None
        if seed is not None:
            self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    def extend(self, frames: TensorDictBase) -> Tensor:
        """Add frames of any batch shape, oldest first, without padding; return their places."""
        flat = _flat(frames)
        count = len(flat)
        flat = flat[max(0, count - self.capacity) :]
        with self._changed:
            if self._storage.is_empty():
                self._storage = self._allocate(flat)
            _check_alike(flat, self._storage)
            places = torch.arange(self.written + count - len(flat), self.written + count)
            places %= self.capacity
            self._storage[places] = flat.to(self.device) if self.device else flat
            self.written += count
            self._changed.notify_all()
        return places

    def sample(self, batch_size: int | None = None, *, places: Tensor | None = None) -> TensorDict:
        """Frames drawn uniformly, with replacement, in new memory.

        places: take the frames there instead. The n-th frame ever added has place `n % capacity`,
            which `extend` returns.
        """
        if batch_size is not None and places is not None:
            raise ValueError("sample() takes a batch_size or places, not both")
        size = self.batch_size if batch_size is None else batch_size
        if places is None and size is None:
            raise ValueError("sample() needs a batch_size, here or in the constructor")
        if size is not None:
            _check_count("batch_size", size, 0)
        with self._changed:
            self._raise_failure()
            if not len(self):
                raise RuntimeError("the replay buffer is still empty: nothing can be sampled")
            if places is None:
                assert size is not None
                places = self._draw(size)
            elif not bool(((places >= 0) & (places < len(self))).all()):
                raise IndexError(f"places: expected 0 to {len(self) - 1}")
            return self._samples(places)

    def __getitem__(self, index: Any) -> TensorDict:
        """Frames by age: the first is the oldest."""
        with self._changed:
            age = torch.arange(len(self))[index]
            return self._at((self.written - len(self) + age) % self.capacity)

    def wait(self, frames: int, timeout: float | None = None) -> int:
        """Wait until so many frames were added, no more will come, or `timeout` is over.

        Returns how many were added. Raises the error that ended the collector.
        """

        def over() -> bool:
            if self.written < frames:
                self._raise_failure()
            return self.written >= frames or self._ended

        with self._changed:
            self._changed.wait_for(over, timeout)
            return self.written

    def keep_from(self, frame: int, room: int) -> None:
        """Have collectors in the background wait rather than overwrite this frame or a later one.

        room: they begin a batch only if so many frames can be added.
        """
        with self._changed:
            self._needed = frame, room
            self._changed.notify_all()

    def await_room(self, timeout: float) -> bool:
        """Wait until the next batch overwrites no frame that is kept; False if it still does."""

        def is_free() -> bool:
            if self._needed is None:
                return True
            frame, room = self._needed
            return self.written + room <= frame + self.capacity

        with self._changed:
            return self._changed.wait_for(is_free, timeout)

    def fail(self, error: BaseException) -> None:
        """Raise this error in every `wait` and `sample` from now on."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def begin(self) -> None:
        """Note that a collector starts to fill the buffer."""
        with self._changed:
            self._collectors += 1
            self._ended, self._failure = False, None

    def end(self) -> None:
        """Note that a collector has ended. After the last one, `wait` returns at once."""
        with self._changed:
            self._collectors = max(0, self._collectors - 1)
            self._ended = not self._collectors
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """The frames by place, the position in the ring, and the state of the sampling."""
        with self._changed:
            state: dict[str, Any] = {"capacity": self.capacity, "written": self.written}
            state["frames"] = by_name(self._storage[: len(self)])
            if self._generator is not None:
                state["generator"] = self._generator.get_state()
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over another buffer's frames, and its position in the ring."""
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"this buffer has capacity={self.capacity}, but the saved one {state['capacity']}"
            )
        with self._changed:
            self.written = int(state["written"])
            if state["frames"]:
                stored = by_key(state["frames"])
                self._storage = self._allocate(stored)
                self._storage[: len(stored)] = stored
            if "generator" in state:
                self._generator = torch.Generator()
                self._generator.set_state(state["generator"])
            self._changed.notify_all()

    def _allocate(self, like: TensorDictBase) -> TensorDict:
        size = torch.Size([self.capacity])
        return like.to_tensordict().new_empty(size, device=self.device)  # type: ignore[arg-type]

    def _draw(self, count: int) -> Tensor:
        """The places of so many frames to sample."""
        return torch.randint(len(self), (count,), generator=self._generator)

    def _samples(self, places: Tensor) -> TensorDict:
        """What `sample` returns for the frames there."""
        return self._at(places)

    def _at(self, places: Tensor) -> TensorDict:
        sampled: TensorDict = self._storage[places.to(self.device) if self.device else places]
        return sampled

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _check_count(name: str, value: Any, minimum: int) -> None:
    if not is_whole(value) or value < minimum:
        raise ValueError(f"{name}={value!r}: expected a whole number of frames, at least {minimum}")


def _check_alike(given: TensorDictBase, stored: TensorDictBase) -> None:
    new, old = dict(given.items(True, True)), dict(stored.items(True, True))
    if new.keys() != old.keys():
        odd = ", ".join(sorted(map(str, new.keys() ^ old.keys())))
        raise ValueError(f"these frames and those in the buffer differ in {odd}")
    for key, value in new.items():
        shape, expected = list(value.shape[1:]), list(old[key].shape[1:])
        if shape != expected or value.dtype != old[key].dtype:
            raise ValueError(
                f"{key!r} is {value.dtype} {shape}, in the buffer it is {old[key].dtype} {expected}"
            )


def _flat(frames: TensorDictBase) -> TensorDictBase:
    """The frames in one row, each environment's in the order of time, without padding."""
    if not isinstance(frames, TensorDictBase):
        raise TypeError(
            f"a replay buffer takes frames as a TensorDict, got {type(frames).__name__}"
        )
    mask = frames.get(("collector", "mask"), None)
    return frames.reshape(-1) if mask is None or bool(mask.all()) else frames[mask]


def by_name(frames: TensorDictBase) -> dict[str, Tensor]:
    """A copy of the frames' tensors, by name."""
    return {name_of(key): frames.get(key).clone() for key in frames.keys(True, True)}


def by_key(tensors: dict[str, Tensor]) -> TensorDict:
    """The frames of which `by_name` gave the tensors."""
    length = len(next(iter(tensors.values())))
    return TensorDict({key_of(name): tensor for name, tensor in tensors.items()}, [length])
