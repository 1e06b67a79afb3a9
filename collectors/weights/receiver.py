"""Where a rollout's weights come from: from a scheme, or from nowhere."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from collectors.weights.models import POLICY
from sync import WeightSyncScheme
from sync.local.waiting import wait_for


class WeightReceiver(ABC):
    """Where a rollout's weights come from. `version` is that of the weights in use."""

    version: int = 0

    @abstractmethod
    def has_news(self) -> bool:
        """Whether there is a newer version to take; cheap enough to ask before every step."""

    @abstractmethod
    def take(self) -> None:
        """Take what is new into use."""

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The policy's `call`, so that a scheme which checks such calls sees them."""
        return call

    def wait(self, timeout: float, fds: Collection[int]) -> None:
        """Return when there may be news to take, one of `fds` is ready, or `timeout` is over."""
        wait_for(fds, timeout)

    def close(self) -> None:
        """Say goodbye to the sender."""


class FixedWeights(WeightReceiver):
    """Nothing comes: the policy has no weights, or they are the trainer's own."""

    def has_news(self) -> bool:
        return False

    def take(self) -> None:
        return


class SchemeReceiver(WeightReceiver):
    """Takes versions from schemes, one for each model; the policy's says which version it is."""

    def __init__(self, schemes: Mapping[str, WeightSyncScheme], base: int = 0):
        self.schemes = dict(schemes)
        self.base = base
        self._main = self.schemes.get(POLICY) or next(iter(self.schemes.values()))
        self._all = list(self.schemes.values())
        self._refused: set[str] = set()
        self.has_news = self._main.has_news if len(self._all) == 1 else self._any_news  # type: ignore[method-assign]
        self.version = base + self._main.version

    def has_news(self) -> bool:
        raise AssertionError("replaced when made")

    def _any_news(self) -> bool:
        return any(scheme.has_news() for scheme in self._all)

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
            self._refused.add(model_id)  # this worker keeps what it has

    def take_at_least(self, versions: Mapping[str, int], timeout: float) -> None:
        """Wait until these versions, by model, are in use: they are on their way."""
        for model_id, version in versions.items():
            scheme = self.schemes[model_id]
            while scheme.version < version and model_id not in self._refused:
                before = scheme.version
                self._receive(model_id, timeout)
                if scheme.version == before and model_id not in self._refused:
                    raise TimeoutError(
                        f"version {version} of {model_id!r} did not come within {timeout:g} s; "
                        f"this worker has version {before}"
                    )
        self.version = self.base + self._main.version

    def rebase(self, base: int) -> None:
        """Count versions from `base` on: those of an earlier run came before."""
        self.base = base
        self.version = base + self._main.version

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        for scheme in self._all:
            call = scheme.watched(call)
        return call

    def wait(self, timeout: float, fds: Collection[int]) -> None:
        if len(self._all) == 1:
            self._main.wait_for_news(timeout, fds)
            return
        with contextlib.ExitStack() as stack:
            for scheme in self._all:
                stack.enter_context(scheme.sleeping())
            if not self._any_news():
                wait_for([*fds, *(fd for s in self._all for fd in s.news_fds())], timeout)

    def close(self) -> None:
        for scheme in self._all:
            scheme.shutdown()
