"""Models to send, workers that do what they are asked, and comparison to the last bit."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, Self

import cloudpickle
import pytest
import torch
import torch.multiprocessing
from tensordict import TensorDict, TensorDictParams, is_tensor_collection
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from sync import (
    HogwildWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

WAIT_S = 30.0

# Every way in which this package brings snapshots to a worker.
KINDS: dict[str, Callable[..., WeightSyncScheme]] = {
    "shared_copy": lambda **options: SharedMemWeightSyncScheme(zero_copy=False, **options),
    "shared_zero_copy": lambda **options: SharedMemWeightSyncScheme(zero_copy=True, **options),
    "multiprocess": lambda **options: MultiProcessWeightSyncScheme(**options),
}
EVERY = {**KINDS, "hogwild": HogwildWeightSyncScheme}
EACH = pytest.mark.parametrize("kind", KINDS)
EACH_OF_ALL = pytest.mark.parametrize("kind", EVERY)


def policy(value: float | None = None) -> nn.Module:
    """A small model with parameters and buffers, all of them `value` if given."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model if value is None else fill(model, value)


def fill(model: nn.Module, value: float) -> nn.Module:
    """Set every parameter and buffer of the model, in place."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def sender(kind: str, model: Any = None, workers: int = 1, **options: Any) -> WeightSyncScheme:
    """A scheme of a kind, initialised for a model and CPU workers."""
    if options.pop("per_worker_weights", False) and kind.startswith("shared"):
        options["per_worker_weights"] = True
    scheme = EVERY[kind](**options)
    scheme.init_on_sender(model=policy(1) if model is None else model, devices=["cpu"] * workers)
    return scheme


class Counting(nn.Module):
    """A model with extra state: an object, and how often and with what it was set."""

    def __init__(self, extra: Any = None, refuses: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra, self.refuses = extra, refuses

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise RuntimeError("this owner refuses its extra state")
        self.extra = state


def nested(module: nn.Module) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, tensor in module.state_dict().items():
        *path, key = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[key] = tensor.clone()
    return tree


# Every form that weights may have, made from a module.
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "tensordict_module": lambda module: TensorDictModule(module, in_keys=["a"], out_keys=["b"]),
    "tensordict": lambda module: TensorDict.from_module(module).data.clone(),
    "tensordict_params": lambda module: TensorDictParams(
        TensorDict.from_module(module).data.clone()
    ),
    "nested_dict": nested,
    "flat_dict": lambda module: {k: v.clone() for k, v in module.state_dict().items()},
}


def inside(weights: Any) -> Any:
    """What a TensorDictModule holds is called "module." there, as in its state dict."""
    return weights.module if isinstance(weights, TensorDictModule) else weights


def bits(source: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What a module, a TensorDict or a dict holds, to the last bit, by dotted name."""
    return {name: (t.dtype, tuple(t.shape), _bytes(t)) for name, t in tensors(source)}


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data: bytes = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def tensors(source: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a source with its dotted name; written apart from the code under test."""
    if isinstance(source, Tensor):
        yield prefix.rstrip("."), source
    elif isinstance(source, Mapping) or is_tensor_collection(source):
        for key, value in source.items():
            yield from tensors(value, f"{prefix}{key}.")
    elif isinstance(source, nn.Module):
        yield from source.named_parameters(remove_duplicate=False)
        yield from source.named_buffers(remove_duplicate=False)


class Worker:
    """A process with a scheme and a model, which calls `function(scheme, model)` when asked.

    method: how its process starts, also "torch.multiprocessing.spawn".
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        make_model: Callable[[], Any] | None = policy,
        *,
        method: str = "fork",
        **receiver: Any,
    ):
        by_torch = method == "torch.multiprocessing.spawn"
        context = multiprocessing.get_context("spawn" if by_torch else method)
        self._pipe, theirs = context.Pipe()
        mine = self._pipe if method == "fork" else None  # a fork has to close its copy
        job = cloudpickle.dumps((make_model, receiver))
        args = (theirs, mine, scheme, job)
        if by_torch:
            started = torch.multiprocessing.spawn(_serve_as, args, join=False, daemon=True)
            self.process = started.processes[0]
        else:
            self.process = context.Process(target=_serve, args=args, daemon=True)
            self.process.start()
        theirs.close()

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the worker call `function(scheme, model, *args)`; `hear` has the answer."""
        self._pipe.send_bytes(cloudpickle.dumps((function, args)))

    def hear(self) -> Any:
        """What the call returned; what it raised is raised here."""
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("the worker did not answer")
        return _result(cloudpickle.loads(self._pipe.recv_bytes()))

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.tell(function, *args)
        return self.hear()

    def meet(self, scheme: WeightSyncScheme, **how: Any) -> None:
        """Connect both sides: the worker's, and this scheme with `connect(**how)`."""
        self.tell(connect)
        scheme.connect(**how)
        self.hear()

    def die(self) -> None:
        """End the process at once, and collect it."""
        self.tell(lambda scheme, model: os._exit(1))
        self.process.join(20)
        assert self.process.exitcode == 1

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send_bytes(b"")
        self.process.join(5)
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class ThreadWorker(Worker):
    """The same in a thread of this process, with a copy of the scheme: it starts at once."""

    def __init__(
        self,
        scheme: WeightSyncScheme,
        make_model: Callable[[], Any] | None = policy,
        **receiver: Any,
    ):
        scheme, model = copy.deepcopy(scheme), None if make_model is None else make_model()
        if receiver:
            scheme.init_on_receiver(model=model, **receiver)
        self._calls, self._results = SimpleQueue[Any](), SimpleQueue[Any]()
        self._thread = threading.Thread(target=self._serve, args=(scheme, model), daemon=True)
        self._thread.start()

    def _serve(self, scheme: WeightSyncScheme, model: Any) -> None:
        while (call := self._calls.get()) is not None:
            self._results.put(_outcome(scheme, model, *call))
        scheme.shutdown()

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        self._calls.put((function, args))

    def hear(self) -> Any:
        return _result(self._results.get(timeout=WAIT_S))

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the worker is stuck"


class Handed:
    """Things of the trainer's that a forked worker inherits, in place of a scheme."""

    def __init__(self, **things: Any):
        self.__dict__.update(things)

    def shutdown(self) -> None:
        """There is nothing to end."""


def _serve(pipe: Any, not_mine: Any, scheme: WeightSyncScheme, job: bytes) -> None:
    torch.set_num_threads(1)
    if not_mine is not None:
        not_mine.close()
    make_model, receiver = cloudpickle.loads(job)
    model = make_model() if make_model is not None else None
    if receiver:
        scheme.init_on_receiver(model=model, **receiver)
    while pipe.poll(4 * WAIT_S) and (request := pipe.recv_bytes()):
        outcome = _outcome(scheme, model, *cloudpickle.loads(request))
        pipe.send_bytes(cloudpickle.dumps(outcome))
    scheme.shutdown()


def _outcome(scheme: Any, model: Any, function: Any, args: Any) -> tuple[bool, Any]:
    try:
        return True, function(scheme, model, *args)
    except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
        return False, error


def _result(outcome: tuple[bool, Any]) -> Any:
    fine, value = outcome
    if not fine:
        raise value
    return value


def _serve_as(number: int, *args: Any) -> None:
    """`torch.multiprocessing.spawn` tells each process its number first."""
    _serve(*args)


@contextlib.contextmanager
def running(
    scheme: WeightSyncScheme,
    make_model: Callable[[], Any] | None = policy,
    *,
    method: str = "thread",
    background: bool = False,
) -> Iterator[list[Worker]]:
    """All workers of an initialised scheme, connected; afterwards nothing of it is left.

    method: "thread" for threads of this process, or how their processes start.
    """
    with contextlib.ExitStack() as workers:
        try:
            started = [
                workers.enter_context(
                    ThreadWorker(scheme, make_model, worker_idx=i)
                    if method == "thread"
                    else Worker(scheme, make_model, method=method, worker_idx=i)
                )
                for i in range(scheme.num_workers)
            ]
            for worker in started:
                worker.tell(connect, background)
            scheme.connect()
            for worker in started:
                worker.hear()
            yield started
        finally:
            scheme.shutdown()  # first, so that no worker waits any more


@contextlib.contextmanager
def in_one_thread(
    scheme: WeightSyncScheme,
    workers: int = 1,
    make_model: Callable[[], Any] = policy,
    *,
    background: bool = False,
) -> Iterator[list[WeightSyncScheme]]:
    """Receivers, met in one thread: another is needed only while `connect` waits for both sides."""
    receivers = [copy.deepcopy(scheme) for _ in range(workers)]
    for worker, receiver in enumerate(receivers):
        receiver.init_on_receiver(model=make_model(), worker_idx=worker)
    meeting = threading.Thread(target=scheme.connect)
    meeting.start()
    for receiver in receivers:
        receiver.connect(background=background)
    meeting.join(20)
    try:
        yield receivers
    finally:
        for receiver in receivers:
            receiver.shutdown()
        scheme.shutdown()


# What workers are asked most often.


def begin_reading(scheme: WeightSyncScheme, model: Any) -> int:
    model.reading = scheme.reading()
    return model.reading.__enter__()


def end_reading(scheme: WeightSyncScheme, model: Any) -> None:
    model.reading.__exit__(None, None, None)


def read(scheme: WeightSyncScheme, model: Any) -> tuple[int, Any]:
    """The version inside of `reading`, and what the model holds there."""
    with scheme.reading() as version:
        return version, bits(model)


def connect(scheme: WeightSyncScheme, model: Any, background: bool = False) -> None:
    scheme.connect(background=background)


def receive(scheme: WeightSyncScheme, model: Any, timeout: float | None = None) -> bool:
    """Whether there was something new."""
    return scheme.receive(timeout) is not None


def held(scheme: WeightSyncScheme, model: Any) -> Any:
    """What the worker's model holds, to the last bit."""
    return bits(model)


def version(scheme: WeightSyncScheme, model: Any) -> int:
    return scheme.version
