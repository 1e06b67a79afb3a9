"""A send to many hosts: from host to host, or from the trainer to each?

    make bench BENCH=broadcast          or, where network namespaces may be made,
    .venv/bin/python benchmarks/broadcast.py [--hosts 2,6,14] [--model 1M] [--mbit 500] [--sends 10]

Trainer and workers are hosts of their own on this machine (network namespaces), and what each of
them sends goes through a token bucket of so many Mbit/s, as through a network card. Measured is a
blocking send over `distributed` and `rpc`, with blocks handed on from host to host and without,
beside what the trainer's card alone needs for one copy of the bytes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import MODEL_WIDTHS, build_model  # noqa: E402
from sync import WeightSyncScheme  # noqa: E402
from tests.promises.network import TRAINER, Network, keep_to_the_cable, network, why_not  # noqa: E402

ENGINES = {"distributed": "DistributedEngine", "rpc": "RPCEngine"}
START_S = 120.0
WARM_UP = 4  # hosts meet when they are needed first
_kept: list[Any] = []


def be_worker(scheme: WeightSyncScheme, worker: int, model: str) -> None:
    """Take weights in a background thread, and do nothing else."""
    policy = build_model(model)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect()
    _kept.append((scheme, policy))


def peer(kind: str, number: int, port: int) -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(f"sync.remote.{kind}")
    module.serve(number, host=TRAINER, port=port, timeout=START_S)


def trainer(kind: str, hosts: int, model: str, sends: int, relay: bool) -> None:
    """Print the port; when all have come, the times of a few sends."""
    from benchmarks import broadcast
    from sync.remote import relay as way

    torch.set_num_threads(1)
    way.LEAST_WORKERS = way.LEAST_WORKERS if relay else sys.maxsize
    module = importlib.import_module(f"sync.remote.{kind}")
    engine = getattr(module, ENGINES[kind])(hosts, host=TRAINER, timeout=START_S)
    print(engine.port, flush=True)
    scheme = WeightSyncScheme.from_backend(kind, timeout=START_S)
    scheme.attach(engine)  # type: ignore[attr-defined]
    scheme.init_on_sender(model=build_model(model), devices=["cpu"] * hosts)
    engine.connect()
    # Found by name over there, which `__main__` would not be.
    ready = [engine.call(w, broadcast.be_worker, scheme, w, model) for w in range(hosts)]
    scheme.connect()
    for future in ready:
        future.result(START_S)
    times = []
    for turn in range(WARM_UP + sends):
        begun = time.perf_counter()
        scheme.send()
        if turn >= WARM_UP:
            times.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.2)  # the buckets fill again
    handed_on = scheme.stats["handed_on"] / (WARM_UP + sends)
    print(json.dumps({"ms": times, "handed_on": handed_on}), flush=True)
    scheme.shutdown()
    engine.close()


def measure(kind: str, hosts: int, arguments: argparse.Namespace, relay: bool) -> dict[str, Any]:
    with network(hosts) as net:
        for name in net.names:
            _limit(net, name, arguments.mbit)
        program = ("-m", "benchmarks.broadcast", "--role")
        told = (kind, str(hosts), arguments.model, str(arguments.sends), str(int(relay)))
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "env": quiet}
        process = net.start(None, *program, "trainer", *told, **options)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        for host in range(hosts):
            net.start(host, *program, "peer", kind, str(host), port, **options)
        found: dict[str, Any] = json.loads(process.stdout.readline())
        process.wait(30)
        return found


def _limit(net: Network, name: str, mbit: int) -> None:
    """What this host sends, as its network card would let it."""
    bucket = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit")
    net._in(name, *bucket, "burst", "128kb", "latency", "200ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", default="2,6,14")
    parser.add_argument("--schemes", default=",".join(ENGINES))
    parser.add_argument("--model", default="1M", choices=list(MODEL_WIDTHS))
    parser.add_argument("--mbit", type=int, default=500)
    parser.add_argument("--sends", type=int, default=10)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    if arguments.role:
        warnings.simplefilter("ignore")  # of networks that are not this machine's own
        keep_to_the_cable()
        role, kind, number, *rest = arguments.role
        if role == "peer":
            peer(kind, int(number), int(rest[0]))
        else:
            trainer(kind, int(number), rest[0], int(rest[1]), bool(int(rest[2])))
        return 0
    if why := why_not():
        print(f"broadcast.py: {why}", file=sys.stderr)
        return 1
    nbytes = 4 * sum(p.numel() for p in build_model(arguments.model).parameters())
    once = nbytes * 8 / arguments.mbit / 1e3
    print(f"one copy of {arguments.model} over {arguments.mbit} Mbit/s: {once:.0f} ms")
    print("scheme, hosts: p50 ms from the trainer to each | from host to host (ratio)")
    results = []
    for kind in arguments.schemes.split(","):
        for hosts in map(int, arguments.hosts.split(",")):
            found = {
                relay: measure(kind, hosts, arguments, relay == "relay")
                for relay in ("star", "relay")
            }
            star, relay = (float(np.median(found[way]["ms"])) for way in ("star", "relay"))
            handed = found["relay"]["handed_on"]
            print(f"{kind}, {hosts}: {star:.0f} | {relay:.0f} ({star / relay:.2f}x); ", end="")
            print(f"{handed:.1f} of {hosts} blocks came from another host", flush=True)
            results.append({"scheme": kind, "hosts": hosts, **found})
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "broadcast.json"
    about = {"model": arguments.model, "bytes": nbytes, "mbit": arguments.mbit}
    file.write_text(json.dumps({**about, "results": results}, indent=2))
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
