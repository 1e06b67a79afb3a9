"""How much it bears: many workers, many environments, a large policy, a flood of versions.

    .venv/bin/python benchmarks/load.py [--cases workers,environments,policy,flood]
        [--workers 32] [--environments 1000] [--gigabytes 1] [--publishes 100000]
        [--output outputs/benchmarks]

workers        2, 4, 8, ... processes of eight environments each, until one number fails to start,
               no more fit into the memory or --workers is reached
environments   one training by the command line with so many environments
policy         one policy of so many gigabytes, sent to two workers by each scheme
flood          so many versions, published as fast as can be, to two workers that take what they can
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from collectors import MultiAsyncCollector  # noqa: E402
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme  # noqa: E402
from sync.errors import WorkerError  # noqa: E402

SCHEMES = {"shared_mem": SharedMemWeightSyncScheme, "multiprocess": MultiProcessWeightSyncScheme}
MEMORY_TO_SPARE = 0.1  # of the machine's: nobody is helped by swapping
CHUNK = 1 << 22  # floats in one parameter


class Policy(nn.Module):
    """Chooses by one layer."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation: Tensor) -> Tensor:
        return self.layer(observation).argmax(-1)


class Block(nn.Module):
    """So many floats, all of them the version."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        sizes = [CHUNK] * (floats // CHUNK) + [floats % CHUNK] * bool(floats % CHUNK)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    @torch.no_grad()
    def hold(self, version: int) -> None:
        for part in self.parts:
            part.fill_(version)

    @torch.no_grad()
    def held(self) -> set[float]:
        """One number, unless it is torn."""
        return {end for part in self.parts for end in (float(part[0]), float(part[-1]))}


def make_env() -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")


# -- workers


def try_workers(count: int, batches: int = 5) -> dict[str, float]:
    """Start so many, take a few batches of each with new weights for all each time, end them."""
    begun = time.perf_counter()
    collector = MultiAsyncCollector(
        make_env,
        Policy(),
        num_workers=count,
        frames_per_batch=256,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(sync=False)},
        timeout=120.0,
        start_timeout=600.0,
    )
    try:
        started = time.perf_counter()
        frames = 0
        for number in range(batches * count):
            frames += collector.next().numel()
            if number % count == 0:
                collector.update_policy_weights_()
        collected = time.perf_counter()
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        memory = sum(one.memory_full_info().pss for one in family) / 2**20
        counts = collector.stats()
    finally:
        ending = time.perf_counter()
        collector.shutdown()
    balance = counts["collected"] - counts["delivered"] - counts["dropped"] - counts["in_flight"]
    return {
        "workers": count,
        "environments": collector.num_envs,
        "start_s": started - begun,
        "fps": frames / (collected - started),
        "memory_mb": memory,
        "shutdown_s": time.perf_counter() - ending,
        "frames_astray": balance,
    }


def workers(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The most that this machine holds: twice as many each time, and at last what still fits."""
    found: list[dict[str, Any]] = []
    count, before = 2, 0
    while before < count <= arguments.workers:
        try:
            found.append(try_workers(count))
        except (WorkerError, OSError, RuntimeError) as error:
            found.append({"workers": count, "failed": f"{type(error).__name__}: {error}"})
            break
        say(found[-1])
        memory = psutil.virtual_memory()
        each = found[-1]["memory_mb"] / count * 2**20
        fits = int((memory.available - memory.total * MEMORY_TO_SPARE) / each)
        before, count = count, min(2 * count, fits, arguments.workers)
    return found


# -- environments


def environments(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of two workers."""
    total = arguments.environments
    with tempfile.TemporaryDirectory(prefix="lockstep-load-") as folder:
        directory = Path(folder) / "run"
        begun = time.perf_counter()
        subprocess.run(
            [
                *(sys.executable, str(ROOT / "run.py"), "collector=multi_async", "logger=jsonl"),
                *(f"env.num_envs={total // 2}", f"collector.frames_per_batch={total // 2 * 32}"),
                *(f"total_frames={total * 320}", "algo.minibatch_size=2000"),
                *("evaluation.at_end=false", f"hydra.run.dir={directory}"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        summary = json.loads((directory / "summary.json").read_text())
        lines = (directory / "metrics.jsonl").read_text().splitlines()
    counts = json.loads(lines[-1])
    names = ("delivered", "dropped", "in_flight")
    found = {
        "environments": total // 2 * 2,
        "fps": summary["fps"],
        "seconds": time.perf_counter() - begun,
        "trainer_mb": counts["system/memory_mb"],
        "frames_astray": counts["collector/collected"]
        - sum(counts[f"collector/{name}"] for name in names),
    }
    say(found)
    return found


# -- one large policy, and many versions of a small one


def follow(scheme: Any, worker: int, floats: int, wanted: int, answers: Any) -> None:
    """A worker: take versions up to `wanted`, or until the sender is gone; report what was seen."""
    torch.set_num_threads(1)
    model = Block(floats)
    scheme.init_on_receiver(model=model, worker_idx=worker)
    scheme.connect(background=False)
    torn = backward = taken = 0
    newest = scheme.version
    try:
        while newest < wanted:
            if scheme.receive(timeout=30.0) is None:
                break
            held = model.held()
            taken += 1
            torn += len(held) > 1 or held != {float(scheme.version)}
            backward += scheme.version < newest
            newest = scheme.version
    except ConnectionError:
        pass
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"newest": newest, "taken": taken, "torn": torn, "back": backward}
    answers.put({**found, "memory_mb": memory_mb})


def send_versions(kind: str, floats: int, count: int, *, wait: bool) -> dict[str, Any]:
    """Send so many versions to two workers; the times, and what arrived."""
    ctx = get_context("forkserver")
    model = Block(floats)
    scheme = SCHEMES[kind](sync=wait, timeout=120.0, connect_timeout=300.0)
    scheme.init_on_sender(model=model, devices=["cpu", "cpu"])
    answers = [ctx.SimpleQueue() for _ in range(2)]
    processes = [
        ctx.Process(target=follow, args=(scheme, i, floats, count, answers[i])) for i in range(2)
    ]
    for process in processes:
        process.start()
    try:
        begun = time.perf_counter()
        scheme.connect()
        connected = time.perf_counter()
        before = psutil.Process().num_fds()
        times = np.zeros(count)
        for version in range(1, count + 1):
            model.hold(version)
            sending = time.perf_counter()
            scheme.send()
            times[version - 1] = time.perf_counter() - sending
        sent = time.perf_counter()
        gained = psutil.Process().num_fds() - before
        said = [queue.get() for queue in answers]
    finally:
        scheme.shutdown()
        for process in processes:
            process.join(30.0)
            process.kill()
            process.join()
    return {
        "scheme": kind,
        "megabytes": floats * 4 / 2**20,
        "versions": count,
        "connect_s": connected - begun,
        "seconds": sent - connected,
        "send_ms_p50": float(np.percentile(times, 50) * 1e3),
        "send_ms_p99": float(np.percentile(times, 99) * 1e3),
        "descriptors_gained": gained,
        "sender_mb": psutil.Process().memory_info().rss / 2**20,
        "workers": said,
    }


def policy(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Blocking sends of a large policy."""
    floats = int(arguments.gigabytes * 2**30 / 4)
    found = []
    for kind in SCHEMES:
        found.append(send_versions(kind, floats, 10, wait=True))
        say(found[-1])
    return found


def flood(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Versions that nobody waits for."""
    found = []
    for kind in SCHEMES:
        found.append(send_versions(kind, 4_500, arguments.publishes, wait=False))
        say(found[-1])
    return found


CASES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "workers": workers,
    "environments": environments,
    "policy": policy,
    "flood": flood,
}


def say(found: dict[str, Any]) -> None:
    """One line."""
    parts = [f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()]
    print("  " + ", ".join(parts), flush=True)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--workers", type=int, default=8 * (os.cpu_count() or 1))
    parser.add_argument("--environments", type=int, default=1000)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--publishes", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in arguments.cases.split(","):
        if name not in CASES:
            parser.error(f"--cases {name}: expected {', '.join(CASES)}")
        print(name, flush=True)
        found[name] = CASES[name](arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "load.json"
    machine = {"cores": os.cpu_count(), "memory_mb": psutil.virtual_memory().total / 2**20}
    file.write_text(json.dumps({"machine": machine, "cases": found}, indent=1))
    print(f"saved {file}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
