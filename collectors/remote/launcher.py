"""Launchers: start the processes of nodes, and provide the engine that calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sync.remote.engine import Engine


class Launcher(ABC):
    """Processes for nodes, started by the constructor; node i is the engine's peer i."""

    engine: Engine
    as_arrays = False  # batches travel best as NumPy arrays

    @abstractmethod
    def replace(self, node: int) -> None:
        """End a node's process, if it lives, and start another; or raise `CannotReplace`."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """End the processes that were started here; a second call does nothing."""
