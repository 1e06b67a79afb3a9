"""How long a blocking `send` to workers behind Ray, RPC or torch.distributed takes.

    make bench BENCH=sync_remote        or, with both environments made,
    .venv/bin/python benchmarks/sync_remote.py [--rounds 8] [--sizes 4.5k,1M] [--no-peers]

Measured in turns within one run: a few sends of ours, a few of torchrl's scheme of the same name,
a few times the same bytes over the bare engine (`ray.put` and `get`, `rpc_async` with the tensor, a
gloo broadcast and its answers), and again. Both sides are processes of this machine, on loopback.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import build_model, timed_ms, timed_sends_ms  # noqa: E402
from benchmarks.remote import ContestantFailed  # noqa: E402
from benchmarks.sync_latency import (  # noqa: E402
    PEER_PYTHON,
    SENDS_A_ROUND,
    Closing,
    Times,
    TorchRL,
    in_turns,
    machine,
    markdown,
    options,
    save,
    shown,
)
from sync import WeightSyncScheme  # noqa: E402

ENGINES = {
    "ray": "sync.remote.ray_engine:RayEngine",
    "rpc": "sync.remote.rpc_engine:RPCEngine",
    "distributed": "sync.remote.gloo_engine:DistributedEngine",
}
START_S = 120.0
MOST_BARE = 1.5  # the aim: at most so many times the bare engine, and faster than torchrl


# -- what workers run


def serve(kind: str, peer: int, port: int, **where: Any) -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(ENGINES[kind].partition(":")[0])
    module.serve(peer, port=port, timeout=START_S, **where)


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
    _join_gloo(rank, world, dist.TCPStore("127.0.0.1", port))
    block, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1)
    while True:
        dist.broadcast(block, 0)
        dist.reduce(answer, 0)


_kept: list[Any] = []


# -- contestants


class Workers:
    """An engine with its peers on this machine, which call `target`; `where` the trainer is."""

    def __init__(self, kind: str, number: int, target: Callable[..., None] = serve, **where: Any):
        make = resolve_name(ENGINES[kind])
        self.kind, self.processes = kind, []
        if kind == "ray":
            import ray

            actor = ray.remote(num_cpus=0, max_concurrency=4)(_Actor)
            self.actors = [actor.remote() for _ in range(number)]
            self.engine = make(self.actors)
            return
        self.engine = make(number, timeout=START_S, **where)
        ctx = multiprocessing.get_context("forkserver")
        for peer in range(number):
            args = (kind, peer, self.engine.port)
            self.processes.append(ctx.Process(target=target, args=args, daemon=True))
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
    """An actor without methods of its own: `__ray_call__` runs functions in it."""


class Lockstep:
    """Our scheme."""

    def __init__(self, workers: Workers, model: str):
        self.model = build_model(model)
        self.scheme = WeightSyncScheme.from_backend(workers.kind, timeout=START_S)
        self.scheme.attach(workers.engine)  # type: ignore[attr-defined]
        number = workers.engine.num_peers
        self.scheme.init_on_sender(model=self.model, devices=["cpu"] * number)
        ready = [workers.engine.call(w, be_worker, self.scheme, w, model) for w in range(number)]
        self.scheme.connect()
        for future in ready:
            future.result(START_S)

    def times_ms(self, count: int) -> list[float]:
        return timed_sends_ms(self.model, self.scheme.send, count)

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
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = self.number + 1
        for rank in range(1, world):
            args = (rank, world, store.port, nbytes)
            self.processes.append(ctx.Process(target=broadcast, args=args, daemon=True))
            self.processes[-1].start()
        _join_gloo(0, world, store)
        self.answer = torch.zeros(1)

    def times_ms(self, count: int) -> list[float]:
        once = {"ray": self._ray, "rpc": self._rpc, "distributed": self._gloo}[self.workers.kind]
        return timed_ms(once, count)

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
        dist.broadcast(self.block, 0)
        dist.reduce(self.answer, 0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            dist.destroy_process_group()


def _join_gloo(rank: int, world: int, store: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)


# -- measuring


class Row(NamedTuple):
    """One engine, model and number of workers, and what was measured in turns."""

    scheme: str
    model: str
    workers: int
    times: dict[str, Times]

    def ratio(self, one: str, other: str) -> float:
        return self.times[one]["p50"] / self.times[other]["p50"]

    def misses(self) -> list[str]:
        """What falls short of the aim."""
        missed = ["engine"] if self.ratio("ours", "bare") > MOST_BARE else []
        if "torchrl" in self.times and self.ratio("torchrl", "ours") <= 1:
            missed.append("torchrl")
        return missed


def measure(kind: str, model: str, number: int, *, rounds: int, peers: bool) -> Row:
    """One row of the table."""
    nbytes = sum(p.numel() * 4 for p in build_model(model).parameters())
    with ExitStack() as stack, Closing() as contestants:
        workers = Workers(kind, number)
        stack.callback(workers.close)
        contestants["ours"] = Lockstep(workers, model)
        contestants["bare"] = Bare(workers, nbytes)
        if peers:
            opening = {"scheme": kind, "model": model, "workers": number}
            contestants["torchrl"] = TorchRL("torchrl_remote", **opening)
        return Row(kind, model, number, in_turns(contestants, SENDS_A_ROUND[model], rounds))


def table(rows: Iterable[Row], *, peers: bool) -> str:
    """Times in ms, ratios of p50."""
    columns = ["scheme", "floats", "workers", "ours", "bare engine", "ours ÷ bare"]
    columns += ["torchrl", "torchrl ÷ ours"] if peers else []
    lines = []
    for row in rows:
        cells = [row.scheme, row.model, str(row.workers)]
        cells += [shown(row.times["ours"]), shown(row.times["bare"])]
        cells += [f"{row.ratio('ours', 'bare'):.2f}"]
        if peers:
            cells += [shown(row.times["torchrl"]), f"{row.ratio('torchrl', 'ours'):.1f}"]
        missed = row.misses()
        lines.append([*cells, f"missed: {' and '.join(missed)}" if missed else "holds"])
    return markdown([*columns, "aim"], lines)


def start_ray() -> None:
    from sync.remote.ray_engine import use_token_authentication

    use_token_authentication()
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options = {"num_cpus": 4, "object_store_memory": 1_500_000_000, "include_dashboard": False}
    ray.init("local", **options, log_to_driver=False, logging_level="error")


def main() -> int:
    parser = options(__doc__.split("\n")[0], rounds=8)
    parser.add_argument("--schemes", default=",".join(ENGINES))
    parser.add_argument("--workers", default="1,2")
    arguments = parser.parse_args()
    peers = not arguments.no_peers
    if peers and not PEER_PYTHON.exists():
        print("the peers' environment is missing: run `make peers`, or pass --no-peers")
        return 2
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "sync.remote.rpc_engine"]
    )
    rows: list[Row] = []
    failed: list[str] = []
    for kind in arguments.schemes.split(","):
        if kind == "ray":
            start_ray()
        for model in arguments.sizes.split(","):
            for number in map(int, arguments.workers.split(",")):
                print(f"measuring {kind} {model} x {number}", file=sys.stderr, flush=True)
                try:
                    row = measure(kind, model, number, rounds=arguments.rounds, peers=peers)
                except ContestantFailed as error:  # the other rows are worth keeping
                    failed.append(f"{kind} {model} x {number} was not measured: {error}")
                else:
                    rows.append(row)
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"Blocking send, p50 / p95 in ms ({about}):\n")
    print(table(rows, peers=peers))
    holding = sum(not row.misses() for row in rows)
    aim = f"at most {MOST_BARE} times the bare engine" + " and faster than torchrl" * peers
    print(f"\n{holding} of {len(rows)} rows hold the aim: {aim}.")
    save("sync_remote", arguments.output, rows)
    print("\n".join(failed), file=sys.stderr, end="\n" * bool(failed))
    return int(bool(failed))


if __name__ == "__main__":
    from benchmarks import sync_remote

    sys.exit(sync_remote.main())  # the functions of `__main__` cannot be found by name elsewhere
