"""Transports: how one versioned snapshot reaches one worker, and how its answer comes back.

A transport moves snapshots and knows one worker; which weights to send, to whom, and how long to
wait is the scheme's business. `offer` never blocks: a newer version replaces one not yet read.
"""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch

from sync.binding import Binding
from sync.board import Event, now_ns
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, combine
from sync.home import Home
from sync.memory import Doorbell, Watch, wait_for
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.stats import WorkerStats
from sync.strategy import Weights, WeightStrategy
from sync.waiting import await_workers

if TYPE_CHECKING:
    from sync.link import Line
    from sync.wire.delta import Bases


@runtime_checkable
class TransportBackend(Protocol):
    """What every transport can do, whatever it is made of."""

    def send_weights(self, weights: Weights) -> None: ...

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any: ...

    def setup_connection_and_weights_on_sender(self) -> None: ...

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any: ...


class Transport(ABC):
    """One worker's line. The same class serves both ends; methods are grouped by end."""

    lends = False  # whether a snapshot lies in memory that another process will write again

    def __init__(self, *, timeout: float = 10.0):
        self.timeout = timeout
        self.worker_idx = 0
        self.device: torch.device | None = None
        self.label = ""
        self.segfault_hint = ""
        self.shares_slots = False
        self.only_in_scheme = ""  # why, if what it moves is more than a model's own block
        self.slots: Slots | None = None
        self.strategy = WeightStrategy()
        self._forget()

    def _forget(self) -> None:
        """Set what belongs to one process, and travels to no other, to its beginnings."""
        self.zero_copy = False
        self.stats = WorkerStats()
        self.addressed = NEVER
        self.answered = NEVER
        self.acknowledged = NEVER
        self.connected = False
        self.has_left = False
        self.failure: WorkerError | None = None
        self.told = False  # whether the caller has heard of a failure
        self.watch: Watch | None = None
        self.bases: Bases | None = None  # what the worker holds, where the wire format asks
        self.line: Line | None = None  # the slow link to the worker, if there is one
        self._binding: Binding | None = None

    # -- the sender's end: what a kind of transport defines

    @abstractmethod
    def offer(self, slot: int, version: int) -> None:
        """Make a written slot the newest that the worker can take."""

    @abstractmethod
    def held(self) -> set[int]:
        """The slots that the worker may be reading, now or soon."""

    def kept(self) -> set[int]:
        """`held`, and what the worker's successor would be offered again."""
        return self.held()

    def wake(self) -> None:
        """Wake the worker if it sleeps, after an offer."""

    @abstractmethod
    def collect(self) -> None:
        """Take in what the worker has said since the last time, without waiting."""

    @abstractmethod
    def news_fds(self) -> list[int]:
        """What to poll for the worker's answers."""

    @property
    def answer_bell(self) -> Doorbell | None:
        """The bell among `news_fds`, if there is one; workers may share it."""
        return None

    def expect(self, version: int) -> None:
        """Say that the sender is about to poll `news_fds` for `version`, or (NEVER) no longer."""

    @abstractmethod
    def offer_again(self) -> bool:
        """Offer what was offered last to a newcomer; False if it is there no more."""

    def retract(self) -> None:
        """Offer nothing, until something is offered again: what a newcomer gets is on its way."""

    @abstractmethod
    def close(self) -> None:
        """Tell the worker that nothing more will come."""

    # -- the receiver's end: what a kind of transport defines

    def become_receiver(self) -> None:
        """From now on this is the worker's end; also in a forked copy of the sender's process."""
        self._forget()
        if self.slots is not None:
            self.slots = self.slots.read_only()

    def nearest(self) -> Transport:
        """What versions really come by to this process, once the sender can be asked."""
        return self

    @abstractmethod
    def greet(self) -> None:
        """Tell the sender that this process is the worker from now on."""

    @abstractmethod
    def newest(self) -> tuple[Snapshot, int] | None:
        """The newest snapshot, kept from being rewritten until `applied` or `refused`; retries."""

    @abstractmethod
    def has_news(self) -> bool:
        """Whether there may be something newer than the last `newest`; costs next to nothing."""

    def may_take_at_once(self, take: Callable[[], bool]) -> None:
        """Whoever brings an offer into this process may call `take`, which applies it.

        It returns False if the model is in use; then its owner must be woken, as otherwise.
        """

    def home(self) -> Home | None:
        """A block in which the model may live, to be written by the sender while it rests."""
        return None

    def found_at_home(self, block: Snapshot) -> bool:
        """Whether the newest version lies there and is news: then `applied` is to be called."""
        return False

    def look_again(self) -> None:
        """Forget that the newest version was seen: it is to be taken once more."""

    def in_use(self) -> None:
        """The snapshot is applied, and the one before is no longer needed."""

    @abstractmethod
    def applied(self, event: Event) -> None:
        """Tell the sender that the snapshot is in use."""

    @abstractmethod
    def refused(self, version: int, text: str) -> None:
        """The snapshot could not be applied; `text` is the traceback."""

    def skip(self, snapshot: Snapshot) -> None:
        """The snapshot builds on one that only this worker's predecessor held.

        The sender, which learns of the newcomer, will offer one that it can read.
        """
        text = f"version {snapshot.version} builds on {snapshot.builds_on}, which is not here"
        self.refused(snapshot.version, text)

    @abstractmethod
    def offer_fds(self) -> list[int]:
        """What becomes readable with an offer while `dozing`, or when the sender is gone."""

    @contextlib.contextmanager
    def dozing(self) -> Iterator[None]:
        """Around a poll of `offer_fds`: an offer rings. Look for one that came before, first."""
        yield

    def wait_for_offer(self, timeout: float, fds: Iterable[int] = ()) -> list[int]:
        """Return when there may be something new, one of `fds` is ready, or `timeout` is over.

        What it returns are the descriptors that were ready.
        """
        with self.dozing():
            if self.has_news():
                timeout = 0.0
            return wait_for([*self.offer_fds(), *fds], timeout)

    @abstractmethod
    def sender_gone(self) -> bool:
        """Nothing more can come: the sender closed, or its process is dead."""

    @abstractmethod
    def leave(self) -> None:
        """Tell the sender that this worker reads no more."""

    # -- the sender's end: what all transports share

    def expect_newcomer(self) -> None:
        """Before a rendezvous: a dead worker is forgotten, so that another can take its place.

        But one that failed before anybody looked is news.
        """
        self.collect()
        if not self.stats.applied and not self.told:
            return
        if self.watch is not None:
            self.watch.look()
        self.judge()
        if isinstance(self.failure, WorkerDied):
            self.watch = None
        self.failure, self.told, self.has_left = None, False, False

    def greeted(self, pid: int) -> None:
        """A process took the worker's place: what its predecessor acknowledged counts no more."""
        self.stats.restarts += self.acknowledged != NEVER
        self.acknowledged = NEVER
        self.connected = self.has_left = False
        self.failure = None
        self.watch = Watch(pid)
        if self.bases is not None:
            self.bases.forget()
        if self.line is not None:
            self.line.greeted()

    def heard(self, event: Event) -> None:
        """An acknowledgement came, or has set out on its way over the link."""
        if self.line is None:
            self._book_answer(event)
        else:
            self.line.answer(event.applied_ns, lambda: self._book_answer(event))

    def _book_answer(self, event: Event) -> None:
        version, published, seen, applied, retries = event
        if self.bases is not None:
            self.bases.in_use(version)
        self.connected = True
        if version > self.acknowledged:
            self.acknowledged = version
        again = version <= self.answered
        if not again:
            self.answered = version
        way_back_ns = 0 if self.line is None else self.line.latency_ns
        acknowledge_ns = applied - published + way_back_ns
        self.stats.add(
            version,
            wake_ns=seen - published,
            apply_ns=applied - seen,
            acknowledge_ns=acknowledge_ns,
            retries=retries,
            again=again,
        )

    def failed(self, version: int, text: str) -> None:
        """The worker could not apply a version; `text` is its traceback."""
        if self.line is None:
            self._book_failure(version, text)
        else:
            self.line.answer(now_ns(), lambda: self._book_failure(version, text))

    def _book_failure(self, version: int, text: str) -> None:
        if self.bases is not None:
            self.bases.refused(version)
        self.stats.failures += version > self.answered
        self.answered = max(self.answered, version)
        self.failure = WorkerRaised(
            self.worker_idx, f"{self} raised while applying weights:\n{text.rstrip()}"
        )

    def judge(self) -> None:
        """Make a failure of it if the worker is known to be gone."""
        if self.has_left:
            self.failure = WorkerDied(self.worker_idx, f"{self} left: it shut its scheme down")
        if self.watch is not None and self.watch.gone:
            self.connected = False
            ending = f", {self.watch.ending}" if self.watch.ending else ""
            hint = self.segfault_hint if "SIGSEGV" in ending else ""
            self.failure = WorkerDied(
                self.worker_idx,
                f"{self} died (pid {self.watch.pid}){ending}: it can take no weights{hint}",
            )

    def left(self) -> None:
        """The worker reads no more, of its own will."""
        self.connected, self.has_left = False, True

    def overdue(self, seconds: float) -> WorkerTimeout:
        if not self.connected:
            return WorkerTimeout(
                self.worker_idx,
                f"{self} did not connect within {seconds:g} s: was its process started, and does "
                "it call init_on_receiver() and connect()?",
            )
        return WorkerTimeout(
            self.worker_idx,
            f"{self} did not acknowledge version {self.addressed} within {seconds:g} s; "
            f"it is alive (pid {self.watch.pid if self.watch else '?'}), "
            f"on version {self.acknowledged}",
        )

    def wait_fds(self) -> list[int]:
        return self.news_fds() + self.watch_fds()

    def watch_fds(self) -> list[int]:
        return self.watch.fds() if self.watch is not None else []

    @property
    def hungry(self) -> bool:
        """A version waits in the sender until the worker has answered to an older one."""
        return False

    @property
    def waiting(self) -> bool:
        return self.acknowledged < self.addressed

    def __str__(self) -> str:
        known = [str(self.device or "cpu"), *([self.label] if self.label else [])]
        return f"worker {self.worker_idx} ({', '.join(known)})"

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs: what the sender knows of its workers stays with it."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._forget()
        return twin.__dict__

    def alone(self) -> Self:
        """What the worker's process needs of it, without a share in other workers' lines."""
        return copy.copy(self)

    # -- used without a scheme

    def send_weights(self, weights: Weights) -> None:
        """Send one version to this worker and wait until it is in use."""
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Weights) -> None:
        """Send one version to this worker and return at once."""
        self._check_alone()
        if self.shares_slots:
            raise RuntimeError(
                f"{self} shares its slots with other workers: "
                f"use scheme.send(weights, worker_ids=[{self.worker_idx}])"
            )
        if self._binding is None or self._binding.target is not weights:
            layout = self.slots.layout if self.slots is not None else None
            self._binding = Binding(weights, self.strategy, layout)
        assert self.slots is not None, "a transport outside a scheme needs slots of its own"
        self.collect()
        version = self.addressed + 1
        slot = self.slots.free(self.held())
        self._binding.pack(self.slots[slot], version, check_finite=True)
        self.offer(slot, version)
        self.wake()

    def _check_alone(self) -> None:
        if self.only_in_scheme:
            raise RuntimeError(f"{self} {self.only_in_scheme}: send and receive with its scheme")

    def wait_ack(self) -> None:
        version = self.addressed
        failures = await_workers([self], lambda t: t.acknowledged >= version, self.timeout)
        if failures:
            raise combine(failures)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Wait for the worker to connect."""
        failures = await_workers([self], lambda t: t.watch is not None, self.timeout)
        if failures:
            raise combine(failures)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Connect, and take the first version into `model` or `weights`."""
        self.become_receiver()
        self.worker_idx = worker_idx
        self.greet()
        return self.receive_weights(self.timeout, weights=weights, model=model, strategy=strategy)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Weights | None = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Apply the newest version to `model` or `weights` and return it; None if there is none."""
        self._check_alone()
        taken = self.newest()
        if taken is None and timeout:
            deadline = time.monotonic() + timeout
            while taken is None and not self.sender_gone() and time.monotonic() < deadline:
                self.wait_for_offer(deadline - time.monotonic())
                taken = self.newest()
        if taken is None:
            return None

        def apply(snapshot: Snapshot) -> None:
            self._bound(snapshot, weights, model, strategy).load(snapshot)

        if (error := take(self, taken, apply)) is not None:
            raise error
        assert self._binding is not None
        return self._binding.weights()

    def _bound(
        self, snapshot: Snapshot, weights: Weights | None, model: Any, strategy: Any
    ) -> Binding:
        target, own = (model if model is not None else weights), False
        if target is None:
            own = True
            names = (leaf.name for leaf in snapshot.layout.leaves)
            views = (view.clone() for view in snapshot.views)
            target = dict(zip(names, views, strict=True))
        if self._binding is None or self._binding.target is not target:
            strategy = strategy or self.strategy
            self._binding = Binding(target, strategy, snapshot.layout, any_extra=own)
        return self._binding


def take(
    transport: Transport,
    taken: tuple[Snapshot, int],
    apply: Callable[[Snapshot], None],
    then: Callable[[], None] | None = None,
) -> Exception | None:
    """Apply a snapshot and tell the sender how it ended; returns what was raised, if anything was.

    then: what must be done, once the snapshot is in use, before the sender is told that it is.
    """
    snapshot, retries = taken
    version, published, seen = snapshot.version, snapshot.published_ns, now_ns()
    try:
        apply(snapshot)
        transport.in_use()
        if then is not None:
            then()
    except Exception as error:  # noqa: BLE001 - whatever it is, the sender must hear of it
        transport.refused(version, traceback.format_exc())
        return error
    transport.applied(Event(version, published, seen, now_ns(), retries))
    return None
