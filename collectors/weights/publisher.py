"""The trainer's side of weight synchronisation: what publishes versions to the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from collectors.weights.models import POLICY, find_model, sends_weights
from sync import NoWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme
from sync.errors import WorkerError, combine
from sync.model.snapshot import NEVER
from sync.model.strategy import Weights, is_by_worker
from sync.updaters import LocalWeightUpdaterBase, MultiProcessedRemoteWeightUpdate


class Publisher:
    """The trainer's side: the schemes, their sources, what version each worker was promised."""

    def __init__(
        self,
        policy: Any,
        schemes: Mapping[str, WeightSyncScheme] | None,
        *,
        devices: Sequence[torch.device | None],
        default: type[WeightSyncScheme] = SharedMemWeightSyncScheme,
        updater: Any = None,
        ctx: Any = None,
    ):
        self.policy = policy
        self.updater = updater
        self.base = 0  # versions of an earlier run that this one continues
        self._own_updates = 0
        if isinstance(updater, MultiProcessedRemoteWeightUpdate):
            updater.serve(devices)
        if schemes is None:
            scheme = getattr(updater, "scheme", None)
            schemes = {POLICY: scheme or default()} if sends_weights(policy, schemes) else {}
        self.schemes = dict(schemes)
        self.promised: dict[int, dict[str, int]] = {w: {} for w in range(len(devices))}
        for model_id, scheme in self.schemes.items():
            if scheme.version != NEVER and scheme.initialized_on_sender:
                raise ValueError(
                    f"the scheme of {model_id!r} serves another collector: give each its own"
                )
            if scheme.initialized_on_sender:
                if scheme.num_workers != len(devices):
                    raise ValueError(
                        f"the scheme of {model_id!r} was initialised for {scheme.num_workers} "
                        f"workers; this collector has {len(devices)}"
                    )
                continue
            model = find_model(policy, model_id)
            scheme.init_on_sender(model_id=model_id, model=model, devices=list(devices), ctx=ctx)

    @property
    def version(self) -> int:
        """The version last published."""
        return self.base + self._own_updates + (self._main.version if self._main else 0)

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
                raise ValueError("weights_dict= names all weights: leave weights and model_id out")
            by_model = dict(weights_dict)
        elif model_id is not None:
            by_model = {model_id: weights}
        elif weights is not None:
            by_model = {
                POLICY
                if POLICY in self.schemes or not self.schemes
                else next(iter(self.schemes)): weights
            }
        else:
            by_model = dict.fromkeys(self.schemes)
            if not by_model and self.policy is not None:
                raise ValueError(self._why_nothing_is_sent())
        for name in by_model:
            if name not in self.schemes:
                known = ", ".join(map(repr, self.schemes)) or f"none: {self._why_none()}"
                raise ValueError(f"no weights are sent for model {name!r}; known are {known}")
        return by_model

    def _why_none(self) -> str:
        has_some = isinstance(self.policy, nn.Module)
        return "weight_sync_schemes={} says so" if has_some else "the policy has no weights"

    def _why_nothing_is_sent(self) -> str:
        if isinstance(self.policy, nn.Module):
            return f"no weights are sent: {self._why_none()}"
        return (
            f"no weights are sent: the policy is a {type(self.policy).__name__}, not an nn.Module. "
            "Make it one, or name the module in it that has some, its `net` say, as "
            "weight_sync_schemes={'net': SharedMemWeightSyncScheme()}"
        )

    def publish(
        self,
        by_model: Mapping[str, Weights | None],
        worker_ids: Any,
        *,
        wait: bool | None = None,
        everybody: list[int] | None = None,
    ) -> None:
        """Publish the next version of these models; `wait` overrides what the schemes say.

        everybody: who there is, if not all places are taken.

        All are published before it is raised what went wrong at workers.
        """
        failures: dict[int, WorkerError] = {}
        for model_id, weights in by_model.items():
            some = everybody if worker_ids is None and not is_by_worker(weights) else worker_ids
            try:
                self._publish_one(model_id, weights, some, wait)
            except WorkerError as error:
                failures = {**error.failures, **failures}
        if failures:
            raise combine(failures)

    def _publish_one(
        self, model_id: str, weights: Weights | None, worker_ids: Any, wait: bool | None
    ) -> None:
        scheme = self.schemes[model_id]
        if isinstance(scheme, NoWeightSyncScheme):
            self._own_updates += model_id == self._main_id
            if weights is not None:
                scheme.apply_weights(weights)
            return
        before = scheme.version
        try:
            pulls = isinstance(self.updater, LocalWeightUpdaterBase)
            if pulls and weights is None:
                self.updater.update_weights()  # into what is then published
            if self.updater is not None and not pulls and model_id == POLICY:
                self._push(scheme, weights, worker_ids, wait)
            elif wait is False:
                scheme.send_async(weights, worker_ids)
            else:
                scheme.send(weights, worker_ids)
        except WorkerError:
            self._note_promised(model_id, before)
            raise
        self._note_promised(model_id, before)

    def _note_promised(self, model_id: str, before: int) -> None:
        """Note to whom versions after `before` were published; an updater may leave workers out."""
        for worker, version in self.schemes[model_id].addressed.items():
            if version > before:
                self.promised[worker][model_id] = version

    def _push(self, scheme: Any, weights: Any, worker_ids: Any, wait: bool | None) -> None:
        """Have the updater send, without waiting if that is told."""
        sync = scheme.sync
        scheme.sync = sync and wait is not False
        try:
            self.updater.update_weights(weights, worker_ids)
        finally:
            scheme.sync = sync

    def is_in_use(self, workers: Iterable[int]) -> bool:
        """Whether these workers use all that was published for them."""
        return all(
            self.schemes[model_id].acknowledged[worker] >= version
            for worker in workers
            for model_id, version in self.promised[worker].items()
        )

    def stats(self) -> dict[str, Any]:
        return {model_id: scheme.stats for model_id, scheme in self.schemes.items()}

    def shutdown(self) -> None:
        for scheme in self.schemes.values():
            scheme.shutdown()
