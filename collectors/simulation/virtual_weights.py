"""The versions that virtual workers may still need, and the policy that acts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from collectors.rollout.rollout import RANDOM_VERSION, Rollout
from collectors.schedule.recording import Delivery, PlannedBatch
from collectors.weights.model_ids import POLICY, copied, parameters_of
from collectors.weights.publisher import Publisher
from collectors.weights.rollout_weights import RolloutWeights
from sync import SimulatedWeightSyncScheme, Snapshot

Load = Callable[[Snapshot], None]  # a version into a policy


class Versions:
    """Blocks by version, and the parameters of all workers' policies, which hold one of them.

    policy: a module with these parameters. It does not act: each worker has a copy of it that
        shares nothing else.
    """

    def __init__(self, publisher: Publisher, policy: Any):
        self._publisher = publisher
        (scheme,) = publisher.schemes.values()
        if not isinstance(scheme, SimulatedWeightSyncScheme):
            raise ValueError(
                f"weight_sync_schemes: {POLICY!r} has a {type(scheme).__name__}; the workers of a "
                "SimulatedCollector are virtual, and take a SimulatedWeightSyncScheme"
            )
        self._scheme = scheme
        scheme.connect()
        self._policy = policy
        self._load = scheme.loader(policy)
        self.blocks = scheme.channel.kept
        self._loaded = -1

    def take_published(self) -> list[Delivery]:
        """What the scheme has sent since the last call."""
        deliveries = []
        for block, workers in self._scheme.channel.take_published():
            version = self._publisher.base + block.version
            self.blocks[version] = block
            deliveries.append(Delivery(version, block.nbytes, workers))
        return deliveries

    def copy(self) -> tuple[Any, Load]:
        """One worker's policy, and how to load a version into it."""
        policy = copied(self._policy, shared=parameters_of(self._policy))
        return policy, self._scheme.loader(policy)

    def use(self, version: int, load: Load | None = None) -> None:
        """Have the parameters hold this version; `load` takes it for the first time."""
        if version != self._loaded or load is not None:
            if version not in self.blocks:
                raise ValueError(
                    f"the schedule has a worker act with version {version}, which was not "
                    f"published: the newest is {max(self.blocks)}. A replay needs a version for "
                    "every one that the recorded run published"
                )
            (load or self._load)(self.blocks[version])
            self._loaded = version

    def applied(self, worker: int, version: int) -> None:
        """A worker took this version into use."""
        number = version - self._publisher.base  # negative for one of a run that this one resumes
        if number >= 0:
            self._scheme.channel.applied(worker, number, self.blocks[version].published_ns)

    def forget(self, below: int, in_use: Iterable[int]) -> None:
        """Release the versions below this one, except those that are in use."""
        needed = {*in_use, max(self.blocks)}
        for version in [one for one in self.blocks if one < below and one not in needed]:
            del self.blocks[version]

    def count_from(self, first: int) -> None:
        """Count the versions published so far from `first`: they go on another run's."""
        blocks = {first + version: block for version, block in self.blocks.items()}
        self.blocks.clear()
        self.blocks.update(blocks)
        self._loaded = -1

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(version): block.buffer.clone() for version, block in self.blocks.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        layout = next(iter(self.blocks.values())).layout
        self._scheme.channel.take_published()
        blocks = {int(name): Snapshot(layout, one.clone()) for name, one in state.items()}
        self.blocks.clear()
        self.blocks.update(blocks)
        self._loaded = -1


class PlannedWeights(RolloutWeights):
    """Takes the versions that a plan says, at the steps that it says."""

    rollout: Rollout

    def __init__(self, versions: Versions, load: Load, worker: int):
        self._versions = versions
        self._load = load  # into the worker's own policy
        self._worker = worker
        self._left: list[tuple[int, int]] = []  # of the plan, the last pair first
        self._newest = -1
        self.version = -1
        self.loaded = -1  # of the worker's own policy

    def begin(self, plan: tuple[tuple[int, int], ...]) -> None:
        """A batch begins. Random actions, which have no version, change nothing here."""
        self._left = [pair for pair in reversed(plan) if pair[1] != RANDOM_VERSION]
        if self.version < 0:
            self._newest = self._left[-1][1] if self._left else max(self._versions.blocks)
            self._use_newest()
        self._newest = self.version
        self._use()

    def has_news(self) -> bool:
        while self._left and self._left[-1][0] <= self.rollout.t:
            self._newest = self._left.pop()[1]
        return self._newest != self.version

    def take(self) -> None:
        if self.has_news():
            self._use_newest()

    def _use_newest(self) -> None:
        self.version = self._newest
        self._use()
        self._versions.applied(self._worker, self.version)

    def _use(self) -> None:
        """Act with this version. Only the parameters are shared with other workers."""
        is_loaded, self.loaded = self.loaded == self.version, self.version
        self._versions.use(self.version, None if is_loaded else self._load)

    def restore(self, base: int, version: int) -> None:
        self.version, self.loaded = version, -1


def random_steps(plan: PlannedBatch, num_steps: int) -> int | None:
    """How many steps the plan begins with random actions; None if it does not say."""
    if plan.versions[0][1] != RANDOM_VERSION:
        return None
    return plan.versions[1][0] if len(plan.versions) > 1 else num_steps
