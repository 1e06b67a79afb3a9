"""Whether each option is of a kind that it can be: one clear line, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from sync import LocalWeightUpdaterBase, RemoteWeightUpdaterBase, WeightSyncScheme
from sync.local.waiting import LONGEST_S


def check_kinds(options: Any) -> None:
    """Refuse options that are not of their kind, and devices that are not here."""
    for names, fits, kind in _KINDS:
        for name in names:
            value = getattr(options, name)
            for one in each(value) if name in _FOR_EACH else [value]:
                if one is None and name in _MAY_BE_NONE:
                    continue
                if not fits(one):
                    raise TypeError(f"{name}={shown(one)}: it must be {kind}")
    for name in ("timeout", "start_timeout", "resume_timeout"):
        if not 0 < getattr(options, name) <= LONGEST_S:
            raise ValueError(
                f"{name}={getattr(options, name)}: seconds, above 0 and up to {LONGEST_S:g}"
            )
    for name in ("device", "policy_device", "storing_device", "env_device"):
        for one in each(getattr(options, name)):
            if one is not None:
                _check_device(name, one)
    how = options.cat_results
    if how not in (None, "stack", 0, 1, -1, -2) or isinstance(how, bool):
        raise ValueError(f"cat_results={how!r}: it is 'stack', or a dimension of a batch, 0 or 1")


def is_whole(value: Any) -> bool:
    """Whether this is an integer, and no flag."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _are_schemes(value: Any) -> bool:
    return _is_mapping(value) and all(isinstance(v, WeightSyncScheme) for v in value.values())


def _are_names(value: Any) -> bool:
    many = isinstance(value, Sequence | Mapping) and not isinstance(value, str)
    return many and all(isinstance(name, str) for name in value)


_KINDS: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        (
            "frames_per_batch",
            "total_frames",
            "num_workers",
            "max_frames_per_traj",
            "init_random_frames",
            "trajs_per_batch",
            "num_threads",
            "num_sub_threads",
            "batches_ahead",
            "max_lag",
            "max_restarts",
            "worker_idx",
            "seed",
        ),
        is_whole,
        "a whole number",
    ),
    (
        ("timeout", "start_timeout", "resume_timeout", "preemptive_threshold"),
        _is_number,
        "a number",
    ),
    (
        (
            "reset_at_each_iter",
            "reset_when_done",
            "set_truncated",
            "resume_episodes",
            "split_trajs",
            "use_buffers",
            "copy",
            "extend_buffer",
            "trust_policy",
            "cudagraph_policy",
            "no_cuda_sync",
            "update_at_each_batch",
        ),
        _is_flag,
        "True or False",
    ),
    (
        ("compile_policy",),
        lambda value: _is_flag(value) or _is_mapping(value),
        "True, False or the arguments of torch.compile",
    ),
    (("policy_factory", "postproc", "collector_class"), callable, "callable"),
    (("create_env_kwargs",), _is_mapping, "the arguments of create_env_fn by name"),
    (
        ("weight_sync_schemes", "weight_recv_schemes"),
        _are_schemes,
        "a dict of schemes by model, as {'policy': SharedMemWeightSyncScheme()}",
    ),
    (
        ("weight_updater",),
        lambda value: isinstance(value, LocalWeightUpdaterBase | RemoteWeightUpdaterBase),
        "a LocalWeightUpdaterBase or a RemoteWeightUpdaterBase",
    ),
    (("info_keys",), _are_names, "names of entries of info, or a dict of them"),
    (("replay_buffer",), lambda value: hasattr(value, "extend"), "a buffer that one can extend()"),
]
_FOR_EACH = {"frames_per_batch", "policy_factory", "create_env_kwargs"}
_MAY_BE_NONE = {
    "max_lag",
    "num_workers",
    "max_frames_per_traj",
    "trajs_per_batch",
    "num_threads",
    "worker_idx",
    "seed",
    "preemptive_threshold",
    "use_buffers",
    "policy_factory",
    "postproc",
    "collector_class",
    "create_env_kwargs",
    "weight_sync_schemes",
    "weight_recv_schemes",
    "weight_updater",
    "replay_buffer",
}


def each(value: Any) -> Sequence[Any]:
    """What there is for each worker, or the one value for all."""
    is_many = isinstance(value, Sequence) and not isinstance(value, str)
    return value if is_many else [value]


def shown(value: Any) -> str:
    """The value if it is short; what it is if not."""
    if isinstance(value, int | float | str | None):
        return repr(value)
    return f"<{type(value).__name__}>"


def _check_device(name: str, value: Any) -> None:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{name}={value!r}: no device of torch, as 'cpu' or 'cuda:0' are"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        here = f"there are {count} CUDA devices here" if count else "there is no CUDA device here"
        raise ValueError(f"{name}={value!r}: {here}")
