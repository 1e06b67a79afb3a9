"""What can go wrong, drawn at random: where it strikes, and how a run may end then."""

from __future__ import annotations

import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import points, runs
from benchmarks.chaos.environments import DEEDS, GARBAGE
from benchmarks.chaos.victim import Victim

Strike = Callable[[Victim], bool]  # whether there was something to hit
END = {"SIGINT": "SIGINT", "SIGTERM": "SIGTERM"}
DEAD_PORT = "http://127.0.0.1:9"


@dataclass
class Fault:
    """One run, what happens to it, and the ends that are right after that."""

    what: str
    endings: set[str]  # done, interrupted, failed, refused, died
    run: runs.Run
    point: tuple[str, int] | None = None
    in_worker: bool = False
    phase: str = ""
    delay_s: float = 0.0
    strike: Strike = lambda victim: True
    mend: Callable[[Victim], None] = lambda victim: None  # before the run is gone on with
    disk: str | None = None  # the size of a disk of its own
    clock: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # what the command is started by
    names_worker: bool = False  # a failure names the worker
    status_may_lie: bool = False  # nothing can be written any more, or the trainer was killed
    may_print_trace: bool = False

    def __str__(self) -> str:
        where = "" if self.point is None else f" {self.phase} ({self.point[0]} #{self.point[1]}"
        late = f", {self.delay_s * 1e3:.0f} ms later" if self.delay_s else ""
        return f"{self.what}{where}{late + ')' if where else ''}; {self.run}"


def draw(seed: int, number: int, *, mounts: bool) -> Fault:
    """The fault of this number, always the same. Each round of numbers has one of each kind.

    What virtual time holds (tests/virtual) is not repeated here: races between threads, processes
    and messages, which need many faults. Here are real signals, disks, limits and sockets.
    """
    rng = random.Random(f"{seed}/{number}")
    every = kinds(mounts=mounts)
    return every[number % len(every)](rng)


def kinds(*, mounts: bool) -> list[Callable[[random.Random], Fault]]:
    """All kinds of faults that can be drawn here."""
    always = [
        interrupt,
        hit_worker,
        trouble,
        kill_trainer,
        hold_process,
        hit_helper,
        hit_host,
        hit_actor,
        descriptors,
        memory,
        file_size,
        clock,
        lost_directory,
        wandb,
    ]
    return [*always, full_disk, locked_disk, no_shared_memory] if mounts else always


# -- where


def _moment(rng: random.Random, *phases: str) -> dict[str, Any]:
    """A point of the trainer, and at times a while after it."""
    phase = rng.choice(phases or list(points.TRAINER))
    name, most = rng.choice(points.TRAINER[phase])
    delay_s = 0.0 if rng.random() < 0.6 else rng.uniform(0, 0.3)
    return {"phase": phase, "point": (name, rng.randint(1, most)), "delay_s": delay_s}


def _worker_moment(rng: random.Random) -> dict[str, Any]:
    phase = rng.choice(list(points.WORKER))
    name, most = rng.choice(points.WORKER[phase])
    return {"phase": f"worker {phase}", "point": (name, rng.randint(1, most)), "in_worker": True}


def _fitting(rng: random.Random, moment: dict[str, Any]) -> runs.Run:
    """A run that gets to that point, or nearly always."""
    needs_workers = moment["phase"] in ("starting workers", *points.WITH_WORKERS)
    return runs.draw(rng, workers=needs_workers, ppo="Learner" in moment["point"][0])


# -- what


def interrupt(rng: random.Random) -> Fault:
    """Ctrl-C (to the whole group, as a terminal does) or SIGTERM, once or twice."""
    signum = rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM])
    role = "group" if signum == signal.SIGINT and rng.random() < 0.7 else "trainer"
    twice = rng.random() < 0.2
    moment = _moment(rng)

    def strike(victim: Victim) -> bool:
        hit = victim.send(signum, role)
        if twice:
            time.sleep(0.05)
            victim.send(signum, role)
        return hit

    early = moment["phase"] in ("imports", "planning", "start-up")
    return Fault(
        f"{'two' if twice else 'a'} {signum.name} to the {role}",
        {"done", "interrupted"} | ({"died"} if early and signum == signal.SIGTERM else set()),
        _fitting(rng, moment),
        strike=strike,
        **moment,
    )


def kill_trainer(rng: random.Random) -> Fault:
    """SIGKILL: nothing more is written, and nothing may be left running."""
    moment = _moment(rng)
    return Fault(
        "SIGKILL to the trainer",
        {"done", "died"},
        _fitting(rng, moment),
        strike=lambda victim: victim.send(signal.SIGKILL, "trainer"),
        status_may_lie=True,
        **moment,
    )


def hold_process(rng: random.Random) -> Fault:
    """SIGSTOP for a while, which is nothing but slow; or for good, which is a worker that hangs."""
    role = rng.choice(["trainer", "worker", "worker", "fork server"])
    for_good = role == "worker" and rng.random() < 0.3
    moment = _moment(rng, *(points.WITH_WORKERS[1:] if for_good else points.WITH_WORKERS))
    seconds = None if for_good else rng.uniform(0.05, 1.5)
    run = _fitting(rng, moment)
    endings = {"done"}
    if for_good:
        run.options["collector.timeout_s"] = "4"
        endings = {"done"} if run.restarts else {"done", "failed"}
    which = rng.randrange(2)
    return Fault(
        f"SIGSTOP to the {role} {'for good' if for_good else f'for {seconds:.2f} s'}",
        endings,
        run,
        strike=lambda victim: victim.hold(role, which, seconds),
        names_worker=for_good,
        **moment,
    )


def hit_worker(rng: random.Random) -> Fault:
    """A signal to a worker, at a point of its own or of the trainer."""
    signum = rng.choice(
        [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT]
    )
    own = rng.random() < 0.6
    moment = _worker_moment(rng) if own else _moment(rng, *points.WITH_WORKERS)
    run = runs.draw(rng, workers=True, ppo="Learner" in moment["point"][0])
    which = rng.randrange(2)

    def strike(victim: Victim) -> bool:
        if not own:
            return victim.send(signum, "worker", which)
        assert victim.reporter is not None
        psutil.Process(victim.reporter).send_signal(signum)
        return True

    greets = moment["point"] in (("collectors.workers.pipe:Pipe.send", n) for n in (1, 2))
    starts = greets or moment["phase"] in ("worker starting", "connecting")
    endings = {"done"} if run.restarts and not starts else {"done", "failed"}
    return Fault(
        f"{signum.name} to a worker",
        {"done"} if signum == signal.SIGINT else endings,
        run,
        strike=strike,
        names_worker=True,
        **moment,
    )


def hit_helper(rng: random.Random) -> Fault:
    """A signal to a process that multiprocessing keeps beside the run."""
    role = rng.choice(["fork server", "fork server", "tracker"])
    signum = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    moment = _moment(rng, *points.WITH_WORKERS, "starting workers", "shutting down")
    return Fault(
        f"{signum.name} to the {role}",
        {"done", "failed"} if moment["phase"] == "starting workers" else {"done"},
        runs.draw(rng, workers=True, ppo="Learner" in moment["point"][0]),
        strike=lambda victim: victim.send(signum, role),
        **moment,
    )


def hit_host(rng: random.Random) -> Fault:
    """A signal to a host that `rpc` or `distributed` reaches, or to the trainer that it serves."""
    run = runs.draw_remote(rng, rng.choice(["rpc", "distributed"]))
    return _remote(rng, run, "worker", "a host")


def hit_actor(rng: random.Random) -> Fault:
    """A signal to one of Ray's actors, or to the trainer that it serves."""
    return _remote(rng, runs.draw_remote(rng, "ray"), "actor", "an actor")


def _remote(rng: random.Random, run: runs.Run, role: str, called: str) -> Fault:
    moment = _moment(rng, *points.WITH_WORKERS[1:], "saving", "shutting down")
    which = rng.randrange(2)
    what = rng.choice(["SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "hold", "the trainer"])
    if what == "hold":
        seconds = rng.uniform(0.05, 1.5)
        return Fault(
            f"SIGSTOP to {called} for {seconds:.2f} s",
            {"done"},
            run,
            strike=lambda victim: victim.hold(role, which, seconds),
            **moment,
        )
    if what == "the trainer":
        signum = rng.choice([signal.SIGKILL, signal.SIGINT])
        killed = signum == signal.SIGKILL
        return Fault(
            f"{signum.name} to the trainer of {called}",
            {"done", "died" if killed else "interrupted"},
            run,
            strike=lambda victim: victim.send(signum, "trainer"),
            status_may_lie=killed,
            **moment,
        )
    signum = signal.Signals[what]
    return Fault(
        f"{signum.name} to {called}",
        {"done"} if run.restarts else {"done", "failed"},
        run,
        strike=lambda victim: victim.send(signum, role, which),
        names_worker=True,
        **moment,
    )


def trouble(rng: random.Random) -> Fault:
    """An environment that raises, hangs, exits or returns garbage."""
    where = rng.choice(["make", "reset", "step", "step", "step", "step", "close"])
    what = rng.choice([*DEEDS, *(GARBAGE if where == "step" else ())])
    run = runs.draw(rng, workers=what in ("hang", "exit", "sys.exit", "segv", "interrupt"))
    most = {"step": 40, "reset": 3}.get(where, 1)  # each environment is made, and closed, once
    run.trouble(where, what, rng.randint(1, most))
    if what == "hang":
        run.options["collector.timeout_s"] = "4"
    return Fault(
        f"an environment's {where}: {what}",
        {"done", "failed", "refused", "interrupted", "died"},
        run,
        may_print_trace=where == "close",
    )


def descriptors(rng: random.Random) -> Fault:
    """No more than a few new file descriptors, from some moment on."""
    moment = _moment(rng, "planning", "start-up", *points.WITH_DIRECTORY)
    few = rng.randint(0, 12)

    def strike(victim: Victim) -> bool:
        limit = psutil.Process(victim.trainer).num_fds() + few
        resource.prlimit(victim.trainer, resource.RLIMIT_NOFILE, (limit, limit))
        return True

    return Fault(
        f"no more than {few} new descriptors",
        {"done", "failed", "refused"},
        _fitting(rng, moment),
        strike=strike,
        status_may_lie=few < 4,
        **moment,
    )


def memory(rng: random.Random) -> Fault:
    """No more than a little more memory, for the trainer or for a worker."""
    role = rng.choice(["trainer", "worker"])
    moment = _moment(rng, *points.WITH_WORKERS)
    few = rng.choice([0, 1, 4, 16, 64]) << 20

    def strike(victim: Victim) -> bool:
        pids = victim.pids(role)
        for pid in pids[:1]:
            limit = psutil.Process(pid).memory_info().vms + few
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        return bool(pids)

    return Fault(
        f"no more than {few >> 20} MiB more for the {role}",
        {"done", "failed", "died"},
        _fitting(rng, moment),
        strike=strike,
        status_may_lie=True,
        may_print_trace=True,
        **moment,
    )


def file_size(rng: random.Random) -> Fault:
    """No file, and no shared memory, may get larger than a little."""
    moment = _moment(rng, *points.WITH_DIRECTORY)
    most = rng.choice([0, 1 << 10, 1 << 14, 1 << 18])
    everywhere = rng.random() < 0.5

    def strike(victim: Victim) -> bool:
        for role in ("trainer", "worker", "fork server") if everywhere else ("trainer",):
            for pid in victim.pids(role):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        return True

    return Fault(
        f"no file larger than {most} bytes {'anywhere' if everywhere else 'in the trainer'}",
        {"done", "failed"},
        _fitting(rng, moment),
        strike=strike,
        status_may_lie=True,
        **moment,
    )


def full_disk(rng: random.Random) -> Fault:
    """The disk that holds the run directory is full from some moment on."""
    moment = _moment(rng, "planning", "start-up", *points.WITH_DIRECTORY, "saving")

    def strike(victim: Victim) -> bool:
        victim.fill_disk()
        return True

    return Fault(
        "a full disk",
        {"done", "failed", "refused"},
        _fitting(rng, moment),
        strike=strike,
        mend=lambda victim: (victim.home / "filler").unlink(missing_ok=True),
        disk="4m",
        status_may_lie=moment["phase"] in ("start-up",),
        **moment,
    )


def locked_disk(rng: random.Random) -> Fault:
    """The run directory can be written no more, or never could."""
    moment = _moment(rng, "planning", "start-up", *points.WITH_DIRECTORY)

    def strike(victim: Victim) -> bool:
        victim.lock_disk(True)
        return True

    return Fault(
        "a disk that cannot be written",
        {"done", "failed", "refused"},
        _fitting(rng, moment),
        strike=strike,
        mend=lambda victim: victim.lock_disk(False),
        disk="4m",
        status_may_lie=True,
        **moment,
    )


def lost_directory(rng: random.Random) -> Fault:
    """Somebody moves the run directory away in mid-run, and back later."""
    moment = _moment(rng, *points.WITH_DIRECTORY)

    def away(victim: Victim) -> Path:
        return victim.home / "elsewhere"

    def strike(victim: Victim) -> bool:
        victim.directory.rename(away(victim))
        return True

    def mend(victim: Victim) -> None:
        if not victim.directory.exists():
            away(victim).rename(victim.directory)

    return Fault(
        "the run directory is moved away",
        {"done", "failed"},
        _fitting(rng, moment),
        strike=strike,
        mend=mend,
        status_may_lie=True,
        **moment,
    )


def no_shared_memory(rng: random.Random) -> Fault:
    """/dev/shm has no room from the start."""
    script = 'mount -t tmpfs -o size=4k chaos /dev/shm && exec "$@"'
    run = runs.draw(rng, workers=True)
    # gymnasium's own processes need semaphores there; Lockstep needs nothing.
    forked = run.options.get("env.vectorisation") == "async"
    return Fault(
        "no room in /dev/shm",
        {"done", "failed"} if forked else {"done"},
        run,
        before=("unshare", "-m", "sh", "-c", script, "sh"),
    )


def clock(rng: random.Random) -> Fault:
    """The wall clock jumps by years, several times a second."""
    return Fault("a clock that jumps", {"done"}, runs.draw(rng), clock=rng.randrange(10**6))


def wandb(rng: random.Random) -> Fault:
    """W&B cannot be reached, does not answer, or its process is killed in mid-run."""
    how = rng.choice(["unreachable", "silent", "killed", "killed"])
    moment = _moment(rng, *points.WITH_WORKERS[1:])
    run = _fitting(rng, moment)
    run.options["logger"] = "wandb"
    environment = {"WANDB_API_KEY": "0" * 40, "WANDB_SILENT": "true"}
    if how == "killed":
        return Fault(
            "SIGKILL to W&B's process",
            {"done"},
            run,
            strike=lambda victim: _kill_wandb(victim),
            environment=environment,
            **moment,
        )
    run.options["logger.wandb.mode"] = "online"
    base = DEAD_PORT if how == "unreachable" else f"http://127.0.0.1:{_silent_port()}"
    return Fault(f"W&B is {how}", {"done"}, run, environment=environment | {"WANDB_BASE_URL": base})


def _kill_wandb(victim: Victim) -> bool:
    """It starts beside the run, which would not wait for it."""
    deadline = time.monotonic() + 20.0
    while not victim.send(signal.SIGKILL, "wandb"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


_SILENT: list[socket.socket] = []


def _silent_port() -> int:
    """Of somebody on this machine who takes calls and says nothing."""
    if not _SILENT:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        _SILENT.append(listener)
    port: int = _SILENT[0].getsockname()[1]
    return port
