"""Scaling of `send` with the workers of this machine, and a prediction for a cluster.

    .venv/bin/python docs/scaling.py [--workers 1,2,4] [--model 1M] [--write docs/scaling.md]

Each scheme is measured with blocking sends of one model to 1, 2, 4, 6, 8 and 16 workers of this
machine. Costs are fitted to up to 8 of them: one for each send, and one for each worker. What they
say of 16 is compared with what was measured. For a cluster they are put together with what links
carry. Tables and prose of docs/scaling.md come from here.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import sync_remote  # noqa: E402
from benchmarks.models import MODEL_WIDTHS, build_model  # noqa: E402
from benchmarks.sync_latency import receive_idle  # noqa: E402
from benchmarks.sync_remote import Lockstep, Workers, serve, start_ray  # noqa: E402
from collectors.simulation.network import Network, Transfers, Version  # noqa: E402
from collectors.simulation.simulated_pool import VirtualClock  # noqa: E402
from sync import Link, WeightSyncScheme  # noqa: E402
from sync.remote import rpc_group  # noqa: E402

LOCAL = ("shared", "multiprocessing")
REMOTE = ("distributed", "rpc", "ray")
WARM_UP = 3
JOIN_S = 600.0
FITTED = 8  # the fit is to so many workers or fewer


@dataclass(frozen=True)
class Point:
    """What was measured with so many workers."""

    workers: int
    p50_ms: float
    p95_ms: float
    trainer_mb: float  # private memory of the trainer
    worker_mb: float  # and of a worker, on average


@dataclass(frozen=True)
class Fit:
    """`fixed_ms + each_ms * workers`; no cost is negative."""

    fixed_ms: float
    each_ms: float
    worst: float  # the largest relative error of the fit where it was made

    def at(self, workers: float) -> float:
        return self.fixed_ms + self.each_ms * workers

    def error(self, points: Iterable[Point]) -> float:
        """The largest relative error for these."""
        return max((abs(self.at(p.workers) / p.p50_ms - 1) for p in points), default=math.nan)

    @classmethod
    def of(cls, points: Sequence[Point]) -> Fit:
        """Least squares on relative errors, to the points of up to 8 workers."""
        points = [point for point in points if point.workers <= FITTED] or points
        times = np.array([point.p50_ms for point in points])
        rows = np.stack([1 / times, np.array([point.workers for point in points]) / times], axis=1)
        ones = np.ones(len(times))
        fixed, each = np.linalg.lstsq(rows, ones, rcond=None)[0]
        if fixed < 0 or each < 0:  # one of them explains it all
            one = 0 if each < 0 else 1
            costs = [0.0, 0.0]
            costs[one] = float(np.linalg.lstsq(rows[:, [one]], ones, rcond=None)[0][0])
            fixed, each = costs
        fit = cls(float(fixed), float(each), 0.0)
        return replace(fit, worst=fit.error(points))


def be_sparing() -> None:
    """Have RPC use sockets within this machine, too, and wait for many to join one by one."""
    few = {"_transports": ["uv"], "_channels": ["basic"]}
    rpc_group._ONE_MACHINE = rpc_group.BETWEEN_MACHINES = few
    sync_remote.START_S = JOIN_S


def serve_sparingly(kind: str, peer: int, port: int) -> None:
    """Be a worker."""
    be_sparing()
    serve(kind, peer, port)


@dataclass(frozen=True)
class Cluster:
    """What the prediction is for."""

    workers: int = 1024
    hosts: int = 128
    gbit: float = 25.0
    latency_ms: float = 0.1

    def carry_ms(self, nbytes: float) -> float:
        """So many bytes over one host's link."""
        return nbytes * 8 / (self.gbit * 1e9) * 1e3


class LocalWorkers:
    """A scheme of one machine, with its workers."""

    def __init__(self, kind: str, model: str, number: int):
        ctx = multiprocessing.get_context("forkserver")
        self.model = build_model(model)
        self.scheme = WeightSyncScheme.from_backend(kind, timeout=120.0, connect_timeout=120.0)
        self.scheme.init_on_sender(model=self.model, devices=["cpu"] * number)
        self.processes = [
            ctx.Process(target=receive_idle, args=(self.scheme, worker, model), daemon=True)
            for worker in range(number)
        ]
        for process in self.processes:
            process.start()
        self.scheme.connect()
        self.pids = [process.pid for process in self.processes]

    def send(self) -> None:
        self.scheme.send()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.scheme.shutdown()


class RemoteWorkers:
    """A scheme over an engine, with its peers on this machine."""

    def __init__(self, kind: str, model: str, number: int):
        self.workers = Workers(kind, number, serve_sparingly)
        self.lockstep = Lockstep(self.workers, model)
        engine = self.workers.engine
        asked = [engine.call(peer, os.getpid) for peer in range(number)]
        self.pids = [future.result(60.0) for future in asked]

    def send(self) -> None:
        self.lockstep.scheme.send()

    def close(self) -> None:
        self.lockstep.close()
        self.workers.close()


def measure(kind: str, model: str, number: int, sends: int) -> Point:
    """Blocking sends to so many workers."""
    make = LocalWorkers if kind in LOCAL else RemoteWorkers
    there = make(kind, model, number)
    try:
        times = []
        for turn in range(WARM_UP + sends):
            begun = time.perf_counter()
            there.send()
            if turn >= WARM_UP:
                times.append((time.perf_counter() - begun) * 1e3)
        memory = [private_mb(pid) for pid in there.pids if pid is not None]
        p50, p95 = np.percentile(times, [50, 95])
        trainer = private_mb(os.getpid())
        return Point(number, float(p50), float(p95), trainer, float(np.mean(memory)))
    finally:
        there.close()


def private_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().uss / 1e6)


class Prediction(NamedTuple):
    """Milliseconds of a blocking send in the cluster, and of the transfers alone."""

    total_ms: float
    link_ms: float


def predict(kind: str, fit: Fit, nbytes: int, on: Cluster) -> Prediction:
    """The slower of processor and links; each worker is called, and answers."""
    waits = 2 * on.latency_ms
    link = copies_in_a_row(kind, on) * on.carry_ms(nbytes) + waits
    return Prediction(max(link, fit.at(on.workers) + waits), link)


class Simulated(NamedTuple):
    """The same cluster as a network of `collector=simulated`.

    latest_ms: when the last worker has a version, counted from the start of the send.
    """

    options: dict[str, float]
    latest_ms: float


def simulate(kind: str, fit: Fit, nbytes: int, on: Cluster) -> Simulated:
    """The learner's port takes as long for a worker as a call and a copy do on average."""
    waits = 2 * on.latency_ms
    port_ms = (predict(kind, fit, nbytes, on).total_ms - waits - fit.fixed_ms) / on.workers
    mbps = nbytes * 8 / port_ms * 1e-3
    clock, arrived = VirtualClock(), list[int]()
    transfers = Transfers(
        Network(mbps),
        Link(latency_ms=on.latency_ms),
        on.workers,
        clock,
        lambda worker, version: arrived.append(clock.now),
    )
    transfers.publish(Version(1, nbytes), range(on.workers))
    while len(arrived) < on.workers:
        clock.step()
    options = {
        "collector.costs.publish_ms": round(fit.fixed_ms, 3),
        "collector.network.port_mbps": round(mbps),
        "sync.link.latency_ms": on.latency_ms,
    }
    return Simulated(options, fit.fixed_ms + max(arrived) * 1e-6)


def copies_in_a_row(kind: str, on: Cluster) -> int:
    """How many times the bytes cross some link before the last worker has them."""
    if kind == "ray":  # each host that has them serves one more at a time
        return math.ceil(math.log2(on.hosts + 1))
    return on.workers


def copies_from_the_trainer(kind: str, on: Cluster) -> int:
    """How many times the bytes leave the trainer's host."""
    return 1 if kind == "ray" else on.workers


# -- the page


def page(
    results: Mapping[str, Sequence[Point]], model: str, nbytes: int, clusters: Sequence[Cluster]
) -> str:
    fits = {kind: Fit.of(points) for kind, points in results.items()}
    lines = [
        "# Scaling of `send`",
        "",
        "How long a blocking `send` takes with more workers, measured on one machine and predicted "
        "for a cluster. No cluster was at hand: treat a prediction as an order of magnitude.",
        "",
        "`python docs/scaling.py` writes this page. "
        f"It ran on {os.cpu_count()} cores "
        f"({platform.machine()}, torch {torch.__version__}), with the {model} model "
        f"({nbytes / 1e6:.1f} MB) and idle workers on the same machine. Memory is the memory that "
        "a process does not share with others (USS).",
        "",
        "## Measured",
        "",
        "| scheme | workers | p50 ms | p95 ms | trainer MB | MB per worker |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, points in results.items():
        lines += [
            f"| {kind} | {p.workers} | {p.p50_ms:.2f} | {p.p95_ms:.2f} | {p.trainer_mb:.0f} "
            f"| {p.worker_mb:.0f} |"
            for p in points
        ]
    lines += [
        "",
        "## Fitted",
        "",
        f"`p50 = fixed + each × workers`, fitted to {FITTED} workers or fewer. With more workers "
        "than cores, most of this time is spent waiting for a core. The workers of a cluster do "
        "not share cores with the trainer, so `each` is likely to be too high. The last column is "
        "the error for more workers, which the fit did not use; the aim is at most 20 %.",
        "",
        "| scheme | fixed ms | each ms | largest error of the fit | error beyond it |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, fit in fits.items():
        beyond = [p for p in results[kind] if p.workers > FITTED]
        missed = f"{100 * fit.error(beyond):.0f} %" if beyond else ""
        lines.append(
            f"| {kind} | {fit.fixed_ms:.3f} | {fit.each_ms:.3f} | {100 * fit.worst:.0f} % "
            f"| {missed} |"
        )
    for on in clusters:
        lines += prediction(fits, nbytes, on)
    lines += in_the_simulator(fits, nbytes, clusters)
    lines += ["", "## What the prediction assumes", "", *ASSUMPTIONS, ""]
    return "\n".join(lines)


def prediction(fits: Mapping[str, Fit], nbytes: int, on: Cluster) -> list[str]:
    """One cluster's section."""
    lines = [
        "",
        f"## Predicted: {on.workers:,} workers on {on.hosts:,} hosts, {on.gbit:g} Gbit/s",
        "",
        "| scheme | send ms | links alone, ms | MB sent by the trainer |",
        "|---|---:|---:|---:|",
    ]
    for kind in fits:
        if kind in LOCAL:
            continue
        cost = predict(kind, fits[kind], nbytes, on)
        carried = nbytes / 1e6 * copies_from_the_trainer(kind, on)
        lines.append(f"| {kind} | {cost.total_ms:.1f} | {cost.link_ms:.1f} | {carried:,.0f} |")
    return lines


def in_the_simulator(
    fits: Mapping[str, Fit], nbytes: int, clusters: Sequence[Cluster]
) -> list[str]:
    """The options that simulate these clusters, and whether the simulator agrees."""
    lines = [
        "",
        "## In the simulator",
        "",
        "`collector.network.port_mbps` is not the speed of the link: it is chosen so that a "
        "version takes as long to each worker as in the prediction, with a model of "
        f"{nbytes / 1e6:.1f} MB.",
        "",
        "The last two columns say when the last worker has a version: in the simulator, and by the "
        "formula, without the answer's way back. They compare the simulator with the formula, not "
        "with a cluster.",
        "",
        "| cluster | scheme | options | simulated, ms | predicted, ms |",
        "|---|---|---|---:|---:|",
    ]
    for on in clusters:
        for kind in fits:
            if kind in LOCAL:
                continue
            simulated = simulate(kind, fits[kind], nbytes, on)
            options = " ".join(f"{name}={value:g}" for name, value in simulated.options.items())
            expected = predict(kind, fits[kind], nbytes, on).total_ms - on.latency_ms
            lines.append(
                f"| {on.workers:,} workers, {on.gbit:g} Gbit/s | {kind} | "
                f"`collector.num_workers={on.workers} {options}` "
                f"| {simulated.latest_ms:.1f} | {expected:.1f} |"
            )
    return lines


ASSUMPTIONS = [
    "- The trainer calls each worker. With `distributed` and `rpc`, each call carries a copy over "
    "the trainer's link.",
    "- With `ray`, a host fetches a block from any host that has it, and its workers map the same "
    "memory. The number of hosts that have it doubles with each step, so there are "
    "⌈log₂(hosts + 1)⌉ steps.",
    "- A call of a worker and its answer take `each` of processor time as measured above, which "
    "includes sending the block. The slower of links and processor counts.",
    "- Links carry nothing else, all hosts are equal, and workers are idle. A worker that is in "
    "the middle of a policy call answers after it, which adds up to the time of one call.",
    "- More than 16 workers, and more than one machine, were not measured.",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", default="1,2,4,6,8,16")
    parser.add_argument("--schemes", default=",".join((*LOCAL, *REMOTE)))
    parser.add_argument("--model", default="1M", choices=list(MODEL_WIDTHS))
    parser.add_argument("--sends", type=int, default=60)
    parser.add_argument("--gbit", default="10,100", help="links to predict for")
    parser.add_argument("--hosts", default="128,1024", help="clusters to predict for")
    parser.add_argument("--workers-per-host", type=int, default=8)
    parser.add_argument("--write", type=Path, default=ROOT / "docs" / "scaling.md", help="the page")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "sync.remote.rpc_engine"]
    )
    torch.set_num_threads(1)
    be_sparing()
    results: dict[str, list[Point]] = {}
    for kind in arguments.schemes.split(","):
        if kind == "ray":
            start_ray()
        for number in map(int, arguments.workers.split(",")):
            print(f"measuring {kind} x {number}", file=sys.stderr, flush=True)
            point = measure(kind, arguments.model, number, arguments.sends)
            results.setdefault(kind, []).append(point)
    nbytes = sum(p.numel() * 4 for p in build_model(arguments.model).parameters())
    clusters = [
        Cluster(hosts * arguments.workers_per_host, hosts, float(gbit))
        for hosts in map(int, arguments.hosts.split(","))
        for gbit in arguments.gbit.split(",")
    ]
    written: Path = arguments.write
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(page(results, arguments.model, nbytes, clusters))
    numbers: dict[str, Any] = {k: [asdict(p) for p in points] for k, points in results.items()}
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "scaling.json").write_text(json.dumps(numbers, indent=2))
    print(f"wrote {written} and {output / 'scaling.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
