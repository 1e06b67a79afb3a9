"""A story that is wrong, made as small as it can be while it stays wrong in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.virtual.story import Plan, tell
from tests.virtual.verdict import judge

MOST_TRIES = 120


def shrunk(plan: Plan, finding: str) -> tuple[Plan, int]:
    """The smallest story that was found with such a finding, and how many were tried."""
    kind, tries = finding.partition(":")[0], 0
    while tries < MOST_TRIES:
        for smaller in _smaller(plan):
            tries += 1
            if any(one.partition(":")[0] == kind for one in judge(tell(smaller))):
                plan = smaller
                break
            if tries >= MOST_TRIES:
                break
        else:
            break
    return plan, tries


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Stories with one thing less."""
    for i in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])
    for name in sorted(plan.calls):
        yield replace(plan, calls={k: call for k, call in plan.calls.items() if k != name})
    for name in ("late", "split", "pipe_bytes", "slow"):
        if name in plan.machine:
            yield replace(plan, machine={k: v for k, v in plan.machine.items() if k != name})
    for name in ("link", "lag", "verify", "zero_copy"):
        if name in plan.scheme_options:
            options = {k: v for k, v in plan.scheme_options.items() if k != name}
            yield replace(plan, scheme_options=options)
    for name in ("record_schedule", "preemptive_threshold", "max_lag"):
        if plan.options.get(name) is not None:
            yield replace(plan, options={k: v for k, v in plan.options.items() if k != name})
    if plan.num_envs > 1:
        yield replace(plan, num_envs=1)
    if plan.options["num_workers"] > 1:
        fewer = {**plan.options, "num_workers": plan.options["num_workers"] - 1}
        yield replace(plan, options=fewer)
    if plan.batches > 1:
        yield replace(plan, batches=plan.batches - 1)
