"""A schedule, recorded and replayed: one line of JSON for what a learner takes from one worker.

    {"format": 1, "num_workers": 2, "num_steps": 128, "num_envs": 4, "group_size": 1, "seed": 7}
    {"worker": 0, "generation": 0, "versions": [[0, 3], [17, 4]], "made_s": 0.0213, "newest": 5,
     "at_s": 1.204}

group_size: how many workers make a batch together: that many lines, one after the other.
model: in the header, if there is one: a checksum of the weights that the run began with.
generation: how often the worker was replaced before.
lost: true in the last lines of a run that ended since this worker failed over this batch or the
next.
versions: pairs (step, version), as the frames' stamps say; -1 are random actions.
made_s: how long the worker took to make the batch, once it had the weights that it waits for.
newest: the newest version when the batch was finished.
at_s: when the learner took it, in seconds since the workers had started.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from collectors.data.batch import WorkerBatch

FORMAT = 1
MOST_BYTES = 1 << 28
_NEVER = 1 << 62  # newer than any version


class PlannedBatch(NamedTuple):
    """One batch of one worker.

    generation: how often the worker was replaced before.
    versions: pairs (step, version): from this step on, this is the newest version that the worker
        can take; -1 for random actions. The first pair is for step 0.
    lost: whether the learner never got it, since the worker failed over it, or soon after it.
    newest: the newest version when the batch was finished; None if that is not known.
    steps_before: how many steps the worker made in earlier generations; only for random frames at
        first, of which a recording itself says how many are left.
    """

    worker: int
    generation: int
    versions: tuple[tuple[int, int], ...]
    lost: bool = False
    newest: int | None = None
    steps_before: int = 0


class Delivery(NamedTuple):
    """A version that is sent to workers: the one just published, or an older one."""

    version: int
    nbytes: int
    workers: Sequence[int]


class EndOfSchedule(Exception):
    """A recording has no more batches."""


@dataclass(frozen=True)
class Header:
    """What a recording was made with."""

    num_workers: int
    num_steps: int  # of a batch
    num_envs: int  # of a worker
    seed: int
    group_size: int = 1  # workers that make a batch together; older recordings lack it
    model: str = ""  # a checksum of the first weights, if the recording names it

    @property
    def frames_per_batch(self) -> int:
        """The frames of all workers in a batch."""
        return self.num_steps * self.num_envs * self.group_size


class ScheduleFile:
    """Appends to the file, a whole line at a time; a second one begins with a new header."""

    def __init__(self, path: str | Path, header: Header):
        self._path = Path(path).absolute()
        self._began = time.monotonic()
        names = ("num_workers", "num_steps", "num_envs", "group_size", "seed")
        self._header = {"format": FORMAT, **{name: getattr(header, name) for name in names}}
        if header.model:
            self._header["model"] = header.model
        self._write(self._header)

    def note_resumed(self) -> None:
        """The workers go on from a saved state: what follows has no replay."""
        self._write(self._header)

    def note(
        self, worker: int, generation: int, versions: Sequence[Sequence[int]], **more: Any
    ) -> None:
        """The learner takes this batch now. versions: pairs (step, version)."""
        at_s = round(time.monotonic() - self._began, 6)
        line = {"worker": worker, "generation": generation, "versions": versions}
        self._write({**line, **more, "at_s": at_s})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Recorder:
    """Writes the schedule of a collector's workers.

    counts: the environments of each worker. frames: of each in a batch.
    """

    def __init__(
        self, path: str | Path, counts: Sequence[int], frames: int, group_size: int, seed: int
    ):
        if len(set(counts)) > 1:
            raise ValueError(
                f"record_schedule: workers have {counts} environments; there is only a replay of "
                "workers with equal numbers"
            )
        header = Header(len(counts), frames // counts[0], counts[0], seed, group_size)
        self._file = ScheduleFile(path, header)

    def note(self, batch: WorkerBatch) -> None:
        """The learner takes this batch now."""
        stamps = batch.frames.stamps(batch.steps)
        made_s = round(batch.made_s, 6)
        self._note(batch.worker, batch.generation, stamps, made_s=made_s, newest=batch.newest)

    def note_failure(
        self, worker: int, generation: int, finished: Iterable[WorkerBatch], so_far: Tensor | None
    ) -> None:
        """The worker failed, and the run ends: what it made and began, so that a replay fails.

        so_far: the versions [envs, steps] of the batch that it began, if they are known.
        """
        for lost in finished:
            self._note(worker, lost.generation, lost.frames.stamps(lost.steps), lost=True)
        if so_far is not None:
            self._note(worker, generation, so_far, lost=True)

    def note_resumed(self) -> None:
        """The workers go on from a saved state: what follows has no replay."""
        self._file.note_resumed()

    def _note(self, worker: int, generation: int, stamps: Tensor, **more: Any) -> None:
        self._file.note(worker, generation, runs(stamps), **more)


def runs(stamps: Tensor) -> list[list[int]]:
    """Pairs (step, version) for stamps [envs, steps], which are the same for all environments."""
    versions = stamps[0].numpy()
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return [[int(step), int(versions[step])] for step in starts]


class RecordedSchedule:
    """Gives the batches of a recording in their order. `ValueError` for a file that is none."""

    exact = True  # its versions are those that acted

    def __init__(self, path: str | Path):
        self.path = Path(path)
        lines = list(_lines(self.path))
        if not lines:
            raise ValueError(f"{self.path} is empty: there is no schedule to replay")
        self.header = _header(lines[0], f"{self.path}, line 1")
        self.batches: list[PlannedBatch] = []
        self.at_s: list[float] = []  # when the learner took each
        self.made_s: list[float] = []  # how long each took its worker; NaN if that is not known
        for number, line in enumerate(lines[1:], 2):
            where = f"{self.path}, line {number}"
            if "format" in line:
                raise ValueError(
                    f"{where}: the run was resumed here, and the recording lacks what its workers "
                    "did before; only a run that was not resumed can be replayed"
                )
            batch, at_s, made_s = self._batch(line, where)
            self.batches.append(batch)
            self.at_s.append(at_s)
            self.made_s.append(made_s)
        oldest = [_oldest(batch) for batch in self.batches]
        self._oldest = list(accumulate(reversed(oldest), min))[::-1]
        self._next = 0

    def _batch(self, line: dict[str, Any], where: str) -> tuple[PlannedBatch, float, float]:
        try:
            worker, generation = line["worker"], line["generation"]
            versions = tuple((step, version) for step, version in line["versions"])
            numbers = [worker, generation, *(number for pair in versions for number in pair)]
            at_s, made_s = float(line["at_s"]), float(line.get("made_s", math.nan))
            newest = line.get("newest")  # recordings of earlier versions lack it
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: this is no batch of a schedule: {error!r}") from None
        steps, whole = [step for step, _ in versions], all(type(one) is int for one in numbers)
        if (
            not whole
            or not 0 <= worker < self.header.num_workers
            or generation < 0
            or steps[:1] != [0]
            or steps != sorted(set(steps))
            or steps[-1] >= self.header.num_steps
            or any(version < -1 for _, version in versions)
            or not (newest is None or type(newest) is int)
        ):
            raise ValueError(f"{where}: this is no batch of a schedule: {line}")
        lost = line.get("lost") is True
        return PlannedBatch(worker, generation, versions, lost, newest), at_s, made_s

    @property
    def num_workers(self) -> int:
        """How many workers the recorded run had."""
        return self.header.num_workers

    @property
    def num_steps(self) -> int:
        """The steps of a batch."""
        return self.header.num_steps

    @property
    def group_size(self) -> int:
        """How many workers make a batch together."""
        return self.header.group_size

    @property
    def num_frames(self) -> int:
        """How many frames the learner took in the recorded run."""
        taken = sum(not batch.lost for batch in self.batches)
        return taken * self.header.num_steps * self.header.num_envs

    @property
    def time_s(self) -> float:
        """When the last batch was taken in the recorded run."""
        return self.at_s[self._next - 1] if self._next else 0.0

    def next_batch(self) -> PlannedBatch:
        if self._next == len(self.batches):
            raise EndOfSchedule(f"{self.path} ends after {self._next} batches")
        self._next += 1
        return self.batches[self._next - 1]

    def skip_update(self) -> None:
        """The recording says how long it took."""

    def publish(self, version: int, deliveries: Sequence[Delivery]) -> None:
        """The recording says what became of it."""

    def oldest_needed(self) -> int:
        return self._oldest[self._next] if self._next < len(self.batches) else _NEVER

    def counts(self) -> dict[str, int]:
        steps = self._next * self.header.num_steps
        return {"collected": steps, "dropped": 0, "in_flight": 0, "restarts": 0}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = int(state["next"])


def _oldest(batch: PlannedBatch) -> int:
    """The oldest version that it names; random actions need none."""
    return min((version for _, version in batch.versions if version >= 0), default=_NEVER)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of the file; a process that was killed may have left a part of one."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: expected an object of JSON")
        yield found


def _header(line: dict[str, Any], where: str) -> Header:
    if line.get("format") != FORMAT:
        raise ValueError(f"{where}: expected the header of a schedule of format {FORMAT}")
    names = ("num_workers", "num_steps", "num_envs", "seed")
    values: dict[str, Any] = {name: line.get(name) for name in names}
    if any(type(value) is not int or value < 0 for value in values.values()):
        raise ValueError(f"{where}: expected whole numbers for {', '.join(names)}")
    group_size = line.get("group_size", 1)
    if type(group_size) is not int or group_size < 1 or values["num_workers"] % group_size:
        raise ValueError(f"{where}: group_size={group_size!r} does not divide the workers")
    return Header(**values, group_size=group_size, model=str(line.get("model", "")))
