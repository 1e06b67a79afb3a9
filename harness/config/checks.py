"""Checks of a whole config, made before any process starts."""

from __future__ import annotations

from harness.environments.factory import check_environment, find
from harness.options.errors import ConfigError
from harness.options.run import Config


def check(config: Config) -> None:
    """Raise `ConfigError` for the first thing in the config that cannot work.

    Types and bounds were checked when the options were built. Each class of options checks its own
    combinations with the rest of the config: `check`.
    """
    check_environment(config.env)
    _check_evaluation(config)
    _check_devices(config)
    for part in config.parts():
        part.check(config)


def _check_evaluation(config: Config) -> None:
    evaluation, env = config.evaluation, config.env
    plays = evaluation.at_end or evaluation.every_frames is not None
    if plays and env.vectorisation == "native" and find(env.id).entry_point is None:
        raise ConfigError(
            f"env.id={env.id} exists only as a vector, but evaluation needs single environments; "
            "use evaluation.at_end=false evaluation.every_frames=null"
        )


def _check_devices(config: Config) -> None:
    devices = config.collector.devices
    is_here = not config.collector.nodes  # else only its host can tell
    policy = devices.policy if isinstance(devices.policy, list) else [devices.policy]
    _check_device("device", config.device)
    _check_device("collector.devices.storing", devices.storing)
    for device in policy:
        _check_device("collector.devices.policy", device, is_here=is_here)


def _check_device(place: str, device: str, *, is_here: bool = True) -> None:
    import torch  # here: naming no device but the CPU should not have to wait for CUDA

    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{place}={device}: no such device; try cpu, cuda or cuda:1") from None
    if parsed.type == "cpu":
        return
    if parsed.type != "cuda":
        raise ConfigError(f"{place}={device}: expected cpu or cuda")
    present = torch.cuda.device_count()
    if is_here and (parsed.index or 0) >= present:
        raise ConfigError(
            f"{place}={device}: this machine has {present} CUDA devices; "
            f"{'take cpu' if not present else f'cuda:{present - 1} is the last'}"
        )
