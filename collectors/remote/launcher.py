"""A fleet: the processes that can be hosts, and the engine that reaches them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sync.remote.engine import Engine


class Launcher(ABC):
    """Started when it is made; its processes are the engine's peers, numbered alike."""

    engine: Engine
    own_process = True  # whether a process serves nothing but its host, and may end with it
    as_arrays = False  # whether batches travel best as arrays of numpy

    @abstractmethod
    def replace(self, host: int) -> None:
        """End this process, if it lives, and start another in its place; or `CannotReplace`."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End what was started here, and nothing else; harmless when done twice."""
