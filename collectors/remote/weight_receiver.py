"""How a node takes weights from its trainer."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from collectors.weights.receiver import SchemeReceiver
from sync import WeightSyncScheme
from sync.local.waiting import Doorbell


class NodeReceiver(SchemeReceiver):
    """Takes versions as they arrive, in a thread of its own: other threads collect meanwhile."""

    def __init__(self, schemes: Mapping[str, WeightSyncScheme], base: int = 0):
        super().__init__(schemes, base)
        self._changed = threading.Condition()
        self._in_use = self._versions()  # by the collector's workers too, unlike a scheme's version
        self._stop = Doorbell()
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._ended is None:
                self.wait(60.0, [self._stop.fd])
                if self._ended is None:
                    self.take()
                    with self._changed:
                        self._in_use = self._versions()
                        self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for a version
            self._ended = f"{type(error).__name__}: {error}"
            with self._changed:
                self._changed.notify_all()

    def _versions(self) -> dict[str, int]:
        return {model_id: scheme.version for model_id, scheme in self.schemes.items()}

    def await_versions(self, versions: Mapping[str, int], timeout: float) -> None:
        """Return when these versions, by model, are in use, or were refused."""

        def is_settled(model_id: str, version: int) -> bool:
            return self._in_use[model_id] >= version or model_id in self._refused

        with self._changed:
            for model_id, version in versions.items():
                self._changed.wait_for(
                    lambda: self._ended is not None or is_settled(model_id, version),  # noqa: B023
                    timeout,
                )
                if is_settled(model_id, version):
                    continue
                if self._ended is not None:
                    raise ConnectionError(f"this node takes no more weights: {self._ended}")
                raise TimeoutError(
                    f"version {version} of {model_id!r} did not come within {timeout:g} s; "
                    f"this node has version {self._in_use[model_id]}"
                )

    def close(self) -> None:
        with self._changed:
            self._ended = "it is closing"
            self._changed.notify_all()
        self._stop.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        super().close()
