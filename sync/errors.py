"""What goes wrong between a sender and its workers, as exceptions that name the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WorkerError(RuntimeError):
    """A worker did not do what was asked. `worker_idx` names the first; `failures` has all."""

    def __init__(self, worker_idx: int, message: str, failures: Mapping[int, WorkerError] = {}):
        super().__init__(message)
        self.worker_idx = worker_idx
        self.failures: dict[int, WorkerError] = dict(failures) or {worker_idx: self}

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        others = {k: v for k, v in self.failures.items() if v is not self}
        return type(self), (self.worker_idx, str(self), others)


class WorkerDied(WorkerError):
    """The worker's process is gone."""


class WorkerRaised(WorkerError):
    """The worker raised; the message carries its own traceback."""


class WorkerTimeout(WorkerError):
    """The worker is alive, as far as can be told, and did not answer in time."""


class WeightsDiffer(RuntimeError):
    """A worker does not hold the weights that were published; see `verify.py`.

    It is raised in the worker. `tensors` are the names of those that differ, `how` says since when.
    """

    def __init__(self, worker_idx: int, version: int, tensors: Sequence[str], how: str):
        super().__init__(worker_idx, version, tensors, how)
        self.worker_idx, self.version, self.tensors, self.how = worker_idx, version, tensors, how

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.tensors[:5]))
        more = f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else ""
        return f"worker {self.worker_idx}, version {self.version}: {shown}{more} {self.how}"


def combine(failures: Mapping[int, WorkerError]) -> WorkerError:
    """One exception for one or several failed workers."""
    first, *others = failures.values()
    if not others:
        return first
    text = "\n".join(str(failure) for failure in failures.values())
    kinds = {type(failure) for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else WorkerError
    return kind(first.worker_idx, f"{len(failures)} workers failed:\n{text}", failures)
