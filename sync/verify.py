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
difference is a `WeightsDiffer` that names the worker, the version and the tensors. What a check
finds, by the step that fails:

- on arrival: a transport that damaged a block, or a sender that wrote to it too early. The worker
  keeps the version it has.
- after applying: a block that was written while it was read, or a model that does not take what it
  is given (two of its tensors share memory, say). From then on the worker refuses to act.
- before a call: somebody else writes the worker's parameters (aliasing), or the policy does.

Checksums are CRC-32, of what a worker is to hold: with a lossy wire format of the numbers as they
are decoded, which the sender computes, too. Buffers are compared when a version is applied and not
afterwards, since a forward pass may change them by design (running statistics, counters). Extra
state and the version itself are compared on arrival.
"""

from __future__ import annotations

from sync.errors import WeightsDiffer
from sync.model.binding import Binding
from sync.model.snapshot import NEVER, Snapshot

VERIFY = ("off", "sampled", "every")
SAMPLED = 100  # one call of so many


def check_verify(verify: str) -> str:
    """The mode, or a `ValueError` that lists them."""
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r}: expected one of {', '.join(VERIFY)}")
    return verify


class Verifier:
    """The checks of one worker.

    verified_calls: how many uses of the model were checked since `take_count` was called.
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
        """`verified_calls`, which begin anew."""
        count, self.verified_calls = self.verified_calls, 0
        return count

    def check_arrived(self, block: Snapshot) -> None:
        """Raise unless the block holds what its checksums say."""
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
        """Raise unless the model holds what the block's checksums say; remember them."""
        self._version, self._expected = block.version, block.checksums
        self._check(binding, "are not in the model as they arrived", buffers=True)

    def check_call(self, binding: Binding) -> None:
        """Before a use of the model: raise if it is to be checked, and its parameters changed."""
        if self._failure is not None:
            raise self._failure
        self._calls += 1
        if self._calls % self._interval == 0:
            self.check_parameters(binding)
            self.verified_calls += 1

    def check_parameters(self, binding: Binding) -> None:
        """Raise if the model's parameters are no longer those of the version in use."""
        how = (
            "changed in the worker after the version was applied; its policy or somebody else "
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
