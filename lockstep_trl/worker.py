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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from collectors.schedule.recording import RecordedSchedule, ScheduleFile
from lockstep_trl.sampler import Answers, Sampler, Writing, advantages
from lockstep_trl.transfer import Transfer

_POLL_S = 0.2
_STOP_S = 60.0


@dataclass
class Answer:
    """One sample, as records speak of it. versions: pairs (token, version)."""

    number: int
    group: int
    versions: list[tuple[int, int]]
    log_probs: list[float]
    reward: float
    staleness: int = 0  # TRL's own figure, of when the trainer took it

    @property
    def length(self) -> int:
        return len(self.log_probs)

    def spans(self) -> list[tuple[int, int, int]]:
        """Triples (version, first token, first token of another version)."""
        ends = [step for step, _ in self.versions[1:]] + [self.length]
        pairs = zip(self.versions, ends, strict=True)
        return [(version, start, end) for (start, version), end in pairs]


class Stamped(dict[str, float]):
    """The metrics of a sample, which TRL hands through as they are, with the answer."""

    answer: Answer


@dataclass
class Batch:
    """What the model wrote at once.

    number: of the batch in the run.
    loaded: the versions that the model took meanwhile, with checksums if there is a trace.
    """

    number: int
    versions: list[tuple[int, int]]
    loaded: list[tuple[int, str]]
    answers: Answers
    made_s: float
    newest: int


class Worker:
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
                pairs = [list(pair) for pair in batch.versions]
                made_s = round(batch.made_s, 6)
                self.schedule.note(0, 0, pairs, made_s=made_s, newest=batch.newest)
            self._pending.extend(self._samples(batch))
            for version, checksum in batch.loaded:
                self.record.trace("applied", version=version, checksum=checksum or None)
            for sample in self._pending:
                self.record.acted(sample.metrics.answer, batch.newest)
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
        pairs: list[tuple[int, int]] = []
        loaded: list[tuple[int, str]] = []

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
            if not pairs or pairs[-1][1] != self._loaded:
                pairs.append((step, self._loaded))

        began = time.monotonic()
        answers = self._sampler.batch(self.writing, self.next, self._size, take)
        if self._replay is not None:
            self._transfer.forget(self._replay.oldest_needed())
        self.next += 1
        made_s, newest = time.monotonic() - began, self._transfer.newest
        return Batch(self.next - 1, pairs, loaded, answers, made_s, newest)

    def _samples(self, batch: Batch) -> list[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        assert self.writing is not None
        samples, each = [], self.writing.answers
        prompts, tokens, log_probs, rewards = batch.answers
        for number in range(self._size):
            rows = slice(number * each, (number + 1) * each)
            worth = advantages(rewards[rows])
            group = batch.number * self._size + number
            for i in range(rows.start, rows.stop):
                versions = [pair for pair in batch.versions if pair[0] < len(tokens[i])]
                spread = (
                    float(np.nanstd(rewards[rows])) if not np.isnan(rewards[rows]).all() else 0.0
                )
                metrics = Stamped(reward=float(rewards[i]), reward_std=spread)
                metrics.answer = Answer(
                    batch.number * self._size * each + i,
                    group,
                    versions,
                    log_probs[i],
                    float(rewards[i]),
                )
                known = len(prompts[i])
                samples.append(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.array(prompts[i] + tokens[i], np.int64),
                        completion_mask=np.array([0] * known + [1] * len(tokens[i]), np.int64),
                        old_log_probs=np.array([0.0] * known + log_probs[i], np.float32),
                        advantage=float(worth[i - rows.start]),
                        model_version=versions[0][1] + self.offset,
                        group_id=group,
                        metrics=metrics,
                        enqueued_at=time.time(),
                    )
                )
        return samples

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
