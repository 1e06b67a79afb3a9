"""What the engines over torch have in common: peers join at any time, and meet in a store."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

from sync.remote.addresses import LOOPBACK, warn_if_exposed
from sync.remote.engine import Engine
from sync.remote.store import open_store

_LOOK_S = 0.01


class JoiningEngine(Engine):
    """The trainer's side.

    host, port: where peers find the trainer's store; port 0 takes a free one, see `port`.
    address: what this process's own connections bind to; `host` unless told.
    timeout: seconds that `connect` and `admit` wait.
    silence_s: seconds without a sign of life after which a peer counts as gone.
    """

    def __init__(
        self,
        num_peers: int,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        address: str | None = None,
        timeout: float = 60.0,
        silence_s: float = 60.0,
    ):
        warn_if_exposed(self.mechanism, host, address or host)
        self.num_peers = num_peers
        self.timeout = timeout
        self._silence_s = silence_s
        self._address = address or host
        self._names: dict[int, str] = {}  # of the peers that were met
        self._store = open_store(host, port, timeout)
        self.host, self.port = host, self._store.port

    def connect(self, given_up: threading.Event | None = None) -> None:
        """Meet every peer that was not met yet; setting `given_up` ends the wait."""
        missing = [peer for peer in range(self.num_peers) if peer not in self._names]
        self._meet_all(missing, given_up or threading.Event())

    def admit(self, peer: int, given_up: threading.Event | None = None) -> None:
        """Meet a peer that came late, or one that takes the place of a dead one."""
        self._meet_all([peer], given_up or threading.Event())

    def _meet_all(self, missing: list[int], given_up: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout
        while missing := [peer for peer in missing if not self._meet(peer, deadline)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"peer {', '.join(map(str, missing))} did not join at {self.host}:{self.port} "
                    f"within {self.timeout:g} s: was its process started, and does it call serve() "
                    f"with this host and port?{self._obstacles()}"
                )
            if given_up.wait(_LOOK_S):
                return

    @abstractmethod
    def _meet(self, peer: int, deadline: float) -> bool:
        """Meet the peer, if it came and was not met yet."""

    def _obstacles(self) -> str:
        """What may keep peers from joining, as the end of an error message."""
        return ""
