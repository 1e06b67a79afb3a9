"""Exceptions between a sender and its workers; each names the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WorkerError(RuntimeError):
    """One or more workers failed. `worker_idx` is the first one; `failures` has all of them."""

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
    """The worker raised an error; the message includes its traceback."""


class WorkerTimeout(WorkerError):
    """The worker seems to be alive, but did not answer in time."""


class WeightsDiffer(RuntimeError):
    """A worker does not have the weights that were published; see `verify.py`.

    Raised in the worker. `tensors` names those that differ; `how` says when the check found it.
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
