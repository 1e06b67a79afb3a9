"""TRL's rollout worker, which is also the queue that TRL's trainer reads.

    exact      the trainer asks for a sample, and it is made then, with the version of the lag
    replay     the same, with the versions that a recorded schedule names
    free       a thread makes samples as fast as it can, with the newest version, and is recorded

A batch of the schedule is what the model writes at once: the answers to some prompts.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from collectors.schedule.recording import RecordedSchedule, ScheduleFile
from lockstep_trl.sampler import SampledAnswer, Sampler, Writing, advantages
from lockstep_trl.transfer import Transfer

_POLL_S = 0.2
_STOP_S = 60.0


class Stamped(dict[str, float]):
    """The metrics of a sample, which TRL hands through as they are, with the answer."""

    def __init__(self, answer: SampledAnswer, **metrics: float):
        super().__init__(metrics)
        self.answer = answer


class Batch(NamedTuple):
    """What the model wrote at once, and the versions that it took meanwhile.

    versions: pairs (token, version).
    loaded: versions with checksums, if there is a trace.
    newest: the newest version at the end.
    """

    answers: list[SampledAnswer]
    versions: list[tuple[int, int]]
    loaded: list[tuple[int, str | None]]
    made_s: float
    newest: int


class AnswerWorker:
    """A `RolloutWorkerProtocol`; its methods `get`, `put_nowait` and `qsize` are the queue's.

    size: prompts in a batch of the schedule.
    apply_at: in a free run, whether newer weights are taken before each token, or each batch.
    """

    def __init__(
        self,
        transfer: Transfer,
        sampler: Sampler,
        *,
        size: int,
        free: bool,
        replay: RecordedSchedule | None,
        queue_batches: int,
        apply_at: Literal["answer", "token"],
    ):
        self.rollout_buffer: Any = self
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.next = 0  # the batch to be made next
        self.writing: Writing | None = None  # set before `start`
        self.schedule: ScheduleFile | None = None
        self.ready: Callable[[], None] | None = None  # called when version 0 is published
        self.record: Any = None  # what follows the answers
        self.offset = 1  # from our numbers of versions to TRL's
        self._transfer, self._sampler, self._size = transfer, sampler, size
        self._replay, self._apply_at = replay, apply_at
        self._loaded = -1
        self._pending: deque[Any] = deque()
        self._queue: queue.Queue[Batch] | None = queue.Queue(queue_batches) if free else None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: Exception | None = None

    # -- called by TRL

    def start(self) -> None:
        if self.ready is None:
            raise RuntimeError("call rollouts.attach(trainer) before trainer.train()")
        self.ready()
        if self._queue is not None:
            self._thread = threading.Thread(target=self._run, name="lockstep-rollouts", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """Nothing to do: the transfer counts versions."""

    def check_health(self, stale_after_s: float) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"the rollout thread failed: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def get(self, timeout: float | None = None) -> Any:
        """The next sample; `queue.Empty` after the timeout in a free run."""
        if not self._pending:
            batch = self._make() if self._queue is None else self._wait(timeout)
            if self.schedule is not None:
                what = {"made_s": round(batch.made_s, 6), "newest": batch.newest}
                self.schedule.note(0, 0, batch.versions, **what)
            self._pending.extend(self._samples(batch.answers))
            for version, checksum in batch.loaded:
                self.record.trace("applied", version=version, checksum=checksum)
            for answer in batch.answers:
                self.record.acted(answer, batch.newest)
        sample = self._pending.popleft()
        self.record.taken(sample)
        return sample

    def qsize(self) -> int:
        waiting = 0 if self._queue is None else self._queue.qsize()
        return len(self._pending) + waiting * self._size * (self.writing or Writing(1, 1)).answers

    def put_nowait(self, sample: Any) -> None:
        raise NotImplementedError("samples come from the worker itself")

    # -- making batches

    def _make(self) -> Batch:
        assert self.writing is not None
        plan = None if self._replay is None else self._replay.next_batch().versions
        versions: list[tuple[int, int]] = []
        loaded: list[tuple[int, str | None]] = []

        def take(step: int) -> None:
            if plan is not None:
                version = [version for start, version in plan if start <= step][-1]
            elif step and self._apply_at == "answer":
                return
            else:
                version = self._transfer.delivered
            if version != self._loaded:
                loaded.append(
                    self._transfer.load(self._sampler.model, None if plan is None else version)
                )
                self._loaded = loaded[-1][0]
            if not versions or versions[-1][1] != self._loaded:
                versions.append((step, self._loaded))

        began, prompts, first = time.monotonic(), self._sampler.prompts, self.next * self._size
        rows = [prompts[i % len(prompts)] for i in range(first, first + self._size)]
        answers = self._sampler.answer(rows, self.writing, self.next, take)
        for answer in answers:
            answer.versions = [pair for pair in versions if pair[0] < len(answer.tokens)]
        if self._replay is not None:
            self._transfer.forget(self._replay.oldest_needed())
        self.next += 1
        made_s = time.monotonic() - began
        return Batch(answers, versions, loaded, made_s, self._transfer.newest)

    def _samples(self, answers: list[SampledAnswer]) -> Iterator[Any]:
        """The answers as TRL takes them, group by group."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        for _, members in groupby(answers, attrgetter("group")):
            group = list(members)
            rewards = np.array([answer.reward for answer in group])
            spread = float(np.nanstd(rewards)) if not np.isnan(rewards).all() else 0.0
            for answer, advantage in zip(group, advantages(rewards), strict=True):
                known, written = len(answer.prompt), len(answer.tokens)
                yield RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(answer.prompt + answer.tokens, np.int64),
                    completion_mask=np.array([0] * known + [1] * written, np.int64),
                    old_log_probs=np.array([0.0] * known + answer.log_probs, np.float32),
                    advantage=float(advantage),
                    model_version=answer.versions[0][1] + self.offset,
                    group_id=answer.group,
                    metrics=Stamped(answer, reward=answer.reward, reward_std=spread),
                    enqueued_at=time.time(),
                )

    # -- a free run

    def _wait(self, timeout: float | None) -> Batch:
        assert self._queue is not None
        deadline = time.monotonic() + (timeout or 3600.0)
        while True:
            try:
                return self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                self.check_health(0.0)
                if time.monotonic() > deadline:
                    raise

    def _run(self) -> None:
        assert self._queue is not None
        try:
            while not self._stopping.is_set():
                batch = self._make()
                while not self._stopping.is_set():
                    try:
                        self._queue.put(batch, timeout=_POLL_S)
                        break
                    except queue.Full:
                        continue
        except Exception as error:  # noqa: BLE001 - raised where the trainer takes samples
            self._error = error
