"""Frames a second that collectors reach, beside the bare loop and other libraries.

    make bench            or, with both environments made,
    .venv/bin/python benchmarks/collect.py [--rounds 5] [--seconds 2] [--envs CartPole-v1]
        [--sizes 1,8] [--modes single,multi_sync] [--contestants bare,lockstep] [--no-peers]

All contestants of one environment and size stand ready in processes of their own and take turns,
round after round, so that a ratio within a round compares what the machine did at that time.
Weights are published once a batch where there are workers. Where a library has several settings,
all are tried first and the fastest takes part. Then start-up: from construction to first batch.
All of it takes about an hour. Only Lockstep has the modes simulated and distributed, which must be
asked for: `--modes single,multi_sync,multi_async,simulated,distributed --no-peers` measures each of
its collectors.

Not here: sample-factory. Its 2.x requires numpy<2 and gymnasium<1, which no environment can have
beside the other peers, and its 1.x is for gym, before gymnasium.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.collect_case import ENVS, MODES, OUR_MODES, SIZES, WORKERS, Case  # noqa: E402
from benchmarks.collect_contestants import CONTESTANTS, label  # noqa: E402
from benchmarks.collect_report import Row, Rows, StartUp, save, show  # noqa: E402
from benchmarks.contest import Options, add_flags, add_names, parse, say  # noqa: E402
from benchmarks.remote import ContestantFailed, ContestantLeftOut, Remote  # noqa: E402

OPEN_S = 120.0
TURN_GRACE_S = 60.0
TRIAL_ROUNDS = 2


@dataclass
class Entry:
    """A contestant with one setting in one case, for as long as it takes part."""

    case: Case
    name: str
    options: Options
    fps: list[float] = field(default_factory=list)
    problem: str = ""
    remote: Remote | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.case), self.name, label(self.options))))

    def attempt(self, do: Callable[[], None]) -> None:
        """Do it; a failure ends this contestant's part and nobody else's."""
        try:
            do()
        except ContestantFailed as error:
            self.leave(str(error))
        except ContestantLeftOut as why:
            self.leave(f"left out: {why}")

    def leave(self, problem: str) -> None:
        self.problem = problem
        if self.remote is not None:
            self.remote.kill()
            self.remote = None

    def open(self) -> float:
        """Make it ready to collect; return the seconds from construction to first batch."""
        if self.remote is None:
            self.remote = CONTESTANTS[self.name].start()
        answer = self.remote.ask(OPEN_S, cmd="open", case=self.case.message(), options=self.options)
        return float(answer["first_batch_s"] or 0.0)

    def turn(self, seconds: float) -> None:
        assert self.remote is not None
        answer = self.remote.ask(2 * seconds + TURN_GRACE_S, cmd="turn", seconds=seconds)
        self.fps.append(answer["frames"] / answer["seconds"])

    def close(self) -> None:
        if self.remote is not None:
            self.remote.close()
            self.remote = None

    def abandon(self, *exception: object) -> None:
        """For the end of a `with`: nothing is left, however it ends."""
        if self.remote is not None:
            self.remote.kill()
            self.remote = None


def compete(entries: Sequence[Entry], *, rounds: int, seconds: float) -> None:
    """Open all, give each a turn a round, the other way round every second time, and close all."""
    with ExitStack() as stack:
        for entry in entries:
            stack.push(entry.abandon)
            begun = time.perf_counter()
            if not entry.problem:
                entry.attempt(lambda entry=entry: entry.open() and None)
            ready_s = time.perf_counter() - begun
            say(f"  {entry}: {entry.problem or f'ready after {ready_s:.1f} s'}")
        for number in range(rounds):
            for entry in entries if number % 2 == 0 else reversed(entries):
                if entry.remote is not None:
                    entry.attempt(lambda entry=entry: entry.turn(seconds))
        for entry in entries:
            entry.close()


def fastest(case: Case, name: str, seconds: float) -> tuple[Entry, dict[str, float | str]]:
    """Try a contestant's settings; return an entry with the fastest, and what each reached."""
    settings = CONTESTANTS[name].settings(case)
    if len(settings) == 1:
        return Entry(case, name, settings[0]), {}
    trials = [Entry(case, name, options) for options in settings]
    compete(trials, rounds=TRIAL_ROUNDS, seconds=seconds)
    best = max(trials, key=lambda trial: median(trial.fps) if trial.fps else 0.0)
    reached = {label(t.options): median(t.fps) if t.fps else t.problem for t in trials}
    return Entry(case, name, best.options), reached


def measure(
    cases: Iterable[Case], names: Sequence[str], *, rounds: int, seconds: float
) -> list[Row]:
    """All cases and contestants in turns within one another."""
    entries, rows = [], []
    for case in cases:
        for name in [name for name in names if CONTESTANTS[name].settings(case)]:
            entry, tried = fastest(case, name, seconds)
            entries.append(entry)
            rows.append(Row(case, name, label(entry.options), tried=tried))
    compete(entries, rounds=rounds, seconds=seconds)
    for row, entry in zip(rows, entries, strict=True):
        row.fps, row.problem = entry.fps, entry.problem
    return rows


def measure_start(case: Case, names: Sequence[str], *, rounds: int) -> list[StartUp]:
    """Construct each twice in a program of its own, in turns."""
    starts = {name: StartUp(case, name) for name in names}
    for _ in range(rounds):
        for name, start in starts.items():
            if start.problem:
                continue
            entry = Entry(case, name, CONTESTANTS[name].settings(case)[0])

            def start_twice(entry: Entry = entry, start: StartUp = start) -> None:
                first_s = entry.open()
                assert entry.remote is not None
                entry.remote.ask(OPEN_S, cmd="close")
                start.first_s.append(first_s)
                start.second_s.append(entry.open())
                entry.close()

            with ExitStack() as stack:
                stack.push(entry.abandon)
                entry.attempt(start_twice)
            start.problem = entry.problem
    return list(starts.values())


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    add_names(flags, "--envs", ENVS, ENVS)
    add_names(flags, "--sizes", SIZES, SIZES)
    add_names(flags, "--modes", (*MODES, *OUR_MODES), MODES)
    add_flags(flags, CONTESTANTS)
    return flags


def main() -> int:
    arguments = parse(parser(), CONTESTANTS)
    rounds, seconds, names = arguments.rounds, arguments.seconds, arguments.contestants
    about = {
        "workers": WORKERS,
        "rounds": rounds,
        "seconds": seconds,
        "contestants": {name: CONTESTANTS[name].what for name in names},
    }
    rows: list[Row] = []
    starts: list[StartUp] = []
    file = arguments.output / "collect.json"
    for env in arguments.envs:
        for size in map(int, arguments.sizes):
            say(f"{env} × {size}, {rounds} rounds")
            cases = [Case(env, size, mode) for mode in arguments.modes]
            measured = measure(cases, names, rounds=rounds, seconds=seconds)
            rows += measured
            show(Rows(measured), [])  # what is measured is kept, however the rest ends
            save(Rows(rows), starts, about, file)
    starters = [name for name in ("lockstep", "torchrl") if name in names]
    for mode in arguments.modes:
        if mode != "single" and starters:
            say(f"start-up, {mode}, {rounds} rounds")
            case = Case(arguments.envs[0], int(arguments.sizes[0]), mode)
            those = [name for name in starters if CONTESTANTS[name].settings(case)]
            starts += measure_start(case, those, rounds=rounds)
    show(Rows(rows), starts)
    save(Rows(rows), starts, about, file)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
