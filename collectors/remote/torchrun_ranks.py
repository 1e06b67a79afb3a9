"""Processes that somebody else started, one a rank: torchrun, or a script of SLURM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

LAUNCHERS = ("local", "env")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is. Rank 0 trains; rank i + 1 is host i."""

    rank: int
    world_size: int
    address: str
    port: int
    agent_store: bool  # torchrun has a store of its own there
    attempt: str

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> Ranks:
        """From the environment variables that launchers set."""
        missing = [name for name in _NEEDED if not env.get(name)]
        if missing:
            raise ValueError(
                f"launcher='env' needs {', '.join(_NEEDED)}, and {', '.join(missing)} is not set: "
                "start it with torchrun, or take launcher='local'"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            try:
                numbers[name] = int(env[name])
            except ValueError:
                raise ValueError(f"{name}={env[name]!r}: it must be a whole number") from None
        if numbers["WORLD_SIZE"] < 2:
            raise ValueError(
                "WORLD_SIZE=1: rank 0 trains and the others collect, so there must be two or more"
            )
        return cls(
            numbers["RANK"],
            numbers["WORLD_SIZE"],
            env["MASTER_ADDR"],
            numbers["MASTER_PORT"],
            env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def num_hosts(self) -> int:
        return self.world_size - 1

    @property
    def host(self) -> int:
        """The number of this process among the hosts."""
        return self.rank - 1

    def own_port(self) -> int:
        """Where rank 0 may open a store: torchrun's own has the port that it names."""
        return 0 if self.agent_store else self.port

    def tell_port(self, port: int, timeout: float) -> None:
        """Rank 0 says where its store is."""
        if self.agent_store:
            self._store(timeout).set(self._key, str(port))

    def ask_port(self, timeout: float) -> int:
        """Where rank 0's store is."""
        if not self.agent_store:
            return self.port
        store = self._store(timeout)
        try:
            return int(store.get(self._key))
        except RuntimeError as error:
            raise ConnectionError(
                f"rank 0 did not say within {timeout:g} s at {self.address}:{self.port} where to "
                f"meet it: {str(error).splitlines()[0]}"
            ) from None

    @property
    def _key(self) -> str:
        return f"lockstep/{self.attempt}/port"

    def _store(self, timeout: float) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=timeout)
        return TCPStore(self.address, self.port, is_master=False, timeout=limit)


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody started this process as one of several ranks."""
    return all(env.get(name) for name in _NEEDED)


def check_launcher(launcher: str | None) -> str:
    """Which launcher is meant; None takes ranks where there are some."""
    if launcher is None:
        return "env" if launched() else "local"
    if launcher not in LAUNCHERS:
        raise ValueError(
            f"launcher={launcher!r}: it is 'local', 'env', or None for 'env' where RANK and "
            "WORLD_SIZE are set"
        )
    return launcher
