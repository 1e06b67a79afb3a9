"""What the two torchrl programs share: making a scheme, and a stdout that carries only our JSON."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

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
