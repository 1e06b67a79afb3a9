"""The command: stories of so many seeds, one after the other, each with a verdict.

python -m tests.virtual --seeds 500
python -m tests.virtual --seed 37 --verbose
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

from tests.virtual.story import draw, tell  # noqa: E402
from tests.virtual.verdict import judge  # noqa: E402


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.virtual", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--until", action="store_true", help="stop at the first that is wrong")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    first, count = arguments.first, arguments.seeds
    if arguments.seed is not None:
        first, count = arguments.seed, 1
    began = time.monotonic()
    ends, struck, wrong, events = Counter[str](), Counter[str](), 0, 0
    gc.freeze()
    for seed in range(first, first + count):
        plan = draw(seed)
        outcome = tell(plan, verbose=arguments.verbose)
        findings = judge(outcome)
        ends[outcome.end] += 1
        struck.update(outcome.struck)
        events += outcome.kernel.events
        if findings or arguments.seed is not None:
            wrong += bool(findings)
            print(f"seed {seed} {outcome.end} {outcome.kernel.events} events: {plan}")
            for fault in plan.faults:
                print(f"    {fault}")
            for finding in findings[:5]:
                print(f"    WRONG {finding[:1500]}")
            print("    excuses", outcome.world.excuses)
            if arguments.seed is not None:
                print("\n".join(outcome.kernel.log))
        if findings and arguments.until:
            break
        if seed % 20 == 19:
            gc.collect()
    seconds = time.monotonic() - began
    print(f"{count} stories, {wrong} wrong, {events} events in {seconds:.1f} s: {ends} {struck}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
