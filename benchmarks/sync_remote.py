"""How long a blocking `send` to workers behind Ray, RPC or torch.distributed takes.

    make bench BENCH=sync_remote        or, with both environments made,
    .venv/bin/python benchmarks/sync_remote.py [--rounds 8] [--sizes 4.5k,1M] [--no-peers]

Measured in turns within one run: a few sends of ours, a few of torchrl's scheme of the same name,
a few times the same bytes over the bare engine (`ray.put` and `get`, `rpc_async` with the tensor, a
gloo broadcast and its answers), and again. Both sides are processes of this machine, on loopback.

Ours is measured twice: as it comes, when workers of the trainer's machine read versions from its
memory, and with `share_memory=False`, when every version goes over the engine as between machines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import MODEL_WIDTHS, build_model  # noqa: E402
from benchmarks.sync_latency import (  # noqa: E402
    PEER_PYTHON,
    SENDS_A_ROUND,
    Closing,
    in_turns,
    summary,
    triple,
)
from sync import WeightSyncScheme  # noqa: E402

KINDS = ("ray", "rpc", "distributed")
START_S = 120.0


# -- what workers run


def serve(kind: str, peer: int, port: int) -> None:
    torch.set_num_threads(1)
    importlib.import_module(f"sync.remote.{kind}").serve(peer, port=port, timeout=START_S)


def be_worker(scheme: WeightSyncScheme, worker: int, model: str) -> None:
    """Take weights in a background thread, and do nothing else."""
    torch.set_num_threads(1)
    policy = build_model(model)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect()
    _kept.append((scheme, policy))


def touch(block: torch.Tensor) -> int:
    """What the bare engine is asked to do with the bytes."""
    return block.numel()


def touch_many(actor: Any, array: Any) -> int:
    return int(array.size)


def broadcast(rank: int, world: int, port: int, nbytes: int) -> None:
    """The other side of the bare gloo broadcast."""
    torch.set_num_threads(1)
    group = _gloo(rank, world, port)
    block, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1)
    while True:
        group.broadcast(block, 0).wait()
        group.reduce(answer, 0).wait()


_kept: list[Any] = []


# -- contestants


class Workers:
    """An engine with its peers on this machine."""

    def __init__(self, kind: str, number: int):
        module = importlib.import_module(f"sync.remote.{kind}")
        self.kind, self.processes = kind, []
        if kind == "ray":
            import ray

            actor = ray.remote(num_cpus=0, max_concurrency=4)(_Actor)
            self.actors = [actor.remote() for _ in range(number)]
            self.engine = module.RayEngine(self.actors)
            return
        make = {"rpc": "RPCEngine", "distributed": "DistributedEngine"}[kind]
        self.engine = getattr(module, make)(number, timeout=START_S)
        ctx = multiprocessing.get_context("forkserver")
        for peer in range(number):
            args = (kind, peer, self.engine.port)
            self.processes.append(ctx.Process(target=serve, args=args, daemon=True))
            self.processes[-1].start()
        self.engine.connect()

    def close(self) -> None:
        self.engine.close()
        if self.kind == "ray":
            import ray

            for actor in self.actors:
                ray.kill(actor)
        for process in self.processes:
            process.join(10)
            process.kill()


class _Actor:
    """What it does is called into it."""


class Lockstep:
    """Our scheme."""

    def __init__(self, workers: Workers, model: str, *, share_memory: bool):
        self.model = build_model(model)
        self.scheme = WeightSyncScheme.from_backend(
            workers.kind, timeout=START_S, share_memory=share_memory
        )
        self.scheme.attach(workers.engine)  # type: ignore[attr-defined]
        number = workers.engine.num_peers
        self.scheme.init_on_sender(model=self.model, devices=["cpu"] * number)
        ready = [workers.engine.call(w, be_worker, self.scheme, w, model) for w in range(number)]
        self.scheme.connect()
        for future in ready:
            future.result(START_S)

    def times_ms(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.view(-1)[-1] += 1
            begun = time.perf_counter()
            self.scheme.send()
            times.append((time.perf_counter() - begun) * 1e3)
        return times

    def close(self) -> None:
        self.scheme.shutdown()


class Bare:
    """The same bytes over the engine alone."""

    def __init__(self, workers: Workers, nbytes: int):
        self.block = torch.zeros(nbytes, dtype=torch.uint8)
        self.workers = workers
        self.number = workers.engine.num_peers
        self.processes: list[Any] = []
        if workers.kind == "distributed":
            self._open_group(nbytes)

    def _open_group(self, nbytes: int) -> None:
        ctx = multiprocessing.get_context("forkserver")
        store = _store(0, is_master=True)
        world = self.number + 1
        for rank in range(1, world):
            args = (rank, world, store.port, nbytes)
            self.processes.append(ctx.Process(target=broadcast, args=args, daemon=True))
            self.processes[-1].start()
        self.group = _gloo(0, world, store.port, store)
        self.answer = torch.zeros(1)

    def times_ms(self, count: int) -> list[float]:
        once = {"ray": self._ray, "rpc": self._rpc, "distributed": self._gloo}[self.workers.kind]
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            once()
            times.append((time.perf_counter() - begun) * 1e3)
        return times

    def _ray(self) -> None:
        import ray

        ref = ray.put(self.block.numpy())
        ray.get([a.__ray_call__.remote(touch_many, ref) for a in self.workers.actors])

    def _rpc(self) -> None:
        from torch.distributed import rpc

        names = list(self.workers.engine._names.values())
        for future in [rpc.rpc_async(name, touch, args=(self.block,)) for name in names]:
            future.wait()

    def _gloo(self) -> None:
        self.group.broadcast(self.block, 0).wait()
        self.group.reduce(self.answer, 0).wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _store(port: int, *, is_master: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)


def _gloo(rank: int, world: int, port: int, store: Any = None) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = store or _store(port, is_master=False)
    return dist.ProcessGroupGloo(store, rank, world, options)


class TorchRL:
    """The peer's scheme of the same name, in its own environment."""

    def __init__(self, kind: str, model: str, workers: int):
        command = [str(PEER_PYTHON), "-m", "benchmarks.peers.torchrl_remote"]
        command += ["--scheme", kind, "--model", model, "--workers", str(workers)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._hear()

    def times_ms(self, count: int) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"count": count}) + "\n")
        self.process.stdin.flush()
        reply = self._hear()
        if not reply["verified"]:
            raise RuntimeError("torchrl's workers do not have the weights that were sent")
        times: list[float] = reply["ms"]
        return times

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline() or '{"error": "it ended"}'
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"torchrl: {reply['error']}")
        return reply

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def measure(
    kind: str, model: str, number: int, *, rounds: int, peers: bool
) -> dict[str, dict[str, float]]:
    """One row of the table."""
    nbytes = sum(p.numel() * 4 for p in build_model(model).parameters())
    with ExitStack() as stack, Closing() as contestants:
        workers = Workers(kind, number)
        stack.callback(workers.close)
        contestants["send"] = Lockstep(workers, model, share_memory=True)
        contestants["engine"] = Lockstep(workers, model, share_memory=False)
        contestants["bare"] = Bare(workers, nbytes)
        if peers:
            contestants["torchrl"] = TorchRL(kind, model, number)
        times = in_turns(contestants, SENDS_A_ROUND[model], rounds)
    return {name: summary(values) for name, values in times.items()}


def table(results: list[dict[str, Any]], *, peers: bool) -> Table:
    """Times in ms, ratios of p50."""
    shown = Table(title="Blocking send: p50 / p95 / p99 in ms")
    columns = ["scheme", "floats", "workers", "bare engine"]
    columns += ["torchrl"] if peers else []
    for way in ("lockstep", "over the engine"):
        columns += [way, "÷ bare"] + (["torchrl ÷"] if peers else [])
    for column in columns:
        shown.add_column(column, justify="right")
    for row in results:
        of = row["times"]
        cells = [row["scheme"], row["model"], str(row["workers"]), triple(of["bare"])]
        cells += [triple(of["torchrl"])] if peers else []
        for way in ("send", "engine"):
            ours = of[way]["p50"]
            cells += [triple(of[way]), f"{ours / of['bare']['p50']:.2f}"]
            cells += [f"{of['torchrl']['p50'] / ours:.1f}"] if peers else []
        shown.add_row(*cells)
    return shown


def start_ray() -> None:
    from sync.remote.ray import use_token_authentication

    use_token_authentication()
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options = {"num_cpus": 4, "object_store_memory": 1_500_000_000, "include_dashboard": False}
    ray.init("local", **options, log_to_driver=False, logging_level="error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sizes", default=",".join(MODEL_WIDTHS), help="of 4.5k, 1M, 25M")
    parser.add_argument("--schemes", default=",".join(KINDS))
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--no-peers", action="store_true", help="measure only ourselves")
    parser.add_argument("--output", default=str(ROOT / "outputs" / "benchmarks"))
    arguments = parser.parse_args()
    peers = not arguments.no_peers
    if peers and not PEER_PYTHON.exists():
        print("the peers' environment is missing: run `make peers`, or pass --no-peers")
        return 2
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "sync.remote.rpc"])
    results = []
    for kind in arguments.schemes.split(","):
        if kind == "ray":
            start_ray()
        for model in arguments.sizes.split(","):
            for number in map(int, arguments.workers.split(",")):
                print(f"measuring {kind} {model} x {number}", file=sys.stderr, flush=True)
                times = measure(kind, model, number, rounds=arguments.rounds, peers=peers)
                row = {"scheme": kind, "model": model, "workers": number, "times": times}
                results.append(row)
    Console(width=200).print(table(results, peers=peers))
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "torch": torch.__version__}
    report = {"machine": machine, "unit": "ms", "results": results}
    (output / "sync_remote.json").write_text(json.dumps(report, indent=2))
    print(f"saved {output / 'sync_remote.json'}")
    return 0


if __name__ == "__main__":
    from benchmarks import sync_remote

    sys.exit(sync_remote.main())  # the functions of `__main__` cannot be found by name elsewhere
