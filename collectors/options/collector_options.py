"""The options of collectors, and the checks before anything is started.

    @takes(Arguments)
    def __init__(self, create_env_fn, policy=None, **options): ...

For mypy, editors and `help()`, this constructor has the parameters of the dataclass `Arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial, update_wrapper
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from collectors.options.check_types import (
    Count,
    NonNegativeInt,
    PositiveShare,
    Seconds,
    check_fields,
    each,
    is_list,
    shown,
)
from collectors.options.rollout_options import PolicyOptions, RolloutOptions, interaction_type
from sync import (
    HogwildWeightSyncScheme,
    LocalWeightUpdaterBase,
    NoWeightSyncScheme,
    RemoteWeightUpdaterBase,
    WeightSyncScheme,
)

P = ParamSpec("P")
R = TypeVar("R")
Device = str | int | torch.device | None
SINGLE, SYNC, ASYNC = "Collector", "MultiSyncCollector", "MultiAsyncCollector"
SIMULATED = "SimulatedCollector"
REMOTE = ("RayCollector", "RPCCollector", "DistributedCollector")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What is collected, the form of batches, and where they go. A list has a value per worker."""

    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any] | None] | None = None
    # Of all workers (async: of one)
    frames_per_batch: Count | Sequence[Count] = 200
    total_frames: int = -1  # -1: no end
    # Of all random streams, also those of factories; None: drawn
    seed: NonNegativeInt | None = None
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None
    # Where
    device: Device | Sequence[Device] = None  # default of policy_device and storing_device
    storing_device: Device | Sequence[Device] = None
    env_device: Device | Sequence[Device] = None
    # The form of batches
    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool = False
    # "final": only those that are not the observation of the next frame in their row
    next_observation: Literal["all", "final"] = "all"
    use_buffers: bool | None = None
    copy: bool = True
    track_policy_version: bool = True
    # Where batches go
    replay_buffer: Any = None
    extend_buffer: bool = True
    no_cuda_sync: bool = False
    # Weights of an outer sender
    weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None
    update_at_each_batch: bool = False
    # Of this collector, where it is a worker of another
    worker_idx: NonNegativeInt | None = None
    num_threads: Count | None = None  # of torch, in this process
    timeout: Seconds = 60.0


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """How weights reach the policies of workers. They need a policy, as `PolicyOptions` do."""

    # None: where its parameters are
    policy_device: Device | Sequence[Device] = None
    init_random_frames: NonNegativeInt = 0  # of all workers
    weight_updater: LocalWeightUpdaterBase | RemoteWeightUpdaterBase | None = None
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How many workers there are."""

    otherwise = "it is one worker, in this process"

    # None: one for each factory
    num_workers: Count | None = None
    num_sub_threads: Count = 1  # of torch, in each worker


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How the processes of workers start, and what happens when they fail."""

    otherwise = "it starts no processes"

    # For TorchRL's users: workers run a Collector
    collector_class: Callable[..., Any] | None = None
    on_worker_failure: Literal["raise", "restart"] = "raise"
    # Of all workers together
    max_restarts: NonNegativeInt = 10
    # Until all workers have started
    start_timeout: Seconds = 120.0
    start_method: Literal["forkserver", "spawn", "fork"] | None = None


@dataclass(frozen=True, kw_only=True)
class TogetherOptions:
    """How workers make a batch together."""

    otherwise = "a batch has frames of one worker"

    # A number: a dimension of a batch
    cat_results: Literal["stack", 0, 1, -1, -2] | None = None
    # Once this share of the workers has finished, the others hand over what they have
    preemptive_threshold: PositiveShare | None = None


@dataclass(frozen=True, kw_only=True)
class AheadOptions:
    """How far workers run ahead of the learner."""

    otherwise = "a batch is started when it is asked for"

    # How many an async worker may finish before the learner takes one
    batches_ahead: Count = 2
    # Pace async workers so that no batch is more versions old
    max_lag: NonNegativeInt | None = None
    # A file for the order of batches and their versions
    record_schedule: str | None = None


# Arguments of earlier versions: what to do instead.
_GONE = {"trajs_per_batch": "; split_trajs=True gives a row to each trajectory of a batch"}

# The layers of options that a kind of collector has, besides those that all have.
LAYERS: dict[str, tuple[type[Any], ...]] = {
    SINGLE: (),
    SYNC: (WorkerOptions, ProcessOptions, TogetherOptions),
    ASYNC: (WorkerOptions, ProcessOptions, AheadOptions),
    SIMULATED: (WorkerOptions,),
}


@dataclass(frozen=True, kw_only=True)
class CollectorOptions(
    AheadOptions,
    TogetherOptions,
    ProcessOptions,
    WorkerOptions,
    WeightOptions,
    BatchOptions,
    RolloutOptions,
):
    """The keyword arguments of all collectors. `LAYERS` says which of them a kind has."""

    @classmethod
    def of(
        cls,
        kind: str,
        arguments: Mapping[str, Any],
        further: Iterable[str] = (),
        like: str | None = None,
    ) -> CollectorOptions:
        """The checked options of a collector of this kind.

        further: other arguments that it has; an error may suggest them for a misspelt name.
        like: the local kind whose options it takes, if it is a remote one.
        """
        options_by_name = cls.__dataclass_fields__
        for name in arguments:
            if name not in options_by_name:
                near = get_close_matches(name, [*options_by_name, *further], 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                hint = _GONE.get(name, hint)
                raise TypeError(f"{kind}() has no argument {name!r}{hint}")
        options = cls(**arguments)
        check_fields(options)
        options._check_values()
        options._check_kind(kind, like or kind)
        for clash in options._clashes(kind):
            raise ValueError(clash)
        options._check_devices(kind)
        return options

    def _check_kind(self, kind: str, like: str) -> None:
        this = f"{kind} with sync=True" if kind in REMOTE and like == SYNC else kind
        for layer in dict.fromkeys(layer for layers in LAYERS.values() for layer in layers):
            if layer in LAYERS[like]:
                continue
            those = " and ".join(one for one, layers in LAYERS.items() if layer in layers)
            for name in self._are_set(layer):
                text = f"{name}={getattr(self, name)!r} is for {those}, not for {this}"
                raise ValueError(f"{text}: {layer.otherwise}")
        if like != SINGLE and self.use_buffers is False:
            raise ValueError(f"use_buffers=False is for {SINGLE}: workers put frames in buffers")
        if kind == SINGLE:
            for name in ("frames_per_batch", "policy_factory", "create_env_kwargs", *_DEVICES):
                if is_list(getattr(self, name)):
                    raise ValueError(f"{name} is a list; {kind} is one worker and takes one value")

    def _check_values(self) -> None:
        if self.total_frames != -1 and self.total_frames < 1:
            raise ValueError(f"total_frames={self.total_frames}: a number of frames, or -1")
        interaction_type(self.exploration_type)
        if self.replay_buffer is not None and not hasattr(self.replay_buffer, "extend"):
            raise TypeError(f"replay_buffer={self.replay_buffer!r}: it has no extend()")

    def _clashes(self, kind: str) -> Iterator[str]:
        """Why some of the options contradict each other."""
        if None not in (self.weight_updater, self.weight_sync_schemes):
            yield "weight_updater and weight_sync_schemes exclude each other"
        if self.split_trajs:
            if self.cat_results not in (None, 0):
                yield "cat_results sorts by worker, split_trajs by trajectory"
            if not self.copy:
                yield "copy=False reuses memory, but trajectories are copies"
        if self.use_buffers is False and not self.copy:
            yield "copy=False reuses a buffer, but use_buffers=False has none"
        if not self.reset_when_done:
            if self.max_frames_per_traj is not None:
                yield "max_frames_per_traj needs resets, and reset_when_done=False forbids resets"
            if kind in (ASYNC, SIMULATED):
                yield NEVER_DONE.format(kind)
        if self.collector_class is not None and getattr(self.collector_class, "kind", "") != SINGLE:
            yield (
                f"collector_class={shown(self.collector_class)}: workers run a {SINGLE}; for more "
                "of them, raise num_workers"
            )
        if self.replay_buffer is None and not self.extend_buffer:
            yield "extend_buffer=False needs a replay_buffer"
        if self.on_worker_failure == "raise" and self.max_restarts != ProcessOptions.max_restarts:
            yield 'max_restarts is for on_worker_failure="restart"'
        if self.record_schedule is not None and not self.track_policy_version:
            yield "record_schedule needs versions, but track_policy_version=False turns them off"
        if self.next_observation == "final":
            if self.split_trajs:
                yield _NOT_WITH_FINALS.format("split_trajs")
            if self.replay_buffer is not None:
                yield _NOT_WITH_FINALS.format("replay_buffer")
        for scheme in dict(self.weight_sync_schemes or {}).values():
            if self.apply_at == "episode" and isinstance(scheme, _AT_ONCE):
                name = type(scheme).__name__
                yield f"apply_at='episode': with {name}, weights change at once"

    def _check_devices(self, kind: str) -> None:
        for name in _DEVICES:
            for one in each(getattr(self, name)):
                check_device(one, name)
        simulated = ["cpu" if one is None else one for one in each(self.env_device)]
        if any(torch.device(one).type != "cpu" for one in simulated):
            raise ValueError(f"env_device={self.env_device}: environments are in CPU memory")
        stored = self.storing()
        if self.no_cuda_sync and (stored is None or stored.type != "cuda"):
            device = stored or "cpu"
            raise ValueError(f"no_cuda_sync=True needs a CUDA storing_device, but it is {device}")
        if self.cudagraph_policy and kind not in REMOTE:  # its machine has devices of its own
            check_graphs(each(self.device if self.policy_device is None else self.policy_device))

    def _are_set(self, layer: type[Any]) -> Iterator[str]:
        """The options of a layer that differ from their defaults."""
        default = layer()
        for name in (one.name for one in fields(layer)):
            one, other = getattr(self, name), getattr(default, name)
            if name == "exploration_type":
                one, other = interaction_type(one), interaction_type(other)
            if one != other:
                yield name

    def check_without_policy(self) -> None:
        """Refuse options that need a policy."""
        for layer in (WeightOptions, PolicyOptions):
            for name in self._are_set(layer):
                raise ValueError(f"{name}: {NO_POLICY}")

    def check_without_weights(self) -> None:
        """Refuse options that need weights to be sent."""
        reason = "the policy has none" if self.weight_sync_schemes is None else "there is no scheme"
        for name in ("weight_updater", "update_at_each_batch"):
            if getattr(self, name):
                raise ValueError(f"{name}: no weights are sent, {reason}")

    def devices(self, num_workers: int) -> list[torch.device | None]:
        """The policy's device on each worker."""
        name = "device" if self.policy_device is None else "policy_device"
        value = self.device if self.policy_device is None else self.policy_device
        return [as_device(one, name) for one in per_worker(value, num_workers, name)]

    def storing(self) -> torch.device | None:
        """The device of batches; None: where they are made."""
        value = self.device if self.storing_device is None else self.storing_device
        devices = {str(as_device(one, "storing_device")) for one in each(value)}
        if len(devices) > 1:
            raise ValueError(
                f"storing_device: a batch is on one device, not on {', '.join(sorted(devices))}"
            )
        return as_device(each(value)[0], "storing_device")


@dataclass(frozen=True)
class Arguments(CollectorOptions):
    """The arguments of every collector."""

    create_env_fn: Callable[..., Any] | Sequence[Any]
    policy: Any = None


@dataclass(frozen=True, kw_only=True)
class MultiArguments(Arguments):
    """The arguments of `MultiCollector`."""

    sync: bool


def takes(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a constructor the signature of this dataclass."""
    return partial(_show, arguments.__init__)


def function_takes(arguments: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of this dataclass."""
    return partial(_show, arguments)


def _show(like: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    # Only sets `__wrapped__`, which `inspect.signature` follows.
    return update_wrapper(called, like, assigned=(), updated=())


_DEVICES = ("device", "policy_device", "storing_device", "env_device")
_AT_ONCE = (HogwildWeightSyncScheme, NoWeightSyncScheme)
NEVER_DONE = (
    f"reset_when_done=False is for {SINGLE} and {SYNC}, not for {{}}: its workers run ahead, and "
    "a worker whose episodes have ended has no frames"
)
_NOT_WITH_FINALS = 'next_observation="final" and {} exclude each other: it needs whole frames'
NO_POLICY = "there is no policy, actions are random"


def as_device(value: Any, name: str) -> torch.device | None:
    """The device that an option names, whether this machine has it or not."""
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{name}={value!r}: no device of torch, as 'cpu' or 'cuda:0' are"
        ) from None


def check_device(value: Any, name: str) -> None:
    """Refuse a device that this machine does not have."""
    device, count = as_device(value, name), torch.cuda.device_count()
    if device is not None and device.type == "cuda" and (device.index or 0) >= count:
        here = f"there are {count} CUDA devices here" if count else "there is no CUDA device here"
        raise ValueError(f"{name}={value!r}: {here}")


def check_graphs(devices: Iterable[Any]) -> None:
    """Refuse CUDA graphs of a policy that is not on a CUDA device."""
    for one in devices:
        if one is None or torch.device(one).type != "cuda":
            device = one or "cpu"
            raise ValueError(
                f"cudagraph_policy=True needs a CUDA policy_device, but it is {device}"
            )


def per_worker(value: Any, count: int, name: str, whose: str = "workers") -> list[Any]:
    """One value for each worker, from one for all or a list of them."""
    if not is_list(value):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} {whose}")
    return list(value)


def count_workers(kind: str, create_env_fn: Any, num_workers: int | None) -> int:
    """The number of workers: as given, or one for each factory."""
    if not isinstance(create_env_fn, Sequence):
        return num_workers or 1
    count = len(create_env_fn)
    if not count:
        raise ValueError("create_env_fn is an empty list: give one factory for each worker")
    if kind == SINGLE and count > 1:
        raise ValueError(f"create_env_fn has {count} factories, but {kind} has one worker")
    if num_workers not in (None, count):
        raise ValueError(f"num_workers={num_workers}, but create_env_fn has {count} factories")
    return count


def check_factory(create_env_fn: Any) -> None:
    """Refuse anything but a function or a list of functions."""
    for one in each(create_env_fn):
        if is_list(one):  # those of a collector's workers
            check_factory(one)
        elif not callable(one):
            kind = type(one).__name__
            raise TypeError(
                f"create_env_fn must be a function that creates environments, got {kind}"
            )


def share_frames(
    frames_per_batch: int | Sequence[int], num_workers: int, *, each: bool
) -> list[int]:
    """The frames of each worker in a batch. With `each`, one number is not divided."""
    if each or isinstance(frames_per_batch, Sequence):
        return per_worker(frames_per_batch, num_workers, "frames_per_batch")
    text = f"frames_per_batch={frames_per_batch}"
    return [_divide(text, frames_per_batch, num_workers, "workers")] * num_workers


def steps_of(frames: int, num_envs: int) -> int:
    """The steps in which these environments make so many frames."""
    return _divide(f"{frames} frames", frames, num_envs, "environments")


def _divide(text: str, frames: int, count: int, sharers: str) -> int:
    if frames % count:
        low = frames // count * count
        near = f"{low} or {low + count}" if low else str(count)
        raise ValueError(
            f"{text} cannot be shared evenly by {count} {sharers}: for instance {near} can"
        )
    return frames // count
