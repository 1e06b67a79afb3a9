"""The specification of a worker, as it is sent to the worker's process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import cloudpickle
import torch

from collectors.options.collector_options import CollectorOptions
from collectors.options.rollout_options import RolloutOptions
from collectors.rollout.seeds import Seeds
from sync.local.memory import AnonymousMemory, as_bytes

# The options that a worker is told as they are.
PASSED_ON = (*(one.name for one in fields(RolloutOptions)), "timeout")


@dataclass
class WorkerSpec:
    """The specification of a worker. It is sent as one cloudpickle."""

    create_env_fn: Any
    create_env_kwargs: Any
    seeds: Seeds
    frames: int  # in a batch
    policy: Any = None
    policy_factory: Callable[[], Any] | None = None
    num_blocks: int = 1  # of shared memory for batches
    policy_device: torch.device | None = None
    num_threads: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> AnonymousMemory:
        """In shared memory."""
        data = pickled(self)
        memory = AnonymousMemory(len(data))
        as_bytes(memory.map(0, memory.nbytes, writable=True))[: len(data)] = data
        return memory

    @staticmethod
    def unpack(memory: AnonymousMemory) -> WorkerSpec:
        spec: WorkerSpec = cloudpickle.loads(as_bytes(memory.map(0, memory.nbytes, writable=False)))
        return spec


def pickled(spec: Any) -> bytes:
    """A specification as cloudpickle; or an error that names what cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(spec)
    except Exception:
        for one in fields(spec):
            _check_pickles(one.name, getattr(spec, one.name))
        raise
    return data


def _check_pickles(name: str, value: Any) -> None:
    try:
        cloudpickle.dumps(value)
    except MemoryError as error:
        raise MemoryError(f"{name} takes more memory to send than there is") from error
    except Exception as error:
        instead = "; policy_factory creates it there" if name == "policy" else ""
        text = f"{name} cannot be sent to another process: {error}{instead}"
        raise TypeError(text) from error


def worker_specs(
    options: CollectorOptions,
    seeds: Seeds,
    *,
    factories: Sequence[Any],
    env_kwargs: Sequence[Any],
    frames: Sequence[int],
    num_blocks: int,
    devices: Sequence[torch.device | None],
) -> list[WorkerSpec]:
    """The specification of each worker, without its policy."""
    count = len(factories)
    shared = {name: getattr(options, name) for name in (*PASSED_ON, "start_timeout")}
    return [
        WorkerSpec(
            create_env_fn=factories[i],
            create_env_kwargs=env_kwargs[i],
            seeds=seeds.of_worker(i),
            frames=frames[i],
            num_blocks=num_blocks,
            policy_device=devices[i],
            num_threads=options.num_sub_threads,
            options={**shared, "random_frames": math.ceil(options.init_random_frames / count)},
        )
        for i in range(count)
    ]
