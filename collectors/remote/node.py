"""A node: a process that runs workers for a trainer, which calls it through an engine.

    trainer (node_handle.py)                   node                               worker
    ------------------------                   ----                               ------
    open_node(name, spec)                 ->   make a model that takes weights
                                          <-   machine and process
    call_node(name, method, worker, ...)
      "start"                             ->   start it in a process, or in a  -> environments
                                          <-   thread if it is the only one    <- Hello
      "meet", and scheme.connect()       <->   take version 0, and pass it on  -> apply it
                                          <-                                   <- Met
      "collect"                           ->   wait for the weights            -> one batch
                                          <-   a copy of the block's rows      <- Filled
      "ask"                               ->                                   -> between two steps
                                          <-                                   <- Answer
      (scheme)                            ->   a thread passes versions on     -> between two steps
      "end"                               ->   end one worker
    call_node(name, "report")             ->   what all workers do
    call_node(name, "close")              ->   end all workers

The value of a worker's call is the event that the worker sent. Calls return a `Reply`, so that
errors travel as text over any engine. The engine ends the process when the trainer is gone.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import threading
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch

from collectors.data.batch import Filled, Trajectories
from collectors.remote.weight_relay import WeightRelay
from collectors.remote.worker_thread import ThreadHandle
from collectors.rollout.frame_block import to_message
from collectors.workers.handle import Answer, Event, Failed, Hello, Met
from collectors.workers.process_handle import ProcessHandle
from collectors.workers.start_process import context
from collectors.workers.worker_spec import WorkerSpec
from sync import WeightSyncScheme
from sync.local.waiting import Doorbell, wait_for

_NODES: dict[str, Node] = {}  # of this process


class Reply(NamedTuple):
    """How a call ended. After an error, `value` is the traceback and `error` the error's class.

    report: what the worker has done, as `HostedWorker.report` says; of "report", that of each.
    """

    value: Any
    error: str | None = None
    report: dict[str, Any] | None = None


@dataclass
class NodeSpec:
    """What the workers of a node share."""

    index: int
    num_workers: int
    policy: Any
    policy_factory: Callable[[], Any] | None
    schemes: Mapping[str, WeightSyncScheme]
    devices: Sequence[torch.device | None]
    sync: bool  # whether versions are acknowledged when workers use them
    timeout: float
    resume_timeout: float
    as_arrays: bool  # frames travel as NumPy arrays


class Node:
    """The workers of this process, and the weights for them."""

    def __init__(self, name: str, spec: NodeSpec):
        self.name, self.spec = name, spec
        policy = None
        if spec.schemes:
            policy = spec.policy_factory() if spec.policy_factory is not None else spec.policy
        self.weights = WeightRelay(
            policy,
            spec.schemes,
            index=spec.index,
            devices=spec.devices,
            sync=spec.sync,
            timeout=spec.timeout,
        )
        self._ctx = context() if spec.num_workers > 1 else None
        self.workers: dict[int, HostedWorker] = {}
        _NODES[name] = self

    def hello(self) -> dict[str, Any]:
        """What the trainer says about this node in errors."""
        return {"machine": platform.node(), "pid": os.getpid()}

    # -- one worker, by its index in the trainer

    def start(self, index: int, spec: bytes, generation: int, base: int) -> Event:
        """Start a worker, or one that replaces it."""
        worker: WorkerSpec = cloudpickle.loads(spec)
        worker.policy, worker.policy_factory = self.spec.policy, self.spec.policy_factory
        self.weights.base = base
        self.workers[index] = hosted = HostedWorker(self._handle(index, worker), generation)
        return hosted.wait((Hello,))

    def _handle(self, index: int, spec: WorkerSpec) -> ProcessHandle:
        kind = ThreadHandle if self._ctx is None else ProcessHandle
        handle = kind(
            index,
            spec,
            Trajectories(),
            self.weights,
            ctx=self._ctx,
            timeout=self.spec.timeout,
            resume_timeout=self.spec.resume_timeout,
        )
        handle.receiver = index % self.spec.num_workers
        return handle

    def meet(self, index: int) -> Event:
        """Have the worker take the newest version."""
        worker = self.workers[index]
        self.weights.connect(worker.handle.receiver)
        return worker.wait((Met,))

    def collect(self, index: int, serial: int, versions: Mapping[str, int]) -> Event:
        """A batch with weights no older than `versions`; its frames are a list of flat bytes."""
        arrived = self.weights.arrived(versions, self.spec.timeout)
        event = self.workers[index].collect(serial, arrived)
        if isinstance(event, Filled) and self.spec.as_arrays:
            layout, pieces = event.content
            event.content = layout, [piece.numpy() for piece in pieces]
        return event

    def ask(self, index: int, number: int, method: str, args: bytes) -> Event:
        """Have the worker do something between two steps."""
        return self.workers[index].ask(number, method, cloudpickle.loads(args))

    def end(self, index: int, timeout: float, close_env: bool) -> bool:
        """End a worker; whether that was possible."""
        worker = self.workers.get(index)
        if worker is None:
            return True
        self.weights.disconnect(worker.handle.receiver)
        return worker.end(timeout, close_env)

    # -- all workers

    def report(self) -> dict[int, dict[str, Any]]:
        """What each worker does."""
        return {index: worker.report() for index, worker in list(self.workers.items())}

    def close(self, timeout: float, close_env: bool = True) -> None:
        """End all workers, and every call that waits."""
        _NODES.pop(self.name, None)
        workers = list(self.workers.values())
        for worker in workers:
            worker.handle.tell_to_stop(timeout, close_env)
        for worker in workers:
            worker.end(timeout, close_env)
        self.weights.close()


class HostedWorker:
    """One worker of a node. Calls wait for what it sends."""

    def __init__(self, handle: ProcessHandle, generation: int):
        self.handle = handle
        self._generation = generation
        self._changed = threading.Condition()
        self._events: dict[Hashable, Event] = {}
        self._failure: Failed | None = None
        self._serial = 0  # of the last batch that was ordered
        self._stop = Doorbell()
        handle.start(handle.spec)
        self._thread = threading.Thread(target=self._listen, name="lockstep-node", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while self._failure is None:
                wait_for([self._stop.fd, *self.handle.fds()], 60.0)
                with self._changed:
                    how = self.handle.gone()  # before what it said last is read
                    for event in self.handle.receive():
                        self._note(event)
                    if how is not None:
                        self._note(Failed(f"died{how}", died=True))
        except Exception:  # noqa: BLE001 - the trainer hears of it
            with self._changed:
                self._note(Failed(f"cannot be watched:\n{traceback.format_exc().rstrip()}"))

    def _note(self, event: Event) -> None:
        if not isinstance(event, Failed):
            self._events[_key(event)] = event
        elif self._failure is None:
            self._failure = event
        self._changed.notify_all()

    def wait(self, key: Hashable) -> Event:
        """What the worker sends under this key, or how it failed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._events or self._failure is not None)
            event = self._events.pop(key, self._failure)
            assert event is not None
            return event

    def collect(self, serial: int, versions: Mapping[str, int]) -> Event:
        """One batch. Each call comes in a thread of its own, and `serial` says in which order."""
        handle = self.handle
        with self._changed:
            self._changed.wait_for(lambda: self._serial == serial - 1 or self._failure is not None)
            if self._failure is None:
                self._send(lambda: handle.order(serial, versions))
            self._serial = serial
            self._changed.notify_all()
        event = self.wait((Filled, serial))
        if isinstance(event, Filled):
            # The block is written again, and its time is that of another clock.
            layout = dataclasses.replace(event.frames.layout)
            pieces = to_message(event.frames, event.steps)
            with self._changed:
                handle.release(event)
            event.content, event.ended_ns = (layout, pieces), 0
        return event

    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> Event:
        """Have it do something between two steps."""
        with self._changed:
            self._send(lambda: self.handle.ask(number, method, args))
        return self.wait((Answer, number))

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except ConnectionError:  # it is gone, and whoever waits for the answer hears of that
            return
        except TimeoutError as error:
            self._note(Failed(f"reads no messages; it {self.handle.activity()}: {error}"))

    def report(self) -> dict[str, Any]:
        """What it does, and how it failed."""
        failure, counts = self._failure, self.handle.reported_counts()
        return {**counts, "generation": self._generation, "failure": failure}

    def end(self, timeout: float, close_env: bool) -> bool:
        """End it; whether that was possible."""
        self.handle.tell_to_stop(timeout, close_env)
        with self._changed:
            self._note(Failed("was ended"))
        self._stop.ring()
        self._thread.join(1.0)
        self.handle.end(timeout)
        self.handle.close()
        return not self.handle.is_alive


def _key(event: Event) -> Hashable:
    if isinstance(event, Filled):
        return Filled, event.serial
    if isinstance(event, Answer):
        return Answer, event.number
    return (type(event),)


# -- what the trainer calls


def open_node(name: str, spec: bytes) -> Reply:
    """Make a node; what it says about itself."""
    return _reply(lambda: Node(name, cloudpickle.loads(spec)).hello())


def call_node(name: str, method: str, *args: Any) -> Reply:
    """Call a method of a node."""

    def call() -> Any:
        if name not in _NODES:
            raise RuntimeError(f"there is no node {name!r} in this process (pid {os.getpid()})")
        return getattr(_NODES[name], method)(*args)

    reply = _reply(call)
    worker = _NODES[name].workers.get(args[0]) if name in _NODES and args else None
    return reply if worker is None else reply._replace(report=worker.report())


def close_all() -> None:
    """End all nodes of this process."""
    for node in list(_NODES.values()):
        node.close(1.0)


def _reply(call: Callable[[], Any]) -> Reply:
    try:
        return Reply(call())
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        return Reply(traceback.format_exc().rstrip(), type(error).__name__)
