"""The receiving end of a scheme: applies the newest version, always as a whole."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from sync.channel_interface import APPLIED, FAILED, Answer, ReceiverChannel, now_ns
from sync.effects.rounding import RoundedFormat
from sync.local.waiting import SLICE_S, Doorbell, awake_s, wait_for
from sync.model.binding import Binding
from sync.model.block import NEVER, Layout, Snapshot
from sync.model.strategy import Weights, WeightStrategy, check_writable
from sync.verify import Verifier

_CLOSE_S = 5.0  # how long closing waits for a thread that is using the model


class Receiver:
    """One worker's model, and the channel through which its weights arrive.

    Either the owner calls `receive` between uses of the model, or a thread applies new versions. In
    the second case `reading` keeps the weights unchanged while the model is used.

    pass_on: called with the weights after each version, before it is acknowledged.
    verifier: compares the model with what was published.
    decoder: turns what the channel brings into a whole model, in the memory of this process.
    """

    def __init__(
        self,
        channel: ReceiverChannel,
        layout: Layout,
        model: Weights | None,
        strategy: WeightStrategy,
        *,
        device: torch.device | None = None,
        zero_copy: bool = False,
        pass_on: Callable[[Any], None] | None = None,
        verifier: Verifier | None = None,
        decoder: RoundedFormat | None = None,
    ):
        self.channel = channel
        self.model = model
        self.version = NEVER
        self.binding: Binding | None = None
        self.reported_error: Exception | None = None  # the last error that the sender knows about
        self._layout = layout
        self._strategy = strategy
        self._device = device
        self._zero_copy = zero_copy
        self._pass_on = pass_on
        self._verifier = verifier
        self._decoder = decoder
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._reading = False
        self._returned = NEVER  # the version that `receive` returned last
        self._thread: threading.Thread | None = None
        self._thread_ended = False
        self._stop = Doorbell()
        self._stopping = False
        self._opened = False

    @property
    def weights(self) -> Any:
        return None if self.binding is None else self.binding.weights()

    def __str__(self) -> str:
        return f"worker {self.channel.worker}"

    # -- connecting

    def connect(self, timeout: float, *, background: bool) -> None:
        """Tell the sender that this worker is ready, and apply the first version."""
        with self._lock:
            self.channel.open()
            self._opened = True
            try:
                self.binding = self._bind()
            except Exception:
                self._answer_failed(NEVER)
                raise
            self._await_first_version(timeout)
            self._returned = self.version
            if self._zero_copy:
                _POINTING.add(self)
            if background:
                thread = threading.Thread(target=self._run, name="lockstep-receive", daemon=True)
                thread.start()
                self._thread = thread

    def _await_first_version(self, timeout: float) -> None:
        deadline = awake_s() + timeout
        while not self._apply_newest():
            remaining = deadline - awake_s()
            if why := self.channel.sender_gone():
                raise ConnectionError(f"{self}: {why}")
            if remaining <= 0:
                raise TimeoutError(
                    f"{self}: no initial weights within {timeout:g} s; does the sender call "
                    "connect()?"
                )
            self._sleep(min(remaining, SLICE_S))
            self._check_open()

    def _bind(self) -> Binding:
        target = self.model if self.model is not None else self._own_weights()
        check_writable(self._strategy.flatten(target))
        binding = Binding(target, self._strategy, self._layout, any_extra=self.model is None)
        if self._zero_copy and (device := binding.accelerator) is not None:
            raise ValueError(f"zero_copy=True: the model is on {device}, not in CPU memory")
        return binding

    def _own_weights(self) -> Weights:
        """Weights to receive into if there is no model."""
        tensors = {
            leaf.name: torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device)
            for leaf in self._layout.leaves
        }
        weights: Weights = self._strategy.assemble(tensors, {})
        return weights

    # -- applying versions

    def receive(self, timeout: float | None) -> Any:
        """Apply the newest version, waiting up to `timeout`; its weights, or None if none came."""
        with self._lock:
            self._apply_newest()
            if timeout and self.version == self._returned:
                self._wait(awake_s() + timeout)
            if self.version == self._returned:
                return None
            self._returned = self.version
            # Without a model, the next version is received into the same memory.
            return self.weights if self.model is not None else _copied(self.weights)

    def apply(self, weights: Weights, inplace: bool) -> None:
        """Put other weights into the model until the next version arrives."""
        with self._lock:
            self.own_memory()
            target = self.model if self.model is not None else self.weights
            self._strategy.apply_weights(target, weights, inplace)

    def _wait(self, deadline: float) -> None:
        while self.version == self._returned:
            self._check_open()
            if self._thread is None:
                is_over = bool(self.channel.sender_gone())
            else:  # only the thread reads what the channel brings
                is_over = self._thread_ended
            if is_over:
                raise ConnectionError(
                    f"{self}: the sender is gone; there is no version after {self.version}"
                )
            remaining = min(deadline - awake_s(), SLICE_S)
            if remaining <= 0:
                return
            if self._thread is not None:
                self._news.wait(remaining)
            else:
                self._sleep(remaining)
                self._apply_newest()

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """Keep the newest weights unchanged; yields their version. May be nested."""
        with self._lock:
            outer, self._reading = self._reading, True
            try:
                if not outer:
                    self._apply_newest()
                    self.verify_call()
                yield self.version
            finally:
                if self.binding is not None:
                    self.binding.after_use()
                self._reading = outer
                if self._stopping and not outer:
                    self._let_go()  # `close` did not wait for this thread

    def _apply_newest(self) -> bool:
        """Whether there was a version to apply."""
        assert self.binding is not None
        version, seen = NEVER, now_ns()
        try:
            block = self.channel.take()
            if block is None:
                return False
            if self._decoder is not None:
                block = self._decoder.decode(block)
            version, published = block.version, block.published_ns
            self._apply(block)
            if self._pass_on is not None:
                self._pass_on(self.weights)
        except Exception as error:
            self._answer_failed(version)
            self.reported_error = error
            raise
        worker = self.channel.worker
        count = 0 if self._verifier is None else self._verifier.take_count()
        times = published, seen, now_ns()
        self.channel.answer(Answer(worker, APPLIED, version, *times, verified_calls=count))
        self._news.notify_all()
        return True

    def _apply(self, block: Snapshot) -> None:
        assert self.binding is not None
        if self._verifier is not None:
            self._verifier.check_parameters(self.binding)  # of the version that was used until now
            self._verifier.check_arrived(block)
        if self._zero_copy:
            self.binding.point_at(block)
            self.channel.keep_block()
        else:
            self.binding.load(block)
        if self._verifier is not None:
            self._verifier.check_applied(self.binding, block)
        self.version = block.version

    def verify_call(self) -> None:
        """Before a use of the model: raise `WeightsDiffer` if a check is due and fails."""
        if self._verifier is not None:
            with self._lock:
                assert self.binding is not None
                self._verifier.check_call(self.binding)

    def _answer_failed(self, version: int) -> None:
        text = traceback.format_exc()
        self.channel.answer(Answer(self.channel.worker, FAILED, version, text=text))

    # -- waiting for versions

    def wait_for_news(self, timeout: float, fds: Collection[int]) -> bool:
        """Sleep until there is news, the sender is gone, or one of `fds` is readable."""
        self.channel_alone("wait_for_news")
        deadline = time.monotonic() + timeout
        with self._lock:  # `close` wakes this thread and waits for it
            while not self.channel.has_news():
                remaining = deadline - time.monotonic()
                ready = self._sleep(max(0.0, remaining), fds)
                self._check_open()
                woken = not set(fds).isdisjoint(ready)
                if remaining <= 0 or woken or self.channel.sender_gone():
                    return self.channel.has_news()
            return True

    def _sleep(self, timeout: float, fds: Collection[int] = ()) -> list[int]:
        """Return when there may be news, one of `fds` is readable, or the time is over."""
        with self.channel.sleeping():
            timeout = 0.0 if self.channel.has_news() else min(timeout, self.channel.look_every_s)
            return wait_for([self._stop.fd, *self.channel.fds(), *fds], timeout)

    def channel_alone(self, call: str) -> ReceiverChannel:
        """The channel, if no background thread reads from it."""
        if self._thread is not None:
            raise RuntimeError(
                f"{call}: the background thread applies new versions; use connect(background=False)"
            )
        return self.channel

    def _check_open(self) -> None:
        if self._stopping:
            raise RuntimeError(f"{self}: another thread has called shutdown()")

    def _run(self) -> None:
        """The background thread: apply versions until the sender or the owner stops it."""
        try:
            while not self._stopping:
                self._sleep(60.0)
                if self._stopping or (not self._apply_and_report() and self.channel.sender_gone()):
                    return
        except Exception:  # for instance, no descriptors are left: nothing more is applied
            self._answer_failed(NEVER)
            raise
        finally:
            self._thread_ended = True
            with self._lock:
                self._news.notify_all()

    def _apply_and_report(self) -> bool:
        """Apply; an error that the sender is told about is not raised here."""
        try:
            with self._lock:
                return self._apply_newest()
        except Exception as error:
            if error is not self.reported_error:
                raise
            return True

    def has_news(self) -> bool:
        """Whether `receive` may find a version; never with a background thread."""
        return self._thread is None and self.channel.has_news()

    # -- releasing memory

    def own_memory(self) -> None:
        """Give the model's parameters their own memory until the next version arrives."""
        with self._lock:
            if self.binding is not None and self._zero_copy:
                self.binding.detach_from_snapshots()

    def close(self) -> None:
        """Stop applying versions, and release the sender's memory. The model keeps its weights.

        If a thread does not leave `reading()` in time, that thread does the rest.
        """
        self._stopping = True
        self._stop.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        if not self._opened or not self._lock.acquire(timeout=_CLOSE_S):
            return
        try:
            self._let_go()
        finally:
            self._lock.release()

    def _let_go(self) -> None:
        """Call it with the lock; a second call does nothing."""
        try:
            self.own_memory()
        finally:
            self.channel.close()


def _copied(weights: Any) -> Any:
    """The same weights in new memory."""
    if not isinstance(weights, dict):
        return weights.clone()
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in weights.items()}


_POINTING: weakref.WeakSet[Receiver] = weakref.WeakSet()


def _forbid_use_in_child() -> None:
    """The blocks at which a model points may be overwritten while a forked process reads them."""
    for receiver in _POINTING:
        if receiver.binding is not None:
            receiver.binding.forbid_use(
                f"this process was forked from {receiver}, whose parameters point at memory of the "
                "sender (zero_copy=True): use the model in the worker, or zero_copy=False"
            )


os.register_at_fork(after_in_child=_forbid_use_in_child)
