"""Time torchrl's blocking `send`, driven by JSON lines so that measurements can be interleaved.

Run from the repository root, in the peers' environment (`make peers`):

    .venv-peers/bin/python -m benchmarks.peers.torchrl_sync --scheme shared

One line in, one line out:

    {"cmd": "open", "model": "1M"}   -> {"opened": "1M", "params": 1000336, "torchrl": "0.14.1"}
    {"cmd": "send", "count": 20}     -> {"ms": [20 floats], "verified": true}
    {"cmd": "close"}                 -> {"closed": true}
    {"cmd": "exit"} or end of input  -> the program ends, and its workers with it

Anything that goes wrong is `{"error": "..."}`; a torchrl call that never returns is
`{"error": "hang: ..."}`, after which the program kills its workers and ends with status 3. With
`--sizes 4.5k,1M,25M` it needs no driver: it opens, sends and closes each and prints one object.

Each scheme runs at the fastest setting found that still counts as sending. Workers wait idle, with
one thread each as in torchrl's collectors, and tensors are shared by name. `--trainer shared` is
torchrl's default: the trainer's own parameters are the shared memory, so that a send moves no
weights at all and only tells the workers. `--trainer private` keeps the trainer's parameters its
own, as every Lockstep scheme does, and each send then carries the weights.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.weight_update import WeightSyncScheme

from benchmarks.models import build_model
from benchmarks.peers.torchrl_common import (
    SCHEMES,
    TRAINERS,
    claim_stdout,
    make_scheme,
    sender_recipe,
    use_fastest_tensor_sharing,
)

WORKER_TIMEOUT_S = 45.0
COMMAND_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 5.0


def corner_values(model: torch.nn.Module) -> list[float]:
    """Read the last element of every parameter: enough to tell one send from another."""
    return [parameter.detach().view(-1)[-1].item() for parameter in model.parameters()]


def worker_main(scheme: WeightSyncScheme, model_name: str, index: int, pipe: Connection) -> None:
    """Let torchrl's background thread receive, and answer each message with the model's corners."""
    use_fastest_tensor_sharing()
    torch.set_num_threads(1)
    model = build_model(model_name)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    try:
        while True:
            pipe.send(corner_values(model))
            pipe.recv()
    except (EOFError, OSError):  # the parent closed its end, or died
        os._exit(0)  # torchrl's daemon thread would make an ordinary exit abort


class Session:
    """One open model: a scheme, its sender side, and the worker processes."""

    def __init__(self, *, scheme: str, trainer: str, model: str, num_workers: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.model = build_model(model)
        self.scheme = make_scheme(scheme, sync=True)
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._source: TensorDictBase = TensorDict.from_module(self.model).data
        self._send = self._choose_send(scheme, trainer)
        recipe = sender_recipe(scheme, trainer, self.model, num_workers)
        self.scheme.init_on_sender(**recipe, ctx=context)
        for index in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker_main, args=(self.scheme, model, index, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.scheme.connect()
        self._read_workers(WORKER_TIMEOUT_S)

    def _choose_send(self, scheme: str, trainer: str) -> Callable[[], None]:
        if trainer == "shared":
            # With shared memory a bare send() is enough. Through the queue it would send `None`.
            return self.scheme.send if scheme == "shared" else self._send_source
        return self._send_source if scheme == "shared" else self._send_copy

    def _send_source(self) -> None:
        self.scheme.send(weights=self._source)

    def _send_copy(self) -> None:
        """Send a copy: what goes into torchrl's queue is moved into shared memory, for good."""
        self.scheme.send(weights=self._source.clone())

    def _read_workers(self, timeout_s: float) -> list[list[float]]:
        """Receive one message from each worker, or say which one is silent or dead."""
        answers = []
        for index, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"worker {index} said nothing for {timeout_s} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"worker {index} died; its traceback is on stderr") from None
        return answers

    def send(self, count: int) -> dict[str, Any]:
        """Change the model in place and send it, `count` times; check what the workers now hold."""
        sent_ms = []
        for _ in range(count):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1e-3)
            start = time.perf_counter()
            self._send()
            sent_ms.append((time.perf_counter() - start) * 1e3)
        for pipe in self.pipes:
            pipe.send("read")
        expected = corner_values(self.model)
        verified = all(held == expected for held in self._read_workers(WORKER_TIMEOUT_S))
        return {"ms": sent_ms, "verified": verified}

    def close(self) -> None:
        """End the workers, by force where closing their pipe is not enough."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(JOIN_TIMEOUT_S)
        kill_workers()
        self.scheme.shutdown()


class Watchdog:
    """Ends the whole program when a command, that is to say torchrl, takes too long."""

    def __init__(self, reply: Callable[[dict[str, Any]], None]) -> None:
        self._reply = reply
        self._timer: threading.Timer | None = None
        self.session: Session | None = None

    def start(self, command: str, timeout_s: float) -> None:
        """Allow `timeout_s` from now until `stop`."""
        self._timer = threading.Timer(timeout_s, self._bite, args=(command, timeout_s))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Call it off."""
        if self._timer is not None:
            self._timer.cancel()

    def _bite(self, command: str, timeout_s: float) -> None:
        self._reply({"error": f"hang: {command} had not returned after {timeout_s:.0f} s"})
        kill_workers()
        os._exit(3)


def kill_workers() -> None:
    """End every process that this one has started."""
    for process in multiprocessing.active_children():
        process.kill()
        process.join(JOIN_TIMEOUT_S)


def obey(request: dict[str, Any], watchdog: Watchdog, args: argparse.Namespace) -> dict[str, Any]:
    """Carry out one command and return the reply; what the caller got wrong is a `ValueError`."""
    command = request.get("cmd")
    if command == "open" and watchdog.session is None:
        model = request["model"]
        watchdog.session = Session(
            scheme=args.scheme, trainer=args.trainer, model=model, num_workers=args.workers
        )
        num_parameters = sum(p.numel() for p in watchdog.session.model.parameters())
        version = importlib.metadata.version("torchrl")
        return {"opened": model, "params": num_parameters, "torchrl": version}
    if command == "send" and watchdog.session is not None:
        return watchdog.session.send(int(request["count"]))
    if command == "close" and watchdog.session is not None:
        watchdog.session.close()
        watchdog.session = None
        return {"closed": True}
    state = "no model is open" if watchdog.session is None else "a model is open"
    raise ValueError(f"cannot {command!r} now ({state}): expected open, send, close or exit")


def serve(args: argparse.Namespace, reply: Callable[[dict[str, Any]], None]) -> None:
    """Answer each line of stdin with one line, until `exit` or the end of the input."""
    watchdog = Watchdog(reply)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if request.get("cmd") == "exit":
                break
            watchdog.start(line.strip(), COMMAND_TIMEOUT_S)
            answer = obey(request, watchdog, args)
        except Exception as error:  # noqa: BLE001  (every failure goes to the driver)
            answer = {"error": f"{type(error).__name__}: {error}"}
            if watchdog.session is None:
                kill_workers()  # of an `open` that failed half-way
        watchdog.stop()
        reply(answer)
    if watchdog.session is not None:
        watchdog.start("exit", COMMAND_TIMEOUT_S)
        watchdog.session.close()
        watchdog.stop()


def measure_alone(args: argparse.Namespace, reply: Callable[[dict[str, Any]], None]) -> None:
    """Measure every model of `--sizes` in turn and print one object."""
    watchdog = Watchdog(reply)
    results: dict[str, Any] = {"scheme": args.scheme, "trainer": args.trainer}
    for model in args.sizes.split(","):
        watchdog.start(f"measure {model}", COMMAND_TIMEOUT_S)
        obey({"cmd": "open", "model": model}, watchdog, args)
        results[model] = obey({"cmd": "send", "count": args.count}, watchdog, args)
        results[model]["p50_ms"] = sorted(results[model]["ms"])[args.count // 2]
        obey({"cmd": "close"}, watchdog, args)
        watchdog.stop()
    reply(results)


def main() -> None:
    """Parse the command line and either serve stdin or measure alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=list(SCHEMES), required=True)
    parser.add_argument("--trainer", choices=TRAINERS, default="shared")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sizes", help="models to measure without a driver, e.g. 4.5k,1M,25M")
    parser.add_argument("--count", type=int, default=20, help="sends per model, with --sizes")
    args = parser.parse_args()
    use_fastest_tensor_sharing()
    reply = claim_stdout()
    (measure_alone if args.sizes else serve)(args, reply)


if __name__ == "__main__":
    main()
