"""A sender and a receiver in one process, with an engine between them that uses threads."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from sync import RPCWeightSyncScheme
from sync.remote.engine import Engine
from sync.remote.pickled_calls import pack, run
from tests.sync.support import in_one_thread


class Threads(Engine):
    """Runs calls in threads of this process."""

    mechanism = "threads"

    def __init__(self, num_peers=1):
        self.num_peers = num_peers
        self.pool = ThreadPoolExecutor(8 * num_peers)

    def call(self, peer, function, *args):
        future = Future()

        def end(done):
            done.result().tell(future, "this process")

        self.pool.submit(lambda: run(*pack((function, args))).add_done_callback(end))
        return future

    def gone(self, peer):
        return None

    def describe(self, peer):
        return f"peer {peer}"

    def close(self):
        self.pool.shutdown()


class Model(nn.Module):
    """One number, which it may refuse to take."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))
        self.refuses = False

    def get_extra_state(self):
        return self.number.item()

    def set_extra_state(self, state):
        if self.refuses:
            raise ValueError("no more of these")


@contextlib.contextmanager
def joined(ours, theirs, *, background=True, engine=None, **options):
    """The sender's scheme and model, and the receiver's."""
    engine = engine or Threads()
    scheme = RPCWeightSyncScheme(**{"timeout": 20.0, **options})
    scheme.attach(engine)
    scheme.init_on_sender(model=ours, devices=["cpu"])
    try:
        with in_one_thread(scheme, make_model=lambda: theirs, background=background) as (receiver,):
            yield scheme, ours, receiver, theirs
    finally:
        engine.close()


def send(scheme, model, number):
    """Publish a number; waits for nobody."""
    with torch.no_grad():
        model.number.fill_(number)
    scheme.send_async()
