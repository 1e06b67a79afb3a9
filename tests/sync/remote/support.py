"""A sender and a receiver in one process, with an engine between them that is but threads."""

from __future__ import annotations

import contextlib
import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from sync import RPCWeightSyncScheme
from sync.remote.engine import Engine
from sync.remote.wire import Outcome

BROUGHT = "brings"


class Threads(Engine):
    """Runs what it is told to run in threads of this process."""

    num_peers = 1

    def __init__(self):
        self.pool = ThreadPoolExecutor(4, thread_name_prefix=BROUGHT)

    def call(self, peer, function, *args):
        future = Future()
        self.pool.submit(lambda: Outcome.of(function, args).tell(future, "this process"))
        return future

    def gone(self, peer):
        return None

    def describe(self, peer):
        return f"peer {peer}"

    def close(self):
        self.pool.shutdown()


@contextlib.contextmanager
def joined(ours, theirs, *, background=True, **options):
    """The sender's scheme and model, and the receiver's."""
    engine = Threads()
    scheme = RPCWeightSyncScheme(**{"timeout": 20.0, "share_memory": False, **options})
    scheme.attach(engine)
    scheme.init_on_sender(model=ours, devices=["cpu"])
    receiver = copy.deepcopy(scheme)
    receiver.init_on_receiver(model=theirs, worker_idx=0)
    meeting = threading.Thread(target=receiver.connect, kwargs={"background": background})
    meeting.start()
    scheme.connect()
    meeting.join()
    try:
        yield scheme, ours, receiver, theirs
    finally:
        receiver.shutdown()
        scheme.shutdown()
        engine.close()
