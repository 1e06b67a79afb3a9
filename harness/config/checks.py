"""Combinations that cannot work, found before any process starts."""

from __future__ import annotations

import importlib.util

from harness.algorithms.sac import SACConfig
from harness.config.errors import ConfigError, ImpossiblePair
from harness.config.link import make_link
from harness.config.remote import REMOTE, check_remote, is_asynchronous, num_hosts
from harness.config.schema import CollectorConfig, Config
from harness.environments.factory import find

# Beyond these it is a slip, and would end in the system's own complaints.
MOST_THREADS, MOST_WORKERS, MOST_ENVS = 4096, 4096, 1_000_000
LONGEST_WAIT_S = 1e9


def check(config: Config) -> None:
    """Raise `ConfigError` for the first thing in the config that cannot work."""
    try:
        config.algo.validate()
        config.env.validate()
        config.model.validate()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_amounts(config)
    _check_evaluation(config)
    check_remote(config.collector, config.sync)
    _check_workers(config.collector, config.env.num_envs)
    _check_devices(config)
    _check_sync(config)
    _check_algo(config)
    if config.logger.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "logger.tensorboard=true needs tensorboard; "
            "install it with: pip install -e '.[tensorboard]'"
        )


def _check_amounts(config: Config) -> None:
    least = {
        "total_frames": (config.total_frames, 1),
        "seed": (config.seed, 0),
        "num_threads": (config.num_threads, 1),
        "log_every_frames": (config.log_every_frames, 1),
        "evaluation.num_episodes": (config.evaluation.num_episodes, 1),
        "evaluation.max_steps": (config.evaluation.max_steps, 1),
        "evaluation.every_frames": (config.evaluation.every_frames, 1),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "checkpoint.every_frames": (config.checkpoint.every_frames, 1),
        "collector.num_workers": (config.collector.num_workers, 1),
        "collector.frames_per_batch": (config.collector.frames_per_batch, 1),
        "collector.num_threads": (config.collector.num_threads, 1),
        "collector.max_frames_per_traj": (config.collector.max_frames_per_traj, 1),
        "collector.batches_ahead": (config.collector.batches_ahead, 1),
        "collector.max_restarts": (config.collector.max_restarts, 0),
        "sync.interval": (config.sync.interval, 1),
        "sync.max_lag": (config.sync.max_lag, 0),
    }
    for name, (value, bound) in least.items():
        if value is not None and value < bound:
            raise ConfigError(f"{name}={value}: expected {bound} or more")
    most = {
        "num_threads": (config.num_threads, MOST_THREADS),
        "collector.num_threads": (config.collector.num_threads, MOST_THREADS),
        "collector.num_workers": (config.collector.num_workers, MOST_WORKERS),
        "env.num_envs": (config.env.num_envs, MOST_ENVS),
    }
    for name, (value, bound) in most.items():
        if value is not None and value > bound:
            raise ConfigError(f"{name}={value}: expected {bound} or less")
    above_zero = {
        "print_every_s": config.print_every_s,
        "collector.timeout_s": config.collector.timeout_s,
        "sync.timeout_s": config.sync.timeout_s,
        "sync.connect_timeout_s": config.sync.connect_timeout_s,
    }
    for name, seconds in above_zero.items():
        if not seconds > 0:
            raise ConfigError(f"{name}={seconds}: expected more than 0 seconds")
        if seconds > LONGEST_WAIT_S:
            raise ConfigError(f"{name}={seconds}: expected {LONGEST_WAIT_S:g} seconds or less")


def _check_evaluation(config: Config) -> None:
    evaluation, env = config.evaluation, config.env
    plays = evaluation.at_end or evaluation.every_frames is not None
    if plays and env.vectorisation == "native" and find(env.id).entry_point is None:
        raise ConfigError(
            f"env.id={env.id} is only there as a vector, and evaluation plays single environments; "
            "say evaluation.at_end=false evaluation.every_frames=null"
        )


def _check_workers(collector: CollectorConfig, num_envs: int) -> None:
    kind = f"collector={collector.name}"
    workers = collector.num_workers
    if collector.name == "single" and workers != 1:
        raise ConfigError(
            f"collector.num_workers={workers}: {kind} is one process; "
            "take collector=multi_sync or collector=multi_async"
        )
    together = _workers_of_a_batch(collector)
    sharing = together * num_envs
    frames = collector.frames_per_batch
    if frames % sharing:
        least, most = frames // sharing * sharing, (frames // sharing + 1) * sharing
        near = most if frames - least > most - frames or not least else least
        who = f"{together} workers with {num_envs}" if together > 1 else f"{num_envs}"
        raise ConfigError(
            f"collector.frames_per_batch={frames} cannot be shared by {who} environments; "
            f"the nearest that can is {near}"
        )
    share = collector.preemptive_threshold
    if share is not None:
        if collector.name != "multi_sync":
            raise ConfigError(
                f"collector.preemptive_threshold={share} needs collector=multi_sync: "
                f"with {kind} nobody waits for the slowest worker"
            )
        if not 0 < share <= 1:
            raise ConfigError(f"collector.preemptive_threshold={share}: expected 0 < share <= 1")
    if collector.batches_ahead != 2 and not is_asynchronous(collector):
        raise ConfigError(
            f"collector.batches_ahead={collector.batches_ahead} needs collector=multi_async: "
            f"with {kind} a batch is begun when the learner asks for it"
        )
    if collector.on_worker_failure == "restart" and collector.name == "single":
        raise ConfigError("collector.on_worker_failure=restart: collector=single has no workers")
    if collector.num_threads != 1 and collector.name == "single":
        raise ConfigError(
            f"collector.num_threads={collector.num_threads}: {kind} has no workers; "
            "num_threads is for the process that collects and trains"
        )
    if collector.cudagraph_policy and "cuda" not in str(collector.devices.policy):
        raise ConfigError("collector.cudagraph_policy=true needs collector.devices.policy=cuda")


def _workers_of_a_batch(collector: CollectorConfig) -> int:
    """How many workers make each batch together."""
    if collector.remote is not None and collector.remote.asynchronous:
        return collector.num_workers // num_hosts(collector)
    return collector.num_workers if collector.name in ("multi_sync", *REMOTE) else 1


def _check_devices(config: Config) -> None:
    collector = config.collector
    places_for = num_hosts(collector) or collector.num_workers
    who = "hosts" if num_hosts(collector) else "workers"
    places: dict[str, str | list[str]] = {
        "device": config.device,
        "collector.devices.policy": collector.devices.policy,
        "collector.devices.storing": collector.devices.storing,
    }
    for place, named in places.items():
        devices = named if isinstance(named, list) else [named]
        if isinstance(named, list) and len(devices) != places_for:
            raise ConfigError(
                f"{place}=[{','.join(devices)}] names {len(devices)} devices for "
                f"{places_for} {who}: name one, or one for each"
            )
        for device in devices:
            elsewhere = place == "collector.devices.policy" and collector.remote is not None
            _check_device(place, device, is_here=not elsewhere)
    if config.sync.name == "hogwild":
        for place, named in list(places.items())[:2]:
            if any(device != "cpu" for device in (named if isinstance(named, list) else [named])):
                raise ConfigError(
                    f"sync=hogwild with {place}={named}: its workers read the learner's own "
                    "memory, so both must be cpu; take sync=shared_mem"
                )


def _check_device(place: str, device: str, *, is_here: bool) -> None:
    import torch  # here: naming no device but the CPU should not have to wait for CUDA

    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{place}={device}: no such device; try cpu, cuda or cuda:1") from None
    if parsed.type == "cpu":
        return
    if parsed.type != "cuda":
        raise ConfigError(f"{place}={device}: expected cpu or cuda")
    if not is_here:
        return  # only its host can tell
    present = torch.cuda.device_count()
    if (parsed.index or 0) >= present:
        raise ConfigError(
            f"{place}={device}: this machine has {present} CUDA devices; "
            f"{'take cpu' if not present else f'cuda:{present - 1} is the last'}"
        )


def _check_sync(config: Config) -> None:
    sync, collector = config.sync, config.collector
    delayed = make_link(sync.link) is not None
    if sync.name in ("none", "hogwild") and (delayed or sync.wire != "float32"):
        raise ConfigError(
            f"sync={sync.name} with {'sync.link' if delayed else f'sync.wire={sync.wire}'}: "
            "nothing travels there that could be delayed or encoded; take sync=shared_mem"
        )
    if sync.apply_at == "episode":
        if config.env.num_envs != 1:
            raise ConfigError(
                f"sync.apply_at=episode env.num_envs={config.env.num_envs}: episodes of several "
                "environments start at different steps; take env.num_envs=1 and more workers"
            )
        if sync.name in ("none", "hogwild"):
            raise ConfigError(
                f"sync.apply_at=episode sync={sync.name}: its weights change at once, in an "
                "episode too; take sync=shared_mem"
            )
    if sync.state_on_update == "zero" and config.model.name != "lstm":
        raise ConfigError(
            f"sync.state_on_update=zero model={config.model.name}: it carries no state; "
            "take model=lstm"
        )
    if sync.on_stale == "wait" and (sync.max_lag is None or not is_asynchronous(collector)):
        missing = "sync.max_lag" if sync.max_lag is None else "collector=multi_async"
        raise ConfigError(
            f"sync.on_stale=wait needs {missing}: asynchronous workers wait so that no frame lags "
            "by more than max_lag"
        )
    if sync.check_torn and sync.name != "hogwild":
        raise ConfigError(
            f"sync={sync.name} with sync.check_torn=true: its workers never see torn weights; only "
            "those of sync=hogwild do"
        )
    if sync.zero_copy and (sync.name != "shared_mem" or sync.wire != "float32"):
        wire = "" if sync.name != "shared_mem" else f" and sync.wire={sync.wire}"
        raise ConfigError(
            f"sync={sync.name} with sync.zero_copy=true{wire}: only sync=shared_mem with "
            "sync.wire=float32 has blocks that parameters can point at"
        )
    if sync.name == "none" and collector.name != "single":
        raise ImpossiblePair(
            f"sync=none collector={collector.name}: its workers would keep the weights they start "
            "with for ever; take sync=shared_mem, or collector=single"
        )
    if sync.name == "hogwild" and collector.name == "single":
        raise ImpossiblePair(
            "sync=hogwild collector=single: one process has nobody to share its memory with; "
            "take sync=none, where the policy is the learner's own"
        )


def _check_algo(config: Config) -> None:
    collector = config.collector
    if collector.next_observation == "final" and collector.remote is not None:
        raise ConfigError(
            f"collector.next_observation=final collector={collector.name}: whole frames travel "
            "between machines; it is for collectors of this one, as collector=multi_async"
        )
    if isinstance(config.algo, SACConfig):
        if config.model.name == "lstm":
            raise ConfigError("algo=sac model=lstm: SAC replays single frames; take model=mlp")
        if collector.next_observation == "final":
            raise ConfigError(
                "collector.next_observation=final algo=sac: SAC replays frames one by one, each "
                "with its own next observation; it is for algo=ppo"
            )
        if config.sync.max_lag is not None:
            raise ConfigError(
                f"sync.max_lag={config.sync.max_lag} algo=sac: SAC replays old frames on purpose; "
                "max_lag is for algo=ppo"
            )
    elif collector.free_running:
        raise ConfigError(
            "collector.free_running=true algo=ppo: PPO has no replay buffer to fill; take algo=sac"
        )
    if collector.free_running and collector.name == "single":
        raise ConfigError(
            "collector.free_running=true collector=single: workers must run beside the learner; "
            "take collector=multi_async"
        )
