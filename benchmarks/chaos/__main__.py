"""The command: so many random faults, each to a whole run, and what was wrong afterwards.

python -m benchmarks.chaos --seed 7
python -m benchmarks.chaos --faults 500 --seed 7 --jobs 2
python -m benchmarks.chaos --seed 7 --only 37
python -m benchmarks.chaos --faults 50 --seed 7 --traced
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import verdict
from benchmarks.chaos.faults import Fault, draw, kinds
from benchmarks.chaos.victim import Victim
from harness.run.checkpoints import Checkpoints

MOST_SHOWN = 8
ALONE = "LOCKSTEP_CHAOS_ALONE"  # set once this program has mounts of its own


@dataclass
class Result:
    """What one fault did."""

    number: int
    fault: Fault
    struck: bool
    end: str
    seconds: float
    findings: list[str] = field(default_factory=list)
    folder: Path | None = None  # kept, if something is wrong

    def __str__(self) -> str:
        how = "WRONG" if self.findings else "ok" if self.struck else "missed"
        return f"{self.number:4d} {how:6s} {self.end:11s} {self.seconds:5.1f} s  {self.fault}"


def torment(seed: int, number: int, place: Path, *, mounts: bool, traced: bool) -> Result:
    """One run, its fault, the verdict, and the same after it went on."""
    fault = draw(seed, number, mounts=mounts)
    if traced:
        fault.run.options["callbacks"] = "[events]"
    victim = Victim(place / str(number))
    began, shm = time.monotonic(), verdict.shm_entries()
    findings: list[str] = []
    struck, code = False, None
    try:
        if fault.disk is not None:
            victim.mount(fault.disk)
        struck = _run(victim, fault)
        code = victim.wait()
        if fault.run.troubled is not None:
            struck = (victim.folder / "once").exists()
        findings += verdict.judge(victim, fault, code, shm)
        fault.mend(victim)
        findings += _resume(victim, fault, code)
        findings += [f"resumed: {line}" for line in verdict.judge_leftovers(victim, shm)]
    except Exception as error:  # noqa: BLE001, which is as much of a finding
        findings.append(f"chaos itself: {type(error).__name__}: {error}")
    finally:
        victim.end()
    if not findings:
        victim.remove()
    seconds = time.monotonic() - began
    kept = victim.folder if findings else None
    return Result(number, fault, struck, verdict.ending(code), seconds, findings, kept)


def _run(victim: Victim, fault: Fault) -> bool:
    """Start the run and strike; whether there was something to hit."""
    plan: dict[str, object] | None = None
    if fault.point is not None:
        name, nth = fault.point
        plan = {"point": name, "nth": nth, "workers": fault.in_worker}
    if fault.clock is not None:
        plan = {"point": "", "clock": fault.clock}
    overrides = fault.run.overrides(victim.directory, victim.folder / "once")
    victim.start(overrides, plan=plan, environment=fault.environment, before=fault.before)
    if fault.point is None:
        return True
    if not victim.meet():
        return False
    if fault.delay_s:
        victim.release()
        time.sleep(fault.delay_s)
    try:
        return fault.strike(victim)
    finally:
        victim.release()


def _resume(victim: Victim, fault: Fault, code: int | None) -> list[str]:
    """Let the run go on from its newest checkpoint, to its end."""
    checkpoints = Checkpoints(victim.directory / "checkpoints").files()
    if not checkpoints:
        return _resume_without(victim, fault) if victim.directory.exists() else []
    wanted = fault.run.total_frames * (2 if code == 0 else 1)
    options = [f"total_frames={wanted}", *fault.run.resumed()]
    if fault.run.options.get("logger") == "wandb":
        options.append("logger.wandb.mode=disabled")
    (victim.folder / "errors").rename(victim.folder / "errors-before")
    victim.start([f"resume={victim.directory}", *options])
    findings = verdict.judge_resumed(victim, victim.wait(), wanted)
    (victim.folder / "errors").rename(victim.folder / "errors-resumed")
    return findings


def _resume_without(victim: Victim, fault: Fault) -> list[str]:
    """There is nothing to go on from, which is said in one line."""
    (victim.folder / "errors").rename(victim.folder / "errors-before")
    victim.start([f"resume={victim.directory}", *fault.run.resumed()])
    code = victim.wait()
    lines = [line for line in victim.errors.read_text().splitlines() if line.startswith("lockstep")]
    (victim.folder / "errors").rename(victim.folder / "errors-resumed")
    if code in (1, 2) and lines:
        return []
    return [f"resumed without a checkpoint, it ended with {code} and says {lines}"]


def torment_all(arguments: argparse.Namespace, place: Path, *, mounts: bool) -> list[Result]:
    """As many faults as wanted, some at a time; each result is printed when it is known."""
    results: list[Result] = []
    numbers: Iterator[int] = iter(arguments.only or itertools.count())
    if arguments.traced:  # only PPO's updates use the batch at hand
        numbers = (
            number
            for number in numbers
            if draw(arguments.seed, number, mounts=mounts).run.options["algo"] == "ppo"
        )
    least = len(arguments.only or ()) or arguments.faults
    said = threading.Lock()

    def one(number: int) -> Result:
        result = torment(arguments.seed, number, place, mounts=mounts, traced=arguments.traced)
        with said:
            print(result, flush=True)
            for finding in result.findings[:MOST_SHOWN]:
                print(f"            {finding}", flush=True)
            if len(result.findings) > MOST_SHOWN:
                print(f"            and {len(result.findings) - MOST_SHOWN} more", flush=True)
            if result.findings:
                command = again(arguments.seed, number, traced=arguments.traced)
                print(f"            again: {command}", flush=True)
                print(f"            kept: {result.folder}", flush=True)
        return result

    with ThreadPoolExecutor(arguments.jobs) as pool:
        under_way: set[Future[Result]] = set()
        while True:
            # What misses is made up for: every fault that was asked for has struck.
            hits = sum(result.struck for result in results)
            enough = arguments.only is None and hits + len(under_way) >= least
            number = None if enough or len(under_way) >= arguments.jobs else next(numbers, None)
            if number is not None:
                under_way.add(pool.submit(one, number))
                continue
            if not under_way:
                return results
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            results += [future.result() for future in done]


def again(seed: int, number: int, *, traced: bool) -> str:
    """The command that repeats one fault."""
    command = f"python -m benchmarks.chaos --seed {seed} --only {number}"
    return f"{command} --traced" if traced else command


def report(results: list[Result], seconds: float) -> None:
    """What was done, in a few lines."""
    struck = [result for result in results if result.struck]
    wrong = [result for result in results if result.findings]
    kinds = Counter(result.fault.what.split(" for ")[0] for result in struck)
    ends = Counter(result.end for result in struck)
    print(f"\n{len(struck)} faults struck in {seconds:.0f} s, {len(results) - len(struck)} missed")
    print("ended: " + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    print(f"{len(kinds)} different: " + ", ".join(f"{k} {n}" for k, n in kinds.most_common(12)))
    print(f"wrong: {len(wrong)} {[result.number for result in wrong] if wrong else ''}")


def may_mount() -> bool:
    """Whether this user may have mounts of his own."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    script = ["unshare", "-rm", "mount", "-t", "tmpfs", "chaos", "/mnt"]
    return subprocess.run(script, capture_output=True, check=False).returncode == 0


def main(given: list[str]) -> int:
    """Torment, report; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--faults", type=int, help="how many strike; by default one of each kind")
    parser.add_argument("--seed", type=int, help="of what is drawn; random if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--only", type=int, nargs="+", help="the faults of these numbers")
    parser.add_argument(
        "--traced", action="store_true", help="runs of PPO that write a trace, which is checked"
    )
    arguments = parser.parse_args(given)
    if ALONE not in os.environ and may_mount():
        command = [sys.executable, "-m", "benchmarks.chaos", *given]
        if arguments.seed is None:
            command += ["--seed", str(random.randrange(10**6))]
        os.execvpe("unshare", ["unshare", "-rm", *command], {**os.environ, ALONE: "1"})
    mounts = ALONE in os.environ
    if mounts:  # shared memory that nobody else on this machine uses meanwhile
        subprocess.run(["mount", "-t", "tmpfs", "chaos", str(verdict.SHM)], check=True)
    if arguments.seed is None:
        arguments.seed = random.randrange(10**6)
    arguments.faults = arguments.faults or len(kinds(mounts=mounts))
    print(f"seed {arguments.seed}; disks of their own: {'yes' if mounts else 'no'}", flush=True)
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    results = torment_all(arguments, place, mounts=mounts)
    report(results, time.monotonic() - began)
    if any(result.findings for result in results):
        return 1
    shutil.rmtree(place, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
