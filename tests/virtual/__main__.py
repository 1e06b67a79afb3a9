"""The command: stories of so many seeds, each with a verdict; a wrong one is shrunk.

python -m tests.virtual --seeds 500
python -m tests.virtual --seed 37
python -m tests.virtual --seed 37 --events
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter

import torch

from tests.virtual.planted import plant

plant()

from tests.virtual.shrink import shrunk  # noqa: E402
from tests.virtual.sometimes import Sometimes  # noqa: E402
from tests.virtual.story import KINDS, Outcome, Plan, draw, tell  # noqa: E402
from tests.virtual.verdict import judge  # noqa: E402

ENOUGH = 500  # seeds, after which all that must occur has to have occurred
COLLECT_EVERY = 20  # stories; what they leave in cycles


def main(given: list[str]) -> int:
    """Tell stories, report; 1 if anything was wrong, or something did not occur."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many stories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="the story of this seed, with its log")
    parser.add_argument("--events", action="store_true", help="each event in the log")
    parser.add_argument("--until", action="store_true", help="stop at the first that is wrong")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    if arguments.seed is not None:
        return show(draw(arguments.seed), verbose=arguments.events)
    began, wrong, events = time.monotonic(), list[int](), 0
    ends, struck = Counter[str](), Counter[str]()
    sometimes = Sometimes()
    gc.freeze()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        with sometimes.watching():
            outcome = tell(draw(seed))
        ends[outcome.end] += 1
        struck.update(outcome.struck)
        events += outcome.kernel.events
        if findings := judge(outcome):
            wrong.append(seed)
            _print_wrong(outcome, findings, shrink=not arguments.until)
            if arguments.until:
                return 1
        if seed % COLLECT_EVERY == 0:
            gc.collect()
    seconds = time.monotonic() - began
    count = arguments.seeds
    print(f"{count} stories, {events} events, {seconds:.0f} s: {count / seconds * 60:.0f} a minute")
    print("ends: " + ", ".join(f"{end} {n}" for end, n in ends.most_common()))
    print("stories with: " + ", ".join(f"{kind} {struck[kind]}" for kind in KINDS))
    for what, n in sometimes.counts.most_common():
        print(f"    {n:6d}  {what}")
    missing = [*sometimes.missing, *(kind for kind in KINDS if not struck[kind])]
    for what in missing:
        print(f"    never   {what}")
    print(f"wrong: {wrong or 'none'}")
    return int(bool(wrong or (missing and count >= ENOUGH)))


def _print_wrong(outcome: Outcome, findings: list[str], *, shrink: bool) -> None:
    plan = outcome.plan
    _print_plan(plan, outcome.end)
    for finding in findings[:5]:
        print(f"    WRONG {finding[:1500]}")
    if shrink:
        smaller, tries = shrunk(plan, findings[0])
        print(f"    shrunk in {tries} stories to:")
        _print_plan(smaller, tell(smaller).end)
    print(f"    again: python -m tests.virtual --seed {plan.seed}", flush=True)


def _print_plan(plan: Plan, end: str) -> None:
    print(f"seed {plan.seed}, {end}: {plan}")
    for fault in plan.faults:
        print(f"    {fault}")


def show(plan: Plan, *, verbose: bool) -> int:
    """One story with its log, and the same shrunk if it is wrong."""
    outcome = tell(plan, verbose=verbose)
    findings = judge(outcome)
    print("\n".join(outcome.kernel.log))
    _print_plan(plan, outcome.end)
    for finding in findings:
        print(f"    WRONG {finding}")
    if findings:
        smaller, tries = shrunk(plan, findings[0])
        outcome = tell(smaller, verbose=True)
        print(f"shrunk in {tries} stories:")
        print("\n".join(outcome.kernel.log[-200:]))
        _print_plan(smaller, outcome.end)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
