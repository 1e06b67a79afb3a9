"""Environments whose every observation says where it came from, and a checker of batches.

An observation is (worker, env, episode, step, last action); episodes end at steps, and in ways,
that follow from the first three. So what must be in every place of every batch can be told from
the batch before it, and from nothing that the collector says.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict
from torch import nn

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector, next_observations

COLLECTORS: dict[str, Any] = {
    "single": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
}
MULTI = ("sync", "async")
NUM_ACTIONS = 7
FIELDS = ("worker", "env", "episode", "step", "last_action")


def episode_length(worker: int, env: int, episode: int) -> int:
    """How many steps an episode has: from 1 to 7."""
    return 1 + (3 * env + 5 * episode + worker) % 7


def is_terminal(env: int, episode: int) -> bool:
    """Whether an episode ends terminated; the others are truncated."""
    return (env + episode) % 2 == 0


def reward_of(episode: int, step: int, action: int) -> float:
    return episode * 64 + step * 8 + action


def chosen_action(episode: int, step: int, env: int) -> int:
    """What `CodePolicy` does."""
    return (episode + 3 * step + env) % NUM_ACTIONS


class CodeEnv(gym.Env[Any, Any]):
    """One environment that tells where it is."""

    observation_space = gym.spaces.Box(-1, 1e6, (len(FIELDS),), np.float32)
    action_space = gym.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, worker: int = 0, env: int = 0, endless: bool = False):
        self.worker, self.env, self.endless = worker, env, endless
        self.episode, self.steps, self.over = -1, 0, True
        self.seeded: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.seeded.append(seed)
        self.episode, self.steps, self.over = self.episode + 1, 0, False
        return self._observe(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert not self.over, "stepped after the end of an episode"
        assert self.action_space.contains(action)
        reward = reward_of(self.episode, self.steps, int(action))
        self.steps += 1
        length = episode_length(self.worker, self.env, self.episode)
        self.over = self.steps >= length and not self.endless
        terminal = is_terminal(self.env, self.episode)
        ends = self.over and terminal, self.over and not terminal
        return self._observe(int(action)), reward, *ends, {}

    def _observe(self, action: int) -> Any:
        told = [self.worker, self.env, self.episode, self.steps, action]
        return np.array(told, np.float32)


class Gate:
    """Lets environments in other processes take steps, as many as it is told."""

    def __init__(self, path: Path):
        os.mkfifo(path)
        self.path = str(path)
        self.folder = path.parent
        self._fd = os.open(path, os.O_RDWR)

    def let(self, steps: int) -> None:
        os.write(self._fd, bytes(steps))

    def close(self) -> None:
        os.close(self._fd)


class GatedEnv(CodeEnv):
    """Waits before every step until its gate lets it take one."""

    def __init__(self, gate: str, worker: int = 0):
        super().__init__(worker)
        self._fd = os.open(gate, os.O_RDWR)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        os.read(self._fd, 1)
        return super().step(action)


class CodeVector(VectorEnv[Any, Any, Any]):
    """A vector of its own make, of any autoreset mode."""

    def __init__(self, worker: int, num_envs: int, mode: AutoresetMode):
        self.metadata = {"autoreset_mode": mode}
        self.mode, self.num_envs = mode, num_envs
        self.members = [CodeEnv(worker, i) for i in range(num_envs)]
        self.single_observation_space = CodeEnv.observation_space
        self.single_action_space = CodeEnv.action_space
        self.observation_space = gym.vector.utils.batch_space(CodeEnv.observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(CodeEnv.action_space, num_envs)
        self._obs = np.zeros((num_envs, len(FIELDS)), np.float32)
        self._over = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        which = np.ones(self.num_envs, bool)
        if options is not None and self.mode is AutoresetMode.DISABLED:
            which = options["reset_mask"]
        for i in np.flatnonzero(which):
            self._obs[i], _ = self.members[i].reset(seed=None if seed is None else seed + int(i))
        self._over[which] = False
        return self._obs.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward = np.zeros(self.num_envs)
        ends = np.zeros((2, self.num_envs), bool)
        info: dict[str, Any] = {}
        for i, member in enumerate(self.members):
            if self._over[i] and self.mode is AutoresetMode.NEXT_STEP:
                self._obs[i], _ = member.reset()
                self._over[i] = False
                reward[i] = np.nan  # nobody may see it
                continue
            self._obs[i], reward[i], *ends[:, i], _ = member.step(actions[i])
            self._over[i] = ends[:, i].any()
            if self._over[i] and self.mode is AutoresetMode.SAME_STEP:
                info.setdefault("final_obs", np.full_like(self._obs, np.nan))[i] = self._obs[i]
                self._obs[i], _ = member.reset()
        return self._obs.copy(), reward, ends[0], ends[1], info


_MODES = {mode.name.lower(): mode for mode in AutoresetMode}
KINDS = ["one", "async", "async_unshared"]
KINDS += [f"{make}_{mode}" for make in ("sync", "native") for mode in _MODES]
RESET_BY_STEPS = ("native_next_step", "async_unshared")  # a step after an end makes no frame
CAN_RESET_SOME = [k for k in KINDS if k not in (*RESET_BY_STEPS, "native_same_step")]


def make_env(kind: str = "one", worker: int = 0, num_envs: int = 3) -> Any:
    """The coding environment of one of `KINDS`."""
    if kind == "one":
        return CodeEnv(worker)
    make, _, mode = kind.partition("_")
    if make == "native":
        return CodeVector(worker, num_envs, _MODES[mode])

    def member(i: int) -> Any:
        return lambda: CodeEnv(worker, i)

    members = [member(i) for i in range(num_envs)]
    if make == "async":
        return AsyncVectorEnv(members, shared_memory=mode != "unshared", context="fork")
    return SyncVectorEnv(members, autoreset_mode=_MODES[mode])


def num_envs_of(kind: str, num_envs: int = 3) -> int:
    return 1 if kind == "one" else num_envs


def workers_of(kind: str, count: int, **kwargs: Any) -> list[dict[str, Any]]:
    """`create_env_kwargs` that tell each worker's environments which worker it is."""
    return [{"kind": kind, "worker": worker, **kwargs} for worker in range(count)]


class CodePolicy(nn.Module):
    """Acts by what it sees, and puts out what it saw and which weights it has."""

    in_keys = ("observation",)
    out_keys = ("action", "seen", "weights")

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, env, episode, step, _ = observation.unbind(-1)
        action = ((episode + 3 * step + env) % NUM_ACTIONS).long()
        return action, observation.clone(), self.number.expand(len(action)).clone()


def publish(collector: Any, **options: Any) -> Any:
    """Publish weights that say which version they are; that version."""
    with torch.no_grad():
        collector.policy.number += 1
    collector.update_policy_weights_(**options)
    return collector.policy_version


def build(
    kind: str,
    env: str = "sync_same_step",
    *,
    steps: int = 11,
    policy: Any = CodePolicy,
    expecting: Iterable[str] = (),
    **options: Any,
) -> tuple[Any, Checker]:
    """A collector of the coding environments, and the checker of its batches.

    expecting: flags of the checker.
    """
    n = num_envs_of(env)
    counts = [n] if kind == "single" else [n, n]
    told = workers_of(env, len(counts))
    if kind == "single":
        options["create_env_kwargs"] = told[0]
    else:
        options |= {"create_env_kwargs": told, "num_workers": 2}
    options.setdefault("frames_per_batch", steps * n * (2 if kind == "sync" else 1))
    checker = Checker(
        counts,
        max_frames=options.get("max_frames_per_traj"),
        policy=policy is CodePolicy,
        set_truncated=options.get("set_truncated", False),
        **dict.fromkeys(expecting, True),
    )
    return COLLECTORS[kind](make_env, policy and policy(), **options), checker


class Checker:
    """Verifies every row of every batch of one collector.

    workers: the number of environments of each worker.
    max_frames: of a trajectory. policy: whether `CodePolicy` acts.
    cuts: episodes may be cut short (a reset in the middle): truncated where their end was not due,
        or, where the batch before was handed over already, followed by a start without an end.
    skips: episodes may be missing (they were reset before they had a frame).
    restarts: workers may be replaced: at the front of a batch their environments are new ones.
    set_truncated: every environment's last frame in a batch is truncated, if nothing else.
    """

    def __init__(
        self,
        workers: Iterable[int],
        *,
        max_frames: int | None = None,
        policy: bool = True,
        cuts: bool = False,
        skips: bool = False,
        restarts: bool = False,
        endless: bool = False,
        set_truncated: bool = False,
    ):
        self.set_truncated = set_truncated
        self.restarts = restarts
        self.first_env = np.concatenate([[0], np.cumsum(list(workers))])
        self.max_frames, self.policy = max_frames, policy
        self.cuts, self.skips, self.endless = cuts, skips, endless
        self.last: dict[tuple[int, int], dict[str, Any]] = {}
        self.ids: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.must_start: set[tuple[int, int]] = set()

    def expect_start(self, *members: tuple[int, int]) -> None:
        """The next frame of these (worker, env), or of all, must start an episode."""
        self.must_start |= set(members or self.last)

    def check(self, batch: TensorDict) -> int:
        """Verify one batch [environments, time]; how many frames it has."""
        assert batch.batch_dims == 2
        if ("next", "finals") in batch.keys(True):
            rebuild(batch)
        mask = batch["collector", "mask"].numpy()
        columns = {"/".join(k) if isinstance(k, tuple) else k: batch[k].numpy() for k in KEYS}
        if self.policy:
            columns |= {k: batch[k].numpy() for k in ("seen", "weights")}
        for name, values in columns.items():
            expected_dtype, ndim = DTYPES[name]
            assert (str(values.dtype), values.ndim) == (expected_dtype, ndim), name
            assert values.shape[:2] == mask.shape, name
        for row in range(len(mask)):
            length = int(mask[row].sum())
            assert mask[row, :length].all(), "padding between frames"
            for name, values in columns.items():
                if not name.startswith("collector"):
                    assert not values[row, length:].any(), f"padding of {name} is not zero"
            if self.restarts and length:
                self._see_newcomer(columns["observation"][row, 0])
            for t in range(length):
                frame = {name: values[row, t] for name, values in columns.items()}
                self._check_frame(frame, last=t == length - 1)
        envs = columns["collector/env"][mask.any(1), 0]
        assert (envs[1:] > envs[:-1]).all(), "rows are not in the order of their environments"
        frames = int(mask.sum())
        self.counts["frames"] += frames
        self.counts["padding"] += mask.size - frames
        return frames

    def _see_newcomer(self, observation: Any) -> None:
        """Forget what came before the first frame of an environment that is new."""
        worker, env, episode, step, _ = (int(x) for x in observation)
        if episode == step == 0 and self.last.pop((worker, env), None) is not None:
            self.counts["newcomers"] += 1

    def _check_frame(self, frame: dict[str, Any], last: bool) -> None:
        worker, env, episode, step, last_action = (int(x) for x in frame["observation"])
        place = f"worker {worker}, env {env}, episode {episode}, step {step}"
        assert frame["collector/worker"] == worker, place
        assert frame["collector/env"] == self.first_env[worker] + env, place
        before = self.last.get((worker, env))
        self._check_start(frame, before, (worker, env, episode, step, last_action), place)
        action = int(frame["action"])
        if self.policy and frame["policy_version"] >= 0:
            assert action == chosen_action(episode, step, env), place
            assert (frame["seen"] == frame["observation"]).all(), place
            assert frame["weights"] == frame["policy_version"], place
        follows = [worker, env, episode, step + 1, action]
        assert frame["next/observation"].tolist() == follows, f"{place}: what follows"
        assert frame["next/reward"] == reward_of(episode, step, action), f"{place}: reward"
        if self.set_truncated and last:
            assert frame["next/done"], f"{place}: the last of its batch"
            assert frame["next/truncated"] != frame["next/terminated"], place
            frame["next/done"] = step + 1 == episode_length(worker, env, episode)
        else:
            self._check_end(frame, worker, env, episode, step, place)
        self.last[worker, env] = {
            "follows": follows,
            "done": bool(frame["next/done"]),
            "id": int(frame["collector/traj_ids"]),
            "episode": episode,
        }

    def _check_start(self, frame: Any, before: Any, seen: Any, place: str) -> None:
        worker, env, episode, step, last_action = seen
        number = int(frame["collector/traj_ids"])
        assert frame["is_init"] == (step == 0), f"{place}: is_init"
        if step == 0:
            assert last_action == -1, place
            assert number not in self.ids, f"{place}: trajectory {number} again"
            self.ids.add(number)
            if before is not None:
                assert before["done"] or self.cuts, f"{place}: the one before it did not end"
                self.counts["cut"] += not before["done"]
                due = episode == before["episode"] + 1
                assert due or (self.skips and episode > before["episode"]), f"{place}: episode"
            self.counts["episodes"] += 1
        else:
            assert (worker, env) not in self.must_start, f"{place}: no start"
            assert before is not None, f"{place}: not the first frame"
            assert not before["done"], f"{place}: goes on after its end"
            assert list(seen) == before["follows"], f"{place}: it does not go on from the last"
            assert number == before["id"], f"{place}: another trajectory number"
        self.must_start.discard((worker, env))

    def _check_end(
        self, frame: Any, worker: int, env: int, episode: int, step: int, place: str
    ) -> None:
        over = step + 1 == episode_length(worker, env, episode) and not self.endless
        terminated, truncated = (
            over and is_terminal(env, episode),
            over and not is_terminal(env, episode),
        )
        if step + 1 == self.max_frames and not over:
            truncated = True
            self.counts["too long"] += 1
        assert frame["next/terminated"] == terminated, f"{place}: terminated"
        if self.cuts and frame["next/truncated"] and not truncated:
            assert not terminated
            truncated = True
            self.counts["cut"] += 1
        assert frame["next/truncated"] == truncated, f"{place}: truncated"
        assert frame["next/done"] == (terminated or truncated), f"{place}: done"
        self.counts["terminated"] += terminated
        self.counts["truncated"] += truncated


def rebuild(batch: TensorDict) -> None:
    """Make of a batch what it is with next_observation="all", after a look at its form."""
    mask, finals = batch["collector", "mask"], batch["next", "finals", "observation"]
    numbers = batch["next", "final"]
    assert ("next", "observation") not in batch.keys(True)
    assert numbers.dtype == torch.int64
    assert sorted(numbers[numbers >= 0].tolist()) == list(range(len(finals)))  # each once
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros(len(mask), 1, dtype=torch.bool)], 1)
    assert torch.equal(numbers >= 0, (batch["next", "done"] & mask) | last)
    following = next_observations(batch)
    assert torch.equal(following[numbers >= 0], finals[numbers[numbers >= 0]])
    batch["next", "observation"] = following


DTYPES = {
    "observation": ("float32", 3),
    "action": ("int64", 2),
    "seen": ("float32", 3),
    "weights": ("float32", 2),
    "is_init": ("bool", 2),
    "policy_version": ("int64", 2),
    "next/observation": ("float32", 3),
    "next/reward": ("float32", 2),
    "next/done": ("bool", 2),
    "next/terminated": ("bool", 2),
    "next/truncated": ("bool", 2),
    "collector/traj_ids": ("int64", 2),
    "collector/worker": ("int64", 2),
    "collector/env": ("int64", 2),
    "collector/mask": ("bool", 2),
}
KEYS = [
    tuple(name.split("/")) if "/" in name else name
    for name in DTYPES
    if name not in ("seen", "weights")
]


def all_accounted_for(stats: dict[str, Any]) -> bool:
    """Whether no frame is lost in silence."""
    known = stats["delivered"] + stats["dropped"] + stats["in_flight"]
    return bool(stats["collected"] == known)


def same_bits(one: TensorDict, other: TensorDict) -> bool:
    """Whether two batches are the same in every key, shape, dtype and bit."""
    keys = set(one.keys(True, True))
    return keys == set(other.keys(True, True)) and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in keys
    )
