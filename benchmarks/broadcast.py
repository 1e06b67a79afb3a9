"""What a blocking `send` of `distributed` to many nodes costs the trainer's processor.

    make bench BENCH=broadcast          or
    .venv/bin/python benchmarks/broadcast.py [--nodes 2,4,8] [--sizes 4.5k]

In a tree, the trainer sends a version to four nodes, and they pass it on; "flat" it sends it to all
of them. Nodes are idle processes of this machine, on loopback, or with `--namespaces` (as root) in
network namespaces, each with a cable to a switch. Processor time is that of the trainer's process
with all its threads. It does not depend on how many cores the nodes share; wall time does.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import sync_remote  # noqa: E402
from benchmarks.models import MODEL_WIDTHS, timed_sends_ms  # noqa: E402
from benchmarks.sync_latency import machine, markdown, save  # noqa: E402
from benchmarks.sync_remote import Lockstep, Workers, serve  # noqa: E402
from sync.remote import tree  # noqa: E402
from tests.promises.network import TRAINER, host_name, network, why_not  # noqa: E402

CLONE_NEWNET = 0x40000000
WARM_UP = 5
CONNECT_S = 120.0
JOIN_S = 600.0
KIND = "distributed"
LAYOUTS = {"tree": tree.FAN_OUT, "flat": 1_000_000}
AIM = "at most twice the processor time for 64 nodes that it takes for 4"
NODE_MB = 60  # what a node may need, so as not to swap


class Point(NamedTuple):
    """What one send takes, in ms; processor time is the median over rounds of sends."""

    scheme: str
    layout: str
    model: str
    nodes: int
    cpu_ms: float
    wall_p50_ms: float
    wall_p95_ms: float


class Fit(NamedTuple):
    """`fixed_ms + each_ms * nodes`, and the largest relative error where it was measured."""

    fixed_ms: float
    each_ms: float
    worst: float

    @classmethod
    def of(cls, nodes: Sequence[int], times_ms: Sequence[float]) -> Fit:
        """Least squares on relative errors."""
        counts, times = np.array(nodes, float), np.array(times_ms)
        rows = np.stack([1 / times, counts / times], axis=1)
        fixed, each = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
        errors = np.abs((fixed + each * counts) / times - 1)
        return cls(float(fixed), float(each), float(errors.max()))


def serve_node(kind: str, peer: int, port: int, tag: str = "") -> None:
    """Be a node; tag: in its namespace of the network of this tag."""
    if tag:
        enter(host_name(tag, peer))
    sync_remote.START_S = JOIN_S
    serve(kind, peer, port, **trainer_of(tag))


def trainer_of(tag: str) -> dict[str, str]:
    """Where the trainer is, as engines take it: on loopback if there is no network."""
    return {"host": TRAINER} if tag else {}


def enter(namespace: str) -> None:
    """Have this thread, and those that it starts, use the network of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def measure(
    models: Iterable[str], number: int, rounds: int, sends: int, tag: str = ""
) -> list[Point]:
    """All models and layouts over one set of nodes; tag: of the network that they are in."""
    with ExitStack() as stack:
        target = functools.partial(serve_node, tag=tag)
        workers = Workers(KIND, number, target, **trainer_of(tag))
        stack.callback(workers.close)
        points = []
        for model in models:
            for layout, fan_out in LAYOUTS.items():
                tree.FAN_OUT = fan_out
                scheme = Lockstep(workers, model)
                try:
                    until_connected(scheme, number)
                    found = _measure(scheme, rounds, sends)
                except TimeoutError as error:  # so many nodes are too slow on so few cores
                    print(f"{layout}, {model}: {error}", file=sys.stderr, flush=True)
                    continue
                finally:
                    scheme.close()
                points.append(Point(KIND, layout, model, number, *found))
        return points


def until_connected(scheme: Lockstep, number: int) -> None:
    """Send until every node below another one gets versions from there."""
    deadline = time.monotonic() + CONNECT_S
    expected = [tree.above(worker) for worker in range(number)]
    while True:
        scheme.times_ms(WARM_UP)
        workers = scheme.scheme.stats["workers"]
        if [workers[worker]["relay"] for worker in range(number)] == expected:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the tree of {number} nodes was not complete within {CONNECT_S} s")


def _measure(scheme: Lockstep, rounds: int, sends: int) -> tuple[float, float, float]:
    cpu, wall = [], []
    for _ in range(rounds):
        spent = []

        def send() -> None:
            begun = time.process_time()
            scheme.scheme.send()
            spent.append(time.process_time() - begun)  # noqa: B023

        wall += timed_sends_ms(scheme.model, send, sends)
        cpu.append(float(np.mean(spent)) * 1e3)
    p50, p95 = np.percentile(wall, [50, 95])
    return float(np.median(cpu)), float(p50), float(p95)


def table(points: Iterable[Point]) -> str:
    columns = ["scheme", "layout", "floats", "nodes", "trainer's processor, ms", "wall, ms"]
    return markdown(
        columns,
        [
            [*map(str, p[:4]), f"{p.cpu_ms:.2f}", f"{p.wall_p50_ms:.1f} / {p.wall_p95_ms:.1f}"]
            for p in points
        ],
    )


def curves(points: Sequence[Point]) -> str:
    """How processor time grows: the fit, its error, and whether the aim holds."""
    columns = ["scheme", "layout", "floats", "fixed ms", "ms a node", "largest error of the fit"]
    lines = []
    for case in dict.fromkeys(p[:3] for p in points):
        found = {p.nodes: p.cpu_ms for p in points if p[:3] == case}
        if len(found) < 2:
            continue
        fit = Fit.of(list(found), list(found.values()))
        ratio = f"{found[64] / found[4]:.1f}" if {4, 64} <= found.keys() else "not measured"
        numbers = [f"{fit.fixed_ms:.2f}", f"{fit.each_ms:.3f}", f"{100 * fit.worst:.0f} %"]
        lines.append([*case, *numbers, ratio])
    return markdown([*columns, "64 ÷ 4 nodes"], lines)


def why_too_many(number: int) -> str:
    """Why this machine does not bear so many nodes; empty if it does."""
    free_mb = psutil.virtual_memory().available / 1e6
    needed_mb = number * NODE_MB
    if needed_mb < 0.8 * free_mb:
        return ""
    return f"they may need {needed_mb / 1e3:.0f} GB, and {free_mb / 1e3:.0f} GB are free"


def in_namespaces(nodes: int) -> int:
    """Run this command again in a namespace, with others for the nodes."""
    if why := why_not():
        print(why)
        return 2
    with network(nodes) as net:
        return net.start(None, *sys.argv, "--in-network", net.tag).wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="2,4,8,16,32,64")
    parser.add_argument("--sizes", default="4.5k,1M", help=f"of {', '.join(MODEL_WIDTHS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sends", type=int, default=20, help="in a round")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--namespaces", action="store_true", help="a network namespace each")
    parser.add_argument("--in-network", metavar="TAG", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.namespaces and not arguments.in_network:
        return in_namespaces(max(map(int, arguments.nodes.split(","))))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "sync.remote.gloo"])
    torch.set_num_threads(1)
    sync_remote.START_S = JOIN_S
    points: list[Point] = []
    stopped = ""
    for number in map(int, arguments.nodes.split(",")):
        if why := why_too_many(number):
            stopped = f"It stops before {number} nodes: {why}."
            break
        print(f"measuring {number} nodes", file=sys.stderr, flush=True)
        counts, sizes = (arguments.rounds, arguments.sends), arguments.sizes.split(",")
        points += measure(sizes, number, *counts, tag=arguments.in_network)
    about: dict[str, Any] = machine()
    print(f"Blocking send ({', '.join(f'{name} {value}' for name, value in about.items())}):\n")
    print(table(points))
    print("\nProcessor time of the trainer, fitted as fixed + nodes × each:\n")
    print(curves(points))
    print(f"\nThe aim: {AIM}.")
    print(
        f"Wall times (p50 / p95) are of nodes that share {os.cpu_count()} cores with the trainer: "
        "with more nodes than cores they measure the wait for a core, not the scheme."
    )
    print(stopped)
    save("broadcast", arguments.output, points)
    return 0


if __name__ == "__main__":
    from benchmarks import broadcast

    sys.exit(broadcast.main())  # the functions of `__main__` cannot be found by name elsewhere
