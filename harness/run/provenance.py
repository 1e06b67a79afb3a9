"""Where a run came from: code, packages, hardware and command."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.run_directory import now

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "lockstep-rl",
    "torch",
    "tensordict",
    "gymnasium",
    "numpy",
    "hydra-core",
    "omegaconf",
    "wandb",
    "safetensors",
    "mujoco",
    "box2d",
    "envpool",
    "ray",
)


def manifest(*, seed: int, overrides: list[str]) -> dict[str, Any]:
    """What a person needs to know to run this again."""
    return {
        "command": command(),
        "overrides": overrides,
        "seed": seed,
        "started": now(),
        "ended": None,
        "git": git(),
        "python": platform.python_version(),
        "packages": packages(),
        "hardware": hardware(),
        "host": socket.gethostname(),
        "user": user(),
        "pid": os.getpid(),
    }


def user() -> str:
    """The user's name; the number of one who has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def command() -> str:
    """What was typed, without the path of the environment."""
    program = Path(sys.argv[0])
    if program.parent == Path(sys.executable).parent:  # the installed `lockstep`
        return shlex.join([program.name, *sys.argv[1:]])
    return shlex.join([Path(sys.executable).name, *sys.argv])


def git() -> dict[str, Any] | None:
    """The commit of this code and what is changed on top of it; None outside a git checkout.

    An installed copy may lie in a virtual environment inside another project's checkout, whose
    commit says nothing about this code: git must track this very file.
    """
    sha = _git("rev-parse", "HEAD")
    if sha is None or _git("ls-files", "--error-unmatch", __file__) is None:
        return None
    diff = _git("diff", "HEAD") or ""
    return {
        "sha": sha.strip(),
        "branch": (_git("rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "diff": diff,
        "untracked": (_git("ls-files", "--others", "--exclude-standard") or "").splitlines(),
    }


def _git(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.decode(errors="replace")


def packages() -> dict[str, str]:
    """The versions of what matters here, as far as it is installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict[str, Any]:
    """Processor, memory and CUDA devices.

    Virtual machines give processors of several kinds one name. The vector instructions that torch
    and NumPy use tell some apart that compute other last digits.
    """
    import numpy as np  # here, for the commands that read run directories and need neither
    import torch

    cuda = torch.cuda.is_available()
    extensions = np.show_config("dicts").get("SIMD Extensions", {}).get("found", [])
    return {
        "platform": platform.platform(),
        "processor": _from_proc("/proc/cpuinfo", "model name") or platform.processor(),
        "instructions": " ".join(
            ["torch", torch.backends.cpu.get_cpu_capability(), "numpy", *extensions]
        ),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * cuda)],
    }


def _from_proc(file: str, key: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
