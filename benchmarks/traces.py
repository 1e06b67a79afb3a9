"""Runs of every collector, drawn at random, whose traces `lockstep check` reads.

python benchmarks/traces.py --runs 200 --seed 1

Each run is small and ends by itself; `python -m benchmarks.chaos --traced` has those that do not.
A finding is printed with the command that repeats the run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run
from lockstep_check.check import CheckResult, check
from lockstep_check.rules import Limit

SMALL = (
    "env.max_episode_steps=40",
    "model.hidden_sizes=[16]",
    "evaluation.at_end=false",
    "logger=jsonl",
    "callbacks=[events]",
)
FEW = {"collector.frames_per_batch": "128", "algo.minibatch_size": "64", "algo.epochs": "2"}
LOCAL = ("single", "multi_sync", "multi_async", "simulated")
ON_HOSTS = {"distributed": "distributed", "rpc": "rpc", "ray": "ray"}  # collector: its scheme


def draw(seed: int, number: int) -> list[str]:
    """The command line of the run of this number, always the same."""
    rng = random.Random(f"{seed}/{number}")
    on_host = rng.random() < 0.1
    collector = rng.choice([*ON_HOSTS] if on_host else LOCAL)
    options = {
        "collector": collector,
        "seed": str(rng.randrange(1000)),
        "algo": "ppo",
        **FEW,
        "env.num_envs": "4",
    }
    options["total_frames"] = str(128 * rng.randint(6, 16))
    if on_host:
        options["sync"] = ON_HOSTS[collector]
        return _lines(options)
    if collector != "simulated":
        options["sync"] = rng.choice(("shared_mem", "multiprocess"))
    if rng.random() < 0.25 and collector == "simulated":
        options["algo"] = "impala"
        del options["algo.minibatch_size"], options["algo.epochs"]
    if collector in ("single", "multi_sync"):
        options["sync.lag"] = str(rng.choice((0, 0, 1, 3, 8)))
    else:
        options["collector.batches_ahead"] = str(rng.choice((1, 2, 4)))
        options["sync.apply_at"] = rng.choice(("step", "batch", "episode"))
        if options["sync.apply_at"] == "episode":
            options["env.num_envs"] = "1"
        if rng.random() < 0.5:
            options["sync.max_lag"] = str(rng.choice((0, 1, 2)))
            options["sync.on_stale"] = rng.choice(("drop", "wait"))
    if collector == "simulated" and rng.random() < 0.5:
        options["collector.num_workers"] = str(rng.choice((2, 8, 32)))
    return _lines(options)


def limit_of(options: list[str]) -> int | None:
    """The oldest age that the options allow, in updates."""
    for option in options:
        name, _, value = option.partition("=")
        if name in ("sync.max_lag", "sync.lag"):
            return int(value)
    return None


def _lines(options: dict[str, str]) -> list[str]:
    groups = [f"{name}={value}" for name, value in options.items() if "." not in name]
    return [*groups, *(f"{name}={value}" for name, value in options.items() if "." in name)]


def trace(options: list[str], place: Path) -> CheckResult | str:
    """Run, and check its trace; a sentence if there is none."""
    with contextlib.redirect_stdout(io.StringIO()):
        status = run.main([*options, *SMALL, f"hydra.run.dir={place}"])
    if status != 0:
        return f"the run ended with {status}"
    return check(place / "events.jsonl", Limit(limit_of(options)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the run of this number alone")
    arguments = parser.parse_args()
    numbers = range(arguments.runs) if arguments.only is None else [arguments.only]
    kinds: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    wrong = events = 0
    began = time.monotonic()
    for number in numbers:
        options = draw(arguments.seed, number)
        place = Path(tempfile.mkdtemp(prefix="traces-"))
        result = trace(options, place / "run")
        kinds[options[0].removeprefix("collector=")] += 1
        if isinstance(result, str):
            findings = [result]
        else:
            events += result.events
            rules.update(finding.rule.name for finding in result.findings if finding.holds)
            findings = [f"{one.rule.name}: {one.first}" for one in result.broken]
        wrong += bool(findings)
        print(f"{number:4d} {'WRONG' if findings else 'ok':5s} {' '.join(options)}", flush=True)
        for line in findings:
            print(f"     {line}", flush=True)
        if findings:
            command = f"python benchmarks/traces.py --seed {arguments.seed} --only {number}"
            print(f"     again: {command}; kept: {place}", flush=True)
        else:
            shutil.rmtree(place)
    seconds = time.monotonic() - began
    print(f"\n{kinds.total()} runs, {events:,} events, {wrong} with a violation, {seconds:.0f} s")
    print("collectors: " + ", ".join(f"{name} {n}" for name, n in kinds.most_common()))
    print("rules that held: " + ", ".join(f"{name} {n}" for name, n in rules.most_common()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
