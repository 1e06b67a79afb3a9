"""torchrl's blocking `send` to processes of this machine, timed; `torchrl_common` has the protocol.

Run from the repository root, in the peers' environment (`make peers`):

    .venv-peers/bin/python -m benchmarks.peers.torchrl_sync

"open" also takes "trainer". With "shared", torchrl's default, the trainer's own parameters are the
shared memory, so that a send moves no weights at all and only tells the workers. With "private" the
trainer keeps its parameters its own, as every Lockstep scheme does, and each send then carries the
weights.

Each scheme runs at the fastest setting found that still counts as sending. Workers wait idle, with
one thread each as in torchrl's collectors, and tensors are shared by name.
"""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.weight_update import WeightSyncScheme

from benchmarks.models import build_model, corner_values
from benchmarks.peers.torchrl_common import (
    make_scheme,
    sender_recipe,
    serve,
    use_fastest_tensor_sharing,
)

NAMES = {"shared_mem": "shared", "multiprocess": "multiprocess"}
WORKER_TIMEOUT_S = 45.0


def worker_main(scheme: WeightSyncScheme, model_name: str, index: int, pipe: Connection) -> None:
    """Let torchrl's background thread receive, and answer each message with the model's corners."""
    use_fastest_tensor_sharing()
    torch.set_num_threads(1)
    model = build_model(model_name)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    try:
        while True:
            pipe.send(corner_values(model))
            pipe.recv()
    except (EOFError, OSError):  # the parent closed its end, or died
        os._exit(0)  # torchrl's daemon thread would make an ordinary exit abort


class Session:
    """One open model: a scheme, its sender side, and the worker processes."""

    def __init__(self, *, scheme: str, trainer: str, model: str, workers: int) -> None:
        use_fastest_tensor_sharing()
        context = torch.multiprocessing.get_context("spawn")
        kind = NAMES[scheme]
        self.model = build_model(model)
        self.scheme = make_scheme(kind, sync=True)
        self.pipes: list[Connection] = []
        self._source: TensorDictBase = TensorDict.from_module(self.model).data
        self.send = self._choose_send(kind, trainer)
        recipe = sender_recipe(kind, trainer, self.model, workers)
        self.scheme.init_on_sender(**recipe, ctx=context)
        for index in range(workers):
            ours, theirs = context.Pipe()
            arguments = (self.scheme, model, index, theirs)
            context.Process(target=worker_main, args=arguments, daemon=True).start()
            theirs.close()
            self.pipes.append(ours)
        self.scheme.connect()
        self._read_workers()

    def _choose_send(self, scheme: str, trainer: str) -> Callable[[], None]:
        if trainer == "shared":
            # With shared memory a bare send() is enough. Through the queue it would send `None`.
            return self.scheme.send if scheme == "shared" else self._send_source
        return self._send_source if scheme == "shared" else self._send_copy

    def _send_source(self) -> None:
        self.scheme.send(weights=self._source)

    def _send_copy(self) -> None:
        """Send a copy: what goes into torchrl's queue is moved into shared memory, for good."""
        self.scheme.send(weights=self._source.clone())

    def _read_workers(self) -> list[list[float]]:
        """Receive one message from each worker, or say which one is silent or dead."""
        answers = []
        for index, pipe in enumerate(self.pipes):
            if not pipe.poll(WORKER_TIMEOUT_S):
                raise TimeoutError(f"worker {index} said nothing for {WORKER_TIMEOUT_S} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"worker {index} died; its traceback is on stderr") from None
        return answers

    def is_verified(self) -> bool:
        for pipe in self.pipes:
            pipe.send("read")
        expected = corner_values(self.model)
        return all(held == expected for held in self._read_workers())


if __name__ == "__main__":
    serve(Session)
