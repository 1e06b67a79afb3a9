"""What a short run costs beside its training: the start and the end of a program.

    .venv/bin/python docs/performance/start.py [--rounds 5] [--jobs 8] [--cleanrl PATH]

PPO on CartPole-v1 for 2,048 frames, by `run.py` alone, and as one of several jobs of a sweep with
`hydra/launcher=local`, one after another. A job's cost there is that of a sweep of several less
that of a sweep of one, divided by the jobs between them. The limit is a Python that imports torch
and gymnasium and ends. CleanRL's ppo.py runs in the peers' environment, without event files. All
take turns, and the table has medians. The training is what the run's own clock says
(`time/collect_s` to `time/log_s`); that of CleanRL's script is not known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.contest import OUR_PYTHON, PEER_PYTHON  # noqa: E402

SHORT = (
    *("algo=ppo", "env=cartpole", "collector=single", "logger=jsonl", "total_frames=2048"),
    *("collector.frames_per_batch=1024", "env.num_envs=8", "evaluation.every_frames=null"),
)
LONGEST_S = 300  # that a command may take
RUN = (str(OUR_PYTHON), str(ROOT / "run.py"))
# Runs CleanRL's script without what it reads its command line and writes event files with.
CLEANRL = """
import runpy, sys, types
class Writer:
    def __init__(self, *args): pass
    def __getattr__(self, name): return lambda *args, **kwargs: None
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=Writer)
settings = {"num_envs": 8, "total_timesteps": 2048, "cuda": False}
sys.modules["tyro"] = types.SimpleNamespace(cli=lambda arguments: arguments(**settings))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


class Cost(NamedTuple):
    """Seconds."""

    wall: float
    training: float

    def beside(self) -> float:
        return self.wall - self.training


def cost(command: Sequence[str]) -> Cost:
    """The seconds of a command, and those that its runs say they trained."""
    with tempfile.TemporaryDirectory(prefix="lockstep-start-") as folder:
        begun = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=LONGEST_S)
        wall = time.perf_counter() - begun
        return Cost(wall, sum(map(training_s, Path(folder).rglob("metrics.jsonl"))))


def training_s(metrics: Path) -> float:
    """What a run spent on its batches, by its own clock."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return sum(
        value for record in records for name, value in record.items() if name.startswith("time/")
    )


def sweep(jobs: int) -> tuple[str, ...]:
    seeds = ",".join(str(seed + 1) for seed in range(jobs))
    return (
        *RUN,
        "-m",
        "hydra/launcher=local",
        "hydra.launcher.parallel=1",
        "sweep=start",
        f"seed={seeds}",
        *SHORT,
    )


def a_job(jobs: int) -> Cost:
    """What one job more costs a sweep."""
    several, one = cost(sweep(jobs)), cost(sweep(1))
    return Cost(*((s - o) / (jobs - 1) for s, o in zip(several, one, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=8, help="of the sweep, 2 or more")
    parser.add_argument("--cleanrl", type=Path, metavar="PATH", help="a checkout of CleanRL")
    arguments = parser.parse_args()
    contestants: dict[str, Callable[[], Cost]] = {
        "limit: import torch, gymnasium": lambda: cost(
            [str(OUR_PYTHON), "-c", "import torch, gymnasium"]
        ),
        "run.py": lambda: cost([*RUN, *SHORT]),
        "a job of a local sweep": lambda: a_job(arguments.jobs),
    }
    if arguments.cleanrl:
        script = str(arguments.cleanrl.resolve() / "cleanrl" / "ppo.py")
        contestants["CleanRL's ppo.py"] = lambda: cost([str(PEER_PYTHON), "-c", CLEANRL, script])
    turns: dict[str, list[Cost]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, contestant in contestants.items():
            turns[name].append(contestant())
    print("| seconds | from start to exit | of which training | beside it |")
    print("|---|---:|---:|---:|")
    for name, taken in turns.items():
        wall, training = map(median, zip(*taken, strict=True))
        beside = median(turn.beside() for turn in taken)
        print(f"| {name} | {wall:.2f} | {training:.2f} | {beside:.2f} |")


if __name__ == "__main__":
    main()
