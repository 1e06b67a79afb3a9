"""Receives the weights of a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from collectors.weights.model_ids import POLICY
from sync import WeightSyncScheme
from sync.local.waiting import wait_for


class RolloutWeights:
    """Source of a rollout's weights: for a policy without weights, or with the trainer's own.

    `version` is that of the weights in use.
    """

    version: int = 0

    def has_news(self) -> bool:
        """Whether there is a newer version to take. It is asked before every step."""
        return False

    def take(self) -> None:
        """Use the newest version from now on."""

    def take_at_least(self, versions: Mapping[str, int], timeout: float) -> None:
        """Wait until these versions, by model, are in use. They were published before."""

    def rebase(self, base: int) -> None:
        """Count versions from `base` on, the last version of an earlier run."""

    def restore(self, base: int, version: int) -> None:
        """Go on from a saved state, which had this version."""
        self.rebase(base)

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The policy's `call`, wrapped for schemes that check such calls."""
        return call

    def wait(self, timeout: float, fds: Collection[int]) -> None:
        """Return when there may be a newer version, one of `fds` is ready, or `timeout` is over."""
        wait_for(fds, timeout)

    def close(self) -> None:
        """End the connection to the sender."""


class SchemeWeights(RolloutWeights):
    """Takes versions from schemes, one for each model. `version` is that of the policy's scheme."""

    def __init__(self, schemes: Mapping[str, WeightSyncScheme], base: int = 0):
        self.schemes = dict(schemes)
        self.base = base
        self._main = self.schemes.get(POLICY) or next(iter(self.schemes.values()))
        self._refused: set[str] = set()
        self.version = base + self._main.version

    def has_news(self) -> bool:
        return any(scheme.has_news() for scheme in self.schemes.values())

    def take(self) -> None:
        for model_id in self.schemes:
            self._receive(model_id, 0)
        self.version = self.base + self._main.version

    def _receive(self, model_id: str, timeout: float) -> None:
        try:
            if self.schemes[model_id].receive(timeout) is not None:
                self._refused.discard(model_id)
        except Exception as error:
            if not self.schemes[model_id].is_reported(error):
                raise
            self._refused.add(model_id)  # this worker keeps its version

    def take_at_least(self, versions: Mapping[str, int], timeout: float) -> None:
        for model_id, version in versions.items():
            scheme = self.schemes[model_id]
            while scheme.version < version and model_id not in self._refused:
                before = scheme.version
                self._receive(model_id, timeout)
                if scheme.version == before and model_id not in self._refused:
                    raise TimeoutError(
                        f"version {version} of {model_id!r} did not arrive within {timeout:g} s; "
                        f"this worker has version {before}"
                    )
        self.version = self.base + self._main.version

    def rebase(self, base: int) -> None:
        self.base = base
        self.version = base + self._main.version

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        for scheme in self.schemes.values():
            call = scheme.watched(call)
        return call

    def wait(self, timeout: float, fds: Collection[int]) -> None:
        if len(self.schemes) == 1:
            self._main.wait_for_news(timeout, fds)
            return
        with contextlib.ExitStack() as stack:
            for scheme in self.schemes.values():
                stack.enter_context(scheme.sleeping())
            if not self.has_news():
                wait_for(
                    [*fds, *(fd for s in self.schemes.values() for fd in s.news_fds())], timeout
                )

    def close(self) -> None:
        for scheme in self.schemes.values():
            scheme.shutdown()
