"""For libraries whose workers are processes of the user's: each calls the policy without pause.

An adapter gives two classes, or functions that return such objects:

    trainer = make_trainer(model, num_workers, context)     in the trainer's process
      trainer.handout                                       what workers need; it is pickled
      trainer.connect()                                     after the workers were started
      trainer.publish(model, worker_ids)
      trainer.close()

    worker = make_worker(handout, model, index)             in each worker's; returns connected
      stamp, seen = worker.step(call)                       one policy call, with the newest weights

`make_worker` must be importable, since workers are spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from .protocol import Opener, System, Tally
from .weights import NumberedModel

READY_S = 90.0
ANSWER_S = 20.0
CALLS_PER_POLL = 16
Seen = tuple[float, float]


class Trainer(Protocol):
    """The trainer's side of a scheme."""

    handout: Any

    def connect(self) -> None: ...

    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None: ...

    def close(self) -> None: ...


class Worker(Protocol):
    """A worker's side."""

    def step(self, call: Callable[[], Seen]) -> tuple[int | None, Seen]:
        """Make one policy call as the library's users do; the stamp is None if it has none."""
        ...


MakeTrainer = Callable[[NumberedModel, int, Any], Trainer]
MakeWorker = Callable[[Any, NumberedModel, int], Worker]


def with_processes(make_trainer: MakeTrainer, make_worker: MakeWorker) -> Opener:
    """The opener of a scheme with such workers."""
    return partial(Processes, make_trainer, make_worker)


def serve(make_worker: MakeWorker, handout: Any, index: int, width: int, pipe: Connection) -> None:
    """A worker: call the policy without pause, and tell what was seen when asked."""
    torch.set_num_threads(1)
    model, tally = NumberedModel(width), Tally()
    try:
        worker = make_worker(handout, model, index)
        pipe.send("ready")
        while True:
            for _ in range(CALLS_PER_POLL):
                stamp, seen = worker.step(model)
                tally.add(stamp, *seen)
            if pipe.poll():
                pipe.recv()
                stamp, seen = worker.step(model)
                tally.add(stamp, *seen)
                pipe.send(tally)
                tally = Tally()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the trainer's process is gone; threads of the library may still run
    except Exception:  # noqa: BLE001 - the trainer's process raises it
        pipe.send(traceback.format_exc())
        os._exit(1)


class Processes(System):
    """Spawned worker processes, with a pipe to each for what it saw."""

    def __init__(
        self, make_trainer: MakeTrainer, make_worker: MakeWorker, num_workers: int, width: int
    ):
        context = multiprocessing.get_context("spawn")
        self.model = NumberedModel(width)
        self._trainer = make_trainer(self.model, num_workers, context)
        self._pipes: list[Connection] = []
        self.pids = []
        for index in range(num_workers):
            ours, theirs = context.Pipe()
            args = (make_worker, self._trainer.handout, index, width, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.pids.append(process.pid or 0)
        self._trainer.connect()
        self._hear(READY_S)

    def _hear(self, timeout_s: float) -> list[Any]:
        answers = []
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"worker {index} said nothing for {timeout_s:g} s")
            answers.append(pipe.recv())
            if isinstance(answers[-1], str) and answers[-1] != "ready":
                raise RuntimeError(f"worker {index} raised:\n{answers[-1]}")
        return answers

    def publish(self, model: NumberedModel, worker_ids: list[int] | None) -> None:
        self._trainer.publish(model, worker_ids)

    def observe(self) -> list[Tally]:
        for pipe in self._pipes:
            pipe.send("observe")
        return self._hear(ANSWER_S)

    def close(self) -> None:
        self._trainer.close()
        for pipe in self._pipes:
            pipe.close()
