"""Experiments: config, training loop, algorithms, logging, checkpoints, statistics and report.

The harness builds a run from a Hydra config. The run collects, updates the policy, publishes its
weights, logs, and writes a run directory. The harness imports `collectors` and `sync`, which do not
import it. Start with `run/run_lifetime.py` (a run from start to end) and `run/training_loop.py`.
"""

from importlib.util import find_spec
from pathlib import Path

COMMANDS = {  # what `lockstep NAME` runs: modules with a `main`
    "report": "harness.report",
    "reproduce": "harness.reproduce",
    "branch": "harness.branch.command",
    "why": "harness.branch.why",
    "calibrate": "harness.calibrate",
    "play": "harness.play",
    "runs": "harness.runs",
    "check": "lockstep_check.__main__",
    "conformance": "lockstep_conformance.__main__",
}

_HERE = Path(__file__).resolve().parents[1]

for _name in ("sync", "collectors"):  # common names: another package's may come first on sys.path
    _spec = find_spec(_name)
    if _spec is None or Path(_spec.origin or "").resolve() != _HERE / _name / "__init__.py":
        _place = None if _spec is None else _spec.origin or _spec.submodule_search_locations
        raise ImportError(
            f"Lockstep's package {_name} is in {_HERE}, but `import {_name}` leads to {_place}: "
            "run it where no other module has this name"
        )
