"""What must hold after a story: the rules of `lockstep check` on its trace, and a few ends."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lockstep_check.check import check
from lockstep_check.rules import Limit
from sync.errors import WorkerError
from tests.virtual.kernel import S
from tests.virtual.story import Outcome


def judge(outcome: Outcome) -> list[str]:
    """What is wrong; each with the name of the rule or the end that says so first."""
    findings = [*outcome.findings]
    findings += _judge_end(outcome)
    findings += _judge_time(outcome)
    findings += _judge_trace(outcome)
    findings += _judge_frames(outcome)
    findings += _judge_schedule(outcome)
    return findings


def _judge_end(outcome: Outcome) -> list[str]:
    error, excuses = outcome.error, outcome.world.excuses
    if outcome.kernel.overrun:
        return [f"end: {outcome.kernel.overrun}"]
    if error is None:
        return []
    text = f"{type(error).__name__}: {str(error)[:300]}"
    if not excuses:
        return [f"end: it failed without a fault that explains it: {text}"]
    if isinstance(error, WorkerError):
        return [] if "worker" in str(error) else [f"end: the error names no worker: {text}"]
    if isinstance(error, OSError) and {"no descriptors", "full disk"} & set(excuses):
        return []
    return [f"end: an error of another kind: {text}"]


def _judge_time(outcome: Outcome) -> list[str]:
    """Nothing waits for something that has happened: a lost wake-up costs virtual seconds."""
    plan = outcome.plan
    allowed = 5.0 + 40.0 * len(plan.faults) + 31.0 * sum(c == "stall" for c in plan.calls.values())
    allowed += sum(fault.how for fault in plan.faults if fault.kind in ("stop", "suspend"))
    allowed += plan.machine.get("late_ns", 0) / S * 200
    took = outcome.kernel.now_ns / S
    return [f"time: it took {took:.1f} virtual seconds"] if took > allowed else []


def _judge_trace(outcome: Outcome) -> list[str]:
    lag = outcome.plan.options.get("max_lag")
    calls = outcome.plan.calls.values()
    is_limited = lag is not None and outcome.plan.options["apply_at"] != "episode"
    is_limited = is_limited and "lag" not in outcome.plan.scheme_options
    is_limited = (
        is_limited
        and not outcome.plan.faults
        and not outcome.plan.is_free
        and not {"many", "one worker"} & set(calls)
    )
    limit = Limit(lag if is_limited else None, "taken", "versions")
    with tempfile.TemporaryDirectory(prefix="virtual-") as folder:
        path = Path(folder, "events.jsonl")
        path.write_text("".join(json.dumps(event) + "\n" for event in outcome.world.events))
        if not outcome.world.events:
            return []
        result = check(path, limit)
    return [f"{one.rule.name}: {one.first}" for one in result.broken]


def _judge_frames(outcome: Outcome) -> list[str]:
    """Of each environment, what was taken is without a gap: no frame is lost between two others."""
    if {"seed", "reset"} & set(outcome.plan.calls.values()):
        return []
    steps: dict[int, list[int]] = {}
    for event in outcome.world.events:
        if event["event"] == "take":
            steps.setdefault(event["worker"], []).append(event["sample"])
    for worker, taken in steps.items():
        if taken != list(range(len(taken))) and "full disk" not in outcome.world.excuses:
            return [f"gap: of environment {worker} these steps were taken: {taken}"]
    return []


def _judge_schedule(outcome: Outcome) -> list[str]:
    """The recording has the batches that were taken."""
    recorded = outcome.schedule
    if recorded is None or "full disk" in outcome.world.excuses or outcome.end == "killed":
        return []
    batches = sum(1 for event in outcome.world.events if event["event"] == "take")
    frames = 4 * outcome.plan.num_envs
    if outcome.end == "done" and len(recorded) * frames != batches:
        return [f"schedule: {len(recorded)} batches are recorded, and {batches} frames were taken"]
    return []
