"""The version of TRL that this package is written for, and the protocols that it relies on."""

from __future__ import annotations

import inspect

SUPPORTED = "1.16"
# What TRL calls, with the parameters that it passes.
PROTOCOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "RolloutWorkerProtocol": {
        "start": (),
        "stop": (),
        "update_model_version": ("model_version",),
        "check_health": ("stale_after_s",),
    },
    "WeightTransferProtocol": {
        "init_weight_transfer": (),
        "pause": (),
        "send_weights": ("iterator",),
        "resume": (),
        "destroy": (),
    },
}


def check_trl() -> None:
    """Raise `ImportError` unless a supported TRL is installed whose protocols are as expected."""
    install = "pip install 'lockstep-rl[trl]'"
    try:
        import trl
        from trl.experimental.async_grpo import async_grpo_trainer
    except ImportError as error:
        raise ImportError(f"lockstep_trl needs trl {SUPPORTED} ({error}): {install}") from error
    if trl.__version__.split(".")[:2] != SUPPORTED.split("."):
        raise ImportError(
            f"lockstep_trl supports trl {SUPPORTED}, and {trl.__version__} is installed: {install}"
        )
    if changes := protocol_changes(async_grpo_trainer):
        raise ImportError(f"trl {trl.__version__} has other protocols: {'; '.join(changes)}")


def protocol_changes(module: object) -> list[str]:
    """What differs between the protocols in TRL's module and the expected ones."""
    changes = []
    for name, methods in PROTOCOLS.items():
        protocol = getattr(module, name, None)
        if protocol is None:
            changes.append(f"{name} is gone")
            continue
        functions = {key: one for key, one in vars(protocol).items() if inspect.isfunction(one)}
        actual = {
            key: tuple(inspect.signature(one).parameters)[1:]
            for key, one in functions.items()
            if not key.startswith("_")
        }
        for method in sorted(actual | methods):
            where = f"{name}.{method}"
            if method not in actual:
                changes.append(f"{where} is gone")
            elif method not in methods:
                changes.append(f"{where} is new")
            elif actual[method] != methods[method]:
                changes.append(f"{where} takes {actual[method]}, expected {methods[method]}")
    return changes
