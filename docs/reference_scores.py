"""What the algorithms reach after so many frames, beside scores that others have published.

    .venv/bin/python docs/reference_scores.py [--rows ppo_acrobot,dqn_cartpole] [--parallel 2]
        [--print]

Each row is a sweep over seeds in outputs/reference_<row>/. What is done is not run again, so an
interrupted measurement goes on where it was. The table is printed at the end, as Markdown; --print
prints it from the runs that there are, without starting any. Rows need the extras mujoco, minatar
and box2d.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.report.runs import read_runs  # noqa: E402

PLAIN = ("collector=single", "sync=none")  # as the published runs: no worker acts ahead
LAST = 0.1  # the part of training that the score is of
METRICS = ("episode/return", "episode/count")


@dataclass(frozen=True)
class Row:
    """A sweep over seeds, and what was published of the same task."""

    name: str
    title: str
    overrides: tuple[str, ...]
    seeds: int
    published: str

    @property
    def command(self) -> str:
        """What a reader types to get these runs."""
        return f"run.py -m {' '.join(self.overrides)} seed={self.seed_list}"

    @property
    def seed_list(self) -> str:
        return ",".join(str(seed) for seed in range(1, self.seeds + 1))

    @property
    def sweep(self) -> str:
        return f"reference_{self.name}"


def of(game: str) -> str:
    return f"env.id=MinAtar/{game}-v1"


ROWS = [
    Row(
        "ppo_cartpole",
        "PPO, CartPole-v1",
        ("experiment=ppo_cartpole_customary", "total_frames=500000"),
        5,
        "490 ± 6 (CleanRL)",
    ),
    Row(
        "ppo_acrobot",
        "PPO, Acrobot-v1",
        ("experiment=ppo_acrobot", *PLAIN),
        5,
        "-86.4 ± 1.3 (CleanRL)",
    ),
    Row(
        "ppo_halfcheetah",
        "PPO, HalfCheetah-v5",
        ("experiment=ppo_halfcheetah", *PLAIN),
        3,
        "1443 ± 46 (CleanRL), 2906 ± 1129 in its earlier table",
    ),
    Row(
        "ppo_hopper", "PPO, Hopper-v5", ("experiment=ppo_hopper", *PLAIN), 3, "2383 ± 272 (CleanRL)"
    ),
    Row(
        "ppo_walker2d",
        "PPO, Walker2d-v5",
        ("experiment=ppo_walker2d", *PLAIN),
        3,
        "2288 ± 572 (CleanRL)",
    ),
    Row(
        "ppo_minatar_breakout",
        "PPO, MinAtar Breakout",
        ("experiment=ppo_minatar_breakout", *PLAIN),
        3,
        "16.6 (gymnax-blines, one run, 0.96 M frames)",
    ),
    Row(
        "ppo_minatar_asterix",
        "PPO, MinAtar Asterix",
        ("experiment=ppo_minatar_breakout", of("Asterix"), *PLAIN),
        3,
        "1.8 (gymnax-blines, one run, 0.96 M frames)",
    ),
    Row(
        "ppo_minatar_space_invaders",
        "PPO, MinAtar Space Invaders",
        ("experiment=ppo_minatar_breakout", of("SpaceInvaders"), *PLAIN),
        3,
        "50.4 (gymnax-blines, one run, 0.96 M frames)",
    ),
    Row(
        "sac_pendulum",
        "SAC, Pendulum-v1",
        ("experiment=sac_pendulum",),
        5,
        "-157 (RL Zoo, one run, 20,000 frames)",
    ),
    Row(
        "sac_halfcheetah",
        "SAC, HalfCheetah-v5",
        ("experiment=sac_halfcheetah", "total_frames=100000"),
        3,
        "6515 ± 514 (Tianshou, 10 seeds, evaluation after 100,000 frames)",
    ),
    Row(
        "dqn_cartpole",
        "DQN, CartPole-v1",
        ("experiment=dqn_cartpole",),
        5,
        "489 ± 16 (CleanRL, 500,000 frames)",
    ),
    Row(
        "dqn_minatar_breakout",
        "DQN, MinAtar Breakout",
        ("experiment=dqn_minatar_breakout",),
        3,
        "about 9 (Young and Tian 2019, read off their figure at 1 M frames)",
    ),
    Row("impala_cartpole", "IMPALA, CartPole-v1", ("experiment=impala_cartpole",), 5, "none found"),
    Row(
        "impala_lunarlander",
        "IMPALA, LunarLander-v3",
        ("experiment=impala_lunarlander",),
        5,
        "none found",
    ),
    Row(
        "impala_minatar_breakout",
        "IMPALA, MinAtar Breakout",
        ("experiment=impala_minatar_breakout",),
        3,
        "none found",
    ),
]


def run(row: Row, parallel: int) -> None:
    """The row's sweep, as far as it is not done."""
    launcher = ("hydra/launcher=local", f"hydra.launcher.parallel={parallel}")
    command = [sys.executable, str(ROOT / "run.py"), "-m", *row.overrides]
    command += [f"seed={row.seed_list}", f"sweep={row.sweep}", "skip_done=true", *launcher]
    subprocess.run(command, check=True)


def score(records: pd.DataFrame, frames: float) -> float:
    """The mean return of the training episodes that ended in the last tenth of a run's frames."""
    ended = records.dropna(subset=list(METRICS))
    counts = ended["episode/count"].diff().fillna(ended["episode/count"])  # it counts so far
    late = ended["step"] > (1 - LAST) * frames
    return float(np.average(ended["episode/return"][late], weights=counts[late]))


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, with as many digits as they are worth."""
    deviation = stdev(values) if len(values) > 1 else 0.0
    digits = 0 if deviation >= 10 else 1 if deviation >= 0.1 else 2
    return f"{fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the runs that are done, and the commands that made them."""
    yield "| | frames | seeds | score | in evaluation | published | minutes a run |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        done = done_runs(Path("outputs", row.sweep))
        *figures, minutes = measured(done) if len(done) else ("", "0", "not run", "", "")
        yield f"| {' | '.join([row.title, *figures, row.published, minutes])} |"
    yield ""
    for row in rows:
        yield f"    python {row.command}"


def done_runs(directory: Path) -> pd.DataFrame:
    """The runs that are done, each with its score."""
    if not directory.is_dir():
        return pd.DataFrame()
    runs, records = read_runs([directory], METRICS)
    done = runs[runs["state"] == "done"]
    by_run = records.groupby("run")
    frames = done["summary.frames"].items()
    return done.assign(score=[score(by_run.get_group(run), most) for run, most in frames])


def measured(done: pd.DataFrame) -> tuple[str, ...]:
    """Frames, seeds, score, evaluation and minutes."""
    return (
        f"{done['summary.frames'].mean():,.0f}",
        str(len(done)),
        spread(list(done["score"])),
        spread(list(done["summary.eval/return"])),
        f"{done['summary.wall_s'].mean() / 60:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = ",".join(row.name for row in ROWS)
    parser.add_argument("--rows", default=names, help=f"of {names}")
    parser.add_argument("--parallel", type=int, default=2, help="runs side by side")
    parser.add_argument("--print", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    known = {row.name: row for row in ROWS}
    wanted = arguments.rows.split(",")
    if unknown := set(wanted) - known.keys():
        parser.error(f"--rows: no {', '.join(sorted(unknown))}; there are {names}")
    rows = [known[name] for name in wanted]
    if not arguments.print:
        for row in rows:
            run(row, arguments.parallel)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
