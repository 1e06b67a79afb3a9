"""What a run measures: gathered batch by batch, read out at every log point and at the end."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from harness.logging.base import Histogram

PHASES = ("collect", "train", "sync", "log")
RECENT_EPISODES = 100
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Episodes:
    """Returns and lengths of the episodes that end, from batches that hold pieces of them."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, float, int]] = {}  # by environment
        self._fresh: list[tuple[float, int]] = []
        self.recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.count = 0

    def add(self, batch: TensorDictBase) -> None:
        """Take in a batch [environments, time]."""
        mask = batch["collector", "mask"].cpu().numpy()
        ids, envs = (batch["collector", key].cpu().numpy()[mask] for key in ("traj_ids", "env"))
        rewards = batch["next", "reward"].cpu().numpy()[mask].astype(np.float64)
        ended = set(ids[batch["next", "done"].cpu().numpy()[mask]].tolist())
        trajectories, firsts, places = np.unique(ids, return_index=True, return_inverse=True)
        returns = np.bincount(places, rewards, len(trajectories)).tolist()
        lengths = np.bincount(places, minlength=len(trajectories)).tolist()
        # Told by their first frames and not by number: a resumed run numbers anew what goes on.
        starts = batch["is_init"].cpu().numpy()[mask][firsts].tolist()
        envs = envs[firsts].tolist()
        found = zip(trajectories.tolist(), envs, starts, returns, lengths, strict=True)
        for trajectory, env, starts_here, gained, length in found:
            known, before, steps = self._open.get(env, (trajectory, 0.0, 0))
            if known != trajectory and starts_here:  # the one before was left without an end
                before, steps = 0.0, 0
            self._open[env] = (trajectory, before + gained, steps + length)
            if trajectory in ended:
                self._end(env)

    def _end(self, env: int) -> None:
        _, gained, length = self._open.pop(env)
        self._fresh.append((gained, length))
        self.recent.append(gained)
        self.count += 1

    def read(self) -> dict[str, float]:
        """Means over the episodes that ended since the last reading."""
        ended, self._fresh = self._fresh, []
        if not ended:
            return {}
        return {
            "episode/return": float(np.mean([value for value, _ in ended])),
            "episode/length": float(np.mean([length for _, length in ended])),
            "episode/count": self.count,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers only."""
        return {
            "open": {key: list(value) for key, value in self._open.items()},
            "fresh": [list(episode) for episode in self._fresh],
            "recent": list(self.recent),
            "count": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._open = {int(env): (t, gained, n) for env, (t, gained, n) in state["open"].items()}
        self._fresh = [(gained, length) for gained, length in state["fresh"]]
        self.recent = deque(state["recent"], maxlen=RECENT_EPISODES)
        self.count = state["count"]


class Lags:
    """How many versions behind the learner the weights were that made the consumed frames."""

    def __init__(self) -> None:
        self.all: Counter[int] = Counter()
        self._fresh: Counter[int] = Counter()
        self.mixed_batches = 0

    def add(self, batch: TensorDictBase, version: int) -> None:
        """Take in a batch that is consumed while `version` is the newest."""
        stamps = batch["policy_version"][batch["collector", "mask"]]
        used, counts = torch.unique(stamps[stamps >= 0], return_counts=True)
        self.mixed_batches += len(used) > 1
        for stamp, count in zip(used.tolist(), counts.tolist(), strict=True):
            self._fresh[version - stamp] += count
            self.all[version - stamp] += count

    def read(self) -> tuple[dict[str, float], Histogram | None]:
        """Figures and histogram of the frames since the last reading."""
        lags, self._fresh = self._fresh, Counter()
        metrics = {"policy/mixed_batches": float(self.mixed_batches)}
        if not lags:
            return metrics, None
        return metrics | lag_figures(lags), lag_histogram(lags)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers only."""
        return {
            "all": dict(self.all),
            "fresh": dict(self._fresh),
            "mixed_batches": self.mixed_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.all, self._fresh = (
            Counter({int(lag): count for lag, count in state[name].items()})
            for name in ("all", "fresh")
        )
        self.mixed_batches = state["mixed_batches"]


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


class Clock:
    """Where the time goes, by phase."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(PHASES, 0.0)
        self._fresh = dict.fromkeys(PHASES, 0.0)
        self._read_at = self.started_at = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time in here to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.total[name] += spent
            self._fresh[name] += spent

    def read(self) -> tuple[dict[str, float], float]:
        """Seconds of each phase since the last reading, and of everything."""
        now = time.perf_counter()
        elapsed, self._read_at = now - self._read_at, now
        fresh, self._fresh = self._fresh, dict.fromkeys(PHASES, 0.0)
        return {f"time/{name}_s": spent for name, spent in fresh.items()}, elapsed

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started_at


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
