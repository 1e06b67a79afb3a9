"""What must hold after a run, whatever happened to it; each finding is one line."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.victim import Victim
from harness.run.checkpoints import CheckpointError, Checkpoints, read
from lockstep_check.check import check
from lockstep_check.events import FILE, TraceError

LEAVE_S = 15.0  # for what is still ending
SHM = Path("/dev/shm")
STATES = {"done": "done", "interrupted": "interrupted", "failed": "failed"}
NOISE = re.compile(r"Traceback|resource_tracker|leaked|Exception ignored|core dumped")


def ending(code: int | None) -> str:
    """How a run ended, by its exit status."""
    if code is None:
        return "hung"
    if code < 0:
        return "died"
    return {0: "done", 1: "failed", 2: "refused", 130: "interrupted", 143: "interrupted"}.get(
        code, f"status {code}"
    )


def judge(victim: Victim, fault: Fault, code: int | None, shm: set[str]) -> list[str]:
    """What is wrong after the run."""
    end = ending(code)
    findings = [] if end in fault.endings else [f"it ended as {end!r} ({code})"]
    findings += _judge_words(victim, fault, end)
    findings += _judge_status(victim, fault, end)
    findings += judge_leftovers(victim, shm)
    findings += judge_files(victim)
    return findings


def judge_resumed(victim: Victim, code: int | None, wanted: int) -> list[str]:
    """What is wrong after the run went on."""
    end = ending(code)
    if end != "done":
        return [f"resumed, it ended as {end!r} ({code})"]
    findings = [f"resumed: {line}" for line in judge_files(victim, ended=True)]
    if status(victim).get("state") != "done":
        findings.append(f"resumed, status.json says {status(victim)}")
    steps = [record["step"] for record in records(victim)]
    if not steps or steps[-1] < wanted:
        findings.append(f"resumed, the records end at {steps[-1:]} of {wanted}")
    if steps != sorted(steps):
        findings.append("resumed, the records are not in order")
    return findings


def _judge_words(victim: Victim, fault: Fault, end: str) -> Iterator[str]:
    said = victim.errors.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith("lockstep: ")]
    if end == "failed" and not lines:
        yield "it failed without a word"
    if end == "refused" and len(lines) != 1:
        yield f"it refused with {len(lines)} lines"
    if end == "interrupted" and victim.directory.exists() and "interrupted by SIG" not in said:
        yield "it does not say that it was interrupted"
    if end == "done" and lines:
        yield f"it is done, and says {lines[0]!r}"
    noise = NOISE.search(said)
    told = end == "failed" and " raised " in said  # with the worker's own traceback
    told |= "Process Worker<AsyncVectorEnv>" in said  # gymnasium's, when their worker is gone
    told |= "Received the following error from Worker-" in said  # theirs, too, when it raised
    if noise and not (fault.may_print_trace or told or end == "died"):
        yield f"it prints {noise[0]!r}"
    named = any(word in "".join(lines) for word in ("worker", "collector"))
    if end == "failed" and fault.names_worker and not named:
        yield f"it does not name the worker: {lines}"


def status(victim: Victim) -> dict[str, Any]:
    """What status.json says; empty if there is none."""
    try:
        found: dict[str, Any] = json.loads((victim.directory / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _judge_status(victim: Victim, fault: Fault, end: str) -> Iterator[str]:
    try:
        found = status(victim)
    except ValueError:
        yield "status.json is no JSON"
        return
    state = found.get("state")
    if state is None:
        if end == "done" and not fault.status_may_lie:
            yield "there is no status.json"
        return
    if end in STATES and state != STATES[end] and not fault.status_may_lie:
        yield f"it ended as {end!r}, and status.json says {state!r}"
    if state == "failed" and not found.get("error"):
        yield "status.json says failed, and not why"
    if state in ("done", "interrupted") and not fault.status_may_lie:
        summary = victim.directory / "summary.json"
        if not summary.exists():
            yield "there is no summary.json"


def judge_leftovers(victim: Victim, shm: set[str]) -> Iterator[str]:
    """Processes, shared memory, temporary files."""
    deadline = time.monotonic() + LEAVE_S
    while found := [*_leftovers(victim, shm)]:
        if time.monotonic() > deadline:
            yield from found
            return
        time.sleep(0.05)


def _leftovers(victim: Victim, shm: set[str]) -> Iterator[str]:
    for process in victim.processes():
        try:
            yield f"left running: {process.pid} {' '.join(process.cmdline())[:120]}"
        except psutil.NoSuchProcess:
            continue
    for name in sorted(shm_entries() - shm):
        if not _is_in_use(SHM / name):
            yield f"left: {SHM / name}"
    for file in sorted(victim.temporary.rglob("*")):
        # torch's cache and Ray's logs are to stay; W&B's own files stay where it was killed.
        names = file.relative_to(victim.temporary).parts
        if names[0] == "ray" or names[0].startswith("torchinductor_") or "wandb-" in names[0]:
            continue
        yield f"left: temporary file {'/'.join(names)}"


def shm_entries() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def _is_in_use(file: Path) -> bool:
    """Other programs of this machine have shared memory, too."""
    for pid in psutil.pids():
        try:
            if str(file) in Path(f"/proc/{pid}/maps").read_text():
                return True
        except OSError:
            continue
    return not file.exists()


def judge_files(victim: Victim, *, ended: bool = False) -> Iterator[str]:
    """Checkpoints and records."""
    checkpoints = Checkpoints(victim.directory / "checkpoints")
    for file in checkpoints.files():
        try:
            read(file)
        except CheckpointError as error:
            yield str(error)
    counted = [record for record in records(victim) if "collector/collected" in record]
    if counted:
        yield from _judge_balance(counted[-1])
    yield from _judge_trace(victim)
    if ended:
        hidden = [p.name for p in victim.directory.rglob(".*") if p.is_file()]
        if hidden:
            yield f"left in the run directory: {hidden}"


def _judge_trace(victim: Victim) -> Iterator[str]:
    """The rules of `lockstep check`, where the run writes a trace."""
    trace = victim.directory / FILE
    if not trace.exists() or not trace.stat().st_size:
        return
    try:
        broken = check(trace).broken
    except TraceError as error:
        yield f"no trace: {error}"
        return
    for finding in broken:
        yield f"{trace.name}, line {finding.line}: {finding.rule.name}: {finding.first}"


def _judge_balance(record: dict[str, Any]) -> Iterator[str]:
    names = ("collected", "delivered", "dropped", "in_flight")
    counts = [record[f"collector/{name}"] for name in names]
    collected, *rest = counts
    if collected != sum(rest):
        yield f"frames do not add up: {dict(zip(names, counts, strict=True))}"


def records(victim: Victim) -> list[dict[str, Any]]:
    """The whole records of metrics.jsonl."""
    found = []
    file = victim.directory / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off in the middle
            continue
    return found
