"""TRL's weight transfer: each version goes through Lockstep's lag, tear and wire format.

Versions count from 0, the weights that training begins with. TRL counts from 1: its `model_version`
is one more.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from sync import Lag, Tear
from sync.model import block
from sync.model.block import Snapshot
from sync.schemes.simulated import SimulatedWeightSyncScheme


class Transfer:
    """Keeps the versions that the worker may still act with; a `WeightTransferProtocol`.

    newest: the version published last.
    delivered: the version that the worker acts with now: with a lag, an older one.
    recent: copies of what was published last, if the run is to be saved.
    """

    def __init__(self, lag: Lag | int | None, tear: Tear | None, wire: str, *, keep_all: bool):
        self.scheme = SimulatedWeightSyncScheme(
            "state_dict", sync=False, lag=lag, tear=tear, wire=wire
        )
        self.newest = self.delivered = -1
        self.begin: Callable[[], None] = lambda: None  # called before the first version
        self.record: Any = None  # what follows the versions
        self.model = ""  # a checksum of version 0
        self.recent: deque[dict[str, Tensor]] = deque(maxlen=0)
        self._names: list[str] = []  # of the parameters that TRL sends
        self._keep_all = keep_all
        self._blocks: dict[int, Snapshot] = {}
        self._lock = threading.RLock()
        self._load: Callable[[Snapshot], None] | None = None

    # -- called by TRL

    def init_weight_transfer(self) -> None:
        self.begin()

    def pause(self) -> None:
        """Nothing to pause: a version is taken between two tokens or two answers."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publish the next version: `delivered` and the versions that are kept follow from it."""
        weights = {name: tensor.detach() for name, tensor in iterator}
        with self._lock:
            if self.newest < 0:
                self.scheme.init_on_sender(weights=weights, devices=[None])
                self.scheme.connect()
                self._blocks, self._names = self.scheme.channel.kept, list(weights)
                self.newest, self.model = self.scheme.first_version, checksum(weights)
            else:
                self.scheme.send(weights)
                self.newest += 1
            if self.record is not None:
                self.record.published(self.newest, self._checksum(weights))
            if self.recent.maxlen:
                self.recent.append({name: one.cpu().clone() for name, one in weights.items()})
            for published, _ in self.scheme.channel.take_published():
                self.delivered = self.scheme.first_version + published.version
                if not self._keep_all:
                    self._blocks.clear()
                self._blocks[self.delivered] = published

    def resume(self) -> None:
        """Nothing was paused."""

    def destroy(self) -> None:
        """Let go of all versions."""
        with self._lock:
            self.scheme.shutdown()

    # -- for the worker

    def forget(self, below: int) -> None:
        """Versions below this one are not needed any more."""
        with self._lock:
            for version in [one for one in self._blocks if one < below]:
                del self._blocks[version]

    def load(self, model: nn.Module, version: int | None = None) -> tuple[int, str | None]:
        """Copy a version, by default the delivered one, into the worker's model.

        Returns it, with a checksum of what the model then has if there is a trace.
        """
        with self._lock:
            version = self.delivered if version is None else version
            if version not in self._blocks:
                raise ValueError(
                    f"the schedule names version {version}, and the newest is {self.newest}: "
                    "the recorded run published its versions at other updates than this one"
                )
            if self._load is None:
                self._targets = self._parameters_of(model)
                self._load = self.scheme.loader(self._targets)
            self._load(self._blocks[version])
            own = version - self.scheme.first_version
            self.scheme.channel.applied(0, own, self._blocks[version].published_ns)
            return version, self._checksum(self._targets)

    def _parameters_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters that TRL sends."""
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        if unknown := [name for name in self._names if name not in own]:
            raise ValueError(
                f"TRL sends {unknown[0]!r}, which the worker's {type(model).__name__} has not: "
                "give LockstepRollouts the model that the trainer trains"
            )
        return {name: own[name] for name in self._names}

    def _checksum(self, weights: dict[str, Tensor]) -> str | None:
        """For the trace, if there is one."""
        return checksum(weights) if self.record is not None and self.record.writes_trace else None


def checksum(weights: dict[str, Tensor]) -> str:
    """Of all tensors and their names."""
    sums = [(name, block.checksum(tensor)) for name, tensor in sorted(weights.items())]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
