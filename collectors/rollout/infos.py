"""The entries of `info` that `info_keys` names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from collectors.rollout.frame_block import torch_dtype
from collectors.rollout.spaces import SpaceLeaf

Array = np.ndarray[Any, Any]


class Infos:
    """Writes the named entries of each step's info into a block.

    keys: names of numbers, which are NaN if a step lacks them; or a mapping from each name to the
    value for steps that lack the entry, which also sets the dtype and the shape.
    """

    def __init__(
        self, keys: Iterable[str] | Mapping[str, Any], leaves: Iterable[SpaceLeaf], owner: str
    ):
        if any(leaf.key[0] == "info" for leaf in leaves):
            raise ValueError("info_keys: an observation is named 'info', too; rename it")
        self._owner = owner
        self._expected = [] if isinstance(keys, Mapping) else list(keys)  # of the first step
        values = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, float("nan"))
        self.absent = {name: _typed(name, value) for name, value in values.items()}

    def write(self, rows: Iterable[Array], told: Mapping[str, Any]) -> None:
        """One environment's entries, into the row of each name."""
        if self._expected:
            self._check(told)
        for (name, absent), row in zip(self.absent.items(), rows, strict=True):
            row[0] = self._fit(name, told[name], absent) if name in told else absent

    def write_all(self, rows: Iterable[Array], told: Mapping[str, Any], ended: Array) -> None:
        """All environments' entries, in the form of gymnasium's vectors: "_name" masks those that
        have the entry, and "final_info" holds the last step of those that were reset at once."""
        final = told.get("final_info", {})
        if self._expected:
            self._check({**told, **final})
        are_final = ended & told.get("_final_info", bool(final))
        for (name, absent), row in zip(self.absent.items(), rows, strict=True):
            row[...] = absent
            for info, whose in ((told, ~are_final), (final, are_final)):
                if name in info:
                    mask = whose & info.get(f"_{name}", True)
                    row[mask] = self._fit(name, info[name], row)[mask]

    def _check(self, told: Mapping[str, Any]) -> None:
        """Refuse a first step without an entry that was named without a value."""
        if missing := [name for name in self._expected if name not in told]:
            entries = ", ".join(repr(n) for n in told if not n.startswith("_")) or "nothing"
            raise ValueError(
                f"info_keys: the info of the first step of {self._owner} has no {missing[0]!r}, it "
                f"has {entries}; if only some steps have it, give a value for the others, as in "
                f"info_keys={{{missing[0]!r}: False}}"
            )
        self._expected.clear()

    def _fit(self, name: str, value: Any, like: Array) -> Array:
        """The entry as an array, if it is what batches hold."""
        array = np.asarray(value)
        if array.shape != like.shape or not np.can_cast(array.dtype, like.dtype, "same_kind"):
            raise ValueError(
                f"info_keys: {self._owner} returned {name!r} as {array.dtype} {list(array.shape)}, "
                f"but batches have {like.dtype} {list(like.shape)}; give a value of its dtype and "
                f"shape, as in info_keys={{{name!r}: np.zeros(3)}}"
            )
        return array


def _typed(name: str, value: Any) -> Array:
    """The value where there is no entry; a Python float as float32."""
    array = np.asarray(value, np.float32 if isinstance(value, float) else None)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"info_keys: {name!r} is {value!r}, expected a number or an array of them")
    torch_dtype(array.dtype)
    return array
