"""One phase of the torchrl probe: a bare scheme, one trainer (this process) and several readers.

Started by `torchrl_probe.py`, which ends it by force if torchrl hangs. Every finding is one JSON
line on stdout as soon as it is known, so that a hang loses only what comes after it.
"""

import argparse
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.weight_update import WeightSyncScheme

from benchmarks.peers.torchrl_common import (
    SCHEMES,
    TRAINERS,
    claim_stdout,
    end_with_parent,
    make_scheme,
    sender_recipe,
    use_fastest_tensor_sharing,
)
from benchmarks.peers.torchrl_probe_policy import VersionedPolicy

READY_TIMEOUT_S = 40.0
ANSWER_TIMEOUT_S = 10.0
SETTLE_S = 0.3
UNSENT_VERSION = 1_000_000
CALLS_PER_POLL = 16


def reader_main(scheme: WeightSyncScheme, width: int, index: int, pipe: Connection) -> None:
    """Call the policy without pause while torchrl's own background thread applies weights."""
    use_fastest_tensor_sharing()
    torch.set_num_threads(1)
    policy = VersionedPolicy(width)
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=index)
    scheme.connect(worker_idx=index)
    pipe.send("ready")
    counts = {"calls": 0, "torn": 0, "torn_inside_one_tensor": 0}
    try:
        while True:
            for _ in range(CALLS_PER_POLL):
                seen = policy()
                counts["calls"] += 1
                if seen.min() != seen.max():
                    counts["torn"] += 1
                    counts["torn_inside_one_tensor"] += bool((seen[:, 0] != seen[:, 1]).any())
            if pipe.poll():
                if pipe.recv() == "look":
                    seen = policy()
                    pipe.send([seen.min().item(), seen.max().item()])
                else:
                    pipe.send(counts)
                    counts = dict.fromkeys(counts, 0)
    except (EOFError, OSError):  # the trainer closed its end, or died
        os._exit(0)  # torchrl's daemon thread would make an ordinary exit abort


class Trainer:
    """The sending side: the trainer's policy, torchrl's scheme, and a pipe to each reader."""

    def __init__(
        self, *, scheme: str, trainer: str, sync: bool, num_readers: int, width: int
    ) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.policy = VersionedPolicy(width)
        self.scheme = make_scheme(scheme, sync=sync)
        recipe = sender_recipe(scheme, trainer, self.policy, num_readers)
        self.scheme.init_on_sender(**recipe, ctx=context)
        self.pipes: list[Connection] = []
        for index in range(num_readers):
            ours, theirs = context.Pipe()
            context.Process(
                target=reader_main, args=(self.scheme, width, index, theirs), daemon=True
            ).start()
            theirs.close()
            self.pipes.append(ours)
        self.scheme.connect()
        self._weights: TensorDictBase = TensorDict.from_module(self.policy).data
        self._receive(READY_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> list[Any]:
        for index, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"reader {index} said nothing for {timeout_s} s")
        return [pipe.recv() for pipe in self.pipes]

    def ask(self, question: str) -> list[Any]:
        """Ask every reader `look` or `report`, and return the answers in reader order."""
        for pipe in self.pipes:
            pipe.send(question)
        return self._receive(ANSWER_TIMEOUT_S)

    def send_own(self, version: int) -> None:
        """Publish as training loops do: change the trainer's policy in place, then send it."""
        self.policy.set_version(version)
        self.scheme.send(weights=self._weights)

    def send_copy(self, version: int, worker_ids: list[int] | None = None) -> None:
        """Publish weights that are new memory each time and not the trainer's: the kinder case."""
        copy = self._weights.apply(lambda tensor: torch.full_like(tensor, version))
        self.scheme.send(weights=copy, worker_ids=worker_ids)

    def check_aliasing(self) -> dict[str, Any]:
        """Step in place without a send: does a reader see it?"""
        self.send_own(7)
        time.sleep(SETTLE_S)
        before = self.ask("look")
        self.policy.set_version(UNSENT_VERSION)
        time.sleep(SETTLE_S)
        saw_unsent = sum(high == UNSENT_VERSION for _low, high in self.ask("look"))
        self.send_own(8)
        return {
            "readers_that_saw_an_unsent_step": saw_unsent,
            "delivered": before == [[7, 7]] * len(before),
        }

    def check_worker_ids(self) -> dict[str, Any]:
        """Send to worker 0 alone: who changes? (The trainer's own policy must not, either.)"""
        self.send_own(9)
        time.sleep(SETTLE_S)
        self.send_copy(10, worker_ids=[0])
        time.sleep(SETTLE_S)
        first, *others = self.ask("look")
        trainer = self.policy()
        return {
            "other_readers_changed": sum(seen != [9, 9] for seen in others),
            "addressed_reader_changed": first == [10, 10],
            "trainers_own_weights_changed": bool((trainer != 9).any()),
        }

    def storm(self, send: Callable[[int], None], seconds: float) -> dict[str, Any]:
        """Publish as fast as torchrl lets us while the readers read; count what they saw."""
        self.ask("report")  # starts the count at zero
        version = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            version += 1
            send(version)
        elapsed_s = time.perf_counter() - start
        readers = self.ask("report")
        total = {key: sum(counts[key] for counts in readers) for key in readers[0]}
        return {
            "sends": version,
            "sends_per_s": round(version / elapsed_s, 1),
            **total,
            "readers": readers,
            "next_send_delivered_after_s": self._time_one_delivery(version + 1),
        }

    def _time_one_delivery(self, version: int) -> float | str:
        """Send once more and wait until every reader has it, behind whatever is queued."""
        start = time.perf_counter()
        self.send_copy(version)
        while time.perf_counter() - start < ANSWER_TIMEOUT_S:
            if self.ask("look") == [[version, version]] * len(self.pipes):
                return round(time.perf_counter() - start, 3)
            time.sleep(0.01)
        return f"not within {ANSWER_TIMEOUT_S:.0f} s"


def main() -> None:
    """Run the checks and both storms, printing each finding as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=list(SCHEMES), required=True)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--nonblocking", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--readers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
    use_fastest_tensor_sharing()
    end_with_parent()
    reply = claim_stdout()
    trainer = Trainer(
        scheme=args.scheme,
        trainer=args.trainer,
        sync=not args.nonblocking,
        num_readers=args.readers,
        width=args.width,
    )
    offered = hasattr(trainer.scheme, "version") or hasattr(trainer.scheme, "policy_version")
    reply({"version_stamp": "offered" if offered else "not offered"})
    reply({"aliasing": trainer.check_aliasing()})
    reply({"worker_ids": trainer.check_worker_ids()})
    reply({"storm_copied_weights": trainer.storm(trainer.send_copy, args.seconds / 2)})
    reply({"storm_own_weights": trainer.storm(trainer.send_own, args.seconds / 2)})
    os._exit(0)  # the readers see their pipes close; torchrl's queues may still be full


if __name__ == "__main__":
    main()
