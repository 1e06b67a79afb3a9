"""The state of numpy's global random stream, kept and resumed.

numpy itself takes a fifth of a millisecond for either. Mostly nobody has drawn in between, and then
it is enough to look at the memory of its generator, and to write it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

_KEYS = 624
_Memory = ctypes.c_char * (4 * _KEYS + 4)  # the keys of a Mersenne twister, and its place in them


@dataclass(frozen=True)
class Kept:
    """A state: as numpy tells it, or as its generator's memory where that is all there is to it."""

    state: Any = None
    memory: bytes | None = None

    def told(self) -> Any:
        """The state as `np.random.get_state` tells it."""
        if self.memory is None:
            return self.state
        keys = np.frombuffer(self.memory, np.uint32, _KEYS).copy()
        position = int.from_bytes(self.memory[4 * _KEYS :], "little")
        return "MT19937", keys, position, 0, 0.0


class _Generator:
    """The global stream's generator, and its memory when it was last known to be all of the state.

    All, that is, unless a normal number waits: they are made two at a time.
    """

    of: Any = None
    memory: Any = None
    known: bytes | None = None

    def find(self) -> bool:
        """Whether its memory can be used."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self.of:
            self.of, self.memory, self.known = generator, None, None
            if type(generator) is np.random.MT19937:
                self.memory = _Memory.from_address(int(generator.ctypes.state_address))
        return self.memory is not None


_global = _Generator()


def keep() -> Kept:
    """The state as it is now."""
    found = _global.find()
    if found and (now := _global.memory.raw) == _global.known:
        return Kept(memory=now)
    if not found:
        return Kept(state=np.random.get_state(legacy=False))
    state: Any = np.random.get_state()
    if state[3]:
        return Kept(state=state)
    _global.known = _global.memory.raw
    return Kept(memory=_global.known)


def resume(kept: Kept) -> None:
    """Go on from there."""
    if kept.memory is None or not _global.find():
        np.random.set_state(kept.told())
        _global.known = None
        return
    if _global.memory.raw != _global.known:
        np.random.set_bit_generator(_global.of)  # type: ignore[attr-defined]  # no number waits now
    _global.memory.raw = _global.known = kept.memory
