"""What the events say so far: the published versions, and the samples in flight.

    act ... act   enqueue   take   train (epoch 0) ... train (epoch n)   closed
                                                    or drop              closed

A sample is closed when an update after its own begins, or when all of it was dropped. Its number
stays known, as part of a range; what it consisted of is forgotten, so that memory holds what is in
flight and no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep_check.events import Event

KEPT_VERSIONS = 100_000
KEPT_CALLS = 1_000


class Published(NamedTuple):
    """What a publish says of its version."""

    update: int | None
    step: int | None
    checksum: str | None


@dataclass(eq=False)
class TracedSample:
    """What one worker made, and what became of it."""

    worker: int
    number: int
    made: int = 0  # frames or tokens
    oldest: int | None = None  # version that acted
    newest: int | None = None
    logprob: float | None = 0.0  # of all spans; None if one of them has none
    spans: dict[int, int] = field(default_factory=dict)  # length by version, less what is dropped
    dropped: int = 0
    update: int | None = None  # that trains on it
    trained: dict[int, int] = field(default_factory=dict)  # by epoch
    denominators: dict[int, float | None] = field(default_factory=dict)  # by epoch

    def __str__(self) -> str:
        return f"sample {self.number} of worker {self.worker}"

    def drop(self, version: int, length: int) -> None:
        """Give up so much of what a version made; its age no longer counts once all of it is."""
        self.spans[version] = self.spans.get(version, 0) - length
        if self.spans[version] <= 0:
            del self.spans[version]
        if self.spans:
            self.oldest, self.newest = min(self.spans), max(self.spans)

    @property
    def left(self) -> int:
        """What was neither trained nor dropped."""
        return 0 if self.update is not None else max(0, self.made - self.dropped)


class Numbers:
    """A set of numbers, kept as ranges."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._firsts, number) - 1
        return index >= 0 and number <= self._lasts[index]

    def add(self, number: int) -> None:
        """Add a number; ranges that touch become one."""
        index = bisect_right(self._firsts, number) - 1
        if index >= 0 and number <= self._lasts[index]:
            return
        joins_before = index >= 0 and self._lasts[index] == number - 1
        joins_after = index + 1 < len(self._firsts) and self._firsts[index + 1] == number + 1
        if joins_before and joins_after:
            self._lasts[index] = self._lasts.pop(index + 1)
            self._firsts.pop(index + 1)
        elif joins_before:
            self._lasts[index] = number
        elif joins_after:
            self._firsts[index + 1] = number
        else:
            self._firsts.insert(index + 1, number)
            self._lasts.insert(index + 1, number)


class Story:
    """Takes in one event after the other.

    After `take_in`, `sample` is the one that the event names, None if it is not in flight; `closed`
    are those that the event closed; `trouble` says what cannot be true of it.
    """

    def __init__(self) -> None:
        self.versions: dict[int, Published] = {}
        self.newest: int | None = None  # version
        self.update = 0  # that trains, or trained last
        self.unit = "frames"
        self.made = 0  # lengths, over the whole trace
        self.delivered = 0
        self.dropped = 0
        self.lost = 0  # in flight at a resume
        self.resumed = 0
        self.in_flight: dict[tuple[int, int], TracedSample] = {}
        self.most_in_flight = 0
        self.sample: TracedSample | None = None
        self.closed: list[TracedSample] = []
        self.trouble = ""
        self._training: deque[TracedSample] = deque()
        self._numbers: dict[int, Numbers] = {}

    def take_in(self, event: Event) -> None:
        """The next event."""
        self.sample, self.trouble = None, ""
        if self.closed:
            self.closed = []
        handler = _HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)

    def end(self) -> None:
        """The trace ends here."""
        self.sample, self.trouble, self.closed = None, "", []
        self._close_training()

    # -- events

    def _trace(self, event: Event) -> None:
        self.unit = event.get("unit", self.unit)

    def _publish(self, event: Event) -> None:
        version = event["version"]
        self.versions[version] = Published(
            event.get("update"), event.get("step"), event.get("checksum")
        )
        self.newest = version if self.newest is None else max(self.newest, version)
        if len(self.versions) > KEPT_VERSIONS:
            del self.versions[next(iter(self.versions))]

    def _act(self, event: Event) -> None:
        key = event["worker"], event["sample"]
        sample = self.in_flight.get(key)
        if sample is None:
            if self._was_closed(key):
                self.trouble = f"acts for {_named(key)}, which is finished"
                return
            sample = self.in_flight[key] = TracedSample(*key)
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        elif sample.update is not None:
            self.trouble = f"acts for {sample}, on which update {sample.update} trains"
        version, length = event["version"], event["length"]
        sample.made += length
        self.made += length
        sample.oldest = version if sample.oldest is None else min(sample.oldest, version)
        sample.newest = version if sample.newest is None else max(sample.newest, version)
        sample.spans[version] = sample.spans.get(version, 0) + length
        sample.logprob = _sum(sample.logprob, event.get("logprob"))
        self.sample = sample

    def _enqueue(self, event: Event) -> None:
        self.sample = self._find(event, "is enqueued")

    def _take(self, event: Event) -> None:
        self.sample = sample = self._find(event, "is taken")
        if sample is not None:
            self.delivered += _length(event, sample)

    def _train(self, event: Event) -> None:
        update = event["update"]
        if update != self.update:
            self._close_training()
            self.update = update
        self.sample = sample = self._find(event, f"is trained on in update {update}")
        if sample is None:
            return
        if sample.update is None:
            sample.update = update
            self._training.append(sample)
        epoch = event.get("epoch") or 0
        sample.trained[epoch] = sample.trained.get(epoch, 0) + _length(event, sample)
        before = sample.denominators.get(epoch, 0.0)
        sample.denominators[epoch] = _sum(before, event.get("logprob"))

    def _drop(self, event: Event) -> None:
        self.sample = sample = self._find(event, f"is dropped ({event['reason']})")
        if sample is None:
            return
        length = _length(event, sample)
        sample.dropped += length
        self.dropped += length
        if (version := event.get("version")) is not None:
            sample.drop(version, length)
        if sample.update is None and sample.dropped >= sample.made:
            self._close(sample)

    def _resume(self, event: Event) -> None:
        self._close_training()
        self.resumed += 1
        self.update = event["update"]
        self.lost = sum(sample.left for sample in self.in_flight.values())
        self.dropped += event.get("dropped") or 0
        for sample in list(self.in_flight.values()):
            self._close(sample)
        self.versions.clear()
        self.newest = None

    # -- samples

    def _find(self, event: Event, what: str) -> TracedSample | None:
        key = event["worker"], event["sample"]
        sample = self.in_flight.get(key)
        if sample is None:
            if self._was_closed(key):
                self.trouble = f"{_named(key)} {what}, and was finished before"
            else:
                self.trouble = f"{_named(key)} {what}, and was never made"
        return sample

    def _was_closed(self, key: tuple[int, int]) -> bool:
        numbers = self._numbers.get(key[0])
        return numbers is not None and key[1] in numbers

    def _close_training(self) -> None:
        while self._training:
            self._close(self._training.popleft())

    def _close(self, sample: TracedSample) -> None:
        self.closed.append(sample)
        del self.in_flight[sample.worker, sample.number]
        self._numbers.setdefault(sample.worker, Numbers()).add(sample.number)


def _length(event: Event, sample: TracedSample) -> int:
    length: int | None = event.get("length")
    return sample.made if length is None else length


def _sum(before: float | None, more: float | None) -> float | None:
    """None as soon as one of them is not known."""
    return None if before is None or more is None else before + more


def _named(key: tuple[int, int]) -> str:
    return f"sample {key[1]} of worker {key[0]}"


_HANDLERS = {
    "trace": Story._trace,
    "publish": Story._publish,
    "act": Story._act,
    "enqueue": Story._enqueue,
    "take": Story._take,
    "train": Story._train,
    "drop": Story._drop,
    "resume": Story._resume,
}
