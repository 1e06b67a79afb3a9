"""Records the schedule of an asynchronous collector: one line of JSON for each batch it delivers.

    {"format": 1, "num_workers": 2, "num_steps": 128, "num_envs": 4, "seed": 7}
    {"worker": 0, "generation": 0, "versions": [[0, 3], [17, 4]], "made_s": 0.0213, "at_s": 1.204}

generation: how often the worker was replaced before.
lost: true in the last lines of a run that ended since this worker failed over this batch or the
next.
versions: pairs (step, version), as the frames' stamps say; -1 are random actions.
made_s: how long the worker took to make the batch, once it had the weights that it waits for.
at_s: when the learner took it, in seconds since the workers had started.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

FORMAT = 1


class Recorder:
    """Appends to the file, a whole line at a time; a second collector begins with a new header."""

    def __init__(self, path: str | Path, **header: Any):
        self._path = Path(path).absolute()
        self._began = time.monotonic()
        self._header = {"format": FORMAT, **header}
        self._write(self._header)

    def note(self, worker: int, generation: int, stamps: Tensor, made_s: float) -> None:
        """The learner takes this batch now. stamps: the version of each frame [envs, steps]."""
        self._note(worker, generation, stamps, made_s=round(made_s, 6))

    def note_lost(self, worker: int, generation: int, stamps: Tensor) -> None:
        """The worker failed, and the run ends: this batch was made, or begun, and not taken."""
        self._note(worker, generation, stamps, lost=True)

    def note_resumed(self) -> None:
        """The workers go on from a saved state: what follows has no replay."""
        self._write(self._header)

    def _note(self, worker: int, generation: int, stamps: Tensor, **more: Any) -> None:
        at_s = round(time.monotonic() - self._began, 6)
        line = {"worker": worker, "generation": generation, "versions": runs(stamps)}
        self._write({**line, **more, "at_s": at_s})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def runs(stamps: Tensor) -> list[list[int]]:
    """Pairs (step, version) for stamps [envs, steps], which are the same for all environments."""
    versions = stamps[0].numpy()
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return [[int(step), int(versions[step])] for step in starts]
