"""Publishes versions of the weights to the workers, through one scheme for each model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from collectors.weights.model_ids import POLICY, find_model, sends_weights
from sync import (
    LocalWeightUpdaterBase,
    MultiProcessedRemoteWeightUpdate,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from sync.errors import WorkerError, combine
from sync.model.block import NEVER
from sync.model.strategy import Weights
from sync.weight_updaters import SchemeUpdater

MOST_TIMES = 1_000


class Publisher:
    """The sending side of all schemes.

    timeout: how long a worker may take, for schemes that have no timeout of their own.
    promised: by worker and model, the newest version that was published to it.
    """

    def __init__(
        self,
        policy: Any,
        schemes: Mapping[str, WeightSyncScheme] | None,
        *,
        devices: Sequence[torch.device | None],
        timeout: float,
        updater: Any = None,
        ctx: Any = None,
    ):
        self.policy = policy
        self.updater = updater
        self.base = 0  # versions of an earlier run that this one continues
        self._own_updates = 0
        # When each was published, less `base`; times are those of time.perf_counter_ns().
        self._published: deque[tuple[int, int]] = deque(maxlen=MOST_TIMES)
        if isinstance(updater, MultiProcessedRemoteWeightUpdate):
            updater.serve(devices)
        if schemes is None:
            scheme = getattr(updater, "scheme", None) or SharedMemWeightSyncScheme()
            schemes = {POLICY: scheme} if sends_weights(policy, schemes) else {}
        self.schemes = dict(schemes)
        self.promised: dict[int, dict[str, int]] = {w: {} for w in range(len(devices))}
        for model_id, scheme in self.schemes.items():
            if not scheme.initialized_on_sender:
                if scheme.timeout is None:
                    scheme.timeout = timeout
                model = find_model(policy, model_id)
                scheme.init_on_sender(
                    model_id=model_id, model=model, devices=list(devices), ctx=ctx
                )
            elif scheme.version != NEVER:
                raise ValueError(
                    f"the scheme of {model_id!r} serves another collector: create one for each"
                )
            elif scheme.num_workers != len(devices):
                raise ValueError(
                    f"the scheme of {model_id!r} was initialised for {scheme.num_workers} "
                    f"workers; this collector has {len(devices)}"
                )

    @property
    def version(self) -> int:
        """The version last published."""
        return self.base + self._own_updates + (self._main.version if self._main else 0)

    def newest_at(self, at_ns: int) -> int:
        """The newest version at a time of this machine, as far as the last `MOST_TIMES` tell."""
        published = list(self._published)  # other threads may publish meanwhile
        if not published:
            return self.version
        before = (v for published_ns, v in reversed(published) if published_ns <= at_ns)
        return self.base + next(before, published[0][1] - 1)

    @property
    def _main_id(self) -> str:
        return POLICY if POLICY in self.schemes else next(iter(self.schemes), POLICY)

    @property
    def _main(self) -> WeightSyncScheme | None:
        return self.schemes.get(self._main_id)

    @property
    def is_direct(self) -> bool:
        """Whether the rollout uses the trainer's own policy object."""
        return isinstance(self._main, NoWeightSyncScheme)

    def check(
        self, weights_dict: Mapping[str, Any] | None, model_id: str | None, weights: Any
    ) -> dict[str, Any]:
        """The weights to publish by model; None for a model's own."""
        if weights_dict is not None:
            if weights is not None or model_id is not None:
                raise ValueError("weights_dict= excludes the arguments weights and model_id")
            by_model = dict(weights_dict)
        elif model_id is not None:
            by_model = {model_id: weights}
        elif weights is not None:
            by_model = {self._main_id: weights}
        else:
            by_model = dict.fromkeys(self.schemes)
            if not by_model and self.policy is not None:
                raise ValueError(f"no weights are sent: {self._why_none()}")
        for name in by_model:
            if name not in self.schemes:
                names = ", ".join(map(repr, self.schemes)) or f"none: {self._why_none()}"
                raise ValueError(f"no weights are sent for model {name!r}; known are {names}")
        return by_model

    def _why_none(self) -> str:
        if isinstance(self.policy, nn.Module):
            return "weight_sync_schemes is empty"
        return (
            f"the policy is a {type(self.policy).__name__}, not an nn.Module; name a module in it, "
            "as weight_sync_schemes={'net': SharedMemWeightSyncScheme()}"
        )

    def publish(
        self,
        by_model: Mapping[str, Weights | None],
        worker_ids: Any,
        *,
        wait: bool | None = None,
    ) -> None:
        """Publish the next version of these models, then raise the errors of workers.

        wait: False does not wait for workers, even if the schemes have `sync=True`.
        """
        failures: dict[int, WorkerError] = {}
        for model_id, weights in by_model.items():
            scheme = self.schemes[model_id]
            before = scheme.addressed
            try:
                self._publish_one(model_id, weights, worker_ids, wait)
            except WorkerError as error:
                failures = {**error.failures, **failures}
            for worker, version in scheme.addressed.items():
                if version > before[worker]:  # not for those that get nothing new
                    self.promised[worker][model_id] = version
        self._published.append((time.perf_counter_ns(), self.version - self.base))
        if failures:
            raise combine(failures)

    def _publish_one(
        self, model_id: str, weights: Weights | None, worker_ids: Any, wait: bool | None
    ) -> None:
        scheme = self.schemes[model_id]
        if isinstance(scheme, NoWeightSyncScheme):
            if weights is not None:
                scheme.apply_weights(weights)
            scheme.send()  # refuses NaN, as schemes that move weights do
            self._own_updates += model_id == self._main_id
            return
        pulls = isinstance(self.updater, LocalWeightUpdaterBase)
        if pulls and weights is None:
            self.updater.update_weights()  # into what is then published
        if self.updater is not None and not pulls and model_id == POLICY:
            if not isinstance(self.updater, SchemeUpdater):
                self.updater.update_weights(weights, worker_ids)
                return
            worker_ids, weights = self.updater.select(weights, worker_ids)
        if wait is False:
            scheme.send_async(weights, worker_ids)
        else:
            scheme.send(weights, worker_ids)

    def stats(self) -> dict[str, Any]:
        return {model_id: scheme.stats for model_id, scheme in self.schemes.items()}

    def shutdown(self) -> None:
        for scheme in self.schemes.values():
            scheme.shutdown()
