"""How weights get from a trainer elsewhere into a local collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from collectors.weights.receiver import SchemeReceiver
from sync import WeightSyncScheme
from sync.local.doorbell import Doorbell


class NodeReceiver(SchemeReceiver):
    """Takes versions as they come, in a thread of its own: the collector is busy collecting."""

    def __init__(self, schemes: Mapping[str, WeightSyncScheme], base: int = 0):
        super().__init__(schemes, base)
        self._taken = threading.Condition()
        self._passed_on = self._versions()
        self._stop = Doorbell()
        self._ending: str | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-intake", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._ending is None:
                self.wait(60.0, [self._stop.fd])
                if self._ending is None:
                    self.take()
                    with self._taken:
                        self._passed_on = self._versions()
                        self._taken.notify_all()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for a version
            self._ending = f"{type(error).__name__}: {error}"
            with self._taken:
                self._taken.notify_all()

    def _versions(self) -> dict[str, int]:
        return {model_id: scheme.version for model_id, scheme in self.schemes.items()}

    def await_versions(self, versions: Mapping[str, int], timeout: float) -> None:
        """Return when these versions, by model, are in use, or were refused."""
        deadline = time.monotonic() + timeout
        with self._taken:
            for model_id, version in versions.items():
                # Not what the scheme says, which is in use only when the workers have it too.
                while self._passed_on[model_id] < version and model_id not in self._refused:
                    if self._ending is not None:
                        raise ConnectionError(f"no weights come any more: {self._ending}")
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise TimeoutError(
                            f"version {version} of {model_id!r} did not come within {timeout:g} s; "
                            f"this host has version {self._passed_on[model_id]}"
                        )
                    self._taken.wait(min(remaining, 1.0))

    def close(self) -> None:
        self._ending = "this host is closing"
        self._stop.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        super().close()
