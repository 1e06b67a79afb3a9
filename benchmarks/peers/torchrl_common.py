"""What the torchrl programs share: making a scheme, and answering JSON lines.

`benchmarks/sync_latency.py` and `benchmarks/sync_remote.py` start torchrl_sync and torchrl_remote.
One line in, one line out; what goes wrong is {"error": "..."}. The driver bounds every wait.

    {"cmd": "open", "scheme": "rpc", "model": "1M", "workers": 2}  -> {"torchrl": "0.14.1"}
    {"cmd": "send", "count": 20}                  -> {"ms": [20 floats], "verified": true}
    end of input                                  -> the program ends, and its workers with it
"""

import importlib.metadata
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from benchmarks.models import timed_sends_ms

SCHEMES: dict[str, type[WeightSyncScheme]] = {
    "shared": SharedMemWeightSyncScheme,
    "multiprocess": MultiProcessWeightSyncScheme,
}
TRAINERS = ("shared", "private")


def make_scheme(name: str, *, sync: bool) -> WeightSyncScheme:
    """Build torchrl's scheme `name`; `sync` is its own switch between blocking and not."""
    if name not in SCHEMES:
        raise ValueError(f"no scheme {name!r}: expected one of {', '.join(SCHEMES)}")
    return SCHEMES[name](sync=sync)


def copy_weights(_worker_index: int, weights: TensorDictBase) -> TensorDictBase:
    """Give a worker a copy of its own: it writes into what it is given."""
    return weights.clone()


def sender_recipe(scheme: str, trainer: str, model: nn.Module, num_workers: int) -> dict[str, Any]:
    """Return the arguments of `init_on_sender` that describe where the workers' weights live.

    `shared` is what torchrl does by default, in its collectors too: the trainer's own parameters
    become the shared memory. `private` keeps them out of it.
    """
    if trainer == "shared":
        return {
            "model_id": "policy",
            "model": model,
            "devices": [torch.device("cpu")] * num_workers,
        }
    if scheme == "shared":
        published = TensorDict.from_module(model).data.clone().share_memory_()
        return {"params_map": dict.fromkeys(range(num_workers), published)}
    # torchrl's queue scheme refuses every params_map: it adds num_workers itself, then objects.
    return {
        "model_id": "policy",
        "model": model,
        "device_map_fn": copy_weights,
        "num_workers": num_workers,
    }


def use_fastest_tensor_sharing() -> None:
    """Share tensors by name and not by descriptor: call it in every process.

    The multiprocess scheme pickles a handle for each tensor. By descriptor (torch's default) each
    handle is a socket round trip to the sender, which makes that scheme two to four times slower.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")


class Session(Protocol):
    """One open model: torchrl's scheme with its workers."""

    model: nn.Module

    def send(self) -> None:
        """Send the model, and wait as torchrl does."""
        ...

    def is_verified(self) -> bool:
        """Whether the workers hold what was sent."""
        ...


def serve(open_session: Callable[..., Session]) -> None:
    """Answer each line of stdin with one line, until the input ends."""
    reply = claim_stdout()
    session: Session | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request.pop("cmd") == "open":
                session = open_session(**request)
                reply({"torchrl": importlib.metadata.version("torchrl")})
                continue
            if session is None:
                raise ValueError("nothing is open")
            times = timed_sends_ms(session.model, session.send, request["count"])
            reply({"ms": times, "verified": session.is_verified()})
    except Exception as error:  # noqa: BLE001  (every failure goes to the driver)
        reply({"error": f"{type(error).__name__}: {error}"})
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)  # torchrl's threads and groups hang in an ordinary exit


def claim_stdout() -> Callable[[dict[str, Any]], None]:
    """Point stdout at stderr for everybody else; return a function that writes JSON lines to it."""
    channel: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return reply


def end_with_parent() -> None:
    """End this process soon after the one that started it, even if torchrl hangs here."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
