"""Run directories made up for tests, whole or damaged in every way that was thought of."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from harness.measures import PHASES

HOSTILE = '<script>alert("x")</script> $\\frac{ | `a` [b](http://evil.example) \x07 ${oc.env:HOME}'


def make_sweep(
    root: Path,
    *,
    seeds: range = range(1, 4),
    schemes: dict[str, float],
    evaluated: bool = False,
) -> Path:
    """A sweep with runs of each scheme, whose returns lie about the value given for it."""
    for scheme, level in schemes.items():
        for seed in seeds:
            place, named = root / f"sync={scheme},seed={seed}", {"scheme": scheme, "seed": seed}
            make_run(place, level=level, evaluated=evaluated, **named)
    return root


def make_run(
    directory: Path,
    *,
    scheme: str = "shared_mem",
    collector: str = "multi_async",
    seed: int = 1,
    level: float = 100.0,
    frames: int = 2000,
    state: str = "done",
    error: str | None = None,
    evaluated: bool = False,
    pid: int | None = None,
    host: str | None = None,
    **options: Any,
) -> Path:
    """One run whose return climbs to about `level`; `options` go into its config.

    evaluated: ten times while training, too. The newest weights score a tenth more than those that
    act, and a twentieth less where they sample.
    """
    rng = np.random.default_rng([seed, abs(int(level))])
    directory.mkdir(parents=True)
    config = {
        "algo": {"name": "ppo"},
        "collector": {
            "name": collector,
            "num_workers": 1 if collector == "single" else 2,
            "frames_per_batch": 50,
        },
        "sync": {"name": scheme, "interval": 1},
        "env": {"id": "CartPole-v1"},
        "logger": {"wandb": {"tags": [str(seed)]}},
        "total_frames": frames,
        "seed": seed,
        **options,
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    records = [_record(step, frames, level, rng) for step in range(100, frames + 1, 100)]
    if evaluated:
        evaluations = np.random.default_rng([seed, abs(int(level)), 1])
        for record in records[1::2]:
            greedy = 1.1 * level * record["step"] / frames + float(evaluations.normal())
            record |= {"eval/return": greedy, "eval/return_sampled": 0.95 * greedy}
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))
    final = level + float(rng.normal())
    torn = {"sync/checked_calls": 250, "sync/torn_calls": 5, "sync/tear_rate": 0.02}
    summary = _summary(frames, final, rng) | (torn if scheme == "hogwild" else {})
    _write(directory / "summary.json", summary)
    status = {"state": state, "error": error, "pid": pid if pid is not None else os.getpid()}
    _write(directory / "status.json", status)
    _write(directory / "manifest.json", _manifest(seed, host or socket.gethostname()))
    return directory


def _record(step: int, frames: int, level: float, rng: np.random.Generator) -> dict[str, float]:
    return {
        "step": step,
        "time": 1e9 + step / 100,
        "episode/return": level * step / frames + float(rng.normal()),
        "sync/publish_ms": float(rng.lognormal()),
        "sync/ack_ms": float(rng.lognormal(1)),
        "policy/lag_mean": float(rng.uniform(0, 2)),
        **{f"time/{phase}_s": 0.25 for phase in PHASES},
    }


def _summary(frames: int, final: float, rng: np.random.Generator) -> dict[str, Any]:
    latencies = {
        f"sync/{name}_ms_{share}": float(rng.lognormal())
        for name in ("publish", "ack", "apply")
        for share in ("p50", "p95", "p99")
    }
    lags = {
        "policy/lag_mean": 1.0,
        "policy/lag_p95": 2.0,
        "policy/lag_max": 3.0,
        "policy/dropped": 77,
        "collector/dropped": 5,
    }
    health = {
        f"policy/{name}/{bucket}": value
        for bucket, values in {
            "lag_0": (0.25, 1.0, 0.0, 1.0),
            "lag_3_4": (0.75, 0.5, 0.125, 9.0),
        }.items()
        for name, value in zip(("share", "ess", "kl", "ratio_max"), values, strict=True)
    }
    parts = {"updates_mean": 3.0, "updates_p95": 7.0, "updates_max": 8.0}
    parts |= {"publish_mean": 1.0, "queue_mean": 2.0, "train_mean": 0.375}
    lags |= {f"policy/lag_{name}": value for name, value in parts.items()}
    times = {f"time/{phase}_s": 5.0 for phase in PHASES}
    return {
        "frames": frames,
        "wall_s": 25.0,
        "fps": frames / 25.0,
        "episode/return": final,
        "eval/return": final,
        "workers": {"0": {}},
        **latencies,
        **lags,
        **health,
        **times,
    }


def _manifest(seed: int, host: str) -> dict[str, Any]:
    return {
        "command": "python run.py --multirun sync=a,b",
        "seed": seed,
        "started": f"2020-01-01T00:00:{seed:02d}+00:00",
        "git": {"sha": "0123abcd", "branch": "main", "diff": "", "untracked": []},
        "python": "3.11",
        "packages": {"torch": "2.0"},
        "hardware": {"processor": "Abacus", "cores": 2, "cuda": []},
        "host": host,
        "user": "a-private-user",
    }


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))
