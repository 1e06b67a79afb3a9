"""A trainer whose collector has hosts in network namespaces; the test moves it by lines of JSON.

    python -m tests.promises.remote_collecting KIND FOLDER NAMESPACE [NAMESPACE ...]

Host i is started in namespace i, and whoever replaces a host in the last one, as on a spare
machine. `remote_hosts.py` says how the trainer is asked.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.collectors.remote.support import COLLECTORS
from tests.promises.collector_probe import Judge, VersionPolicy, balance, make_cartpole
from tests.promises.network import TRAINER, keep_to_the_cable
from tests.promises.remote_hosts import answer_lines

CLONE_NEWNET = 0x40000000


def serve_elsewhere(
    serve: Callable[..., Any], folder: Path, names: list[str], number: int, **options: Any
) -> Any:
    """`serve`, on another host."""
    keep_to_the_cable()
    first = folder / f"host-{number}"
    name = names[-1] if first.exists() else names[number]
    first.touch()
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    return serve(number, **options)


class TrainerHost:
    """What the test may ask for."""

    def __init__(self, kind: str, folder: Path, names: list[str]):
        class Spread(COLLECTORS[kind]):  # type: ignore[misc, name-defined]
            _serve = functools.partial(serve_elsewhere, COLLECTORS[kind]._serve, folder, names)

        self.judge = Judge()
        self.policy = VersionPolicy()
        self.collector = Spread(
            make_cartpole,
            self.policy,
            num_collectors=len(names) - 1,
            frames_per_batch=40,
            sync=False,
            launcher="local",
            host=TRAINER,
            timeout=4.0,
            start_timeout=50.0,
            on_worker_failure="restart",
        )

    def collect(self, until: list[int], restarts: int = 0) -> list[int]:
        """Collect until, after so many restarts, all these hosts made a batch; who made which."""
        makers: list[int] = []
        since: set[int] = set()
        while not since >= set(until):
            batch = self.collector.next()
            self.judge.take(batch)
            makers.append(int(batch["collector", "worker"][0, 0]))
            assert balance(self.collector) == 0
            if self.collector.stats()["restarts"] >= restarts:
                since.add(makers[-1])
        assert self.judge.violations() == {}
        return makers

    def publish(self) -> int:
        version = self.collector.policy_version + 1
        self.policy.hold(version)
        self.collector.update_policy_weights_()
        return int(self.collector.policy_version)

    def stats(self) -> dict[str, Any]:
        names = ("collected", "delivered", "dropped", "in_flight", "restarts")
        stats = self.collector.stats()
        return {name: stats[name] for name in names} | {"seen": self.judge.frames}

    def close(self) -> None:
        self.collector.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    keep_to_the_cable()
    kind, folder, *names = sys.argv[1:]
    answer_lines(TrainerHost(kind, Path(folder), names))


if __name__ == "__main__":
    from tests.promises import remote_collecting

    remote_collecting.main()
