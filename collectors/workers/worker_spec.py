"""The specification of a worker, as it is sent to the worker's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import cloudpickle
import torch

from collectors.rollout.rollout_options import RolloutOptions
from collectors.rollout.seeds import Seeds
from sync.local.memory import AnonymousMemory, as_bytes

# The options that a worker is told as they are.
PASSED_ON = (*(one.name for one in fields(RolloutOptions)), "timeout")


@dataclass
class WorkerSpec:
    """The specification of a worker. It is sent as one cloudpickle."""

    create_env_fn: Any
    create_env_kwargs: Any
    policy: Any
    policy_factory: Callable[[], Any] | None
    seeds: Seeds
    frames: int  # in a batch
    num_blocks: int = 1  # of shared memory for batches
    policy_device: torch.device | None = None
    num_threads: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def pickled(self) -> bytes:
        """As cloudpickle; or an error that names what cannot be pickled."""
        try:
            data: bytes = cloudpickle.dumps(self)
        except Exception:
            for name in (one.name for one in fields(self)):
                self._check_pickles(name)
            raise
        return data

    def _check_pickles(self, name: str) -> None:
        try:
            cloudpickle.dumps(getattr(self, name))
        except MemoryError as error:
            text = f"{name} takes more memory to send than there is"
            raise MemoryError(text) from error
        except Exception as error:
            instead = "; policy_factory creates it there" if name == "policy" else ""
            text = f"{name} cannot be sent to another process: {error}{instead}"
            raise TypeError(text) from error

    def pack(self) -> AnonymousMemory:
        """The same in shared memory."""
        data = self.pickled()
        memory = AnonymousMemory(len(data))
        as_bytes(memory.map(0, memory.nbytes, writable=True))[: len(data)] = data
        return memory

    @staticmethod
    def unpack(memory: AnonymousMemory) -> WorkerSpec:
        spec: WorkerSpec = cloudpickle.loads(as_bytes(memory.map(0, memory.nbytes, writable=False)))
        return spec
