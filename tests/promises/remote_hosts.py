"""A trainer and workers on hosts of their own; the test moves them by lines of JSON.

    python -m tests.promises.remote_hosts trainer KIND NUM_PEERS
    python -m tests.promises.remote_hosts peer KIND PEER PORT

The trainer answers each line {"do": name, ...} with {"said": ...} or {"raised": kind, "text": ...}.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import warnings
from typing import Any

import torch

from sync import WeightSyncScheme
from tests.promises.network import TRAINER, keep_to_the_cable
from tests.promises.probe import VersionPolicy
from tests.promises.remote_probe import ENGINES, MODULES

SILENCE_S = 6.0
_mine: list[Any] = []


def be_worker(scheme: WeightSyncScheme, worker: int) -> None:
    policy = VersionPolicy()
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    _mine[:] = [scheme, policy]
    threading.Thread(target=scheme.connect, daemon=True).start()


def held() -> tuple[int, float, float]:
    """The version in use, and the lowest and highest number that the weights say."""
    scheme, policy = _mine
    with scheme.reading() as version:
        return (version, *policy())


class TrainerHost:
    """What the test may ask for."""

    def __init__(self, kind: str, num_peers: int):
        module = importlib.import_module(MODULES[kind])
        make = getattr(module, ENGINES[kind])
        self.engine = make(num_peers, host=TRAINER, timeout=50.0, silence_s=SILENCE_S)
        self.policy = VersionPolicy()
        self.scheme = WeightSyncScheme.from_backend(kind, timeout=2.0)
        self.scheme.attach(self.engine)  # type: ignore[attr-defined]
        self.scheme.init_on_sender(model=self.policy, devices=["cpu"] * num_peers)

    def port(self) -> int:
        return int(self.engine.port)

    def connect(self) -> dict[int, int]:
        self.engine.connect()
        peers = range(self.engine.num_peers)
        for started in [self.engine.call(p, be_worker, self.scheme, p) for p in peers]:
            started.result(50.0)
        self.scheme.connect()
        return self.scheme.acknowledged

    def send(self, to: list[int] | None = None) -> int:
        version = self.scheme.version + 1
        self.policy.hold(version)
        self.scheme.send(worker_ids=to)
        return version

    def settle(self, seconds: float) -> dict[int, int]:
        self.scheme.wait_async(seconds)
        return self.scheme.acknowledged

    def held(self, peer: int) -> tuple[int, float, float]:
        return self.engine.call(peer, held).result(20.0)

    def mechanisms(self) -> list[str]:
        """How versions travelled."""
        return list(self.scheme.stats["moved"])

    def gone(self, peer: int) -> str | None:
        return self.engine.gone(peer)

    def close(self) -> None:
        self.scheme.shutdown()
        self.engine.close()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    keep_to_the_cable()
    role, kind, number, *rest = sys.argv[1:]
    if role == "peer":
        module = importlib.import_module(MODULES[kind])
        options = {"port": int(rest[0]), "timeout": 50.0, "silence_s": SILENCE_S}
        print(module.serve(int(number), host=TRAINER, **options), flush=True)
        return
    answer_lines(TrainerHost(kind, int(number)))


def answer_lines(trainer: Any) -> None:
    """Do what the test asks for, until it asks no more."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"said": getattr(trainer, request.pop("do"))(**request)}
        except Exception as error:  # noqa: BLE001 - the test judges it
            answer = {"raised": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    from tests.promises import remote_hosts

    remote_hosts.main()  # the functions of `__main__` cannot be found by name elsewhere
