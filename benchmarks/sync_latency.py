"""How long a blocking `send` to two workers takes, beside torchrl and the machine's own limits.

    make bench BENCH=sync_latency       or, with both environments made,
    .venv/bin/python benchmarks/sync_latency.py [--rounds 12] [--sizes 4.5k,1M] [--no-peers]

Everything is measured in turns within one run: a few sends of ours, a few of torchrl's, a few
copies of the same bytes, a few round trips of an eventfd, and again. So all of them meet the same
conditions. Ratios are those of the medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.contest import PEER_PYTHON  # noqa: E402
from benchmarks.models import (  # noqa: E402
    MODEL_WIDTHS,
    build_model,
    timed_ms,
    timed_sends_ms,
)
from benchmarks.remote import Remote  # noqa: E402
from sync import WeightSyncScheme  # noqa: E402

# What is measured together: our schemes, and the options of each.
TOGETHER: dict[str, dict[str, dict[str, Any]]] = {
    "shared_mem": {"shared_mem": {}, "shared_mem, zero_copy": {"zero_copy": True}},
    "multiprocess": {"multiprocess": {}},
}
PEERS = {"torchrl, as it comes": "shared", "torchrl, copying": "private"}
SENDS_A_ROUND = {"4.5k": 40, "1M": 20, "25M": 4}
WORKERS = 2
WARM_UP = 5
PEER_OPEN_S = 180.0
PEER_SEND_S = 180.0

Times = dict[str, float]  # percentiles in ms


class Row(NamedTuple):
    """One of our schemes with one model, and what was measured in turns with it."""

    scheme: str
    model: str
    ours: Times
    others: dict[str, Times]
    stages: Times

    def ratio(self, beside: str) -> float:
        """How many times as long the other takes."""
        return self.others[beside]["p50"] / self.ours["p50"]


class Aim(NamedTuple):
    """At least `bound` times as fast as a peer, or at most `bound` times as long as one memcpy."""

    scheme: str
    model: str
    beside: str
    bound: float

    def verdict(self, rows: Iterable[Row]) -> str:
        """One line of Markdown; empty if it was not measured."""
        for row in rows:
            if (row.scheme, row.model) == self[:2] and self.beside in row.others:
                break
        else:
            return ""
        if self.beside == "memcpy":
            figure, holds = 1 / row.ratio("memcpy"), 1 / row.ratio("memcpy") <= self.bound
            said = f"{figure:.2f} memcpy (aim: at most {self.bound:g})"
        else:
            figure, holds = row.ratio(self.beside), row.ratio(self.beside) >= self.bound
            said = f"{figure:.1f} times as fast as {self.beside} (aim: at least {self.bound:g})"
        return f"- {'holds' if holds else '**missed**'}: {self.scheme}, {self.model}: {said}"


AIMS = [
    Aim("shared_mem", "4.5k", "torchrl, as it comes", 2.0),
    Aim("shared_mem", "1M", "torchrl, copying", 2.0),
    Aim("shared_mem", "25M", "memcpy", 2.5),
    Aim("shared_mem, zero_copy", "1M", "torchrl, copying", 1.0),
    Aim("shared_mem, zero_copy", "25M", "torchrl, copying", 1.0),
    Aim("shared_mem, zero_copy", "25M", "memcpy", 1.5),
    *(Aim("multiprocess", model, "torchrl, copying", 4.0) for model in MODEL_WIDTHS),
]


# -- contestants


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


class Lockstep:
    """Our scheme, with its workers."""

    def __init__(self, scheme: str, model: str, **options: Any):
        ctx = multiprocessing.get_context("forkserver")
        self.model = build_model(model)
        self.scheme = WeightSyncScheme.from_backend(scheme, **options)
        self.scheme.init_on_sender(model=self.model, devices=["cpu"] * WORKERS)
        self.processes = [
            ctx.Process(target=receive_idle, args=(self.scheme, worker, model), daemon=True)
            for worker in range(WORKERS)
        ]
        for process in self.processes:
            process.start()
        self.scheme.connect()

    def times_ms(self, count: int) -> list[float]:
        return timed_sends_ms(self.model, self.scheme.send, count)

    def stages(self) -> Times:
        """The medians of a send's parts; those of the slower worker, where each has its own."""
        stats = self.scheme.stats
        workers = stats["workers"].values()
        stages = {stage: stats[f"{stage}_ms"]["p50"] for stage in ("pack", "publish")}
        for stage in ("wake", "apply", "ack"):
            stages[stage] = max(worker[f"{stage}_ms"]["p50"] for worker in workers)
        return stages

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.scheme.shutdown()


class TorchRL:
    """The peer's scheme of the same name, in its own environment; `peers/` has the programs."""

    def __init__(self, program: str, **opening: Any):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment["PYTHONPATH"] = str(ROOT)
        self.process = Remote(PEER_PYTHON, f"benchmarks.peers.{program}", environment)
        try:
            self.version = self.process.ask(PEER_OPEN_S, cmd="open", **opening)["torchrl"]
        except BaseException:
            self.close()
            raise

    def times_ms(self, count: int) -> list[float]:
        reply = self.process.ask(PEER_SEND_S, cmd="send", count=count)
        if not reply["verified"]:
            raise RuntimeError("torchrl's workers do not have the weights that were sent")
        times: list[float] = reply["ms"]
        return times

    def close(self) -> None:
        self.process.close()


class Memcpy:
    """One copy of the model's bytes by one thread."""

    def __init__(self, model: str):
        size = sum(p.numel() for p in build_model(model).parameters())
        self.source, self.target = np.ones(size, np.float32), np.zeros(size, np.float32)

    def times_ms(self, count: int) -> list[float]:
        return timed_ms(lambda: np.copyto(self.target, self.source), count)

    def close(self) -> None:
        pass


class EventfdRoundTrip:
    """Waking another process and being woken by it."""

    def __init__(self) -> None:
        self.there, self.back = os.eventfd(0), os.eventfd(0)
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=self._answer, daemon=True)
        self.process.start()

    def _answer(self) -> None:
        while True:
            os.eventfd_read(self.there)
            os.eventfd_write(self.back, 1)

    def _round_trip(self) -> None:
        os.eventfd_write(self.there, 1)
        os.eventfd_read(self.back)

    def times_ms(self, count: int) -> list[float]:
        return timed_ms(self._round_trip, count)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        os.close(self.there)
        os.close(self.back)


# -- measuring


class Closing(dict[str, Contestant]):
    """Contestants by name, closed at the end whatever happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for contestant in self.values():
            contestant.close()


def in_turns(contestants: dict[str, Contestant], count: int, rounds: int) -> dict[str, Times]:
    """Let each have `count` turns a round, in an order drawn anew each round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.times_ms(WARM_UP)
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(contestants), len(contestants)):
            times[name] += contestants[name].times_ms(count)
    return {name: summary(values) for name, values in times.items()}


def summary(times: Sequence[float]) -> Times:
    points = {f"p{p}": float(np.percentile(times, p)) for p in (50, 95, 99)}
    return {**points, "count": len(times)}


def measure(scheme: str, model: str, *, rounds: int, peers: bool) -> list[Row]:
    """The rows of one scheme and model."""
    with Closing(eventfd=EventfdRoundTrip(), memcpy=Memcpy(model)) as contestants:
        for name, options in TOGETHER[scheme].items():
            contestants[name] = Lockstep(scheme, model, **options)
        for name, trainer in PEERS.items() if peers else ():
            opening = {"scheme": scheme, "trainer": trainer, "model": model, "workers": WORKERS}
            contestants[name] = TorchRL("torchrl_sync", **opening)
        times = in_turns(contestants, SENDS_A_ROUND[model], rounds)
        ours = {name: times.pop(name) for name in TOGETHER[scheme]}
        stages = {name: contestants[name].stages() for name in ours}  # type: ignore[attr-defined]
    return [Row(name, model, found, times, stages[name]) for name, found in ours.items()]


# -- reporting


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose numbers are aligned to the right."""
    lines = [columns, ["---:"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(times: Times) -> str:
    """In ms, with three digits of the larger times and microseconds of the smaller."""
    digits = 3 if times["p50"] < 10 else 1
    return f"{times['p50']:.{digits}f} / {times['p95']:.{digits}f}"


def table(rows: Iterable[Row], *, peers: bool) -> str:
    """One row a scheme and model; times in ms, ratios of p50."""
    peer_names = list(PEERS) if peers else []
    columns = ["floats", "scheme", "ours", *peer_names, "memcpy", "eventfd, µs", "ours ÷ memcpy"]
    columns += [f"{name} ÷ ours" for name in peer_names]
    lines = []
    for row in rows:
        lines.append([row.model, row.scheme, shown(row.ours)])
        lines[-1] += [shown(row.others[name]) for name in (*peer_names, "memcpy")]
        lines[-1] += [f"{row.others['eventfd']['p50'] * 1e3:.1f}"]
        lines[-1] += [f"{1 / row.ratio('memcpy'):.2f}"]
        lines[-1] += [f"{row.ratio(name):.1f}" for name in peer_names]
    return markdown(columns, lines)


def stages_table(rows: Iterable[Row]) -> str:
    """Where the time of a send goes, in ms."""
    lines = []
    columns: list[str] = []
    for row in rows:
        send, stages = row.ours["p50"], row.stages
        parts = {"send": send, **stages, "rest": send - stages["pack"] - stages["ack"]}
        columns = ["floats", "scheme", *parts]
        lines.append([row.model, row.scheme, *(f"{value:.3f}" for value in parts.values())])
    return markdown(columns, lines)


NOTES = """\
"As it comes": the trainer's own tensors are the shared memory. No send copies a weight, and workers
see every step before it is sent. "Copying": the trainer keeps memory of its own, and a send carries
the weights. "memcpy": one copy of the same bytes by one thread. "eventfd": a round trip between two
processes."""
STAGES = """\
Medians in ms. pack: check and copy. publish: to announce the version and to wake the workers. Of
the slower worker, wake: from the end of pack until it saw the version; apply: from then until it
used it; ack: both. rest: what is left of the send, such as the way of the last answer."""


def save(name: str, output: Path, rows: Iterable[Any]) -> None:
    """Keep all percentiles, and what machine they are of, as JSON."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"{name}.json"
    rows = [row._asdict() for row in rows]
    file.write_text(json.dumps({"machine": machine(), "unit": "ms", "rows": rows}, indent=2))
    print(f"saved {file}")


def machine() -> dict[str, Any]:
    return {"processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__}


def processor() -> str:
    """The model's name, on Linux; else what Python knows."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def options(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """What both benchmarks of sends can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--sizes", default=",".join(MODEL_WIDTHS), help="of 4.5k, 1M, 25M")
    parser.add_argument("--no-peers", action="store_true", help="measure only ourselves")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    return parser


def main() -> int:
    parser = options(__doc__.split("\n")[0], rounds=12)
    parser.add_argument("--schemes", default=",".join(TOGETHER))
    arguments = parser.parse_args()
    peers = not arguments.no_peers
    if peers and not PEER_PYTHON.exists():
        print("the peers' environment is missing: run `make peers`, or pass --no-peers")
        return 2
    rows = []
    for model in arguments.sizes.split(","):
        for scheme in arguments.schemes.split(","):
            print(f"measuring {scheme} {model}", file=sys.stderr, flush=True)
            rows += measure(scheme, model, rounds=arguments.rounds, peers=peers)
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"Blocking send to {WORKERS} workers, p50 / p95 in ms ({about}):\n")
    print(table(rows, peers=peers))
    print(f"\n{NOTES}\n")
    print(f"{STAGES}\n")
    print(stages_table(rows) + "\n")
    print("\n".join(filter(None, (aim.verdict(rows) for aim in AIMS))))
    save("sync_latency", arguments.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
