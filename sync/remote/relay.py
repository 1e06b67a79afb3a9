"""A node that passes versions on: it delivers to its own worker, and to the nodes below.

    parent (the trainer, or a node)             node                          nodes below
    -------------------------------             ----                          -----------
    Link.send(v1, branch)   -- pass_on ---->    to its worker's inbox
                                                Link.send(v1, part) --------> ...
                            <-- news --------   once all have answered, or after a while
    (if some have not)      -- ask_for_news ->  ...
                            <-- news --------   once the rest has, or after a while

News say what became of single deliveries. An answer is the worker's own, so a node only gathers
answers: it waits with them until it has all, but not for long. It also says which workers have a
version that they have not answered yet. Whoever is not heard of is sent the version by the trainer,
with the same serial number, and its inbox takes it once.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync.channel import APPLIED, FAILED
from sync.remote.blocks import give_back
from sync.remote.inbox import Reply, close_inbox, deliver
from sync.remote.tree import Branch

RECEIVED = "received"  # the worker's process has the version
UNREACHED = "unreached"  # it may not have it, and nothing more will be heard of it on this way
CUT = "cut"  # its connection with the node above is broken
NOTHING = torch.empty(0, dtype=torch.uint8)
_WAIT_S = 0.1  # how long a node gathers answers before it says those that it has

Post = Callable[..., Future[Any]]  # (function, block, *args): Engine.post to one peer


class News(NamedTuple):
    """What became of a delivery: its reply, or one of the words above.

    held_ns: how long nodes have kept it back.
    """

    worker: int
    serial: int
    what: Reply | str
    held_ns: int = 0


class Gathered(NamedTuple):
    """What a node says to its parent; `more` if there are deliveries without an answer."""

    news: list[News]
    more: bool


# -- the parent's side


class Link:
    """The way to one node, and to all below it.

    post: to this node.
    nothing: an empty block, as `post` takes it.
    hear: is given news, in a thread of the engine, and what broke the link if something did.
    """

    def __init__(
        self, post: Post, nothing: Any, hear: Callable[[list[News], BaseException | None], None]
    ):
        self._post, self._nothing, self._hear = post, nothing, hear
        self._token = uuid.uuid4().hex
        self._lock = threading.Lock()  # guards the two below
        self._open: dict[int, int] = {}  # the workers of deliveries without an answer, by serial
        self._asked = 0  # calls that have not returned

    def send(self, block: Any, key: str, engine: str, branch: Branch) -> Future[Gathered]:
        """Returns a future that ends when the node has the block, or later."""
        with self._lock:
            self._open.update((one.serial, one.worker) for one in branch.all())
            self._asked += 1
        return self._call(pass_on, block, key, engine, self._token, branch)

    def _call(self, function: Callable[..., Any], block: Any, key: str, *args: Any) -> Future[Any]:
        try:
            future = self._post(function, block, key, *args)
        except Exception as error:  # noqa: BLE001 - a full object store, say
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._note(done, key))
        return future

    def _note(self, done: Future[Gathered], key: str) -> None:
        error = done.exception()
        news, more = done.result() if error is None else ([], False)
        with self._lock:
            self._asked -= 1
            for one in news:
                if one.what != RECEIVED:
                    self._open.pop(one.serial, None)
            lost: dict[int, int] = {}
            if error is not None or not (more or self._asked):
                lost, self._open = self._open, {}
            ask_again = bool(self._open) and not self._asked
            self._asked += ask_again
        unreached = [News(worker, serial, UNREACHED) for serial, worker in lost.items()]
        self._hear(news + unreached, error)
        if ask_again:
            self._call(ask_for_news, self._nothing, key, self._token)


# -- the node's side

_connected: dict[tuple[str, int, int], Post] = {}  # by engine, own number and the other's
_relays: dict[tuple[str, str], _Relay] = {}  # by a scheme's key and the token of a parent's link
_lock = threading.Lock()  # guards both


def connect(engine: str, own: int, other: int, post: Post) -> None:
    """From now on peer `own` of an engine, in this process, reaches `other` with `post`."""
    with _lock:
        _connected[engine, own, other] = post


def pass_on(block: Tensor, key: str, engine: str, token: str, branch: Branch) -> Future[Gathered]:
    """Deliver a block to the worker of this process and to those below."""
    with _lock:
        relay = _relays.setdefault((key, token), _Relay())
    return relay.take(block, key, engine, branch)


def ask_for_news(_: Tensor, key: str, token: str) -> Future[Gathered]:
    """What became of the deliveries that were passed on, once all have ended or after a while."""
    with _lock:
        relay = _relays.setdefault((key, token), _Relay())
    return relay.ask()


def close(key: str, worker: int) -> None:
    """The trainer shut its scheme down: nothing more comes for this worker, or for those below."""
    with _lock:
        for place in [place for place in _relays if place[0] == key]:
            del _relays[place]
    close_inbox(key, worker)


class _Relay:
    """What one parent has this node pass on. One call of the parent at a time waits for news."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: set[int] = set()  # the serial numbers of deliveries without an answer
        self._news: dict[int, tuple[News, int]] = {}  # with the time when each was heard
        self._links: dict[int, tuple[Post | None, Link]] = {}
        self._waiting: Future[Gathered] | None = None
        self._awaited: set[int] = set()  # the deliveries whose end it waits for
        self._is_due = False

    def take(self, block: Tensor, key: str, engine: str, branch: Branch) -> Future[Gathered]:
        with self._lock:
            serials = {one.serial for one in branch.all()}
            self._open |= serials
            self._add([News(branch.worker, branch.serial, RECEIVED)])
            answer = self._wait(serials)
            links = [self._link(engine, branch.worker, one.worker) for one in branch.below]
        users: list[Future[Any]] = [
            link.send(block, key, engine, one)
            for link, one in zip(links, branch.below, strict=True)
        ]
        # A view: its memory is given back below, and not when the worker alone is done with it.
        delivered = deliver(block.view(-1), key, branch.worker, branch.owner, branch.serial)
        _give_back_after([*users, delivered], block)
        delivered.add_done_callback(
            lambda done: self._hear([News(branch.worker, branch.serial, done.result())])
        )
        return answer

    def _link(self, engine: str, own: int, other: int) -> Link:
        """The link over the present connection: calls over an earlier one may never return."""
        with _lock:
            connection = _connected.get((engine, own, other))
        known = self._links.get(other)
        if known is not None and known[0] is connection:
            return known[1]

        def post(*args: Any) -> Future[Any]:
            if connection is None:
                raise ConnectionError(f"peer {own} is not connected with peer {other}")
            return connection(*args)

        def hear(news: list[News], error: BaseException | None) -> None:
            broken = [News(other, -1, CUT)] if error is not None else []
            self._hear([*news, *broken])

        link = Link(post, NOTHING, hear)
        self._links[other] = connection, link
        return link

    def ask(self) -> Future[Gathered]:
        return self._wait(self._open)

    def _wait(self, serials: set[int]) -> Future[Gathered]:
        """Wait for these, but with news of others no longer than `_WAIT_S`."""
        with self._lock:
            self._reply(always=True)  # a newer call waits in the place of an older one
            waiting: Future[Gathered] = Future()
            self._waiting, self._awaited, self._is_due = waiting, set(serials), False
            self._reply()
        if not waiting.done():
            timer = threading.Timer(_WAIT_S, self._note_due, (waiting,))
            timer.daemon = True
            waiting.add_done_callback(lambda _: timer.cancel())
            timer.start()
        return waiting

    def _note_due(self, waiting: Future[Gathered]) -> None:
        with self._lock:
            if waiting is self._waiting:
                self._is_due = True
                self._reply()

    def _hear(self, news: Sequence[News]) -> None:
        with self._lock:
            self._add(news)
            self._reply()

    def _add(self, news: Sequence[News]) -> None:
        heard_ns = time.monotonic_ns()
        for one in news:
            if one.what == CUT:
                self._news[-1 - one.worker] = one, heard_ns
            elif one.serial in self._open:
                self._news[one.serial] = one, heard_ns
                if one.what != RECEIVED:
                    self._open.discard(one.serial)
                    self._awaited.discard(one.serial)

    def _reply(self, *, always: bool = False) -> None:
        """Answer the call that waits, if there is one and it has waited long enough."""
        waiting = self._waiting
        if waiting is None or not (always or not self._awaited or (self._is_due and self._news)):
            return
        now_ns = time.monotonic_ns()
        news = [
            one._replace(held_ns=one.held_ns + now_ns - heard_ns)
            for one, heard_ns in self._news.values()
        ]
        self._waiting, self._news = None, {}
        waiting.set_result(Gathered(news, bool(self._open)))


def _give_back_after(users: Sequence[Future[Any]], block: Tensor) -> None:
    """Give memory back when all are known to have read it; if one is not, leave it to Python."""
    lock, left = threading.Lock(), set(users)

    def note(done: Future[Any]) -> None:
        if done.exception() is not None:
            return
        ended = done.result()
        if isinstance(ended, Reply) and ended.answer.kind not in (APPLIED, FAILED):
            return  # the worker may still be reading
        with lock:
            left.discard(done)
            if left:
                return
        give_back(block)

    for user in users:
        user.add_done_callback(note)
