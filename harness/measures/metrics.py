"""What a run measures: gathered batch by batch, read out at every log point and at the end."""

from __future__ import annotations

import math
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from harness.environments.wrappers import FIRST, KEY, LENGTH, OVER, RETURN
from harness.measures import PHASES
from harness.measures.meters import Histogram, Ratios, Readings, Update
from harness.saved_state import Stateful
from lockstep_check.ages import age

Array = np.ndarray[Any, Any]
RECENT_EPISODES = 100
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Open(NamedTuple):
    """An episode under way."""

    trajectory: int  # -1 if the environment itself tells its episodes apart
    wrapped: float  # the return so far, as the learner sees it
    steps: int
    own: float = 0.0  # the same as the environment itself counts, if `own_steps` is not -1
    own_steps: int = -1
    is_cut: bool = False  # whether it ends here, unless the environment goes on with it


class Piece(NamedTuple):
    """What a batch holds of one episode."""

    env: int
    starts: bool  # whether its first frame is the episode's
    is_over: bool
    episode: Open


def _pieces(batch: TensorDictBase) -> list[Piece]:
    """The episodes that a batch holds pieces of, each environment's in order."""
    mask = batch["collector", "mask"].cpu().numpy()
    ids, envs = (batch["collector", key].cpu().numpy()[mask] for key in ("traj_ids", "env"))
    rewards = batch["next", "reward"].cpu().numpy()[mask].astype(np.float64)
    done = batch["next", "done"].cpu().numpy()[mask]
    counts_of_env = batch.get(("next", "info", KEY), None)
    if counts_of_env is not None:
        return _told_pieces(counts_of_env.cpu().numpy()[mask], envs, rewards, done)
    ended = set(ids[done].tolist())
    trajectories, firsts, places = np.unique(ids, return_index=True, return_inverse=True)
    returns = np.bincount(places, rewards, len(trajectories)).tolist()
    lengths = np.bincount(places, minlength=len(trajectories)).tolist()
    # Told by their first frames and not by number: a resumed run numbers anew what goes on.
    starts = batch["is_init"].cpu().numpy()[mask][firsts].tolist()
    rows = zip(trajectories.tolist(), envs[firsts].tolist(), starts, returns, lengths, strict=True)
    return [
        Piece(env, start, trajectory in ended, Open(trajectory, gained, length))
        for trajectory, env, start, gained, length in rows
    ]


def _told_pieces(counted: Array, envs: Array, rewards: Array, done: Array) -> list[Piece]:
    """The same of episodes that the environment itself counts."""
    order = np.argsort(envs, kind="stable")
    counted, envs, rewards, done = counted[order], envs[order], rewards[order], done[order]
    starts = counted[:, FIRST] > 0
    firsts = np.flatnonzero(starts | (np.diff(envs, prepend=-1) != 0))
    lasts = np.append(firsts[1:], len(envs))[: len(firsts)] - 1
    spans = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return [
        Piece(
            int(envs[last]),
            bool(starts[first]),
            bool(counted[last, OVER] > 0),
            Open(
                -1,
                float(rewards[first : last + 1].sum()),
                last + 1 - first,
                float(counted[last, RETURN]),
                int(counted[last, LENGTH]),
                bool(done[last]),
            ),
        )
        for first, last in spans
    ]


class Episodes(Stateful):
    """Returns and lengths of the episodes that end, from batches that hold pieces of them.

    They are the environment's own where its wrappers may alter them (harness/environments/
    wrappers.py): an episode that a wrapper ends is counted when the environment starts another one.
    """

    STATE = ("_open", "_fresh", "recent", "count", "differs")

    def __init__(self) -> None:
        self._open: dict[int, Open] = {}  # by environment
        self._fresh: list[tuple[float, int, float]] = []
        self.recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.count = 0
        self.differs = False  # whether wrappers ever altered a return

    def measure(self, update: Update) -> None:
        self.add(update.batch)

    def add(self, batch: TensorDictBase) -> None:
        """Take in a batch [environments, time]."""
        for env, starts, is_over, episode in _pieces(batch):
            before = self._open.pop(env, None)
            if before is not None:
                if not starts or before.trajectory == episode.trajectory >= 0:
                    wrapped, steps = before.wrapped + episode.wrapped, before.steps + episode.steps
                    episode = episode._replace(wrapped=wrapped, steps=steps)
                elif before.is_cut:  # else it was left without an end
                    self._end(before)
            if is_over:
                self._end(episode)
            else:
                self._open[env] = episode

    def _end(self, episode: Open) -> None:
        gained, length = episode.wrapped, episode.steps
        if episode.own_steps >= 0:
            gained, length = episode.own, episode.own_steps
        self.differs |= not math.isclose(gained, episode.wrapped, rel_tol=1e-5, abs_tol=1e-6)
        self._fresh.append((gained, length, episode.wrapped))
        self.recent.append(gained)
        self.count += 1

    def read(self) -> dict[str, float]:
        """Means over the episodes that ended since the last reading."""
        ended, self._fresh = self._fresh, []
        if not ended:
            return {}
        gained, length, wrapped = np.mean(ended, axis=0).tolist()
        metrics = {"episode/return": gained, "episode/length": length, "episode/count": self.count}
        return metrics | ({"episode/wrapped_return": wrapped} if self.differs else {})

    @property
    def mean_return(self) -> float:
        """Of the last hundred episodes."""
        return float(np.mean(self.recent)) if self.recent else float("nan")

    def summary(self) -> dict[str, float]:
        """The newest return, and how many episodes there were."""
        return {"episode/return": self.mean_return, "episode/count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._open = {int(env): Open(*episode) for env, episode in self._open.items()}


class Lags(Stateful):
    """How many versions behind the learner the weights were that made the consumed frames."""

    STATE = ("all", "_fresh", "mixed_batches")

    def __init__(self) -> None:
        self.all: Counter[int] = Counter()
        self._fresh: Counter[int] = Counter()
        self.mixed_batches = 0

    def measure(self, update: Update) -> None:
        self.add(update.batch, update.version, update.ratios)

    def add(self, batch: TensorDictBase, version: int, ratios: Ratios | None = None) -> None:
        """Take in a batch that is consumed while `version` is the newest.

        ratios: of the frames that were learned from; without them, all frames of the batch count.
        """
        stamps = batch["policy_version"][batch["collector", "mask"]]
        self.add_stamps(stamps, version, None if ratios is None else ratios.version)

    def add_stamps(self, stamps: Tensor, version: int, used: Tensor | None = None) -> None:
        """The same of the versions of a batch's frames, and of the frames that were learned from.

        used: by default all.
        """
        self.mixed_batches += len(torch.unique(stamps[stamps >= 0])) > 1
        stamps = stamps if used is None else used
        used, counts = torch.unique(stamps[stamps >= 0], return_counts=True)
        for stamp, count in zip(used.tolist(), counts.tolist(), strict=True):
            self._fresh[age(stamp, version)] += count
            self.all[age(stamp, version)] += count

    def read(self) -> Readings:
        """Figures and histogram of the frames since the last reading."""
        lags, self._fresh = self._fresh, Counter()
        metrics = {"policy/mixed_batches": float(self.mixed_batches)}
        if not lags:
            return metrics
        return {**metrics, **lag_figures(lags), "histogram/lag": lag_histogram(lags)}

    def summary(self) -> dict[str, float]:
        """Figures of all frames."""
        figures = lag_figures(self.all) if self.all else {}
        return {**figures, "policy/mixed_batches": self.mixed_batches}


def lag_figures(lags: Mapping[int, int], name: str = "policy/lag") -> dict[str, float]:
    """Mean, 95th percentile and maximum of lags with their counts."""
    values = sorted(lags)
    counts = np.array([lags[lag] for lag in values])
    upto = np.cumsum(counts)
    return {
        f"{name}_mean": float(np.dot(values, counts) / upto[-1]),
        f"{name}_p95": float(values[int(np.searchsorted(upto, 0.95 * upto[-1]))]),
        f"{name}_max": float(values[-1]),
    }


def lag_histogram(lags: Mapping[int, int]) -> Histogram:
    """One bin for each lag."""
    least, most = min(lags), min(max(lags), min(lags) + 200)
    counts = [lags.get(lag, 0) for lag in range(least, most + 1)]
    counts[-1] += sum(count for lag, count in lags.items() if lag > most)
    return Histogram(counts, [lag - 0.5 for lag in range(least, most + 2)])


class Clock(Stateful):
    """Where the time goes, by phase. Pauses for evaluations are in no phase.

    tell: called with the name of each phase that ends, its start and its end (perf_counter).
    """

    STATE = ("total", "evaluate_s", "wall_s")

    def __init__(self, tell: Callable[[str, float, float], None] | None = None) -> None:
        self._tell = tell
        self.total = dict.fromkeys(PHASES, 0.0)
        self.evaluate_s = 0.0
        self._fresh = dict.fromkeys(PHASES, 0.0)
        self._read_at = self._counts_from = time.perf_counter()

    @contextmanager
    def phase(self, name: str, work: str | None = None) -> Iterator[None]:
        """Count the time in here to a phase. work: what is done in it, if that has its own name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.total[name] += end - start
            self._fresh[name] += end - start
            if self._tell is not None:
                self._tell(work or name, start, end)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Leave the time in here out of all phases and of the time in all."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.evaluate_s += end - start
            self._read_at += end - start
            self._counts_from += end - start
            if self._tell is not None:
                self._tell("evaluate", start, end)

    def read(self) -> tuple[dict[str, float], float]:
        """Seconds of each phase since the last reading, and of everything."""
        now = time.perf_counter()
        elapsed, self._read_at = now - self._read_at, now
        spent_s, self._fresh = self._fresh, dict.fromkeys(PHASES, 0.0)
        return {f"time/{name}_s": spent for name, spent in spent_s.items()}, elapsed

    @property
    def wall_s(self) -> float:
        """Seconds since the start, less those of evaluations and between a run and its resumption.

        To set it is to go on from there.
        """
        return time.perf_counter() - self._counts_from

    @wall_s.setter
    def wall_s(self, spent_s: float) -> None:
        self._counts_from = time.perf_counter() - spent_s


def percentiles(values: list[float], name: str) -> dict[str, float]:
    """`name_p50`, `name_p95` and `name_p99` (nearest rank)."""
    if not values:
        return {}
    ranked = sorted(values)
    return {
        f"{name}_{label}": ranked[round(share * (len(ranked) - 1))]
        for label, share in SHARES.items()
    }


def system_metrics() -> dict[str, float]:
    """What this process uses of the machine."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    metrics = {
        "system/cpu_s": usage.ru_utime + usage.ru_stime,
        "system/memory_mb": usage.ru_maxrss / 1024,
        "system/load": os.getloadavg()[0],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        metrics["system/cuda_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return metrics
