"""Returns and lengths of episodes, from batches that hold pieces of them."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDictBase

from harness.environments.wrappers import FIRST, KEY, LENGTH, OVER, RETURN
from harness.measures.meters import Update
from harness.saved_state import Stateful

Array = np.ndarray[Any, Any]
RECENT_EPISODES = 100


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
        return _counted_pieces(counts_of_env.cpu().numpy()[mask], envs, rewards, done)
    ended = set(ids[done].tolist())
    trajectories, firsts, places = np.unique(ids, return_index=True, return_inverse=True)
    returns = np.bincount(places, rewards, len(trajectories)).tolist()
    lengths = np.bincount(places, minlength=len(trajectories)).tolist()
    # Known by their first frames and not by number: a resumed run numbers anew what goes on.
    starts = batch["is_init"].cpu().numpy()[mask][firsts].tolist()
    rows = zip(trajectories.tolist(), envs[firsts].tolist(), starts, returns, lengths, strict=True)
    return [
        Piece(env, start, trajectory in ended, Open(trajectory, gained, length))
        for trajectory, env, start, gained, length in rows
    ]


def _counted_pieces(counted: Array, envs: Array, rewards: Array, done: Array) -> list[Piece]:
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
