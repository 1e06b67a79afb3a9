"""Exact lag: each worker acts with the weights of a given number of versions ago.

    lag 2          send(): version 5                        worker
    -----          -----------------                        ------
    the pipeline     of 3, 4 and 5, 3 is due   --->         take(): 3, stamped 3

Workers receive versions unchanged, with their own stamps. Of the versions that were published to a
worker, it gets the newest one that is old enough and that it does not have yet. The first version
is delivered at once, because a worker cannot act without weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import ClassVar, Literal

import numpy as np

from lockstep_check.ages import of_age
from sync.model.block import NEVER, Snapshot

# Purposes of random streams. No worker has such a number: a slow link draws from [seed, worker].
_BY_VERSION, _BY_WORKER = 1_000_001, 1_000_002


@dataclass(frozen=True)
class Lag:
    """How many versions old the weights of workers are: a number, or a distribution.

    | kind | options | the lag is |
    |---|---|---|
    | `constant` | `k` | `k` |
    | `uniform` | `low`, `high` | one of `low` to `high`, each as likely |
    | `geometric` | `mean`, `most` | k with a probability that falls geometrically; at most `most` |
    | `cycle` | `values` | the next of `values`, over and over |
    | `two_point` | `low`, `high`, `share` | `high` with probability `share`, else `low` |

    per: "version" draws a lag for each version that is published, "worker" one for each worker.
    seed: of the draws. They depend on it and on the version or worker, and on nothing else.

    A worker never goes back to older weights. So with draws per version, its lag grows by at most
    one from version to version, and it reaches a larger draw step by step or not at all.
    """

    kind: Literal["constant", "uniform", "geometric", "cycle", "two_point"] = "constant"
    k: int = 0
    low: int = 0
    high: int = 0
    mean: float = 0.0
    most: int | None = None  # 8 times the mean if it is not given
    values: tuple[int, ...] = ()
    share: float = 0.5
    per: Literal["version", "worker"] = "version"
    seed: int = 0

    OPTIONS: ClassVar[dict[str, tuple[str, ...]]] = {
        "constant": ("k",),
        "uniform": ("low", "high"),
        "geometric": ("mean", "most"),
        "cycle": ("values",),
        "two_point": ("low", "high", "share"),
    }

    def __post_init__(self) -> None:
        if isinstance(self.values, Sequence):
            object.__setattr__(self, "values", tuple(self.values))
        if self.kind not in self.OPTIONS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(self.OPTIONS)}")
        if self.per not in ("version", "worker"):
            raise ValueError(f"per={self.per!r}: expected version or worker")
        if not isinstance(self.values, tuple):
            raise ValueError(f"values={self.values!r}: expected a list of lags")
        taken = self.OPTIONS[self.kind]
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name in ("kind", "per", "seed") or given == field.default:
                continue
            if field.name not in taken:
                raise ValueError(
                    f"{field.name}={given!r}: kind={self.kind} has no such option; "
                    f"it has {', '.join(taken)}"
                )
        counts = {"k": self.k, "low": self.low, "high": self.high, "most": self.most or 0}
        counts |= {f"values[{i}]": value for i, value in enumerate(self.values)}
        for name, count in counts.items():
            if type(count) is not int or count < 0:
                raise ValueError(f"{name}={count!r}: expected a number of versions, 0 or more")
        if self.kind in ("uniform", "two_point") and self.high < self.low:
            raise ValueError(f"high={self.high}: expected at least low={self.low}")
        if self.kind == "cycle" and not self.values:
            raise ValueError("values=[]: expected at least one lag")
        if not isinstance(self.mean, Real) or not 0 <= self.mean < math.inf:
            raise ValueError(f"mean={self.mean}: expected 0 or more versions")
        if not isinstance(self.share, Real) or not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share}: expected a probability, 0 to 1")

    @classmethod
    def of(cls, given: Lag | int | None) -> Lag | None:
        """A lag, given as itself or as a number; None if it is always zero."""
        if isinstance(given, int) and not isinstance(given, bool):
            given = Lag(k=given)
        if not isinstance(given, Lag | None):
            raise ValueError(f"lag={given!r}: expected a number of versions, or a Lag")
        return None if given is None or given.largest == 0 else given

    @property
    def smallest(self) -> int:
        """The smallest possible lag."""
        of_kind = {"constant": self.k, "geometric": 0, "cycle": min(self.values, default=0)}
        return of_kind.get(self.kind, self.low if self.share < 1 else self.high)

    @property
    def largest(self) -> int:
        """The largest possible lag, which is the number of versions to keep."""
        if self.kind == "geometric":
            return math.ceil(8 * self.mean) if self.most is None else self.most
        of_kind = {"constant": self.k, "cycle": max(self.values, default=0)}
        return of_kind.get(self.kind, self.high)

    def draw(self, version: int, worker: int) -> int:
        """The lag of a worker when `version`, counted over the whole run, is published."""
        number = version if self.per == "version" else worker
        if self.kind == "constant":
            return self.k
        if self.kind == "cycle":
            return self.values[number % len(self.values)]
        purpose = _BY_VERSION if self.per == "version" else _BY_WORKER
        random = np.random.default_rng([self.seed, purpose, number])
        if self.kind == "uniform":
            return int(random.integers(self.low, self.high + 1))
        if self.kind == "two_point":
            return self.high if random.random() < self.share else self.low
        return min(int(random.geometric(1 / (1 + self.mean))) - 1, self.largest)


def due(past: Sequence[Snapshot], delivered: int, lag: int) -> Snapshot | None:
    """Of what was published to a worker, the version to deliver with the last of it.

    delivered: the version that the worker was delivered last. None if it keeps that.
    """
    if delivered == NEVER:
        return past[0]
    newest_due = of_age(lag, past[-1].version)
    old_enough = [block for block in past if delivered < block.version <= newest_due]
    return old_enough[-1] if old_enough else None
