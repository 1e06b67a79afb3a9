"""What a collector can be told, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from tensordict.nn import InteractionType

from collectors.option_checks import check_kinds, each
from collectors.rollout.policy import interaction_type
from collectors.weights.policy_version import PolicyVersion
from sync import (
    HogwildWeightSyncScheme,
    LocalWeightUpdaterBase,
    NoWeightSyncScheme,
    RemoteWeightUpdaterBase,
    WeightSyncScheme,
)

Device = str | int | torch.device | None
SINGLE, SYNC, ASYNC = "Collector", "MultiSyncCollector", "MultiAsyncCollector"
REMOTE = ("RayCollector", "RPCCollector", "DistributedCollector")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of every collector. Some are only for some of them.

    Many can be one value, or a list with one for each worker.
    """

    # What is collected, and by whom
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    num_workers: int | None = None  # as many as there are factories, unless told
    frames_per_batch: int | Sequence[int] = 200  # of all workers (async: of one)
    total_frames: int = -1  # for ever
    seed: int | None = None  # of all random streams, also those of factories; drawn, unless told
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    collector_class: Callable[..., Any] | None = None  # what each worker hosts; or a partial of it
    # Where
    device: Device | Sequence[Device] = None  # for policy and batches, where those are not named
    policy_device: Device | Sequence[Device] = None  # None: where its parameters are
    storing_device: Device | Sequence[Device] = None
    env_device: Device | Sequence[Device] = None
    # Episodes and exploration
    max_frames_per_traj: int | None = None
    init_random_frames: int = 0
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    exploration_type: str | InteractionType = "random"
    set_truncated: bool = False
    resume_episodes: bool = True  # load_state_dict replays the episodes under way
    resume_timeout: float = 300.0  # of a worker, to replay them; then new ones are started
    # The form of batches
    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool = False
    trajs_per_batch: int | None = None
    cat_results: Literal["stack"] | int | None = None
    # "final": only those that no later frame of their row shows
    next_observation: Literal["all", "final"] = "all"
    info_keys: Sequence[str] | Mapping[str, Any] = ()  # with what stands where info lacks them
    use_buffers: bool | None = None
    copy: bool = True
    track_policy_version: bool | str | PolicyVersion = True
    # Where batches go
    replay_buffer: Any = None
    extend_buffer: bool = True
    # The policy's calls
    trust_policy: bool = False
    compile_policy: bool | Mapping[str, Any] = False
    cudagraph_policy: bool = False
    no_cuda_sync: bool = False
    num_threads: int | None = None
    num_sub_threads: int = 1
    # Weights
    weight_updater: LocalWeightUpdaterBase | RemoteWeightUpdaterBase | None = None
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None
    weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None
    update_at_each_batch: bool = False
    # When new weights are applied; "episode": its end has the weights of its beginning
    apply_at: Literal["step", "batch", "episode"] = "step"
    state_on_update: Literal["keep", "zero"] = "keep"  # what the policy carries
    worker_idx: int | None = None  # who this collector is to those above it
    # Trouble
    preemptive_threshold: float | None = None
    batches_ahead: int = 2  # that an async worker may finish before the learner takes one
    max_lag: int | None = None  # pace async workers so that no batch is more versions old
    on_worker_failure: Literal["raise", "restart"] = "raise"
    max_restarts: int = 10  # of all workers together
    timeout: float = 60.0
    start_timeout: float = 120.0  # until all workers are there
    start_method: Literal["forkserver", "spawn", "fork"] | None = None

    @classmethod
    def of(cls, kind: str, arguments: Mapping[str, Any], further: Iterable[str] = ()) -> Options:
        """The options of a collector of this kind, or an error that says what is wrong.

        further: arguments that it has besides.
        """
        known = cls.__dataclass_fields__
        for name in arguments:
            if name not in known:
                near = get_close_matches(name, [*known, *further], 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{kind}() has no argument {name!r}{hint}")
        options = cls(**arguments)
        check_kinds(options)
        options._check_kind(kind)
        options._check_ranges()
        options._check_pairs(kind)
        options._check_places(kind)
        return options

    def _check_ranges(self) -> None:
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            many = isinstance(value, Sequence) and not isinstance(value, str)
            for one in value if many else [value]:
                if one is not None and one < low:
                    raise ValueError(f"{name}={value!r}: it must be at least {low}")
        if self.total_frames != -1 and self.total_frames < 1:
            raise ValueError(
                f"total_frames={self.total_frames}: a number of frames, or -1 for no end"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                shown = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r}: it is one of {shown}")
        interaction_type(self.exploration_type)
        if self.preemptive_threshold is not None and not 0 < self.preemptive_threshold <= 1:
            raise ValueError(
                f"preemptive_threshold={self.preemptive_threshold}: a share of the workers, "
                "above 0 and up to 1"
            )

    def _check_pairs(self, kind: str) -> None:
        clashes = [
            (
                self.weight_updater is not None and self.weight_sync_schemes is not None,
                "weight_updater and weight_sync_schemes exclude each other",
            ),
            (
                self.split_trajs and self.trajs_per_batch is not None,
                "trajs_per_batch gives whole trajectories already: leave split_trajs out",
            ),
            (
                self.set_truncated and self.trajs_per_batch is not None,
                "set_truncated ends trajectories where batches end, trajs_per_batch gathers them "
                "beyond that: give one",
            ),
            (
                self.cat_results not in (None, 0) and self.split_trajs,
                "cat_results arranges frames by worker, split_trajs by trajectory: give one",
            ),
            (
                self.cat_results not in (None, 0) and self.trajs_per_batch is not None,
                "cat_results arranges frames by worker, trajs_per_batch by trajectory: give one",
            ),
            (
                self.use_buffers is False and not self.copy,
                "copy=False hands out views of buffers, which use_buffers=False does without",
            ),
            (
                not self.copy and (self.split_trajs or self.trajs_per_batch is not None),
                "copy=False hands out views, and whole trajectories are made by copying",
            ),
            (
                not self.reset_when_done and self.max_frames_per_traj is not None,
                "max_frames_per_traj cuts by a reset, which reset_when_done=False forbids",
            ),
            (
                self.trajs_per_batch is not None and not self.reset_when_done,
                "trajs_per_batch waits for many episodes; with reset_when_done=False there is one",
            ),
            (
                self.collector_class is not None and self.preemptive_threshold is not None,
                "preemptive_threshold cuts between two steps, which a hosted collector_class hides",
            ),
            (
                self.replay_buffer is None and not self.extend_buffer,
                "extend_buffer=False says how to fill a replay_buffer, and there is none",
            ),
            (
                self.on_worker_failure == "raise" and self.max_restarts != 10,
                'max_restarts is for on_worker_failure="restart"',
            ),
            (kind == ASYNC and not self.reset_when_done, NEVER_DONE.format(kind)),
            (
                kind in REMOTE and self.next_observation == "final",
                f'next_observation="final" is for collectors of this machine, not for {kind}: '
                "what travels between machines is whole frames",
            ),
        ]
        for clash, message in clashes:
            if clash:
                raise ValueError(message)
        check_hosted(self.collector_class)
        if self.next_observation == "final":
            for name, why in _NOT_WITH_FINALS.items():
                if self._is_told(name):
                    raise ValueError(
                        f'next_observation="final" and {name} exclude each other: {why}, and what '
                        "followed a frame may lie in the next frame of its row"
                    )
        for scheme in dict(self.weight_sync_schemes or {}).values():
            if self.apply_at == "episode" and isinstance(scheme, _AT_ONCE):
                raise ValueError(
                    f"apply_at='episode' keeps an episode's weights to its end, and those of a "
                    f"{type(scheme).__name__} change at once: take another scheme"
                )

    def _check_places(self, kind: str) -> None:
        for one in each(self.env_device):
            if one is not None and torch.device(one).type != "cpu":
                raise ValueError(
                    f"env_device={self.env_device}: gymnasium environments live in CPU memory; "
                    "policy_device and storing_device can be elsewhere"
                )
        stored = self.storing()
        if self.no_cuda_sync and (stored is None or stored.type != "cuda"):
            raise ValueError(
                "no_cuda_sync=True says not to wait for batches that go to a CUDA storing_device, "
                f"it is {stored or 'cpu'}"
            )
        if self.cudagraph_policy and kind not in REMOTE:  # those name the devices of their hosts
            placed = self.policy_device if self.policy_device is not None else self.device
            check_graphs(each(placed))

    def _check_kind(self, kind: str) -> None:
        like = ASYNC if kind in REMOTE else kind
        for name, (kinds, why) in _ONLY_FOR.items():
            if like not in kinds and self._is_told(name):
                fit = " and ".join(kinds)
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for {fit}, not for {kind}: {why}"
                )
        if like != SINGLE and self.use_buffers is False:
            raise ValueError(
                f"use_buffers=False is for {SINGLE}, not for {kind}: workers hand over what they "
                "collect in buffers"
            )
        if kind == SINGLE:
            for name in ("frames_per_batch", "policy_factory", "create_env_kwargs", *_DEVICES):
                value = getattr(self, name)
                if isinstance(value, Sequence) and not isinstance(value, str):
                    raise ValueError(f"{name} is a list; {kind} is one worker and takes one value")

    def _is_told(self, name: str) -> bool:
        """Whether an option is something else than what it is of itself."""
        given, default = getattr(self, name), getattr(Options(), name)
        if name == "exploration_type":
            return interaction_type(given) != interaction_type(default)
        return bool(given != default)

    def check_without_policy(self) -> None:
        """Refuse what only a policy could follow."""
        for name in _OF_A_POLICY:
            if self._is_told(name):
                raise ValueError(f"{name}: {NO_POLICY}")

    def check_without_weights(self) -> None:
        """Refuse what says how weights are sent."""
        reason = "the policy has none" if self.weight_sync_schemes is None else "there is no scheme"
        for name in ("weight_updater", "update_at_each_batch"):
            if self._is_told(name):
                raise ValueError(f"{name}: no weights are sent, {reason}")

    def devices(self, num_workers: int) -> list[torch.device | None]:
        """The policy's device on each worker."""
        placed = self.policy_device if self.policy_device is not None else self.device
        name = "policy_device" if self.policy_device is not None else "device"
        devices = per_worker(placed, num_workers, name)
        return [None if device is None else torch.device(device) for device in devices]

    def storing(self) -> torch.device | None:
        """Where batches are handed out; None for where they are made."""
        placed = self.storing_device if self.storing_device is not None else self.device
        if isinstance(placed, Sequence) and not isinstance(placed, str):
            distinct = {str(torch.device(device)) for device in each(placed)}
            if len(distinct) > 1:
                raise ValueError(
                    f"storing_device: a batch is in one place, not in {', '.join(sorted(distinct))}"
                )
            placed = placed[0]
        return None if placed is None else torch.device(placed)


_DEVICES = ("device", "policy_device", "storing_device", "env_device")
_AT_LEAST = {
    "num_workers": 1,
    "batches_ahead": 1,
    "max_lag": 0,
    "frames_per_batch": 1,
    "max_frames_per_traj": 1,
    "init_random_frames": 0,
    "trajs_per_batch": 1,
    "num_threads": 1,
    "num_sub_threads": 1,
    "max_restarts": 0,
    "worker_idx": 0,
    "seed": 0,
}
_CHOICES = {
    "apply_at": ("step", "batch", "episode"),
    "state_on_update": ("keep", "zero"),
    "next_observation": ("all", "final"),
    "on_worker_failure": ("raise", "restart"),
    "start_method": (None, "forkserver", "spawn", "fork"),
}
# What a hosted collector is told by its worker, and what its frames come in.
_OF_THE_HOST = (
    "frames_per_batch",
    "total_frames",
    "create_env_kwargs",
    "seed",
    "policy_device",
    "init_random_frames",
    "trajs_per_batch",
    "split_trajs",
    "next_observation",
    "cat_results",
    "postproc",
    "replay_buffer",
    "track_policy_version",
)
_MULTI = (SYNC, ASYNC)
_ONLY_FOR: dict[str, tuple[tuple[str, ...], str]] = {
    "num_workers": (_MULTI, "it is one worker"),
    "collector_class": (_MULTI, "it has no workers that could host one"),
    "num_sub_threads": (_MULTI, "it has no workers; num_threads is for this process"),
    "on_worker_failure": (_MULTI, "it has no workers that could fail"),
    "max_restarts": (_MULTI, "it has no workers that could fail"),
    "start_method": (_MULTI, "it starts no processes"),
    "start_timeout": (_MULTI, "it starts no processes"),
    "preemptive_threshold": ((SYNC,), "in its batches no worker waits for another"),
    "max_lag": ((ASYNC,), "its batches have the newest weights"),
    "batches_ahead": ((ASYNC,), "its workers begin a batch when it is asked for"),
    "cat_results": ((SYNC,), "in its batches there are no several workers to put together"),
}
_NOT_WITH_FINALS = {
    "split_trajs": "it rearranges frames",
    "trajs_per_batch": "it rearranges frames",
    "replay_buffer": "it gives frames out one by one",
    "collector_class": "it hands over whole frames",
}
_AT_ONCE = (HogwildWeightSyncScheme, NoWeightSyncScheme)
NEVER_DONE = (
    f"reset_when_done=False is for {SINGLE} and {SYNC}, not for {{}}: its workers run ahead, and "
    "one whose episodes have ended has nothing to hand over"
)
NO_POLICY = "there is no policy, actions are random"
_OF_A_POLICY = (
    "policy_device",
    "init_random_frames",
    "exploration_type",
    "trust_policy",
    "compile_policy",
    "cudagraph_policy",
    "apply_at",
    "state_on_update",
    "weight_sync_schemes",
    "weight_updater",
)


def check_hosted(collector_class: Any) -> None:
    """Refuse what a hosted collector was told that is not its to be told."""
    for name in getattr(collector_class, "keywords", ()):
        if name in _OF_THE_HOST:
            raise ValueError(f"{name} in collector_class: tell the collector that hosts it, not it")


def check_graphs(devices: Iterable[Any]) -> None:
    """Refuse CUDA graphs of policies that are elsewhere."""
    for one in devices:
        if one is None or torch.device(one).type != "cuda":
            raise ValueError(
                f"cudagraph_policy=True needs a CUDA policy_device, it is {one or 'cpu'}"
            )


def per_worker(value: Any, num_workers: int, name: str) -> list[Any]:
    """One value for each worker, from one for all or a list of them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != num_workers:
            raise ValueError(f"{name} has {len(value)} entries for {num_workers} workers")
        return list(value)
    return [value] * num_workers


def count_workers(kind: str, create_env_fn: Any, num_workers: int | None) -> int:
    """How many workers there are, from the factories and from what was said."""
    if isinstance(create_env_fn, Sequence):
        if not create_env_fn:
            raise ValueError("create_env_fn is an empty list: give one factory for each worker")
        if kind == SINGLE and len(create_env_fn) > 1:
            raise ValueError(
                f"create_env_fn has {len(create_env_fn)} factories, and {kind} one worker"
            )
        if num_workers is not None and num_workers != len(create_env_fn):
            raise ValueError(
                f"num_workers={num_workers}, but create_env_fn has {len(create_env_fn)} factories"
            )
        return len(create_env_fn)
    return num_workers or 1


def check_factory(create_env_fn: Any) -> None:
    """Refuse what makes no environments."""
    for one in create_env_fn if isinstance(create_env_fn, Sequence) else [create_env_fn]:
        if isinstance(one, Sequence) and not isinstance(one, str):  # a hosted collector's workers
            check_factory(one)
        elif not callable(one):
            raise TypeError(
                f"create_env_fn must be a function that makes an environment, "
                f"got {type(one).__name__}"
            )


class Steps:
    """How many steps a block has, so that all environments together make so many frames."""

    def __init__(self, frames: int):
        self.frames = frames

    def __call__(self, num_envs: int) -> int:
        if self.frames % num_envs:
            low = self.frames // num_envs * num_envs
            near = f"{low} or {low + num_envs}" if low else str(num_envs)
            raise ValueError(
                f"{self.frames} frames cannot be shared evenly by {num_envs} environments: "
                f"for instance {near} can"
            )
        return self.frames // num_envs


def share_frames(
    frames_per_batch: int | Sequence[int], num_workers: int, *, each: bool
) -> list[int]:
    """The frames of each worker in a batch; with `each`, a single number is every worker's own."""
    if isinstance(frames_per_batch, Sequence):
        return per_worker(frames_per_batch, num_workers, "frames_per_batch")
    if each:
        return [frames_per_batch] * num_workers
    if frames_per_batch % num_workers:
        low = frames_per_batch // num_workers * num_workers
        near = f"{low} or {low + num_workers}" if low else str(num_workers)
        raise ValueError(
            f"frames_per_batch={frames_per_batch} cannot be shared evenly by {num_workers} "
            f"workers: for instance {near} can"
        )
    return [frames_per_batch // num_workers] * num_workers
