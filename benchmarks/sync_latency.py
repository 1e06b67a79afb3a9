"""How long a blocking `send` to two workers takes, beside torchrl and the machine's own limits.

    make bench            or, with both environments made,
    .venv/bin/python benchmarks/sync_latency.py [--rounds 12] [--sizes 4.5k,1M] [--no-peers]
    .venv/bin/python benchmarks/sync_latency.py --booking-only

Everything is measured in turns within one run: a few sends of ours, a few of torchrl's, a few
copies of the same bytes, a few round trips of an eventfd, and again, so that all of them meet the
machine in the same moods. Ratios are those of the medians over all rounds; absolute times are only
as steady as the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import MODEL_WIDTHS, build_model  # noqa: E402
from sync import (  # noqa: E402
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from sync.stats import SendStats, WorkerStats  # noqa: E402

SCHEMES: dict[str, type[WeightSyncScheme]] = {
    "shared_mem": SharedMemWeightSyncScheme,
    "multiprocess": MultiProcessWeightSyncScheme,
}
PEER_NAMES = {"shared_mem": "shared", "multiprocess": "multiprocess"}
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
BOOKED_AT_ONCE = 200
SENDS_A_ROUND = {"4.5k": 40, "1M": 20, "25M": 4}
WORKERS = 2
WARM_UP = 5


class Contestant(Protocol):
    """Something that can be timed a few times, again and again."""

    def times_ms(self, count: int) -> list[float]: ...

    def close(self) -> None: ...


def receive_idle(scheme: WeightSyncScheme, worker: int, model: str) -> None:
    """A worker that does nothing but take weights, in a background thread as torchrl's do."""
    torch.set_num_threads(1)
    scheme.init_on_receiver(model=build_model(model), worker_idx=worker)
    scheme.connect()
    while True:
        time.sleep(60.0)


def receive_busy(scheme: WeightSyncScheme, worker: int, model: str) -> None:
    """A worker that looks for weights between policy calls, as a collector's does."""
    torch.set_num_threads(1)
    policy = build_model(model)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=False)
    observation = torch.zeros(1, MODEL_WIDTHS[model][0])
    with torch.no_grad():
        while True:
            scheme.receive()
            policy(observation)


class Lockstep:
    """Our scheme, with its workers."""

    def __init__(
        self,
        scheme: str,
        model: str,
        *,
        work: Callable[..., None] = receive_idle,
        wait: bool = True,
    ):
        ctx = multiprocessing.get_context("forkserver")
        self.model = build_model(model)
        self.scheme = SCHEMES[scheme](sync=wait)
        self.scheme.init_on_sender(model=self.model, devices=["cpu"] * WORKERS)
        self.processes = [
            ctx.Process(target=work, args=(self.scheme, worker, model), daemon=True)
            for worker in range(WORKERS)
        ]
        for process in self.processes:
            process.start()
        self.scheme.connect()

    def times_ms(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.view(-1)[-1] += 1  # a training step, as far as sending is concerned
            begun = time.perf_counter()
            self.scheme.send()
            times.append((time.perf_counter() - begun) * 1e3)
        return times

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.scheme.shutdown()


class TorchRL:
    """The peer's scheme of the same name, in its own environment."""

    def __init__(self, scheme: str, model: str, trainer: str):
        self.process = subprocess.Popen(
            [
                *(str(PEER_PYTHON), "-m", "benchmarks.peers.torchrl_sync"),
                *("--scheme", PEER_NAMES[scheme], "--trainer", trainer, "--workers", str(WORKERS)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._ask(cmd="open", model=model)["torchrl"]

    def times_ms(self, count: int) -> list[float]:
        reply = self._ask(cmd="send", count=count)
        if not reply["verified"]:
            raise RuntimeError("torchrl's workers do not have the weights that were sent")
        times: list[float] = reply["ms"]
        return times

    def close(self) -> None:
        self._ask(cmd="close")
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)

    def _ask(self, **message: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(
            self.process.stdout.readline() or '{"error": "it ended"}'
        )
        if "error" in reply:
            raise RuntimeError(f"torchrl: {reply['error']}")
        return reply


class Memcpy:
    """One copy of the model's bytes by one thread: what moving them cannot beat."""

    def __init__(self, model: str):
        size = sum(p.numel() for p in build_model(model).parameters())
        self.source, self.target = np.ones(size, np.float32), np.zeros(size, np.float32)

    def times_ms(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            np.copyto(self.target, self.source)
            times.append((time.perf_counter() - begun) * 1e3)
        return times

    def close(self) -> None:
        pass


class EventfdRoundTrip:
    """Waking another process and being woken by it: what waiting for an answer cannot beat."""

    def __init__(self) -> None:
        self.there, self.back = os.eventfd(0), os.eventfd(0)
        self.child = os.fork()
        if self.child == 0:
            while os.eventfd_read(self.there) < 1_000_000:
                os.eventfd_write(self.back, 1)
            os._exit(0)

    def times_ms(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            os.eventfd_write(self.there, 1)
            os.eventfd_read(self.back)
            times.append((time.perf_counter() - begun) * 1e3)
        return times

    def close(self) -> None:
        os.eventfd_write(self.there, 1_000_000)
        os.waitpid(self.child, 0)
        os.close(self.there)
        os.close(self.back)


class Booking:
    """What the stats of a send to all workers and of their answers cost, without the send."""

    def __init__(self) -> None:
        self.sends, self.workers = SendStats(), [WorkerStats() for _ in range(WORKERS)]

    def times_ms(self, count: int) -> list[float]:
        times = []
        everybody = list(range(WORKERS))
        for _ in range(count):
            begun = time.perf_counter()
            for version in range(BOOKED_AT_ONCE):  # one alone takes little more than the clock
                for worker in self.workers:
                    worker.addressed += 1
                self.sends.add(version, 1, pack_ns=1, publish_ns=1, workers=everybody)
                for worker in self.workers:
                    worker.add(
                        version, wake_ns=1, apply_ns=1, acknowledge_ns=2, retries=0, again=False
                    )
            times.append((time.perf_counter() - begun) * 1e3 / BOOKED_AT_ONCE)
        return times

    def close(self) -> None:
        pass


class Closing(dict[str, Contestant]):
    """Contestants by name, closed at the end whatever happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for contestant in self.values():
            contestant.close()


def in_turns(contestants: dict[str, Contestant], count: int, rounds: int) -> dict[str, list[float]]:
    """Let each have `count` turns a round, the first of all not counted, in an order drawn anew
    each round, so that nobody always comes after the same one."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.times_ms(WARM_UP)
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(contestants), len(contestants)):
            times[name] += contestants[name].times_ms(count)
    return times


def measure(scheme: str, model: str, *, rounds: int, peers: bool) -> dict[str, dict[str, float]]:
    """Blocking sends, and publishes that wait for nobody, with their limits beside them."""
    with Closing(eventfd=EventfdRoundTrip()) as contestants:
        contestants["send"] = Lockstep(scheme, model)
        contestants["memcpy"] = Memcpy(model)
        if peers:
            contestants["torchrl"] = TorchRL(scheme, model, "shared")
            contestants["torchrl_private"] = TorchRL(scheme, model, "private")
        times = in_turns(contestants, SENDS_A_ROUND[model], rounds)
    with Closing(publish=Lockstep(scheme, model, work=receive_busy, wait=False)) as contestants:
        times |= in_turns(contestants, SENDS_A_ROUND[model], rounds)
    return {name: summary(values) for name, values in times.items()}


def summary(times: Iterable[float]) -> dict[str, float]:
    values = np.asarray(list(times))
    points = {f"p{p}": float(np.percentile(values, p)) for p in (50, 95, 99)}
    return {**points, "count": len(values)}


def table(results: dict[str, dict[str, dict[str, dict[str, float]]]], *, peers: bool) -> Table:
    """One row a scheme and size; times in ms, ratios of p50."""
    shown = Table(title=f"Blocking send to {WORKERS} workers: p50 / p95 / p99 in ms")
    columns = ["scheme", "floats", "lockstep", "memcpy", "eventfd p50", "÷ memcpy", "publish p50"]
    if peers:
        columns += ["torchrl, aliasing", "torchrl ÷ ours", "torchrl, copying", "torchrl ÷ ours"]
    for column in columns:
        shown.add_column(column, justify="right")
    for scheme, by_model in results.items():
        for model, of in by_model.items():
            ours = of["send"]["p50"]
            row = [scheme, model, triple(of["send"]), triple(of["memcpy"])]
            row += [f"{of['eventfd']['p50']:.3f}", f"{ours / of['memcpy']['p50']:.2f}"]
            row += [f"{of['publish']['p50']:.4f}"]
            for peer in ("torchrl", "torchrl_private") if peers else ():
                row += [triple(of[peer]), f"{of[peer]['p50'] / ours:.1f}"]
            shown.add_row(*row)
    return shown


def triple(of: dict[str, float]) -> str:
    return " / ".join(f"{of[p]:.3f}" for p in ("p50", "p95", "p99"))


NOTES = """\
publish: a send that waits for nobody, to workers that are busy with policy calls.
torchrl, aliasing: its default; the trainer's own tensors are the shared memory, so no send copies
  a weight, and workers see every step before it is sent (benchmarks/peers/torchrl_probe.py counts).
torchrl, copying: the trainer keeps memory of its own, so that a send carries the weights."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", default=",".join(MODEL_WIDTHS), help="of 4.5k, 1M, 25M")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--no-peers", action="store_true", help="measure only ourselves")
    parser.add_argument("--booking-only", action="store_true", help="measure only what stats cost")
    parser.add_argument("--output", default=str(ROOT / "outputs" / "benchmarks"))
    arguments = parser.parse_args()
    peers = not arguments.no_peers and not arguments.booking_only
    if peers and not PEER_PYTHON.exists():
        print("the peers' environment is missing: run `make peers`, or pass --no-peers")
        return 2
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    schemes = () if arguments.booking_only else arguments.schemes.split(",")
    for scheme in schemes:
        for model in arguments.sizes.split(","):
            print(f"measuring {scheme} {model}", file=sys.stderr, flush=True)
            measured = measure(scheme, model, rounds=arguments.rounds, peers=peers)
            results.setdefault(scheme, {})[model] = measured
    booking = summary(in_turns({"booking": Booking()}, 100, arguments.rounds)["booking"])
    if results:
        Console(width=200).print(table(results, peers=peers))
        print(NOTES if peers else NOTES.split("\n")[0])
    booked = " / ".join(f"{booking[p] * 1e3:.2f}" for p in ("p50", "p95", "p99"))
    print(f"stats of a send to {WORKERS} workers: {booked} µs (p50 / p95 / p99)")
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    machine = {
        "processor": platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    report = {"machine": machine, "workers": WORKERS, "unit": "ms", "results": results}
    report["booking"] = booking
    file = output / ("sync_booking.json" if arguments.booking_only else "sync_latency.json")
    file.write_text(json.dumps(report, indent=2))
    print(f"saved {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
