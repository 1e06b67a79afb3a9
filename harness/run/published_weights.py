"""The versions that a resumed run publishes again."""

from __future__ import annotations

from collections import deque

from torch import Tensor, nn

from collectors import BaseCollector
from harness.saved_state import weights


class PublishedWeights:
    """Copies of the weights with which workers act now or will act, the oldest first.

    A resumed run sends them again.

    kept: how many; zero if workers act with what the learner has when it is saved.
    """

    def __init__(self, policy: nn.Module, kept: int):
        self._policy = policy
        self._versions: deque[dict[str, Tensor]] = deque(maxlen=kept)

    def add(self) -> None:
        """Note that the policy's weights were published."""
        if self._versions.maxlen:
            self._versions.append(weights(self._policy))

    def state(self) -> list[dict[str, Tensor]]:
        """The copies, for a checkpoint."""
        return list(self._versions)

    def go_back(self, state: list[dict[str, Tensor]]) -> int:
        """Give the policy the oldest version of `state`, for a collector that is made with it.

        Returns how many versions follow it, which `publish_again` publishes.
        """
        self._versions.extend(state)
        if self._versions:
            self._policy.load_state_dict(self._versions[0])
        return max(0, len(self._versions) - 1)

    def publish_again(self, collector: BaseCollector) -> None:
        """Publish the versions that follow the oldest, in their order."""
        for version in list(self._versions)[1:]:
            self._policy.load_state_dict(version)
            collector.update_policy_weights_()
