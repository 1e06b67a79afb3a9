"""The lifecycle of a weight-sync scheme: one model, one sender, any number of workers.

    trainer                                     worker (another process)
    -------                                     ------------------------
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=..., devices=[...])
    start workers, handing them `scheme`  --->  scheme.init_on_receiver(model=..., worker_idx=i)
    scheme.connect()                      <-->  scheme.connect()           (version 0 in use)
    scheme.send()                         --->  scheme.receive()           (or in the background)
    scheme.shutdown()                           scheme.shutdown()

What a scheme does at its two ends is in `sender.py` and `receiver.py`; how a snapshot travels is a
`Transport`. This class holds what is handed to workers, and is the face of it all.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, Self

from sync.forms import SenderForm, resolve_model
from sync.layout import Layout
from sync.link import Link
from sync.receiver import ReceiverEnd
from sync.sender import SenderEnd
from sync.slots import Slots
from sync.snapshot import NEVER
from sync.stats import SendStats
from sync.strategy import Weights, WeightStrategy, is_by_worker
from sync.transport import Transport
from sync.views import WeightReceiver, WeightSender
from sync.waiting import LONGEST_S
from sync.wire import check_wire, make_decoder


class WeightSyncScheme(ABC):
    """Brings the weights of one model from a trainer to its workers, version by version.

    strategy: "tensordict", "state_dict" or a `WeightStrategy`.
    sync: whether `send` waits until every addressed worker has the new version in use.
    timeout, connect_timeout: seconds after which a send or a rendezvous is an error.
    check_finite: refuse to send NaN and infinite values.
    wire: how numbers are written while they travel: "float32" (as they are), "bfloat16", "float16",
        "int8" or "delta"; `wire/` says what each does to them.
    link: have snapshots arrive as late as over this network, a `Link` or the name of a preset.
    """

    _sender_end: type[SenderEnd] = SenderEnd
    _moves_nothing = ""  # why there is nothing to encode or to delay, in a kind of scheme without
    _zero_copy: bool | None = False

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        sync: bool = True,
        timeout: float = 10.0,
        connect_timeout: float = 60.0,
        check_finite: bool = True,
        wire: str = "float32",
        link: Link | str | None = None,
    ):
        if isinstance(strategy, str):
            strategy = WeightStrategy(strategy)
        if not isinstance(strategy, WeightStrategy):
            raise ValueError(
                f"strategy={strategy!r}: expected 'tensordict', 'state_dict' or a WeightStrategy"
            )
        for name, seconds in (("timeout", timeout), ("connect_timeout", connect_timeout)):
            if not isinstance(seconds, Real) or not 0 <= seconds <= LONGEST_S:
                raise ValueError(f"{name}={seconds!r}: expected seconds, from 0 to {LONGEST_S:g}")
        self.strategy = strategy
        self.sync = sync
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.check_finite = check_finite
        self.wire = check_wire(wire)
        self.link = Link.of(link)
        if self._moves_nothing and (self.wire != "float32" or self.link is not None):
            given = f"wire={wire!r}" if self.wire != "float32" else f"link={link!r}"
            raise ValueError(f"{given}: {self._moves_nothing}")
        self.model_id: str | None = None
        self._layout: Layout | None = None
        self._transports: dict[int, Transport] = {}
        self._num_workers = 0
        self._leave_process()

    def _leave_process(self) -> None:
        """What belongs to one process, and travels to no other."""
        self._pid = os.getpid()
        self._sender: SenderEnd | None = None
        self._receiver: ReceiverEnd | None = None
        self._context: Callable[[], Any] = _nothing
        self._shut = False
        self._cut_short = False  # whether an interrupt ended its shutdown
        self._last_version = NEVER

    def _point_at_snapshots(self, zero_copy: bool | None) -> None:
        """Whether workers may point their parameters at one; not where it has to be decoded."""
        if zero_copy and self.wire != "float32":
            raise ValueError(
                f"zero_copy=True with wire={self.wire!r}: parameters cannot point at weights that "
                'have to be decoded; take wire="float32", or leave zero_copy out'
            )
        self._zero_copy = zero_copy if self.wire == "float32" else False

    # -- what a kind of scheme defines

    @abstractmethod
    def _open(self, layout: Layout, num_workers: int) -> tuple[Slots, dict[int, Transport]]:
        """Make, in the sender, everything that is handed to workers."""

    def _check_by_worker(self) -> None:
        """Raise if this scheme, as it was set up, cannot send each worker its own weights."""

    # -- the sender's side

    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: Weights | None = None,
        model: Any = None,
        params_map: Mapping[int, Weights] | None = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        """Say what will be sent, and to how many workers. Nothing is communicated yet.

        One of: `model_id` + `context`; `params_map`; `weights` or `model` + `devices` (one for each
        worker); `weights` or `model` + `device_map_fn` + `num_workers`. `ctx` is the context that
        will start the workers: CUDA workers are refused if it forks.
        """
        form = SenderForm.of(
            model_id=model_id,
            context=context,
            weights=weights,
            model=model,
            params_map=params_map,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
            ctx=ctx,
        )
        sender = self._make_sender(form)
        self.shutdown()
        self._leave_process()
        self.model_id = model_id
        self._context = _nothing if context is None else weakref.ref(context)
        self._layout = sender.layout
        self._num_workers = form.num_workers
        slots, self._transports = self._open(sender.wire_layout, form.num_workers)
        for worker, transport in self._transports.items():
            transport.worker_idx, transport.timeout = worker, self.timeout
            transport.strategy = self.strategy
            transport.device = form.devices[worker]
            transport.shares_slots = form.num_workers > 1
            transport.only_in_scheme = self._only_in_scheme()
        sender.open(slots, self._transports)
        self._sender = sender
        _OPEN.add(self)

    def _make_sender(self, form: SenderForm) -> SenderEnd:
        return self._sender_end(
            form,
            self.strategy,
            timeout=self.timeout,
            connect_timeout=self.connect_timeout,
            check_finite=self.check_finite,
            wire=self.wire,
            link=self.link,
        )

    def _only_in_scheme(self) -> str:
        """Why transports cannot be used without their scheme, if they cannot."""
        if self.wire != "float32":
            return f"has wire={self.wire!r}"
        return "has a slow link" if self.link is not None else ""

    def for_worker(self, worker_idx: int) -> Self:
        """The scheme as one worker needs it, to be handed to that worker's process.

        Handing over the whole does as well, but has a few descriptors for each worker in it, and
        the fork server passes on some 250.
        """
        twin = copy.copy(self)
        lines = self._transports
        twin._transports = {worker_idx: self._line(worker_idx).alone()} if lines else {}
        twin._shut = True  # until a worker takes it: there is nothing to end when it is let go of
        return twin

    def describe_worker(self, worker_idx: int, label: str) -> None:
        """What error messages say about a worker besides its number and device."""
        sender = self._need_sender("describe_worker")
        sender.transports[sender.workers(worker_idx)[0]].label = label

    def send(
        self,
        weights: Weights | Mapping[int, Weights] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Publish the weights as the next version, to all workers or only to `worker_ids`.

        weights: of the registered model if None; a module, a TensorDict or a dict; or a dict of
        these by worker. With `sync=True`, returns when every addressed worker has them in use.
        """
        workers = self._publish("send", weights, worker_ids, settling=self.sync)
        if self.sync:
            self._need_sender("send").settle(workers)

    def send_async(
        self,
        weights: Weights | Mapping[int, Weights] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Publish and return at once, whatever `sync` says; `wait_async` waits."""
        self._publish("send_async", weights, worker_ids, settling=False)

    def wait_async(self, timeout: float | None = None) -> None:
        """Wait until every worker uses the newest version that was addressed to it."""
        sender = self._need_sender("wait_async")
        sender.settle(sender.workers(None), timeout)

    def _publish(
        self,
        call: str,
        weights: Any,
        worker_ids: int | Sequence[int] | None,
        *,
        settling: bool,
    ) -> list[int]:
        sender = self._need_sender(call)
        by_worker = is_by_worker(weights)
        if by_worker:
            self._check_by_worker()
        return sender.send(weights, worker_ids, by_worker=by_worker, settling=settling)

    # -- the receiver's side

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Say which model of this process takes the weights. Nothing is communicated yet.

        model: a module, a TensorDict or a dict; or `model_id` + `context`. Without any, `receive`
        returns weights of its own.
        """
        if self._is_sender and not self._shut:
            raise RuntimeError(
                "this process is the sender: hand the scheme to the worker's process, or a "
                "copy.deepcopy of it to a worker in this one"
            )
        if not self._transports:
            raise RuntimeError(
                "init_on_receiver(): this scheme did not go through init_on_sender()"
            )
        if context is not None:
            model_id = model_id or self.model_id
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
            if model is None and model_id is not None:
                model = resolve_model(context, model_id)
        transport = self._line(worker_idx)
        assert self._layout is not None
        if self._receiver is not None and self._pid == os.getpid():
            self._receiver.close()
        self._leave_process()
        self.model_id = model_id or self.model_id
        self._context = _nothing if context is None else weakref.ref(context)
        transport.become_receiver()
        self._receiver = ReceiverEnd(
            transport,
            self._layout,
            model,
            self.strategy,
            zero_copy=self._zero_copy,
            decoder=make_decoder(self.wire, self._layout),
            pass_on=self._pass_on if hasattr(context, "update_policy_weights_") else None,
        )

    def _pass_on(self, weights: Any) -> None:
        """Hand weights that arrived down to the workers of this worker."""
        context = self._context()
        if context is not None:
            context.update_policy_weights_(weights, model_id=self.model_id)

    def receive(self, timeout: float | None = None) -> Any:
        """Take the newest version into use and return its weights; None if there is no newer one.

        timeout: seconds to wait for one; without it, only look.
        """
        return self._need_connected("receive").receive(timeout)

    def sender_knows(self, error: BaseException) -> bool:
        """Whether this is what `receive` raised last, and the sender has its traceback."""
        return self._receiver is not None and self._receiver.told is error

    def reading(self) -> AbstractContextManager[int]:
        """`with scheme.reading() as version:` the model holds still, at that version."""
        return self._need_connected("reading").reading()

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What a receiver should call in the place of `call`, which uses the model.

        That is `call` itself, unless this scheme counts what happens to the weights meanwhile.
        """
        return call

    def has_news(self) -> bool:
        """Whether there may be something newer to `receive`: no lock, no system call, no copy."""
        receiver = self._receiver or self._need_receiver("has_news")
        return receiver.transport.has_news()

    def wait_for_news(self, timeout: float, fds: Collection[int] = ()) -> bool:
        """Sleep until there is news, the sender is gone, or one of `fds` is readable; `has_news()`.

        timeout: seconds after which to return in any case.
        """
        return self._need_receiver("wait_for_news").wait_for_news(timeout, fds)

    def news_fds(self) -> list[int]:
        """What `wait_for_news` polls, for a poll of one's own inside `dozing()`."""
        return self._need_receiver("news_fds").transport.offer_fds()

    def dozing(self) -> AbstractContextManager[None]:
        """`with scheme.dozing():` look at `has_news()`, then poll `news_fds()`: an offer wakes.

        Outside of it nobody is rung, because that would cost the sender a system call.
        """
        return self._need_receiver("dozing").transport.dozing()

    def resting(self) -> AbstractContextManager[None]:
        """`with scheme.resting():` the model is not used, and a new version may find its way in.

        For a receiver that looks for versions itself. Where a scheme can write a small model from
        outside, it does so now, and wakes nobody for it; `has_news()` and `version` say so.
        """
        return self._need_receiver("resting").resting()

    # -- both sides

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Weights | None = None,
        background: bool = True,
    ) -> None:
        """Meet the other side and hand over the initial weights, within `connect_timeout`.

        On the sender: wait for all workers, or for one (also one that takes a dead one's place).
        On a receiver: wait for the initial weights. Then, with `background`, a thread applies what
        comes, so take `reading()` around every use of the model; without it, call `receive()`
        between uses.
        """
        if self._is_sender:
            self._need_sender("connect").connect(worker_idx, weights)
            return
        receiver = self._need_receiver("connect")
        if worker_idx is not None and worker_idx != self.worker_idx:
            raise ValueError(f"this receiver is worker {self.worker_idx}, not {worker_idx}")
        if weights is not None:
            raise ValueError("connect(weights=...) is for the sender: a receiver is given weights")
        receiver.connect(self.connect_timeout, background=background)

    @property
    def _is_sender(self) -> bool:
        """Also false in a process forked from the sender's."""
        return self._sender is not None and self._pid == os.getpid()

    @property
    def context(self) -> Any:
        return self._context()

    @property
    def model(self) -> Any:
        """The model whose weights are sent, or into which they are received."""
        if self._is_sender and self._sender is not None:
            return self._sender.form.source
        return None if self._receiver is None else self._receiver.model

    @property
    def weights(self) -> Any:
        """The model's weights in the strategy's form, sharing its memory."""
        if self._is_sender and self._sender is not None:
            return self.strategy.extract_weights(self._sender.form.weights_for(0))
        return None if self._receiver is None else self._receiver.weights

    @property
    def worker_idx(self) -> int | None:
        return None if self._receiver is None else self._receiver.transport.worker_idx

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def version(self) -> int:
        """The version last published (on the sender) or in use (on a receiver); -1 before any.

        After `shutdown` it is the last there was.
        """
        end = self._sender if self._is_sender else self._receiver
        return self._last_version if end is None else end.version

    @property
    def addressed(self) -> dict[int, int]:
        """The version that each worker was sent last; -1 for none yet."""
        sender = self._need_sender("addressed")
        return {worker: t.addressed for worker, t in sender.transports.items()}

    @property
    def acknowledged(self) -> dict[int, int]:
        """The version that each worker is known to use; -1 for none yet."""
        sender = self._need_sender("acknowledged")
        sender.collect()
        return {worker: t.acknowledged for worker, t in sender.transports.items()}

    @property
    def send_stats(self) -> SendStats:
        """What `stats` sums up of the sends, as it is kept: looking at it costs nothing."""
        return self._need_sender("send_stats").stats

    @property
    def stats(self) -> dict[str, Any]:
        """Bytes, times (ms) and counts of all sends, and for each worker."""
        return self._need_sender("stats").summary()

    @property
    def initialized_on_sender(self) -> bool:
        return self._is_sender

    @property
    def initialized_on_receiver(self) -> bool:
        return self._receiver is not None

    @property
    def synchronized_on_sender(self) -> bool:
        return self._is_sender and all(self._connected().values())

    @property
    def synchronized_on_receiver(self) -> bool:
        return self._receiver is not None and self._receiver.version != NEVER

    def _connected(self) -> dict[int, bool]:
        return {worker: t.connected for worker, t in self._transports.items()}

    def prepare_weights(
        self,
        weights: Any = None,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Weights in the strategy's form: of what is given, else of `context`, else the model's."""
        if weights is None and context is not None:
            weights = resolve_model(context, model_id or self.model_id or "")
        if weights is None:
            weights = self.weights
        return None if weights is None else (strategy or self.strategy).extract_weights(weights)

    def apply_weights(self, weights: Weights, inplace: bool = True) -> None:
        """Put weights into this side's model, without any communication."""
        model = self.model if self.model is not None else self.weights
        if model is None:
            raise RuntimeError("apply_weights() needs init_on_sender() or init_on_receiver() first")
        if self._receiver is not None:
            self._receiver.own_memory()
        self.strategy.apply_weights(model, weights, inplace)

    def create_transport(self, *, worker_idx: int = 0) -> Transport:
        """The transport of one worker."""
        if not self._transports:
            raise RuntimeError("create_transport() is for between init_on_sender() and shutdown()")
        return self._line(worker_idx)

    def _line(self, worker_idx: Any) -> Transport:
        if worker_idx not in self._transports:
            known = f"has workers 0 to {self.num_workers - 1}"
            if len(self._transports) < self.num_workers:
                known = f"was made for worker {next(iter(self._transports))}"
            raise ValueError(f"worker_idx={worker_idx!r}: this scheme {known}")
        return self._transports[worker_idx]

    def shutdown(self) -> None:
        """Let the other side go, and release everything. Bounded.

        A second call does nothing, but for what an interrupt has kept the first from.

        The scheme lets go of the model, which keeps its weights in memory of its own, and of every
        snapshot; of all it knew, `version` and `model_id` stay.
        """
        if (self._shut and not self._cut_short) or self._pid != os.getpid():
            return
        self._last_version = self.version
        self._shut, self._cut_short = True, False
        try:
            for end in (self._sender, self._receiver):
                if end is not None:
                    end.close()
        except BaseException as error:
            self._cut_short = not isinstance(error, Exception)
            raise
        self._sender = self._receiver = self._layout = None
        self._transports, self._num_workers = {}, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_last_version"):
            self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in (
            "_pid",
            "_sender",
            "_receiver",
            "_context",
            "_shut",
            "_cut_short",
            "_last_version",
        ):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._leave_process()

    def _need_sender(self, call: str) -> SenderEnd:
        if self._sender is None or self._shut or self._pid != os.getpid():
            raise RuntimeError(f"{call} is for the sender, between init_on_sender() and shutdown()")
        return self._sender

    def _need_receiver(self, call: str) -> ReceiverEnd:
        if self._receiver is None or self._shut:
            raise RuntimeError(
                f"{call} is for a receiver, between init_on_receiver() and shutdown()"
            )
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{call} is for the receiver: this process was forked from its, and has a copy of "
                "the model, which no version reaches"
            )
        return self._receiver

    def _need_connected(self, call: str) -> ReceiverEnd:
        receiver = self._need_receiver(call)
        if receiver.version == NEVER:
            raise RuntimeError(f"{call}() before connect(): there are no weights yet")
        return receiver

    # -- the older spelling

    @staticmethod
    def from_backend(name: str, **kwargs: Any) -> WeightSyncScheme:
        """The scheme known by a short name, such as "shared" or "multiprocessing"."""
        from sync.backends import make_scheme

        return make_scheme(name, **kwargs)

    def init_on_worker(self, **kwargs: Any) -> None:
        """`init_on_receiver`, as it was called once."""
        self.init_on_receiver(**kwargs)

    def synchronize_weights(self, **kwargs: Any) -> None:
        """`connect`, as it was called once."""
        self.connect(**kwargs)

    def create_sender(self) -> WeightSender:
        return WeightSender(self)

    def get_sender(self) -> WeightSender:
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        return WeightReceiver(self)

    def get_receiver(self) -> WeightReceiver:
        return WeightReceiver(self)


def _nothing() -> None:
    return None


_OPEN: weakref.WeakSet[WeightSyncScheme] = weakref.WeakSet()


@atexit.register
def _shut_down_the_rest() -> None:
    """Before multiprocessing waits for children that wait for weights."""
    for scheme in list(_OPEN):
        scheme.shutdown()
