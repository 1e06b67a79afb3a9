"""A story: a run of a few batches, drawn from a seed, and the faults that happen to it.

Each seed draws which kinds of faults exist in its story, and how often they strike, so that some
stories have many faults of one kind and others a few of each. A fault strikes at an event, by its
number. What the schedule draws and what the faults draw are apart: without one of its faults, a
story is the same up to there.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import SyncVectorEnv

from collectors.multi import MultiAsyncCollector, MultiSyncCollector
from collectors.schedule.recording import RecordedSchedule
from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme
from sync.effects.slow_link import Link
from sync.errors import WorkerError, WorkerRaised
from tests.virtual import modules
from tests.virtual import world as worlds
from tests.virtual.kernel import NEVER_NS, SIGKILL, Kernel, Process
from tests.virtual.world import Numbers, Witness, World, index_of

TIMEOUT_S = 10.0  # of collectors and schemes
START_TIMEOUT_S = 20.0
SCHEDULE = "schedule.jsonl"
FEW_EVENTS = 1500  # for which a process gets few new descriptors


@dataclass(frozen=True)
class Fault:
    """What happens at an event. worker: to which; how: more about it."""

    kind: str
    at: int
    worker: int = 0
    how: float = 0.0

    def __str__(self) -> str:
        how = f" {self.how:g}" if self.how else ""
        return f"at event {self.at}: {self.kind}{how}, worker {self.worker}"


@dataclass(frozen=True)
class Plan:
    """All that is drawn for a story. `machine`: of the kernel. `options`: of the collector."""

    seed: int
    batches: int
    collector: str
    scheme: str
    scheme_options: dict[str, Any]
    options: dict[str, Any]
    machine: dict[str, Any]
    num_envs: int
    step_s: float
    is_free: bool = False  # a thread collects, while the first one publishes
    calls: dict[int, str] = field(default_factory=dict)  # what the trainer does, by batch
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        options = {**self.options, **self.scheme_options, **self.machine}
        options = {name: value for name, value in options.items() if value not in (None, False)}
        free = " free" if self.is_free else ""
        return (
            f"{self.collector} {self.scheme}{free}, {self.batches} batches, {self.num_envs} "
            f"environments, {options}, calls {self.calls}"
        )


# -- drawing

KINDS = (
    "kill",
    "kill in a call",
    "trouble",
    "stop",
    "suspend",
    "descriptors",
    "refuse",
    "disk",
    "kill trainer",
)
TROUBLES = ("raise", "sys.exit", "exit", "hang")
CALLS = (
    "counts", "stats", "pause", "attribute", "seed", "reset", "save", "stall",
    "not finite", "one worker", "many", "none",
)  # fmt: skip
ASKS = ("attribute", "pause", "seed", "reset", "save", "many", "stall")


def draw(seed: int) -> Plan:
    """The story of a seed."""
    rng = random.Random(f"story {seed}")
    batches = rng.randint(4, 10)
    collector = rng.choice(["multi_sync", "multi_async", "multi_async"])
    scheme = rng.choice(["shared_mem", "shared_mem", "multiprocess"])
    plan = Plan(
        seed=seed,
        batches=batches,
        collector=collector,
        scheme=scheme,
        scheme_options=_scheme_options(rng, scheme),
        options=_options(rng, collector),
        machine=_machine(rng),
        num_envs=rng.choice([1, 1, 2]),
        step_s=rng.choice([0.0001, 0.001, 0.01]),
        is_free=rng.random() < 0.25,
    )
    plan = replace(plan, calls=_calls(rng, plan))
    if plan.options.get("apply_at") == "episode":
        plan = replace(plan, num_envs=1)
    return replace(plan, faults=_faults(rng, plan))


def _scheme_options(rng: random.Random, scheme: str) -> dict[str, Any]:
    options: dict[str, Any] = {"sync": rng.random() < 0.6}
    if scheme == "shared_mem" and rng.random() < 0.4:
        options["zero_copy"] = True
    if rng.random() < 0.15:
        options["link"] = Link(latency_ms=rng.choice([0.1, 3.0]), jitter_ms=1.0)
    if rng.random() < 0.1:
        options["verify"] = "every"
    if rng.random() < 0.1:
        options["lag"] = rng.choice([1, 2])
    return options


def _options(rng: random.Random, collector: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_workers": rng.choice([1, 2, 2, 3]),
        "on_worker_failure": rng.choice(["restart", "restart", "raise"]),
        "start_method": rng.choice(["forkserver", "spawn"]),
        "apply_at": rng.choice(["step", "step", "batch", "episode"]),
        "seed": rng.randrange(1000),
    }
    if collector == "multi_async":
        options["batches_ahead"] = rng.choice([1, 2, 3])
        options["max_lag"] = rng.choice([None, None, 0, 1, 3])
        if rng.random() < 0.3:
            options["record_schedule"] = SCHEDULE
    elif rng.random() < 0.3:
        options["preemptive_threshold"] = 0.5
    return options


def _machine(rng: random.Random) -> dict[str, Any]:
    machine: dict[str, Any] = {"switch": rng.choice([0.02, 0.1, 0.3])}
    if rng.random() < 0.5:
        machine["slow"] = 0.4
    if rng.random() < 0.4:
        machine |= {"late": rng.choice([0.1, 0.5]), "late_ns": rng.choice([10**5, 10**7, 10**9])}
    if rng.random() < 0.3:
        machine["split"] = 0.3
    if rng.random() < 0.2:
        machine["pipe_bytes"] = rng.choice([4000, 8000])
    return machine


def _calls(rng: random.Random, plan: Plan) -> dict[int, str]:
    share = rng.choice([0.0, 0.2, 0.6])
    allowed = [call for call in CALLS if rng.random() < 0.5] or ["counts"]
    if plan.is_free:  # beside the thread that replaces workers
        share, allowed = 0.8, list(ASKS)
    elif rng.random() < 0.3:
        share, allowed = 0.6, ["many", rng.choice(allowed)]
    return {k: rng.choice(allowed) for k in range(plan.batches) if rng.random() < share}


def _faults(rng: random.Random, plan: Plan) -> tuple[Fault, ...]:
    if rng.random() < 0.2:
        return ()
    workers = plan.options["num_workers"]
    horizon = 600 + 400 * workers + plan.batches * 150 * plan.num_envs
    kinds = [kind for kind in KINDS if rng.random() < 0.3]
    faults = []
    for kind in kinds:
        for _ in range(1 if kind == "kill trainer" else rng.choice([1, 1, 2, 3])):
            fault = Fault(kind, rng.randrange(horizon), rng.randrange(workers))
            if kind == "kill in a call":
                fault = replace(fault, how=float(rng.randrange(80)))
            elif kind == "stop":
                how = rng.choice([0.01, 0.5, 1.5, 30.0])
                fault = replace(fault, how=how)
            elif kind == "suspend":
                fault = replace(fault, how=rng.choice([0.5, 5.0, 1000.0]))
            elif kind == "trouble":
                fault = replace(fault, how=float(rng.randrange(len(TROUBLES))))
            elif kind == "disk":
                fault = replace(fault, how=rng.choice([100, 1000]))
            elif kind == "descriptors":
                fault = replace(
                    fault, worker=rng.randrange(-1, workers), how=float(rng.randrange(-2, 4))
                )
            faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at))


# -- telling


@dataclass
class Outcome:
    """What came of a story."""

    plan: Plan
    end: str  # done, failed, killed
    error: BaseException | None
    world: World
    kernel: Kernel
    struck: set[str]
    schedule: list[tuple[int, ...]] | None = None  # the batches of the recording, if there is one

    @property
    def findings(self) -> list[str]:
        return self.world.findings


class Strikes:
    """Lets the faults of a plan happen."""

    def __init__(self, plan: Plan, kernel: Kernel, world: World):
        self._in_calls = [fault for fault in plan.faults if fault.kind == "kill in a call"]
        self._left = [fault for fault in plan.faults if fault.kind != "kill in a call"]
        self._plan, self._kernel, self._world = plan, kernel, world
        self._again: list[tuple[int, Callable[[], None]]] = []
        self.struck: set[str] = set()
        kernel.on_event = self.strike
        self._set_next()

    def _set_next(self) -> None:
        moments = [fault.at for fault in self._left[:1]] + [at for at, _ in self._again]
        self._kernel.next_strike = min(moments, default=NEVER_NS)

    def at_call(self) -> None:
        """The trainer asks workers now."""
        calls, self._in_calls = self._in_calls, []
        for fault in calls:
            at = self._kernel.events + int(fault.how)
            self._again.append((at, partial(self._kill, replace(fault, how=0.0))))
        self._set_next()

    def strike(self, number: int) -> None:
        for at, call in [one for one in self._again if one[0] <= number]:
            self._again.remove((at, call))
            call()
        while self._left and self._left[0].at <= number:
            fault = self._left.pop(0)
            self._set_next()
            getattr(self, f"_{fault.kind.replace(' ', '_')}")(fault)
        self._set_next()

    def _note(self, fault: Fault, process: Process | None = None) -> None:
        at = "" if process is None else f" hits {process}"
        self._kernel.note(f"FAULT {fault.kind}{at} {fault.how or ''}")
        self.struck.add(fault.kind)

    def _worker(self, fault: Fault) -> Process | None:
        """The process that serves as the worker now."""
        found = [
            process
            for process in self._kernel.processes.values()
            if not process.ended
            and process.name.startswith("lockstep-worker")
            and index_of(process) == fault.worker
        ]
        return found[-1] if found else None

    def _trainer(self) -> Process:
        return next(iter(self._kernel.processes.values()))

    def _excuse(self, fault: Fault) -> None:
        """The run may fail for it, if workers are not replaced or have not started yet."""
        collector = self._world.collector
        if self._plan.options["on_worker_failure"] == "raise":
            self._world.excuses.append(fault.kind)
        elif collector is None:
            self._world.excuses.append(f"{fault.kind} during the start")

    def _kill(self, fault: Fault) -> None:
        process = self._worker(fault)
        if process is not None:
            self._note(fault, process)
            self._excuse(fault)
            self._set_next()
            self._kernel.end_process(process, -SIGKILL)

    def _kill_trainer(self, fault: Fault) -> None:
        process = self._trainer()
        if not process.ended:
            self._note(fault, process)
            self._kernel.end_process(process, -SIGKILL)

    def _trouble(self, fault: Fault) -> None:
        self._note(fault)
        self._excuse(fault)
        self._world.troubles[fault.worker] = TROUBLES[int(fault.how)]

    def _stop(self, fault: Fault) -> None:
        process = self._worker(fault)
        if process is not None:
            self._note(fault, process)
            if fault.how >= 1:
                self._excuse(fault)
            self._kernel.stop(process, fault.how)

    def _suspend(self, fault: Fault) -> None:
        self._note(fault)
        for process in self._kernel.processes.values():
            self._kernel.stop(process, fault.how)

    def _descriptors(self, fault: Fault) -> None:
        process = self._trainer() if fault.worker < 0 else self._worker(fault)
        if process is not None and not process.ended:
            self._note(fault, process)
            self._world.excuses.append("no descriptors")
            process.most_fds = len(process.fds) + int(fault.how)
            self._again.append((fault.at + FEW_EVENTS, lambda: _allow(process)))

    def _disk(self, fault: Fault) -> None:
        """The disk is full for so many events."""
        self._note(fault)
        self._world.excuses.append("full disk")
        self._kernel.disk_is_full = True
        self._again.append((fault.at + int(fault.how), self._free_disk))

    def _free_disk(self) -> None:
        self._kernel.disk_is_full = False

    def _refuse(self, fault: Fault) -> None:
        self._note(fault)
        self._world.refusals += 1
        self._world.excuses.append("a version is refused")


def _allow(process: Process) -> None:
    process.most_fds = 1 << 20


def tell(plan: Plan, *, verbose: bool = False) -> Outcome:
    """Run a story; what is wrong with it is found by `verdict.judge`."""
    kernel = Kernel(plan.seed, verbose=verbose, **plan.machine)
    world = worlds.current = World(step_s=plan.step_s)
    strikes = Strikes(plan, kernel, world)
    with tempfile.TemporaryDirectory(prefix="virtual-") as folder:
        gc.disable()
        try:
            with modules.virtual(kernel):
                first = kernel.run(lambda: Trainer(plan, world, strikes, Path(folder)).run())
        finally:
            gc.enable()
            worlds.current = None
        schedule = _recorded(Path(folder, SCHEDULE), world)
    error = first.error
    end = "done" if error is None and first.status == 0 else "failed"
    if first.status < 0:
        end = "killed"
    return Outcome(plan, end, error, world, kernel, strikes.struck, schedule)


def _recorded(path: Path, world: World) -> list[tuple[int, ...]] | None:
    """The worker and the versions of each batch of a recording."""
    if not path.exists():
        return None
    try:
        batches = RecordedSchedule(path).batches
    except ValueError as error:
        if "is empty" not in str(error):
            world.find(f"the recorded schedule cannot be read: {error}")
        return None
    return [(one.worker, *(n for pair in one.versions for n in pair)) for one in batches]


def make_one() -> Any:
    return Witness()


def make_two() -> Any:
    return SyncVectorEnv([Witness, Witness])


class Trainer:
    """The program of the first process: collect, learn, publish."""

    def __init__(self, plan: Plan, world: World, strikes: Strikes, folder: Path):
        self.plan, self.world, self.strikes, self.folder = plan, world, strikes, folder
        self.kernel = modules.kernel()
        self.policy = Numbers()
        self.number = 0  # of the batch that it is at
        self.update = 0
        self.calls = 0

    def run(self) -> None:
        plan, world = self.plan, self.world
        world.write("trace", format=1, program="a story", unit="frames")
        kinds = {"multi_sync": MultiSyncCollector, "multi_async": MultiAsyncCollector}
        options = dict(plan.options)
        if "record_schedule" in options:
            options["record_schedule"] = str(self.folder / options["record_schedule"])
        workers = options.pop("num_workers")
        make = make_one if plan.num_envs == 1 else make_two
        frames = 4 * plan.num_envs * (workers if plan.collector == "multi_sync" else 1)
        scheme = self._scheme()
        collector: Any = kinds[plan.collector](
            [make] * workers,
            self.policy,
            frames_per_batch=frames,
            total_frames=-1,
            timeout=TIMEOUT_S,
            start_timeout=START_TIMEOUT_S,
            weight_sync_schemes={"policy": scheme},
            replay_buffer=self if plan.is_free else None,
            **options,
        )
        world.collector = self.collector = collector
        try:
            self._note_versions()
            if plan.is_free:
                collector.start()
            for number in range(plan.batches):
                self._try(number, plan.calls.get(number, ""))
            self._count()
        finally:
            self._note_versions()
            collector.shutdown()
            self._check_left()

    def await_room(self, seconds: float) -> bool:
        """The thread is ahead of this program by a few batches at most."""
        self.kernel.wait(lambda: self.update < self.number + 3, seconds)
        return self.update < self.number + 3

    def extend(self, batch: Any) -> None:
        """What a thread that collects calls, as of a replay buffer."""
        self.kernel.note("trainer: takes a batch")
        self._note_versions()
        self._take(batch)

    def _scheme(self) -> WeightSyncScheme:
        kinds: dict[str, type[WeightSyncScheme]] = {
            "shared_mem": SharedMemWeightSyncScheme,
            "multiprocess": MultiProcessWeightSyncScheme,
        }
        return kinds[self.plan.scheme](timeout=TIMEOUT_S, **self.plan.scheme_options)

    def _try(self, number: int, call: str) -> None:
        """A user may go on after an error of the system."""
        try:
            self._iterate(number, call)
        except OSError as error:
            has_excuse = {"full disk", "no descriptors"} & set(self.world.excuses)
            if isinstance(error, ConnectionError) or not has_excuse:
                raise
            self.kernel.note(f"trainer: goes on after an error of the system: {error}")

    def _iterate(self, number: int, call: str) -> None:
        self.number = number
        if call:
            self.kernel.note(f"trainer: {call}")
            self.strikes.at_call()
            self._call(call)
        if self.plan.is_free:
            self.kernel.wait(lambda: self.update > number or not self.collector.running, 100.0)
        else:
            self.extend(self.collector.next())
        for _ in range(20 if call == "many" else 1):
            self._note_versions()
            self.world.number += 1
            self.policy.fill(self.world.number)
            self._publish(call)

    def _call(self, call: str) -> None:
        collector = self.collector
        if call == "counts":
            self._count()
        elif call == "stats":
            collector.stats()
        elif call == "pause":
            with collector.pause():
                self.kernel.sleep(0.01)
        elif call == "attribute":
            collector.getattr_env("steps" if self.plan.num_envs == 1 else "num_envs")
        elif call == "seed":
            self._unless_recording(lambda: collector.set_seed(self.world.number))
        elif call == "reset":
            self._unless_recording(collector.reset)
        elif call == "stall":
            self.kernel.sleep(0.05 if self.plan.is_free else 30.0)
        elif call == "save":
            collector.state_dict()
        elif call == "not finite" and not self.plan.is_free:
            self.policy.fill(float("nan"))
            before = collector.policy_version
            try:
                collector.update_policy_weights_()
                self.world.find("weights that are not finite were sent")
            except ValueError:
                if collector.policy_version != before:
                    self.world.find("a refused send has taken a version number")
            finally:
                self.policy.fill(self.world.number)

    def _unless_recording(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            if isinstance(error, WorkerError) or "recording" not in str(error):
                raise

    def _publish(self, call: str) -> None:
        if call == "none":
            return
        collector, ids = self.collector, [0] if call == "one worker" else None
        serving = [handle.reported_counts()["pid"] for handle in collector.pool.handles]
        scheme = collector.publisher.schemes["policy"]
        try:
            collector.update_policy_weights_(worker_ids=ids)
        except WorkerRaised:
            if "a version is refused" not in self.world.excuses:
                raise
            self.kernel.note("trainer: a worker has refused a version")
        else:
            has_refusals = any(fault.kind == "refuse" for fault in self.plan.faults)
            is_exact = not has_refusals and "lag" not in self.plan.scheme_options
            if scheme.sync and self.plan.options["apply_at"] != "episode" and is_exact:
                for pid in serving if ids is None else serving[:1]:
                    self.world.floors[pid] = self.world.number
        finally:
            self._note_versions()

    def _note_versions(self) -> None:
        """Write which versions there are by now."""
        world, newest = self.world, self.collector.policy_version
        for version in range(len(world.versions), newest + 1):
            world.versions[version] = world.number
            world.write("publish", version=version, update=self.update)

    def _take(self, batch: Any) -> None:
        """Write what became of each frame of a batch."""
        world = self.world
        self.update += 1
        numbers, steps = batch["observation"].unbind(-1)
        after = batch["next", "observation"]
        mask = batch.get(("collector", "mask"), None)
        for i, t in torch.cartesian_prod(*map(torch.arange, numbers.shape)).tolist():
            if mask is not None and not mask[i, t]:
                continue
            number, step = int(numbers[i, t]), int(steps[i, t])
            stamp = int(batch["policy_version"][i, t])
            here = {"worker": number, "sample": step}
            self.calls += 1
            for value in sorted({float(batch[name][i, t]) for name in ("low", "high")}):
                version = self._version_of(value, stamp)
                world.write("act", **here, version=version, length=1, call=self.calls)
            world.write("take", **here, version=stamp)
            world.write("train", **here, update=self.update, version=stamp)
            if [int(x) for x in after[i, t]] != [number, step + 1]:
                world.find(f"frame {step} of environment {number} is followed by {after[i, t]}")
            if float(batch["next", "reward"][i, t]) != number + step:
                world.find(f"frame {step} of environment {number} has another's reward")

    def _version_of(self, value: float, stamp: int) -> int:
        """The version that acted: that of the stamp if it has these weights."""
        versions = [one for one, number in self.world.versions.items() if number == value]
        if not versions:
            self.world.find(f"weights {value:g} act, and no version has them")
            return -2
        return stamp if stamp in versions else versions[0]

    def _count(self) -> None:
        if self.plan.is_free:  # between two batches of the thread
            with self.collector.pause():
                counts = self.collector.counts()
                self._write_counts(counts)
        else:
            self._write_counts(self.collector.counts())

    def _write_counts(self, counts: dict[str, Any]) -> None:
        names = ("collected", "delivered", "dropped", "in_flight")
        self.world.write("counts", **{name: int(counts[name]) for name in names})
        made = sum(self.world.made.values())
        if counts["collected"] > made:
            self.world.find(f"{counts['collected']} frames count as collected, {made} were made")

    def _check_left(self) -> None:
        left = [
            str(process)
            for process in self.kernel.processes.values()
            if not process.ended and process.name.startswith("lockstep-worker")
        ]
        if left:
            self.world.find(f"after shutdown() these run: {', '.join(left)}")
