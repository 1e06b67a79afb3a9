"""Processes that a launcher started, one per rank: torchrun, or a SLURM script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks(NamedTuple):
    """The rank of this process and the number of ranks. Rank 0 trains; rank i + 1 is worker i."""

    rank: int
    world_size: int
    address: str
    port: int
    agent_store: bool  # torchrun itself has a store at that port
    attempt: str

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> Ranks:
        """From the environment variables that launchers set."""
        if missing := [name for name in _NEEDED if not env.get(name)]:
            raise ValueError(
                f"launcher='env' needs {', '.join(_NEEDED)}, and {', '.join(missing)} is not set: "
                "start it with torchrun, or use launcher='local'"
            )
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            if not env[name].isdecimal():
                raise ValueError(f"{name}={env[name]!r}: it must be a whole number")
        if int(env["WORLD_SIZE"]) < 2:
            raise ValueError(
                "WORLD_SIZE=1: rank 0 trains and the others collect, so start two or more"
            )
        return cls(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def num_workers(self) -> int:
        return self.world_size - 1

    @property
    def worker(self) -> int:
        """The number of this process among the workers."""
        return self.rank - 1

    def own_port(self) -> int:
        """Where rank 0 may open a store; 0 (any) if torchrun's store has the port."""
        return 0 if self.agent_store else self.port

    def tell_port(self, port: int, timeout: float) -> None:
        """Rank 0 publishes the port of its store in torchrun's."""
        if self.agent_store:
            self._torchrun_store(timeout).set(self._key, str(port))

    def ask_port(self, timeout: float) -> int:
        """The port of rank 0's store."""
        if not self.agent_store:
            return self.port
        store = self._torchrun_store(timeout)
        try:
            return int(store.get(self._key))
        except RuntimeError as error:
            raise ConnectionError(
                f"rank 0 did not publish its port at {self.address}:{self.port} within "
                f"{timeout:g} s: {str(error).splitlines()[0]}"
            ) from None

    @property
    def _key(self) -> str:
        return f"lockstep/{self.attempt}/port"

    def _torchrun_store(self, timeout: float) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=timeout)
        return TCPStore(self.address, self.port, is_master=False, timeout=limit)


def check_launcher(launcher: str | None) -> str:
    """The launcher to use; None means "env" if there are ranks."""
    if launcher is None:
        return "env" if all(os.environ.get(name) for name in _NEEDED) else "local"
    return launcher
