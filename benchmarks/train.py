"""Frames a second of whole trainings, beside other libraries, and what was learned in them.

    make bench BENCH=train            or, with both environments made,
    .venv/bin/python benchmarks/train.py [--rounds 3] [--algos ppo,pong,sac]
        [--frames ppo=300000,pong=200000,sac=15000] [--seconds 900]
        [--contestants lockstep_single,sb3] [--cleanrl PATH] [--no-peers]
        [--output outputs/benchmarks]

PPO on CartPole-v1 (8 environments × 128 steps, minibatches of 256, 4 epochs, 64×64 tanh), the same
on the pixels of Pong (the extra atari; a frame is one step of four), and SAC on Pendulum-v1
(256×256, batches of 256, one update a frame), all with the settings in `train_case.py`.
In each round every contestant trains once, from nothing, in a process of its own, with the round's
seed and one torch thread; the next round takes them the other way round. Beside the speed stands
the mean return of the last tenth of training: speed that harms learning is none. All of it takes
about an hour on two cores, most of it SAC's. Pong, which takes hours, is only run by name.

CleanRL is no package, and its scripts are run from a checkout of it: --cleanrl PATH. Not here:
sample-factory. Its 2.x requires numpy<2 and gymnasium<1, which no environment can have beside the
other peers, and its 1.x is for gym, before gymnasium.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.contest import add_flags, add_names, parse, say  # noqa: E402
from benchmarks.remote import ContestantFailed, ContestantLeftOut  # noqa: E402
from benchmarks.train_case import FRAMES, PONG, PPO, SAC, Training  # noqa: E402
from benchmarks.train_contestants import CONTESTANTS  # noqa: E402
from benchmarks.train_report import Row, Turn, save, show  # noqa: E402


@dataclass(frozen=True)
class Limits:
    """How much of everything."""

    rounds: int
    seconds: float  # that one training may take
    cleanrl: str | None = None  # the checkout


def train_once(row: Row, training: Training, limits: Limits) -> Turn:
    """One training in a process of its own, of which nothing is left afterwards."""
    contestant = CONTESTANTS[row.contestant]
    (options,) = contestant.settings(row.algo)
    if row.contestant == "cleanrl":
        options = {"cleanrl": limits.cleanrl}
    begun = time.perf_counter()
    remote = contestant.start()
    try:
        answer = remote.ask(
            limits.seconds, cmd="train", training=training.message(), options=options
        )
        remote.close()
    finally:
        remote.kill()
    around_s = time.perf_counter() - begun - answer["seconds"]
    return Turn(seed=training.seed, around_s=around_s, **answer)


def take_turn(row: Row, training: Training, limits: Limits) -> None:
    """Train once more; a failure ends this contestant's part and nobody else's."""
    try:
        turn = train_once(row, training, limits)
    except (ContestantFailed, ContestantLeftOut) as problem:
        row.problem = str(problem)
        said = row.problem
    else:
        row.turns.append(turn)
        gained = "no episode" if turn.final_return is None else f"return {turn.final_return:.0f}"
        said = f"{turn.fps:,.0f} frames/s, {gained}"
    say(f"  {training.algo}, seed {training.seed}, {row.contestant}: {said}")


def measure(algo: str, names: Sequence[str], frames: int, limits: Limits) -> list[Row]:
    """All contestants in turns, the other way round every second time."""
    rows = [
        Row(algo, name, CONTESTANTS[name].what, CONTESTANTS[name].is_peer)
        for name in names
        if CONTESTANTS[name].settings(algo)
    ]
    for number in range(limits.rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            if row.problem:
                continue
            with tempfile.TemporaryDirectory(prefix="lockstep-train-") as scratch:
                take_turn(row, Training(algo, frames, number + 1, scratch), limits)
    return rows


def parse_frames(text: str) -> dict[str, int]:
    """`ppo=2048,sac=1500`: of one training; what is not named keeps its default."""
    frames = dict(FRAMES)
    for part in text.split(","):
        algo, _, amount = part.partition("=")
        if algo not in FRAMES or not amount.isdecimal() or not int(amount):
            known = " or ".join(f"{name}=N" for name in FRAMES)
            raise argparse.ArgumentTypeError(f"{part!r}: expected {known} with N above 0")
        frames[algo] = int(amount)
    return frames


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument(
        "--frames",
        type=parse_frames,
        default=",".join(f"{algo}={frames}" for algo, frames in FRAMES.items()),
        help="of one training (default: %(default)s)",
    )
    flags.add_argument("--seconds", type=float, default=900.0, help="that one training may take")
    add_names(flags, "--algos", FRAMES, ("ppo", "sac"))
    add_flags(flags, CONTESTANTS)
    flags.add_argument("--cleanrl", metavar="PATH", help="a checkout of CleanRL")
    return flags


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse(parser(), CONTESTANTS)
    names = arguments.contestants
    cleanrl = None if arguments.cleanrl is None else str(Path(arguments.cleanrl).resolve())
    limits = Limits(arguments.rounds, arguments.seconds, cleanrl)
    rows: list[Row] = []
    for algo in arguments.algos:
        say(f"{algo}, {arguments.frames[algo]:,} frames, rounds: {limits.rounds}")
        rows += measure(algo, names, arguments.frames[algo], limits)
    about = {
        "frames": {algo: arguments.frames[algo] for algo in arguments.algos},
        "rounds": limits.rounds,
        "settings": {"ppo": vars(PPO), "pong": vars(PONG), "sac": vars(SAC)},
    }
    show(rows, arguments.frames)
    save(rows, about, arguments.output / "train.json")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
