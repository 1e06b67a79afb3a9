"""The lifecycle of a weight-sync scheme: one model, one sender, any number of workers.

    trainer                                     worker (another process)
    -------                                     ------------------------
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=..., devices=[...])
    start workers, passing them `scheme`  --->  scheme.init_on_receiver(model=..., worker_idx=i)
    scheme.connect()                      <-->  scheme.connect()           (version 0 in use)
    scheme.send()                         --->  scheme.receive()           (or in the background)
    scheme.shutdown()                           scheme.shutdown()

`sender.py` and `receiver.py` are the two ends. A pair of channels (`channel_interface.py`) moves
versions between them. Each kind of scheme creates its own: `schemes/` has one file for each.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

from sync.channel_interface import ReceiverChannel, SenderChannel
from sync.effects.exact_lag import Lag
from sync.effects.pipeline import Pipeline
from sync.effects.rounding import RoundedFormat, check_wire
from sync.effects.slow_link import Link, SlowLinkSender
from sync.effects.tearing import Tear
from sync.local.waiting import LONGEST_S
from sync.model.block import NEVER, CheckFinite, Layout
from sync.model.strategy import Weights, WeightStrategy
from sync.receiver import Receiver
from sync.schemes import scheme_class
from sync.sender import Sender, is_by_worker
from sync.sender_form import SenderForm, resolve_model
from sync.transports import SchemeTransport
from sync.verify import Verifier, check_verify
from sync.worker_record import SendStats, WorkerRecord

SEND_TIMEOUT_S = 10.0  # of a scheme without a timeout of its own, outside of a collector

P = ParamSpec("P")
R = TypeVar("R")


def closes_on_interrupt(call: Callable[P, R]) -> Callable[P, R]:
    """Shut the scheme down if Ctrl-C ends the call, which may have left it half done."""

    @functools.wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except KeyboardInterrupt:
            args[0].shutdown()  # type: ignore[attr-defined]
            raise

    return guarded


class WeightSyncScheme:
    """Moves the weights of one model from a trainer to its workers, version by version.

    strategy: "tensordict", "state_dict" or a `WeightStrategy`.
    sync: whether `send` waits until every addressed worker uses the new version.
    timeout, connect_timeout: seconds after which a send or a connect is an error. None: a send may
        take 10 s, or in a collector as long as the collector's timeout.
    check_finite: refuse to send NaN and infinite parameters; "all" also refuses such buffers.
    wire: the number format in which weights travel: "float32" (unchanged), "bfloat16", "float16",
        "int8"; see `effects/rounding.py`.
    round_buffers: whether a lossy wire format also rounds the buffers of a module.
    link: delay versions like this network, a `Link` or the name of a preset.
    lag: send versions that are older by this number, or by a random `Lag`.
    tear: compose each version from itself and an older one, see `Tear`.
    verify: "every" or "sampled": workers compare their weights with what was published, at each
        policy call or at one in a hundred, and whenever they apply a version (`verify.py`).

    first_version: the number of version 0 in the count of the run, if this scheme continues another
        one. Lags and tears are drawn by that count. Set it before `init_on_sender`.

    A subclass names the two channel classes of its mechanism. `moves_weights` is False if no
    weights travel that could be encoded, delayed or torn.
    """

    sender_channel: ClassVar[type[SenderChannel]]
    receiver_channel: ClassVar[type[ReceiverChannel]]
    moves_weights: ClassVar[bool] = True
    zero_copy: bool = False  # whether a model points at the blocks that it receives

    # What belongs to one process and is not pickled; `_leave_process` resets it.
    _of_one_process: ClassVar[tuple[str, ...]] = (
        "_pid",
        "_sender",
        "_receiver",
        "_context",
        "_last_version",
    )
    _sender: Sender | None = None
    _receiver: Receiver | None = None
    _context: weakref.ref[Any] | None = None
    _last_version: int = NEVER  # after `shutdown`

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        timeout: float | None = None,
        connect_timeout: float = 60.0,
        check_finite: CheckFinite = True,
        wire: str = "float32",
        round_buffers: bool = False,
        link: Link | str | None = None,
        lag: Lag | int | None = None,
        tear: Tear | None = None,
        verify: str = "off",
    ):
        if not hasattr(self, "sender_channel"):
            raise TypeError(f"{type(self).__name__} is abstract: it names no sender_channel")
        if isinstance(strategy, str):
            strategy = WeightStrategy(strategy)
        if not isinstance(strategy, WeightStrategy):
            raise ValueError(
                f"strategy={strategy!r}: expected 'tensordict', 'state_dict' or a WeightStrategy"
            )
        limits = {"connect_timeout": connect_timeout} | (
            {} if timeout is None else {"timeout": timeout}
        )
        for name, seconds in limits.items():
            is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
            if not is_number or not 0 <= seconds <= LONGEST_S:
                raise ValueError(f"{name}={seconds!r}: expected seconds, from 0 to {LONGEST_S:g}")
        if not isinstance(sync, bool):
            raise ValueError(f"sync={sync!r}: expected True or False")
        if check_finite not in (True, False, "all"):
            raise ValueError(f"check_finite={check_finite!r}: expected True, False or 'all'")
        self.strategy = strategy
        self.sync = sync
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.check_finite: CheckFinite = check_finite
        self.wire = check_wire(wire)
        self.round_buffers = round_buffers
        self.link = Link.of(link)
        self.lag, self.tear = Lag.of(lag), Tear.of(tear)
        self.first_version = 0
        self.verify = check_verify(verify)
        if not self.moves_weights:
            self._refuse_effects(
                wire=wire,
                round_buffers=round_buffers,
                link=link,
                lag=lag,
                tear=tear,
                verify=verify,
            )
        self.model_id: str | None = None
        self._layout: Layout | None = None
        self._handout: Any = None
        self._devices: tuple[Any, ...] = ()
        self._leave_process()

    def _refuse_effects(self, **given: Any) -> None:
        """Raise if an effect on versions is requested, but no versions travel."""
        nothing = {
            "wire": "float32",
            "round_buffers": False,
            "link": None,
            "lag": None,
            "tear": None,
            "verify": "off",
        }
        for name, value in nothing.items():
            if getattr(self, name) != value:
                lacks = "moves no weights that could be encoded, delayed or torn"
                if name == "verify":
                    lacks = "publishes no weights that could be compared"
                raise ValueError(
                    f"{name}={given[name]!r}: {type(self).__name__} {lacks}; "
                    "use SharedMemWeightSyncScheme"
                )

    @property
    def history(self) -> int:
        """How many versions before the newest one are needed to decide what workers get next."""
        lag = 0 if self.lag is None else self.lag.largest
        return lag + (0 if self.tear is None else self.tear.span)

    def _leave_process(self) -> None:
        """Reset what belongs to one process."""
        for name in self._of_one_process:
            self.__dict__.pop(name, None)
        self._pid = os.getpid()

    def _remember(self, context: Any) -> None:
        self._context = None if context is None else weakref.ref(context)

    # -- what a subclass defines

    def _make_sender(self, layout: Layout, num_workers: int) -> SenderChannel:
        """The sender's channel, for blocks of this layout."""
        return self.sender_channel(layout, num_workers)

    def _make_receiver(self, handout: Any, layout: Layout, worker: int) -> ReceiverChannel:
        """The worker's channel."""
        return self.receiver_channel(handout, layout, worker)

    def _check_form(self, form: SenderForm) -> None:
        """Raise if this scheme cannot send what `init_on_sender` describes."""

    def _check_ready(self) -> None:
        """Raise if a sender lacks something that it needs to connect."""

    def _check_by_worker(self) -> None:
        """Raise if this scheme, with its options, cannot send each worker its own weights."""

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
        """Declare what will be sent, and to how many workers. Does not communicate yet.

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
        self._check_form(form)
        sender = Sender(
            form,
            self.strategy,
            timeout=SEND_TIMEOUT_S if self.timeout is None else self.timeout,
            connect_timeout=self.connect_timeout,
            check_finite=self.check_finite,
            verify=self.verify != "off",
        )
        self.shutdown()
        self._leave_process()
        sender.pipeline = self._open_pipeline(sender.layout, form.num_workers)
        self.model_id = model_id
        self._remember(context)
        self._sender, self._layout = sender, sender.layout
        self._handout, self._devices = sender.channel.handout, form.devices
        _OPEN.add(self)

    def _open_pipeline(self, layout: Layout, num_workers: int) -> Pipeline:
        """The channel, and what happens to a version before it travels."""
        encoder = RoundedFormat.of(self.wire, layout, round_buffers=self.round_buffers)
        channel = self._make_sender(layout if encoder is None else encoder.layout, num_workers)
        if self.link is not None:
            channel = SlowLinkSender(channel, self.link)
        return Pipeline(
            channel,
            layout,
            lag=self.lag,
            tear=self.tear,
            encoder=encoder,
            first_version=self.first_version,
        )

    def check_worker(self, worker_idx: Any) -> int:
        """The number of a worker, or a `ValueError` if there is no such worker."""
        if worker_idx not in range(self.num_workers):
            raise ValueError(
                f"worker_idx={worker_idx!r}: this scheme has workers 0 to {self.num_workers - 1}"
            )
        return int(worker_idx)

    def describe_worker(self, worker_idx: int, label: str) -> None:
        """Add a description of a worker to error messages, besides its number and device."""
        self.worker(worker_idx, call="describe_worker").label = label

    def worker(self, worker_idx: int, *, call: str = "worker") -> WorkerRecord:
        """What the sender knows about a worker: its versions, statistics and last failure."""
        sender = self._need_sender(call)
        return sender.workers[sender.chosen(worker_idx)[0]]

    @closes_on_interrupt
    def send(
        self,
        weights: Weights | Mapping[int, Weights] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Publish the weights as the next version, to all workers or only to `worker_ids`.

        weights: a module, a TensorDict or a dict, or a dict of these by worker. If None, those of
        the registered model. With `sync=True`, returns when every addressed worker uses them.
        """
        workers = self._publish("send", weights, worker_ids, wait=self.sync)
        if self.sync:
            self._need_sender("send").settle(workers)

    @closes_on_interrupt
    def send_async(
        self,
        weights: Weights | Mapping[int, Weights] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Publish and return at once, even with `sync=True`; see `wait_async`."""
        self._publish("send_async", weights, worker_ids, wait=False)

    @closes_on_interrupt
    def wait_async(
        self, timeout: float | None = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Wait until all workers, or `worker_ids`, use the newest version sent to them."""
        sender = self._need_sender("wait_async")
        sender.settle(sender.chosen(worker_ids), timeout, call="wait_async")

    def _publish(
        self,
        call: str,
        weights: Any,
        worker_ids: int | Sequence[int] | None,
        *,
        wait: bool,
    ) -> list[int]:
        sender = self._need_sender(call)
        if is_by_worker(weights):
            self._check_by_worker()
        return sender.send(weights, worker_ids, wait=wait)

    # -- the receiver's side

    def init_on_receiver(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Declare which model of this process receives the weights. Does not communicate yet.

        Pass `model` (a module, a TensorDict or a dict), or `model_id` + `context`. Without either,
        `receive` returns weights in new memory.
        """
        if self._is_sender:
            raise RuntimeError(
                "this process is the sender: pass the scheme to the worker's process, or a "
                "copy.deepcopy of it to a worker in this process"
            )
        if self._layout is None:
            raise RuntimeError(
                "init_on_receiver(): call init_on_sender() on this scheme first, in the trainer"
            )
        if context is not None:
            model_id = model_id or self.model_id
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
            if model is None and model_id is not None:
                model = resolve_model(context, model_id)
        worker = self.check_worker(worker_idx)
        if self._receiver is not None and self._pid == os.getpid():
            self._receiver.close()
        self._leave_process()
        self.model_id = model_id or self.model_id
        self._remember(context)
        decoder = RoundedFormat.of(self.wire, self._layout, round_buffers=self.round_buffers)
        layout = self._layout if decoder is None else decoder.layout
        self._receiver = Receiver(
            self._make_receiver(self._handout, layout, worker),
            self._layout,
            model,
            self.strategy,
            device=self._devices[worker],
            zero_copy=self.zero_copy,
            pass_on=self._pass_on if hasattr(context, "update_policy_weights_") else None,
            verifier=None if self.verify == "off" else Verifier(self.verify, worker),
            decoder=decoder,
        )

    def _pass_on(self, weights: Any) -> None:
        """Pass received weights on to the workers of this worker."""
        if self.context is not None:
            self.context.update_policy_weights_(weights, model_id=self.model_id)

    @closes_on_interrupt
    def receive(self, timeout: float | None = None) -> Any:
        """Apply the newest version and return its weights; None if there is no newer one.

        timeout: seconds to wait for one; None does not wait.
        """
        return self._need_connected("receive").receive(timeout)

    def is_reported(self, error: BaseException) -> bool:
        """Whether this is what `receive` raised last, and the sender has its traceback."""
        return self._receiver is not None and self._receiver.reported_error is error

    def reading(self) -> AbstractContextManager[int]:
        """Inside `with scheme.reading() as version:`, the weights stay at that version."""
        return self._need_connected("reading").reading()

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function that a receiver should call instead of `call`, which uses the model.

        It is `call` itself, unless this scheme checks the weights at such calls.
        """
        if self.verify == "off":
            return call

        def verified(*inputs: Any) -> Any:
            self._need_connected("verify").verify_call()
            return call(*inputs)

        return verified

    def has_news(self) -> bool:
        """Whether there may be a newer version to `receive`. Cheap enough to call at every step."""
        return self._need_receiver("has_news").has_news()

    @closes_on_interrupt
    def wait_for_news(self, timeout: float, fds: Collection[int] = ()) -> bool:
        """Sleep until there is news, the sender is gone, or one of `fds` is readable.

        timeout: seconds after which to return in any case. Returns `has_news()`.
        """
        return self._need_receiver("wait_for_news").wait_for_news(timeout, fds)

    def news_fds(self) -> list[int]:
        """The descriptors that `wait_for_news` polls, to poll them yourself inside `sleeping()`."""
        return self._need_receiver("news_fds").channel_alone("news_fds").fds()

    def sleeping(self) -> AbstractContextManager[None]:
        """Inside `with scheme.sleeping():`, check `has_news()`, then poll `news_fds()`.

        Outside of it, a publish does not wake this worker, to save the sender a system call.
        """
        return self._need_receiver("sleeping").channel_alone("sleeping").sleeping()

    # -- both sides

    @closes_on_interrupt
    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Weights | None = None,
        background: bool = True,
    ) -> None:
        """Connect to the other side and exchange the initial weights, within `connect_timeout`.

        On the sender: wait for all workers, or for one (also for the replacement of a dead one).
        On a receiver: wait for the initial weights. With `background`, a thread then applies new
        versions, so use the model only inside `reading()`. Without it, call `receive()` between
        uses of the model.
        """
        if self._is_sender:
            sender = self._need_sender("connect")
            self._check_ready()
            sender.connect(worker_idx, weights)
            return
        receiver = self._need_receiver("connect")
        if worker_idx is not None and worker_idx != self.worker_idx:
            raise ValueError(f"this receiver is worker {self.worker_idx}, not {worker_idx}")
        if weights is not None:
            raise ValueError("connect(weights=...) is for the sender, not for a receiver")
        receiver.connect(self.connect_timeout, background=background)

    @property
    def _is_sender(self) -> bool:
        """Whether this is the sender's process; false in a process forked from it."""
        return self._sender is not None and self._pid == os.getpid()

    @property
    def context(self) -> Any:
        return None if self._context is None else self._context()

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
            return self.strategy.extract_weights(self._sender.weights_for(0))
        return None if self._receiver is None else self._receiver.weights

    @property
    def worker_idx(self) -> int | None:
        return None if self._receiver is None else self._receiver.channel.worker

    @property
    def num_workers(self) -> int:
        return len(self._devices)

    @property
    def version(self) -> int:
        """The version last published (on the sender) or in use (on a receiver); -1 before any.

        After `shutdown`, it is the last version.
        """
        end = self._sender if self._is_sender else self._receiver
        return self._last_version if end is None else end.version

    @property
    def addressed(self) -> dict[int, int]:
        """The version that each worker was sent last; -1 for none yet."""
        sender = self._need_sender("addressed")
        return {record.index: record.addressed for record in sender.workers}

    @property
    def acknowledged(self) -> dict[int, int]:
        """The version that each worker is known to use; -1 for none yet."""
        sender = self._need_sender("acknowledged")
        sender.collect()
        return {record.index: record.acknowledged for record in sender.workers}

    @property
    def send_stats(self) -> SendStats:
        """The records of sends that `stats` summarises. Reading them is cheap."""
        return self._need_sender("send_stats").stats

    @property
    def stats(self) -> dict[str, Any]:
        """Bytes, times (ms) and counts of all sends, and for each worker.

        "moved" counts versions and bytes by mechanism.
        """
        return self._need_sender("stats").summary()

    @property
    def mechanism(self) -> str:
        """How weights travel, in a few words: "shared memory"."""
        return self._need_sender("mechanism").channel.mechanism

    @property
    def verified_calls(self) -> int:
        """How many policy calls `verify` has checked, up to the workers' last answers."""
        sender = self._need_sender("verified_calls")
        sender.collect()
        return sum(record.verified_calls for record in sender.workers)

    @property
    def links(self) -> dict[int, Any]:
        """The state of each worker's slow link; empty without one."""
        channel: Any = self._need_sender("links").channel
        return channel.links if isinstance(channel, SlowLinkSender) else {}

    @property
    def initialized_on_sender(self) -> bool:
        return self._is_sender

    @property
    def initialized_on_receiver(self) -> bool:
        return self._receiver is not None

    @property
    def synchronized_on_sender(self) -> bool:
        if self._sender is None or not self._is_sender:
            return False
        return all(record.synchronized for record in self._sender.workers)

    @property
    def synchronized_on_receiver(self) -> bool:
        return self._receiver is not None and self._receiver.version != NEVER

    def apply_weights(self, weights: Weights, inplace: bool = True) -> None:
        """Copy weights into this side's model, without any communication."""
        model = self.model if self.model is not None else self.weights
        if model is None:
            raise RuntimeError("apply_weights() needs init_on_sender() or init_on_receiver() first")
        if self._receiver is not None:
            self._receiver.apply(weights, inplace)
        else:
            self.strategy.apply_weights(model, weights, inplace)

    def prepare_weights(
        self,
        weights: Any = None,
        model_id: str | None = None,
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Weights in the strategy's form: these, or those of `context`, or those of the model."""
        if weights is None and context is not None:
            weights = resolve_model(context, model_id or self.model_id or "")
        if weights is None:
            weights = self.weights
        return None if weights is None else (strategy or self.strategy).extract_weights(weights)

    def create_transport(self, *, worker_idx: int = 0) -> SchemeTransport:
        """This scheme as the transport of one worker."""
        if not self.num_workers:
            raise RuntimeError("call create_transport() between init_on_sender() and shutdown()")
        return SchemeTransport(self, self.check_worker(worker_idx))

    # -- TorchRL's older spellings

    def init_on_worker(self, **arguments: Any) -> None:
        """`init_on_receiver`."""
        self.init_on_receiver(**arguments)

    def synchronize_weights(self, **arguments: Any) -> None:
        """`connect`."""
        self.connect(**arguments)

    def update_weights(self, weights: Any = None, workers: Any = None) -> None:
        """`send`."""
        self.send(weights, workers)

    def create_sender(self) -> Self:
        """The scheme, which is both a sender and a receiver."""
        return self

    create_receiver = get_sender = get_receiver = create_sender

    # -- ending

    def shutdown(self) -> None:
        """Disconnect from the other side and release everything. A second call does nothing.

        The model keeps its weights, in its own memory. Of the scheme's state, only `version` and
        `model_id` remain. The time is bounded.
        """
        if self._pid != os.getpid():
            return
        version, ends = self.version, (self._sender, self._receiver)
        self._leave_process()
        self._last_version, self._layout, self._handout, self._devices = version, None, None, ()
        for end in ends:
            if end is not None:
                end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_pid"):
            self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self._of_one_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._leave_process()

    def _need_sender(self, call: str) -> Sender:
        if self._sender is None or self._pid != os.getpid():
            raise RuntimeError(
                f"{call} is for the sender: call it between init_on_sender() and shutdown()"
            )
        return self._sender

    def _need_receiver(self, call: str) -> Receiver:
        if self._receiver is None:
            raise RuntimeError(
                f"{call} is for a receiver: call it between init_on_receiver() and shutdown()"
            )
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{call} is for the receiver: this process was forked from it, and its copy of the "
                "model receives no versions"
            )
        return self._receiver

    def _need_connected(self, call: str) -> Receiver:
        receiver = self._need_receiver(call)
        if receiver.version == NEVER:
            raise RuntimeError(f"{call}() before connect(): there are no weights yet")
        return receiver

    @staticmethod
    def from_backend(name: str, **kwargs: Any) -> WeightSyncScheme:
        """The scheme known by a short name, such as "shared" or "multiprocessing"."""
        scheme: WeightSyncScheme = scheme_class(name)(**kwargs)
        return scheme


_OPEN: weakref.WeakSet[WeightSyncScheme] = weakref.WeakSet()


@atexit.register
def _shut_down_the_rest() -> None:
    """Before multiprocessing waits for children that wait for weights."""
    for scheme in list(_OPEN):
        scheme.shutdown()
