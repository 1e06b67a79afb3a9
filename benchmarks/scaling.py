"""Scaling of `send` with the workers of this machine, and a prediction for a cluster.

    make bench BENCH=scaling            or
    .venv/bin/python benchmarks/scaling.py [--workers 1,2,4] [--model 1M] [--write docs/scaling.md]

Each scheme is measured with blocking sends of one model to 1, 2, 4, 6, 8 and 16 workers of this
machine. Costs are fitted to up to 8 of them: one for each send, one for each worker, and one more
for each worker that has its versions from another one instead of the trainer. What they say of 16
is compared with what was measured. For a cluster they are put together with what links carry.
Tables and prose of docs/scaling.md come from here.
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
from benchmarks.broadcast import JOIN_S, until_connected  # noqa: E402
from benchmarks.models import MODEL_WIDTHS, build_model  # noqa: E402
from benchmarks.sync_latency import receive_idle  # noqa: E402
from benchmarks.sync_remote import Lockstep, Workers, serve, start_ray  # noqa: E402
from collectors.schedule.network import Network, Transfers, Version  # noqa: E402
from collectors.schedule.simulated_pool import VirtualClock  # noqa: E402
from sync import Link, WeightSyncScheme  # noqa: E402
from sync.remote import rpc_group, tree  # noqa: E402

LOCAL = ("shared", "multiprocessing")
REMOTE = ("distributed", "rpc", "ray")
TREE = ("distributed",)  # whose nodes pass versions on
WARM_UP = 3
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
    """`fixed_ms + each_ms * workers + relayed_ms * relayed(workers)`; no cost is negative."""

    fixed_ms: float
    each_ms: float
    relayed_ms: float
    worst: float  # the largest relative error of the fit where it was made
    is_tree: bool  # whether nodes pass versions on

    def at(self, workers: float) -> float:
        others = relayed(workers) if self.is_tree else 0.0
        return self.fixed_ms + self.each_ms * workers + self.relayed_ms * others

    def error(self, points: Iterable[Point]) -> float:
        """The largest relative error for these."""
        return max((abs(self.at(p.workers) / p.p50_ms - 1) for p in points), default=math.nan)

    @classmethod
    def of(cls, points: Sequence[Point], *, is_tree: bool) -> Fit:
        """Least squares on relative errors, to the points of up to 8 workers."""
        points = [point for point in points if point.workers <= FITTED] or points
        times = np.array([point.p50_ms for point in points])
        workers = [point.workers for point in points]
        columns = {
            "fixed": np.ones(len(points)),
            "each": np.array(workers, float),
            "relayed": np.array([relayed(n) if is_tree else 0 for n in workers], float),
        }
        used = [name for name in columns if columns[name].any()][: len(points)]
        while True:
            rows = np.stack([columns[name] / times for name in used], axis=1)
            costs = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
            if len(used) == 1 or costs.min() >= 0:
                break
            del used[int(costs.argmin())]
        found = dict.fromkeys(columns, 0.0) | dict(zip(used, map(float, costs), strict=True))
        fit = cls(found["fixed"], found["each"], found["relayed"], 0.0, is_tree)
        return replace(fit, worst=fit.error(points))


def be_sparing() -> None:
    """Have RPC use sockets within this machine, too, and wait for many to join one by one."""
    few = {"_transports": ["uv"], "_channels": ["basic"]}
    rpc_group._ONE_MACHINE = rpc_group.BETWEEN_MACHINES = few
    sync_remote.START_S = JOIN_S


def serve_sparingly(kind: str, peer: int, port: int) -> None:
    """Be a node."""
    be_sparing()
    serve(kind, peer, port)


def relayed(workers: float) -> float:
    """How many of them get a version from another one."""
    return max(0.0, workers - tree.FAN_OUT)


def levels(kind: str, nodes: int) -> int:
    """How many levels of nodes there are below the trainer."""
    number, over = 1, tree.above(nodes - 1) if kind in TREE else None
    while over is not None:
        number, over = number + 1, tree.above(over)
    return number


@dataclass(frozen=True)
class Cluster:
    """What the prediction is for."""

    workers: int = 1024
    nodes: int = 128
    gbit: float = 25.0
    latency_ms: float = 0.1

    @property
    def on_a_node(self) -> float:
        return self.workers / self.nodes

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
        if kind in TREE:
            until_connected(self.lockstep, number)
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


def predict(kind: str, fits: Mapping[str, Fit], nbytes: int, on: Cluster) -> dict[str, float]:
    """Milliseconds of a blocking send in the cluster, and through what.

    Each node has one receiver, which shares what arrives with the node's workers (shared memory).
    """
    spread = fits["shared"].at(on.on_a_node) if "shared" in fits else 0.0
    if kind in LOCAL:
        return {"nodes": 1, "total_ms": fits[kind].at(on.on_a_node), "link_ms": 0.0}
    waits = on.latency_ms * 2 * levels(kind, on.nodes)
    link = copies_in_a_row(kind, on.nodes) * on.carry_ms(nbytes) + waits
    fit, calls = fits[kind], calls_in_a_row(kind, on.nodes)
    by_nodes = relayed(calls) if fit.is_tree else 0.0  # all but those of the trainer
    processor = fit.fixed_ms + fit.each_ms * calls + fit.relayed_ms * by_nodes + waits
    return {"nodes": on.nodes, "total_ms": max(link, processor) + spread, "link_ms": link}


class Simulated(NamedTuple):
    """The same cluster as a network of `collector=simulated`, whose workers are the nodes.

    latest_ms: when the last node has a version, counted from the start of the send.
    """

    options: dict[str, float]
    latest_ms: float


def simulate(kind: str, fits: Mapping[str, Fit], nbytes: int, on: Cluster) -> Simulated:
    """Every port takes as long for a node as the calls and copies in a row do on average."""
    found = predict(kind, {kind: fits[kind]}, nbytes, on)  # without the workers of a node
    waits = on.latency_ms * 2 * levels(kind, on.nodes)
    port_ms = (found["total_ms"] - waits - fits[kind].fixed_ms) / calls_in_a_row(kind, on.nodes)
    mbps = nbytes * 8 / port_ms * 1e-3
    clock, arrived = VirtualClock(), list[int]()
    transfers = Transfers(
        Network(mbps, "tree" if kind in TREE else "star", tree.FAN_OUT),
        Link(latency_ms=on.latency_ms),
        on.nodes,
        clock,
        lambda node, version: arrived.append(clock.now),
    )
    transfers.publish(Version(1, nbytes), range(on.nodes))
    while len(arrived) < on.nodes:
        clock.step()
    options = {
        "collector.costs.publish_ms": round(fits[kind].fixed_ms, 3),
        "collector.network.port_mbps": round(mbps),
        "sync.link.latency_ms": on.latency_ms,
    }
    return Simulated(options, fits[kind].fixed_ms + max(arrived) * 1e-6)


def calls_in_a_row(kind: str, nodes: int) -> int:
    """How many nodes are called, one after the other, before the last one is."""
    if kind not in TREE:
        return nodes

    def turns(worker: int) -> int:
        over = tree.above(worker)
        return worker % tree.FAN_OUT + 1 + (0 if over is None else turns(over))

    return max(turns(worker) for worker in range(nodes))


def copies_in_a_row(kind: str, nodes: int) -> int:
    """How many times the bytes cross some link before the last node has them."""
    if kind == "ray":  # each node that has them serves one more at a time
        return math.ceil(math.log2(nodes + 1))
    return calls_in_a_row(kind, nodes)


def copies_from_the_trainer(kind: str, nodes: int) -> int:
    """How many times the bytes leave the trainer's host."""
    if kind == "ray":
        return 1
    return min(nodes, tree.FAN_OUT) if kind in TREE else nodes


# -- the page


def page(
    results: Mapping[str, Sequence[Point]], model: str, nbytes: int, clusters: Sequence[Cluster]
) -> str:
    fits = {kind: Fit.of(points, is_tree=kind in TREE) for kind, points in results.items()}
    lines = [
        "# Scaling of `send`",
        "",
        "How long a blocking `send` takes with more workers, measured on one machine and predicted "
        "for a cluster. No cluster was at hand: treat a prediction as an order of magnitude.",
        "",
        "`make bench BENCH=scaling` writes this page. "
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
        "`p50 = fixed + each × workers + relayed × max(0, workers − "
        f"{tree.FAN_OUT})`, fitted to {FITTED} workers or fewer. With `distributed`, "
        f"the trainer sends to {tree.FAN_OUT} workers, and these pass versions "
        "on to the others, which is what `relayed` costs. With more workers than cores, most of "
        "this time is spent waiting for a core. The nodes of a cluster do not share cores, "
        "so `each` and `relayed` are likely to be too high. The last column is the "
        "error for more workers, which the fit did not use; the aim is at most 20 %.",
        "",
        "| scheme | fixed ms | each ms | relayed ms | largest error of the fit | error beyond it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, fit in fits.items():
        beyond = [p for p in results[kind] if p.workers > FITTED]
        missed = f"{100 * fit.error(beyond):.0f} %" if beyond else ""
        lines.append(
            f"| {kind} | {fit.fixed_ms:.3f} | {fit.each_ms:.3f} | {fit.relayed_ms:.3f} "
            f"| {100 * fit.worst:.0f} % | {missed} |"
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
        f"## Predicted: {on.workers:,} workers on {on.nodes:,} nodes, {on.gbit:g} Gbit/s",
        "",
        "| scheme | send ms | links alone, ms | MB sent by the trainer |",
        "|---|---:|---:|---:|",
    ]
    for kind in fits:
        if kind in LOCAL:
            continue
        found = predict(kind, fits, nbytes, on)
        carried = nbytes / 1e6 * copies_from_the_trainer(kind, on.nodes)
        lines.append(
            f"| {kind} | {found['total_ms']:.1f} | {found['link_ms']:.1f} | {carried:,.0f} |"
        )
    return lines


def in_the_simulator(
    fits: Mapping[str, Fit], nbytes: int, clusters: Sequence[Cluster]
) -> list[str]:
    """The options that simulate these clusters, and whether the simulator agrees."""
    lines = [
        "",
        "## In the simulator",
        "",
        "In `collector=simulated`, one worker stands for one node; set `env.num_envs` to the "
        "environments of a whole node. `collector.network.port_mbps` is not the speed of the link: "
        "it is chosen so that a version takes as long from node to node as in the prediction, with "
        f"a model of {nbytes / 1e6:.1f} MB. With `distributed`, add "
        f"`collector.network.topology=tree collector.network.fan_out={tree.FAN_OUT}`.",
        "",
        "The last two columns say when the last node has a version: in the simulator, and by the "
        "formula, without the answer's way back and the workers of the node. They compare the "
        "simulator with the formula, not with a cluster.",
        "",
        "| cluster | scheme | options | simulated, ms | predicted, ms |",
        "|---|---|---|---:|---:|",
    ]
    for on in clusters:
        for kind in fits:
            if kind in LOCAL:
                continue
            found = simulate(kind, fits, nbytes, on)
            options = " ".join(f"{name}={value:g}" for name, value in found.options.items())
            back = on.latency_ms * levels(kind, on.nodes)
            expected = predict(kind, {kind: fits[kind]}, nbytes, on)["total_ms"] - back
            lines.append(
                f"| {on.nodes:,} nodes, {on.gbit:g} Gbit/s | {kind} | "
                f"`collector.num_workers={on.nodes} {options}` "
                f"| {found.latest_ms:.1f} | {expected:.1f} |"
            )
    return lines


ASSUMPTIONS = [
    "- Each node has one receiver. The workers of the node share each version through shared "
    "memory, at the cost measured for `shared` with as many workers.",
    f"- With `distributed`, the trainer sends to {tree.FAN_OUT} nodes, and each node to "
    f"{tree.FAN_OUT} others, one after the other. The last node is reached after all sends on the "
    "path to it. With `rpc` and `ray`, the trainer calls all nodes. With `distributed` and `rpc`, "
    "each send is a copy over the sender's link.",
    "- With `ray`, a node fetches a block from any node that has it. The number of nodes that have "
    "it doubles with each step, so there are ⌈log₂(nodes + 1)⌉ steps.",
    "- A call of a node and its answer take `each` of processor time as measured above, and "
    "`relayed` besides if another node calls. This includes sending the block, and calls in a row "
    "add up. The slower of links and processors counts. Each level of the tree adds two link "
    f"latencies of {Cluster.latency_ms:g} ms.",
    "- Links carry nothing else, all nodes are equal, and workers are idle. A worker that is in "
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
    parser.add_argument("--nodes", default="128,1024", help="clusters to predict for")
    parser.add_argument("--workers-per-node", type=int, default=8)
    parser.add_argument("--write", type=Path, default=ROOT / "docs" / "scaling.md", help="the page")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "sync.remote.rpc"])
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
        Cluster(nodes * arguments.workers_per_node, nodes, float(gbit))
        for nodes in map(int, arguments.nodes.split(","))
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
