"""The tree in which nodes of `distributed` pass versions on, so that the trainer sends few copies.

    trainer ---- 0 ---- 4 ---- 20, 21, 22, 23         (FAN_OUT = 4)
             |      |-- 5 ---- 24, 25, 26, 27
             |      |-- 6 ---- ...
             |      '-- 7
             |-- 1 ---- 8, 9, 10, 11
             |-- 2 ---- ...
             '-- 3

A worker's place follows from its number alone, so that others keep theirs when one leaves. The
trainer draws the tree anew for each version: a worker gets it from the one above if that one gets
the same version now, and is connected with it; otherwise from the trainer. So whoever is lost, or
has not answered yet, passes nothing on, and those below it are served by the trainer.

    trainer                               node 0                       node 4 and below
    -------                               ------                       ----------------
    pass_on(v1, branch of 0)    ----->    to its worker's inbox
                                          pass_on(v1, branch of 4) --> ...
                                <-----    one reply for the branch: the answers that came in time
    whose answer is not in it:
    deliver(nothing, v1)        ------------------------------------>  its answer, or MISSING
    deliver(v1), if missing     ------------------------------------>  taken once
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch import Tensor

from sync.channel import APPLIED, FAILED, About, Answer, now_ns
from sync.model.block import Layout
from sync.remote.channel import Delivery, RemoteSender, Version
from sync.remote.engine import PeerDied, give_back
from sync.remote.gloo import DistributedEngine, connection_to
from sync.remote.inbox import MISSING, Reply, deliver, finished

FAN_OUT = 4  # how many a node passes a version on to; up to so many workers, there is no tree
_AGAIN_S = 10.0  # after which two nodes that lost each other are connected again
_GATHER_S = 0.1  # how long a node waits for answers, times the levels below it
# The trainer asks workers itself if the reply for their branch takes longer.
_PATIENCE_S = 1.0
_SLOWEST_BYTES_PER_S = 40e6


class Branch(NamedTuple):
    """A worker, and those to whom its node passes the version on. owner: the id of its inbox."""

    worker: int
    owner: str
    below: list[Branch]

    def workers(self) -> Iterator[int]:
        """This one and all below it."""
        yield self.worker
        for branch in self.below:
            yield from branch.workers()

    def levels(self) -> int:
        return 1 + max((branch.levels() for branch in self.below), default=0)


def above(worker: int) -> int | None:
    """The worker from whose node this one gets versions; None if from the trainer."""
    return worker // FAN_OUT - 1 if worker >= FAN_OUT else None


def below(worker: int) -> range:
    """The workers to which this one's node passes versions on, if there are so many."""
    return range(FAN_OUT * (worker + 1), FAN_OUT * (worker + 2))


class Tree:
    """Which workers are there, and which of them are connected with the one above."""

    def __init__(self, engine: DistributedEngine) -> None:
        self._engine = engine
        self._there: set[int] = set()
        self._connected: set[int] = set()
        self._connecting: dict[int, list[Future[Any]]] = {}
        self._again_s: dict[int, float] = {}  # when to connect them again

    def join(self, worker: int) -> None:
        """A process now serves as the worker: give it its place."""
        self.leave(worker)
        self._there.add(worker)
        for one in (worker, *below(worker)):
            self._connect(one)

    def leave(self, worker: int) -> None:
        """The worker left or was lost; those below it are the trainer's to serve."""
        self._there.discard(worker)
        for one in (worker, *below(worker)):
            self._connected.discard(one)
            self._connecting.pop(one, None)
            self._again_s.pop(one, None)

    def cut(self, worker: int) -> None:
        """Nothing comes through from the one above."""
        if worker in self._connected:
            self._connected.discard(worker)
            self._again_s[worker] = time.monotonic() + _AGAIN_S

    def _connect(self, worker: int) -> None:
        over = above(worker)
        if over is not None and over in self._there and worker in self._there:
            self._connecting[worker] = self._engine.introduce(over, worker)

    def _look(self) -> None:
        """See which connections have been made since the last look."""
        for worker, calls in list(self._connecting.items()):
            if all(call.done() for call in calls):
                del self._connecting[worker]
                if all(call.exception() is None for call in calls):
                    self._connected.add(worker)
                else:
                    self._again_s[worker] = time.monotonic() + _AGAIN_S
        for worker, at_s in list(self._again_s.items()):
            if time.monotonic() > at_s:
                del self._again_s[worker]
                self._connect(worker)

    def grow(self, owners: dict[int, str]) -> list[Branch]:
        """The branches for these workers that the trainer serves; owners: by worker."""
        self._look()
        branches = {worker: Branch(worker, owner, []) for worker, owner in owners.items()}
        heads: list[Branch] = []
        for worker, branch in branches.items():
            over = above(worker) if worker in self._connected else None
            over_branch = None if over is None else branches.get(over)
            (heads if over_branch is None else over_branch.below).append(branch)
        return heads


# -- the trainer's side


class BranchCall(NamedTuple):
    """A version on its way to a branch. due_ns: when to ask the workers instead."""

    version: Version
    deliveries: list[Delivery]
    due_ns: int


class TreeSender(RemoteSender):
    """Sends a version to a few nodes, which pass it on."""

    engine: DistributedEngine

    def __init__(self, layout: Layout, num_workers: int, engine: DistributedEngine):
        super().__init__(layout, num_workers, engine)
        self._tree = Tree(engine)
        self._branch_calls: dict[Future[Any], BranchCall] = {}  # those without a reply
        self._unanswered: deque[Delivery] = deque()  # the engine's threads add to them
        self._relays: dict[int, int | None] = {}  # by worker: who passed the newest version on

    def send(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries[0].version is None:
            super().send(deliveries)
            return
        by_worker = {delivery.worker: delivery for delivery in deliveries}
        owners = {worker: self.peers[worker].owner for worker in by_worker}
        for head in self._tree.grow(owners):
            self._relays[head.worker] = None
            if head.below:
                self._send_along(head, by_worker)
            else:
                self.send_to_worker(by_worker[head.worker])

    def _send_along(self, head: Branch, by_worker: dict[int, Delivery]) -> None:
        """Send a version to a node that passes it on."""
        self._note_relays(head, by_worker)
        deliveries = [by_worker[worker] for worker in head.workers()]
        version = deliveries[0].version
        assert version is not None
        packed, nbytes = version.packed(self.engine), version.block.wire_bytes
        args = (self.key, self.engine.port, head, version.number)
        call = self.engine.post(head.worker, pass_on, packed, *args)
        patience_s = _PATIENCE_S + nbytes / _SLOWEST_BYTES_PER_S
        due_ns = now_ns() + int(patience_s * 1e9)
        self.calls[call] = version
        self._branch_calls[call] = BranchCall(version, deliveries, due_ns)
        self.count_moved(nbytes, packed.mechanism, times=len(deliveries))
        call.add_done_callback(lambda done: self._note_replies(done, deliveries, now_ns()))

    def _note_relays(self, branch: Branch, by_worker: dict[int, Delivery]) -> None:
        for one in branch.below:
            by_worker[one.worker].relay = by_worker[branch.worker]
            self._relays[one.worker] = branch.worker
            self._note_relays(one, by_worker)

    def _note_replies(
        self, call: Future[Any], deliveries: Iterable[Delivery], heard_ns: int
    ) -> None:
        """Called in a thread of the engine."""
        replies: dict[int, Reply] = {} if call.exception() is not None else call.result()
        for delivery in deliveries:
            if delivery.worker in replies:
                self.ended.append((delivery, finished(replies[delivery.worker]), heard_ns))
            else:
                self._unanswered.append(delivery)
        self.bell.ring()

    def poll(self) -> list[Answer]:
        answers = super().poll()
        now = now_ns()
        for call, (version, deliveries, due_ns) in list(self._branch_calls.items()):
            if call.done():
                del self._branch_calls[call]
                if isinstance(call.exception(), PeerDied):
                    self.never_write(version)
            elif due_ns <= now:
                del self._branch_calls[call]
                self._unanswered.extend(deliveries)
        while self._unanswered:
            self._ask(self._unanswered.popleft())
        return answers

    def _ask(self, delivery: Delivery) -> None:
        """Ask a worker for its answer, unless that has come or another process serves now."""
        is_current = self.peers[delivery.worker].on_the_way is delivery
        if is_current and not delivery.is_asked:
            delivery.is_asked = True
            self.send_to_worker(delivery, with_block=False)

    def note_end(
        self, delivery: Delivery, future: Future[Reply], heard_ns: int
    ) -> Iterator[Answer]:
        ended = future.exception() or future.result()
        if isinstance(ended, Reply) and ended.answer.kind == MISSING:
            self._send_missing(delivery)
        else:
            yield from super().note_end(delivery, future, heard_ns)

    def _send_missing(self, delivery: Delivery) -> None:
        """A version did not come through the tree: send it, unless it is for a predecessor."""
        relay = delivery.relay
        if relay is not None and relay.has_ended and not relay.was_missing:
            self._tree.cut(delivery.worker)  # the node above had the version
        if self.peers[delivery.worker].on_the_way is delivery:
            delivery.was_missing = True
            self._relays[delivery.worker] = None
            self.send_to_worker(delivery)

    def note_joined(self, worker: int) -> None:
        self._tree.join(worker)

    def note_left(self, worker: int) -> None:
        self._tree.leave(worker)

    def due_ns(self) -> int | None:
        due = [call.due_ns for call in self._branch_calls.values()]
        return min(due) if due else super().due_ns()

    def about(self, worker: int) -> About:
        return super().about(worker)._replace(statistics={"relay": self._relays.get(worker)})


# -- the node's side


def pass_on(
    block: Tensor, key: str, port: int, branch: Branch, version: int
) -> Future[dict[int, Reply]]:
    """Deliver a version to the worker of this process and to those below; the answers by worker.

    port: of the trainer's store, which names the trainer.
    """
    calls = [_pass_below(branch.worker, block, key, port, one, version) for one in branch.below]
    # A view: its memory is given back below, and not when the worker alone is done with it.
    delivered = deliver(block.view(-1), key, branch.worker, branch.owner, version)
    _give_back_after([*calls, delivered], block)
    return _gather(branch.worker, delivered, calls, _GATHER_S * branch.levels())


def _pass_below(
    peer: int, block: Tensor, key: str, port: int, branch: Branch, version: int
) -> Future[dict[int, Reply]]:
    try:
        connection = connection_to(port, peer, branch.worker)
        return connection.post(pass_on, block, key, port, branch, version)
    except Exception as error:  # noqa: BLE001 - it is no reason not to deliver it here
        failed: Future[dict[int, Reply]] = Future()
        failed.set_exception(error)
        return failed


def _gather(
    worker: int, delivered: Future[Reply], calls: Sequence[Future[dict[int, Reply]]], wait_s: float
) -> Future[dict[int, Reply]]:
    """The answers by worker, when all have come or the time is over."""
    gathered: Future[dict[int, Reply]] = Future()
    replies: dict[int, tuple[Reply, int]] = {}  # with the times at which they came
    users: list[Future[Any]] = [delivered, *calls]
    pending = set(users)
    lock = threading.Lock()

    def finish() -> None:
        with lock:
            if not gathered.done():
                now = time.monotonic_ns()
                gathered.set_result(
                    {
                        one: reply._replace(held_ns=reply.held_ns + now - came_ns)
                        for one, (reply, came_ns) in replies.items()
                    }
                )

    def note(done: Future[Any]) -> None:
        with lock:
            if done.exception() is None:
                found = {worker: done.result()} if done is delivered else done.result()
                came_ns = time.monotonic_ns()
                replies.update((one, (reply, came_ns)) for one, reply in found.items())
            pending.discard(done)
            is_last = not pending
        if is_last:
            timer.cancel()
            finish()

    timer = threading.Timer(wait_s, finish)
    timer.daemon = True
    timer.start()
    for user in users:
        user.add_done_callback(note)
    return gathered


def _give_back_after(users: Sequence[Future[Any]], block: Tensor) -> None:
    """Give memory back when all are known to have read it; if one is not, leave it to Python."""
    lock, left = threading.Lock(), set(users)

    def note(done: Future[Any]) -> None:
        if done.exception() is not None:
            return
        result = done.result()
        if isinstance(result, Reply) and result.answer.kind not in (APPLIED, FAILED):
            return  # the worker may still be reading
        with lock:
            left.discard(done)
            if left:
                return
        give_back(block)

    for user in users:
        user.add_done_callback(note)
