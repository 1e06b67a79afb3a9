"""What a branch may change, and the config that it therefore has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.calibrate import calibrate
from harness.config.compose import parsed
from harness.config.plan import to_config
from harness.config.stored import changed, option
from harness.errors import ConfigError, show
from harness.files import flatten
from harness.options.base import defaults, in_types
from harness.options.run import Config
from harness.options.simulated import SimulatedConfig

# Groups whose options may change at a moment, and those of their options that may not.
GROUPS = ("algo", "sync", "collector")
FIXED = {
    "seed": "a branch has a seed of its own, which follows from the repeat",
    "total_frames": "all branches of a moment end at the same frame, to be compared there",
    "evaluation": "all branches are evaluated alike, to be compared",
    "model": "the saved weights are those of the parent's model",
    "env": "the episodes under way are those of the parent's environments",
    "algo.name": "the saved state is that of the parent's algorithm",
    "sync.name": "its options are those of the parent's scheme",
    "collector.name": "the saved state is that of the parent's workers",
    "collector.num_workers": "the saved state is that of the parent's workers",
    "collector.replay": "a branch follows no recorded schedule: its learner is another one",
    "sync.max_lag": "the run was started with algo.max_lag, which has priority; set algo.max_lag",
}


def check_changes(changes: Sequence[str], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The values that changes set, by option; `ConfigError` for one that cannot change."""
    if not changes:
        raise ConfigError(
            "name what the branches change, as sync.lag=0; the unchanged options are the control"
        )
    values = dict(parsed(changes))
    for text in changes:
        name, equals, _ = text.partition("=")
        if not equals or name not in values:
            raise ConfigError(f"{text!r}: expected option=value")
        _check_may_change(name, text)
        if isinstance(values[name], list) and "," in text and not text.endswith("]"):
            raise ConfigError(f"{text}: expected one value; do one command for each")
        before = option(stored, name)
        if before == values[name]:
            raise ConfigError(f"{text}: the parent has {name}={show(before)}, too")
    return values


def _check_may_change(name: str, text: str) -> None:
    for fixed, reason in FIXED.items():
        if name == fixed or name.startswith(f"{fixed}."):
            raise ConfigError(f"{text}: {fixed} cannot change in a branch: {reason}")
    if not name.startswith(tuple(f"{group}." for group in GROUPS)):
        groups = ", ".join(f"{group}.*" for group in GROUPS)
        raise ConfigError(f"{text}: a branch may change options of {groups}")


def branch_options(
    stored: Mapping[str, Any], collector: Mapping[str, Any] | None, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of the parent's branches, but for the seed.

    collector: the options of another collector than the parent's.
    """
    options = {**stored, "logger": {}}
    options["checkpoint"] = {**stored["checkpoint"], "at_end": True}
    if collector is not None:
        options["collector"] = dict(collector)
    if options["collector"].get("failures"):  # they happened before
        options["collector"] = {**options["collector"], "failures": []}
    for name, value in values.items():
        options = changed(options, name, value, f"{name}={show(value)}")
    return options


def with_seed(options: Mapping[str, Any], seed: int) -> tuple[Config, dict[str, Any]]:
    """The config of a branch, typed and as plain options."""
    sync = dict(options["sync"])
    if "lag_seed" in sync:
        sync["lag_seed"] = seed
    options = {**options, "seed": seed, "sync": sync}
    config = to_config(options)
    return config, in_types(options, config)


def check_learner(arm: str, config: Config, control: Config) -> None:
    """Raise `ConfigError` if the learner of an arm needs a state that the control's lacks."""
    # They take time to import.
    from harness.run.build import make_learner
    from harness.run.run_lifetime import MISFITS

    learner, state = make_learner(config), make_learner(control).state_dict()
    names = [
        {name for name, _ in flatten(one, lists=True)} for one in (learner.state_dict(), state)
    ]
    lacking = sorted({name.split(".")[1] for name in names[0] - names[1]})
    if lacking:
        raise ConfigError(
            f"{arm} needs the state {', '.join(lacking)} of the learner, which the parent does not "
            "keep; a run with this option from the start is a run of its own"
        )
    try:
        learner.load_state_dict(state)
    except MISFITS as error:
        raise ConfigError(
            f"{arm} does not fit the state of the parent's learner: {error}"
        ) from error


def calibrated(parent: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a simulated collector with the costs of a `multi_async` run."""
    usual = defaults(SimulatedConfig)
    collector = {name: stored["collector"].get(name, value) for name, value in usual.items()}
    options: dict[str, Any] = {"collector": {**collector, "name": "simulated"}}
    try:
        costs = calibrate(parent).overrides()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"the costs of {parent} cannot be measured for simulated workers: {error}; "
            "--real-workers needs none"
        ) from error
    for name, value in parsed(costs[1:]):
        options = changed(options, name, value, f"{name}={value}")
    return dict(options["collector"])
