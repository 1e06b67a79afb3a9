"""Small views of one end of a scheme, for code that uses the older names."""

from __future__ import annotations

from typing import Any


class WeightSender:
    """The sending end of a scheme."""

    def __init__(self, scheme: Any):
        self.scheme = scheme

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        self.scheme.send(weights, worker_ids)

    def send_async(self, weights: Any = None, worker_ids: Any = None) -> None:
        self.scheme.send_async(weights, worker_ids)

    def wait_async(self, timeout: float | None = None) -> None:
        self.scheme.wait_async(timeout)

    def update_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        self.scheme.send(weights, worker_ids)


class WeightReceiver:
    """The receiving end of a scheme."""

    def __init__(self, scheme: Any):
        self.scheme = scheme

    def receive(self, timeout: float | None = None) -> Any:
        return self.scheme.receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        self.scheme.apply_weights(weights, inplace)
