"""No synchronisation: workers need no weights, or use the trainer's own model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sync.channel_interface import APPLIED, JOINED, Answer, ReceiverChannel, SenderChannel
from sync.model.block import Layout, Snapshot, private_snapshot
from sync.model.strategy import Weights, refuse_non_finite
from sync.scheme import WeightSyncScheme
from sync.schemes import register
from sync.sender_form import SenderForm, resolve_model
from sync.worker_record import SendStats


class NoSender(SenderChannel):
    """Every worker has version 0, without an answer of its own."""

    mechanism = "no weights travel"

    def __init__(self, layout: Layout, num_workers: int):
        super().__init__(layout, num_workers)
        self._answers: list[Answer] = []

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        for worker in workers:
            self._answers += [Answer(worker, JOINED), Answer(worker, APPLIED, block.version)]

    def poll(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def fds(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class NoReceiver(ReceiverChannel):
    """Has version 0, and never another one."""

    _is_taken = False

    def open(self) -> None:
        self._is_taken = False

    def take(self) -> Snapshot | None:
        if self._is_taken:
            return None
        self._is_taken = True
        block = private_snapshot(self.layout)
        block.stamp(0, b"")
        return block

    def answer(self, answer: Answer) -> None:
        pass

    def has_news(self) -> bool:
        return not self._is_taken

    def fds(self) -> list[int]:
        return []

    def sender_gone(self) -> str:
        return ""

    def close(self) -> None:
        pass


@register("none", "direct")
class NoWeightSyncScheme(WeightSyncScheme):
    """Workers keep the weights they started with: `send` moves nothing, the version stays 0.

    Its sender and receivers have an empty set of weights instead of the model's.
    """

    sender_channel = NoSender
    receiver_channel = NoReceiver
    moves_weights = False
    _of_one_process = (*WeightSyncScheme._of_one_process, "_model")
    _model: Any = None

    def init_on_sender(
        self, *, model_id: str | None = None, ctx: Any = None, **source: Any
    ) -> None:
        """Takes the same arguments as every scheme, and checks them."""
        form = SenderForm.of(model_id=model_id, ctx=ctx, **source)
        super().init_on_sender(weights={}, devices=form.devices)
        self._model, self.model_id = form.source, model_id
        self._remember(source.get("context"))

    def init_on_receiver(self, *, context: Any = None, model: Any = None, **worker: Any) -> None:
        super().init_on_receiver(context=context, model={}, **worker)
        if model is None and context is not None and self.model_id:
            model = resolve_model(context, self.model_id)
        self._model = model

    def _publish(
        self, call: str, weights: Any, worker_ids: Any, *, wait: bool = False
    ) -> list[int]:
        """Publish nothing; what no scheme could send is refused, such as NaN."""
        self._need_sender(call).addressees(weights, worker_ids)
        if self._model is not None:
            refuse_non_finite(self.strategy.flatten(self._model), self.check_finite)
        return []  # the workers to wait for

    def wait_async(
        self, timeout: float | None = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Returns at once: nothing is on its way."""
        self._need_sender("wait_async").chosen(worker_ids)

    @property
    def model(self) -> Any:
        return self._model

    @property
    def weights(self) -> Any:
        return None if self._model is None else self.strategy.extract_weights(self._model)

    def apply_weights(self, weights: Weights, inplace: bool = True) -> None:
        self.strategy.apply_weights(self._model, weights, inplace)

    @property
    def send_stats(self) -> SendStats:
        return SendStats()

    @property
    def stats(self) -> dict[str, Any]:
        nothing = SendStats()
        summary = {"version": self.version, **nothing.summary(), "wire": nothing.wire_summary()}
        return {**summary, "moved": {}, "workers": {}}
