"""No synchronisation: workers need no weights, or use the trainer's own model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sync.local.waiting import wait_for
from sync.model.block import NEVER
from sync.model.strategy import Weights, refuse_non_finite
from sync.scheme import WeightSyncScheme
from sync.schemes import register
from sync.sender import chosen_workers, is_by_worker
from sync.sender_form import SenderForm, resolve_model
from sync.worker_record import SendStats


@register("none", "direct")
class NoWeightSyncScheme(WeightSyncScheme):
    """Workers keep the weights they started with: `send` moves nothing, the version stays 0."""

    moves_weights = False

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._side: str | None = None
        self._worker_idx: int | None = None
        self._model: Any = None

    def init_on_sender(self, *, model_id: str | None = None, ctx: Any = None, **given: Any) -> None:
        """Takes the same arguments as every scheme, and checks them."""
        form = SenderForm.of(model_id=model_id, ctx=ctx, **given)
        self._side, self._model, self.model_id = "sender", form.source, model_id
        self._last_version = NEVER
        self._remember(given.get("context"))
        self._devices = form.devices

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        if model is None and context is not None and (model_id or self.model_id):
            model = resolve_model(context, model_id or self.model_id or "")
        if worker_idx is None:
            worker_idx = getattr(context, "worker_idx", None)
        self._side, self._model, self._worker_idx = "receiver", model, worker_idx
        self._last_version = NEVER
        self._remember(context)

    def connect(self, **how: Any) -> None:
        """Waits for nothing."""
        if self._side is None:
            raise RuntimeError("connect() needs init_on_sender() or init_on_receiver() first")
        self._last_version = 0

    def send(
        self,
        weights: Weights | Mapping[int, Weights] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Moves nothing; what no scheme could send is refused, such as NaN."""
        self._publish("send", weights, worker_ids)

    def wait_async(
        self, timeout: float | None = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Waits for nothing, because nothing is in flight."""
        self._check_side("wait_async", "sender")

    def _publish(
        self, call: str, weights: Any, worker_ids: Any, *, wait: bool = False
    ) -> list[int]:
        self._check_side(call, "sender")
        workers = chosen_workers(worker_ids, self.num_workers)
        if is_by_worker(weights):
            addressed = chosen_workers(weights, self.num_workers)
            if worker_ids is not None and workers != addressed:
                raise ValueError(
                    f"worker_ids={worker_ids} and weights for workers {addressed} disagree"
                )
        if self._model is not None:
            refuse_non_finite(self.strategy.flatten(self._model), self.check_finite)
        return workers

    def _check_side(self, call: str, side: str) -> None:
        if self._side != side:
            own = f"a {self._side}" if self._side else "not initialised"
            raise RuntimeError(f"{call} is for a {side}, but this scheme is {own}")

    def receive(self, timeout: float | None = None) -> None:
        """Returns None: no version ever arrives."""
        self._check_side("receive", "receiver")
        return None

    def has_news(self) -> bool:
        """False: no version ever arrives."""
        return False

    def wait_for_news(self, timeout: float, fds: Collection[int] = ()) -> bool:
        """Sleep until one of `fds` is readable, or the time is over."""
        deadline = time.monotonic() + timeout
        while not wait_for(fds, deadline - time.monotonic()) and time.monotonic() < deadline:
            continue  # it looks for at most so long at a time
        return False

    def news_fds(self) -> list[int]:
        """Empty: no version ever arrives."""
        return []

    def sleeping(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        yield self.version

    @property
    def model(self) -> Any:
        return self._model

    @property
    def weights(self) -> Any:
        return None if self._model is None else self.strategy.extract_weights(self._model)

    @property
    def worker_idx(self) -> int | None:
        return self._worker_idx

    @property
    def addressed(self) -> dict[int, int]:
        return self.acknowledged

    @property
    def acknowledged(self) -> dict[int, int]:
        return dict.fromkeys(range(self.num_workers), self.version)

    @property
    def send_stats(self) -> SendStats:
        return SendStats()

    @property
    def stats(self) -> dict[str, Any]:
        nothing = SendStats()
        summary = {"version": self.version, **nothing.summary(), "wire": nothing.wire_summary()}
        return {**summary, "moved": {}, "workers": {}}

    @property
    def mechanism(self) -> str:
        return "no weights travel"

    @property
    def verified_calls(self) -> int:
        return 0

    @property
    def links(self) -> dict[int, Any]:
        return {}

    def describe_worker(self, worker_idx: int, label: str) -> None:
        """Checks the number; no error is raised about a worker."""
        self._check_side("describe_worker", "sender")
        self.check_worker(worker_idx)

    @property
    def initialized_on_sender(self) -> bool:
        return self._side == "sender"

    @property
    def initialized_on_receiver(self) -> bool:
        return self._side == "receiver"

    @property
    def synchronized_on_sender(self) -> bool:
        return self._side == "sender" and self.version != NEVER

    @property
    def synchronized_on_receiver(self) -> bool:
        return self._side == "receiver" and self.version != NEVER

    def shutdown(self) -> None:
        """Release the model; a second call does nothing."""
        self._side, self._model, self._devices = None, None, ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_side": None, "_model": None}
