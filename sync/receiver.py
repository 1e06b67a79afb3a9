"""The receiving end of a scheme: the newest version is taken into use, in one piece."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sync.binding import Binding
from sync.board import Event, now_ns
from sync.home import Home
from sync.layout import Layout
from sync.memory import SLICE_S, Doorbell, awake_s
from sync.snapshot import NEVER, Snapshot
from sync.strategy import Weights, WeightStrategy
from sync.transport import Transport, take
from sync.wire import Decoder

# From this size on a worker points at the snapshot; below, copying is as fast and keeps addresses.
ZERO_COPY_BYTES = 1 << 18


class ReceiverEnd:
    """One worker's model, and the transport that brings its weights.

    Either the owner calls `receive` between uses of the model, or a thread applies what comes; then
    `reading` keeps the weights still while the model is used.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        model: Weights | None,
        strategy: WeightStrategy,
        *,
        zero_copy: bool | None = False,
        pass_on: Callable[[Any], None] | None = None,
        decoder: Decoder | None = None,
    ):
        self._version = NEVER
        self._home: Home | None = None
        self.told: Exception | None = None  # the last error that the sender has the traceback of
        self.transport = transport
        self.binding: Binding | None = None
        self._layout = layout
        self._model = model
        self._strategy = strategy
        self._zero_copy = zero_copy
        self._pass_on = pass_on
        self._decoder = decoder
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._held_still = False
        self._returned = NEVER
        self._thread: threading.Thread | None = None
        self._stop = Doorbell()
        self._stopping = False
        self._greeted = False

    @property
    def version(self) -> int:
        """What is in use; at home, the sender may have brought it."""
        if (home := self._home) is not None:
            self._version = max(self._version, home.block.version)
        return self._version

    @property
    def model(self) -> Weights | None:
        return self._model

    @property
    def weights(self) -> Any:
        return None if self.binding is None else self.binding.weights()

    def connect(self, timeout: float, *, background: bool) -> None:
        """Greet the sender and take the first version into use."""
        self.transport = self.transport.nearest()
        slots, worker_idx = self.transport.slots, self.transport.worker_idx
        assert slots is not None
        if not slots.claim(worker_idx):
            raise ConnectionError(f"{self.transport}: another process, which is alive, is it")
        self.transport.greet()
        self._greeted = True
        try:
            self.binding = Binding(
                self._target(), self._strategy, self._layout, any_extra=self._model is None
            )
            self.transport.zero_copy = self._points_at_snapshots(self.binding)
        except Exception:
            self.transport.refused(NEVER, traceback.format_exc())
            raise
        deadline = awake_s() + timeout
        while True:
            with self._news:
                if self._apply_newest():
                    break
            remaining = deadline - awake_s()
            if self.transport.sender_gone():
                raise ConnectionError(f"{self.transport}: the sender is gone")
            if remaining <= 0:
                raise TimeoutError(
                    f"{self.transport}: no initial weights within {timeout:g} s; does the sender "
                    "call connect()?"
                )
            self.transport.wait_for_offer(min(remaining, SLICE_S))
        self._returned = self.version
        if self._points_at_slots:
            _IN_SHARED_MEMORY.add(self)
        if self._pass_on is None and self._decoder is None and not self.transport.zero_copy:
            self._move_in(rests=background)
        if background:
            self._thread = threading.Thread(target=self._run, name="lockstep-receive", daemon=True)
            self._thread.start()
            if self._pass_on is None:  # that may take its time, and is nobody else's to wait for
                self.transport.may_take_at_once(self._take_at_once)

    def _target(self) -> Weights:
        if self._model is not None:
            return self._model
        empty = {
            leaf.name: torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.transport.device)
            for leaf in self._layout.leaves
        }
        target: Weights = self._strategy.assemble(empty, {})
        return target

    def _move_in(self, *, rests: bool) -> None:
        """Have a small model live where the sender can write it, while it rests."""
        home = self.transport.home()
        if home is None:
            return
        assert self.binding is not None
        with self._lock:
            if not home.work() or not self.binding.move_into(home.block):
                home.go_away()
                home.close()
                return
            home.block.stamp(self._version, b"")
            self._home = home
            if rests:
                home.rest()
        _IN_SHARED_MEMORY.add(self)

    def _move_out(self) -> None:
        """Give the model memory of its own, to be written by nobody else."""
        home, binding = self._home, self.binding
        assert home is not None
        assert binding is not None
        if not home.enter() or home.torn:
            self.transport.look_again()
        self._version = self.version
        home.go_away()
        binding.move_out()
        self._home = None
        home.close()

    def _copy_for_fork(self) -> list[torch.Tensor]:
        """What a child process gets: the memory itself may have changed when it comes to look."""
        if self._points_at_slots:
            # In vain only if another thread uses the model, which then holds still for it.
            alone = self._lock.acquire(timeout=1.0)
            try:
                assert self.binding is not None
                return self.binding.copies()
            finally:
                if alone:
                    self._lock.release()
        values: list[torch.Tensor] = []
        for _ in range(1000):  # the sender may be writing: with one version around it, all is whole
            if (home := self._home) is None:
                return values
            before = home.block.version
            with torch.inference_mode(False):
                values = [view.clone() for view in home.block.views]
            if before == home.block.version != NEVER:
                break
        return values

    def _moved_by_fork(self, values: list[torch.Tensor]) -> None:
        """In a child process: the parent's model is in shared memory, and this is a copy of it."""
        home, self._home = self._home, None
        if (home is not None or self._points_at_slots) and self.binding is not None:
            self.binding.move_out(values)

    @property
    def _points_at_slots(self) -> bool:
        """Whether the model's parameters are in memory that is written again some day."""
        return self.transport.zero_copy and self.transport.lends

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Nobody else touches the model, neither another thread nor the sender."""
        with self._news:
            self._enter()
            try:
                yield
            finally:
                if self._home is not None:
                    self._home.leave()

    def _enter(self) -> None:
        """Keep the sender off. One that was stopped while it wrote is not waited for."""
        if self._home is None:
            return
        if not self._home.enter():
            self._move_out()
            self._apply_newest()
        elif self._home.torn:
            self.transport.look_again()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Let the sender write into the model; with a background thread it may at other times."""
        if self._home is None or self._thread is not None:
            yield
            return
        try:
            with self._lock:
                self._home.rest()
            yield
        finally:
            try:
                self._work()
            except BaseException:
                self._work()  # an interrupt must not leave the model to the sender
                raise

    def _work(self) -> None:
        """Rest no more."""
        with self._lock:
            if self._home is None:
                return
            if not self._home.work():
                self._move_out()
            elif not self._home.torn:
                return
            self.transport.look_again()
            self._apply_newest()

    def _points_at_snapshots(self, binding: Binding) -> bool:
        on_cpu = binding.device.type == "cpu"
        if self._zero_copy is None:
            large = self._layout.nbytes >= ZERO_COPY_BYTES
            return on_cpu and large and isinstance(binding.target, nn.Module)
        if self._zero_copy and not on_cpu:
            raise ValueError(f"zero_copy=True: the model is on {binding.device}, not in CPU memory")
        return self._zero_copy

    def receive(self, timeout: float | None) -> Any:
        """Apply the newest version if there is one, waiting for it if told; its weights or None."""
        with self._using():
            self._apply_newest()
            if timeout and self.version == self._returned:
                self._wait(awake_s() + timeout)
            if self.version == self._returned:
                return None
            self._returned = self.version
            return self.weights

    def wait_for_news(self, timeout: float, fds: Collection[int]) -> bool:
        if self._thread is not None:
            raise RuntimeError(
                "wait_for_news: the background thread takes what is new; connect(background=False)"
            )
        deadline = time.monotonic() + timeout
        while not (news := self.transport.has_news()):
            remaining = deadline - time.monotonic()
            ready = self.transport.wait_for_offer(max(0.0, remaining), fds)
            if remaining <= 0 or not set(fds).isdisjoint(ready) or self.transport.sender_gone():
                return self.transport.has_news()
        return news

    def _wait(self, deadline: float) -> None:
        while self.version == self._returned:
            if self.transport.sender_gone():
                raise ConnectionError(
                    f"{self.transport}: the sender is gone; no version after {self.version} comes"
                )
            remaining = min(deadline - awake_s(), SLICE_S)
            if remaining <= 0:
                return
            if self._thread is not None:
                self._news.wait(remaining)
            else:
                self.transport.wait_for_offer(remaining)
                self._apply_newest()

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """Hold the newest weights still; gives their version. Within another, nothing changes."""
        with self._using():
            around, self._held_still = self._held_still, True
            try:
                if not around:
                    self._apply_newest()
                yield self.version
            finally:
                self._held_still = around

    def _apply_newest(self) -> bool:
        at_home = self._home is not None and self._found_at_home()
        if at_home and not self.transport.has_news():
            return True
        taken = self.transport.newest()
        if taken is None:
            return at_home
        assert self.binding is not None
        if self._decoder is not None and not self._decoder.can_read(taken[0]):
            self.transport.skip(taken[0])
            return False
        if (error := take(self.transport, taken, self._apply, self._hand_down)) is not None:
            self.told = error
            raise error
        self._news.notify_all()
        return True

    def _found_at_home(self) -> bool:
        """Whether the newest version is in the block, so that the model has it."""
        assert self._home is not None
        assert self.binding is not None
        block = self._home.block
        if not self.transport.found_at_home(block) or not self._lives_there():
            return False
        self.binding.was_written()
        self._version = block.version
        now = now_ns()
        self.transport.applied(Event(block.version, block.published_ns, now, now, 0))
        self._news.notify_all()
        return True

    def _lives_there(self) -> bool:
        """Whether the model is still at home; if its owner gave it other tensors, it moves out."""
        assert self.binding is not None
        try:
            if self.binding.lives_there():
                return True
        except (KeyError, ValueError):  # it fits no more: whoever applies will hear of it
            pass
        self._move_out()
        self.transport.look_again()
        return False

    def _apply(self, snapshot: Snapshot) -> None:
        assert self.binding is not None
        if self._decoder is not None:
            snapshot = self._decoder.unpack(snapshot)
        if self.transport.zero_copy:
            self.binding.point_at(snapshot)
        elif self._home is not None and self._lives_there():
            self._home.block.become(snapshot)
            self.binding.was_written()
        else:
            self.binding.load(snapshot)
        self._version = snapshot.version

    def _hand_down(self) -> None:
        if self._pass_on is not None:
            self._pass_on(self.weights)

    def _run(self) -> None:
        """The background thread: apply what comes until the sender or the owner says stop."""
        try:
            while not self._stopping and not self.transport.sender_gone():
                self.transport.wait_for_offer(60.0, [self._stop.fd])
                if self._stopping:
                    return
                self._apply_and_tell()
        except Exception:  # no descriptors are left, say: nothing is applied here any more
            self.transport.refused(NEVER, traceback.format_exc())
            raise

    def _apply_and_tell(self) -> None:
        """Whoever sent what cannot be applied hears of it, and nobody here."""
        try:
            with self._using():
                self._apply_newest()
        except Exception as error:
            if error is not self.told:
                raise

    def _take_at_once(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._stopping:
                self._apply_and_tell()
            return not self._stopping
        finally:
            self._lock.release()

    def close(self) -> None:
        """Stop applying and let the sender have its memory back; the model keeps its weights."""
        self._stopping = True
        self._stop.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with self._using():
            try:
                self.own_memory()
            finally:
                if self._greeted and self.transport.slots is not None:
                    self.transport.leave()
                    self.transport.slots.give_back(self.transport.worker_idx)

    def own_memory(self) -> None:
        """Have the model's parameters in memory of their own until the next version comes."""
        with self._using():
            if self.binding is not None and self.transport.zero_copy:
                self.binding.detach_from_snapshots()
            if self._home is not None:
                self._apply_and_tell()  # what the sender brought or began to bring
            if self._home is not None:
                self._move_out()


_IN_SHARED_MEMORY: weakref.WeakSet[ReceiverEnd] = weakref.WeakSet()


class _Forking(threading.local):
    """What the child gets of a fork that this thread is at."""

    copies: Mapping[ReceiverEnd, list[torch.Tensor]] = {}


_FORKING = _Forking()


def _before_fork() -> None:
    _FORKING.copies = {receiver: receiver._copy_for_fork() for receiver in list(_IN_SHARED_MEMORY)}


def _after_fork() -> None:
    _FORKING.copies = {}


def _after_fork_in_child() -> None:
    for receiver in list(_IN_SHARED_MEMORY):
        receiver._moved_by_fork(_FORKING.copies.get(receiver) or receiver._copy_for_fork())
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
