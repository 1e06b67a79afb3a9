"""Launchers: start the processes of workers, and provide the engine that calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sync.remote.engine import Engine


class Launcher(ABC):
    """Processes of workers, started by the constructor; worker i is the engine's peer i."""

    engine: Engine

    @abstractmethod
    def replace(self, worker: int) -> None:
        """End a worker's process, if it lives, and start another; or raise `CannotReplace`."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End the processes that were started here; a second call does nothing."""
