"""Verification: a worker compares the weights that it uses with those that were published.

    trainer                                          worker
    -------                                          ------
    pack a version, add checksums of its tensors
    publish                                  --->    are they those of the block that arrived?
                                                     apply it
                                                     are they those of the model?
                                                     before a policy call: of its parameters, still?
                                                     before the next version is applied: once more

"every" checks each policy call, "sampled" one call in a hundred; both check each version. A
difference raises a `WeightsDiffer` that names the worker, the version and the tensors. Its cause
depends on the step that fails:

- on arrival: a transport damaged the block, or the sender overwrote it too early. The worker
  keeps its version.
- after applying: the block was overwritten while it was read, or the model does not store what it
  is given (because two of its tensors share memory, for example). The worker then refuses to act.
- before a call: other code writes to the worker's parameters (aliasing), or the policy does.

Checksums are CRC-32 of the values that a worker must have. With a lossy wire format these are the
decoded values, which the sender computes as well. Buffers are only compared when a version is
applied, because a forward pass may change them by design (running statistics, counters). Extra
state and the version itself are compared on arrival.
"""

from __future__ import annotations

from sync.errors import WeightsDiffer
from sync.model.binding import Binding
from sync.model.block import NEVER, Snapshot

VERIFY = ("off", "sampled", "every")
SAMPLED = 100  # "sampled" checks one call in this many


def check_verify(verify: str) -> str:
    """The mode, or a `ValueError` that lists them."""
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(VERIFY)}")
    return verify


class Verifier:
    """The checks of one worker.

    verified_calls: how many uses of the model were checked since the last `take_count`.
    """

    def __init__(self, verify: str, worker: int):
        self.verified_calls = 0
        self._interval = 1 if verify == "every" else SAMPLED
        self._worker = worker
        self._calls = 0
        self._version = NEVER
        self._expected: list[int] = []
        self._failure: WeightsDiffer | None = None

    def take_count(self) -> int:
        """Return `verified_calls` and reset it."""
        count, self.verified_calls = self.verified_calls, 0
        return count

    def check_arrived(self, block: Snapshot) -> None:
        """Raise unless the block matches its checksums."""
        expected, found = block.checksums, block.current_checksums()
        names = [*(leaf.name for leaf in block.layout.leaves), "version or extra state"]
        if len(expected) != len(found):
            differing = ["number of checksums"]
        else:
            pairs = zip(names, expected, found, strict=True)
            differing = [name for name, one, other in pairs if one != other]
        if differing:
            raise WeightsDiffer(self._worker, block.version, differing, "arrived damaged")

    def check_applied(self, binding: Binding, block: Snapshot) -> None:
        """Raise unless the model matches the block's checksums; remember them."""
        self._version, self._expected = block.version, block.checksums
        self._check(binding, "are not in the model as they arrived", buffers=True)

    def check_call(self, binding: Binding) -> None:
        """Before a use of the model: raise if a check is due and its parameters have changed."""
        if self._failure is not None:
            raise self._failure
        self._calls += 1
        if self._calls % self._interval == 0:
            self.check_parameters(binding)
            self.verified_calls += 1

    def check_parameters(self, binding: Binding) -> None:
        """Raise if the model's parameters are no longer those of the version in use."""
        how = (
            "changed in the worker after the version was applied; its policy or other code "
            "writes to its parameters"
        )
        self._check(binding, how, buffers=False)

    def _check(self, binding: Binding, how: str, *, buffers: bool) -> None:
        if self._failure is not None:
            raise self._failure
        if self._version == NEVER:
            return
        if differing := binding.differing(self._expected, buffers=buffers):
            self._failure = WeightsDiffer(self._worker, self._version, differing, how)
            raise self._failure
