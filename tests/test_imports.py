"""Imports point one way: run → harness → collectors → sync, never back.

The rules are read off the code itself: absolute and relative imports, at the top, inside functions
and under TYPE_CHECKING alike, and `import_module("name")`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

CONFIG_LIBRARIES = ("hydra", "omegaconf")
OUTSIDE = ("tests", "benchmarks", "examples")
SHIPPED = (
    "sync",
    "collectors",
    "harness",
    "hydra_plugins",
    "lockstep_check",
    "lockstep_conformance",
    "lockstep_trl",
    "run.py",
)
LOCKSTEP = ("run", "harness", "collectors", "sync", "hydra_plugins", "lockstep_trl")
HEAVY = ("torch", "tensordict", "numpy", "gymnasium", "wandb")
PEERS = ("torchrl", "stable_baselines3", "sample_factory", "tianshou", "rlpyt")
# The bridge to TorchRL, which runs in the peers' environment.
BRIDGE = ("examples/from_torchrl", "tests/examples/torchrl_cases")

# Where code lives, and what it may never import.
FORBIDDEN = {
    "lockstep_trl/": ("run", "wandb", *CONFIG_LIBRARIES, *OUTSIDE),
    "lockstep_conformance/": (
        "run",
        "harness",
        "lockstep_trl",
        "wandb",
        *CONFIG_LIBRARIES,
        *OUTSIDE,
    ),
    "lockstep_check/": (*LOCKSTEP, *HEAVY, *CONFIG_LIBRARIES, *OUTSIDE),
    "run.py": OUTSIDE,
    "hydra_plugins/": ("run", "wandb", *OUTSIDE),
    "harness/": ("run", "lockstep_trl", *OUTSIDE),
    "collectors/": ("run", "harness", "lockstep_trl", "wandb", *CONFIG_LIBRARIES, *OUTSIDE),
    "sync/": (
        *("run", "harness", "collectors", "lockstep_trl", "gymnasium", "wandb"),
        *(*CONFIG_LIBRARIES, *OUTSIDE),
    ),
}
# What plans, does and compares runs; each may import those before it, and sweep the report.
COMMANDS = ("config", "run", "report", "sweep", "branch", "application")
# Folders and files of harness/, and those above them, which they may not import.
ABOVE = {
    "harness/options/": ("algorithms", "environments", "models", "measures", "logging", *COMMANDS),
    "harness/models/": ("algorithms", "environments", "measures", "logging", *COMMANDS),
    "harness/environments/": ("algorithms", "models", "measures", "logging", *COMMANDS),
    "harness/measures/": ("algorithms", "logging", *COMMANDS),
    "harness/algorithms/": ("environments", "logging", *COMMANDS),
    "harness/logging/": ("algorithms", *COMMANDS),
    "harness/callbacks.py": ("measures", "logging", *COMMANDS),
    "harness/run_directory.py": ("measures", "logging", *COMMANDS),
    "harness/config/": COMMANDS[1:],
    "harness/run/": COMMANDS[2:],
    "harness/sweep/": ("branch", "application"),
    "harness/branch/": ("sweep", "application"),
}
# The folders of collectors/: each may import those before it, and the last two not each other.
FOLDERS = ("options", "weights", "rollout", "data", "schedule", "workers", "remote", "simulation")
for place, folder in enumerate(FOLDERS):
    later = [*FOLDERS[place + 1 :], *(["remote"] if folder == "simulation" else [])]
    names = [f"collectors.{name}" for name in later]
    FORBIDDEN = {f"collectors/{folder}/": (*FORBIDDEN["collectors/"], *names), **FORBIDDEN}
HYDRA = ("run.py", "hydra_plugins", "harness/application", "harness/config", "harness/sweep")
# What only some of that code may import.
RESERVED = {
    "wandb": ("harness/logging",),
    "hydra": HYDRA,
    "omegaconf": HYDRA,
    # Whoever wants RPC imports these, in the function that uses it.
    "torch.distributed.rpc": ("sync/remote/rpc_engine.py", "sync/remote/rpc_group.py"),
}
# Large or optional: imported by the function that uses it.
LAZY = (
    *("ray", "envpool", "mujoco", "optuna", "submitit", "tensorboard"),
    "torch.utils.tensorboard",
)
TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:"


class Import(NamedTuple):
    """One imported name, and whether importing the file already imports it."""

    name: str
    line: int
    eager: bool


def violations(root: Path) -> list[str]:
    """Every import below `root` that breaks a rule, as `file:line: what is wrong`."""
    return [
        f"{file.relative_to(root)}:{found.line}: {complaint}"
        for file in source_files(root)
        for found in imports(file, root)
        for complaint in complaints(file.relative_to(root).as_posix(), found)
    ]


def source_files(root: Path) -> list[Path]:
    rooms = (
        *("hydra_plugins", "harness", "collectors", "sync"),
        *("lockstep_check", "lockstep_conformance", "lockstep_trl", "tests", "examples"),
    )
    return sorted([*root.glob("*.py"), *(f for room in rooms for f in (root / room).rglob("*.py"))])


def complaints(path: str, found: Import) -> Iterator[str]:
    name = match(found.name, PEERS)
    if name and not (name == "torchrl" and inside(path, BRIDGE)):
        yield f"imports {name}, a peer, outside benchmarks/"
    place = next((place for place in FORBIDDEN if path.startswith(place)), None)
    if place is None:
        return
    folder = next((folder for folder in ABOVE if path.startswith(folder)), None)
    above = tuple(f"harness.{name}" for name in ABOVE[folder]) if folder else ()
    if folder and (name := match(found.name, above)):
        yield f"{folder} may not import {name}, which is above it"
    if name := match(found.name, FORBIDDEN[place]):
        yield f"{place} may not import {name}"
    elif (name := match(found.name, RESERVED)) and not inside(path, RESERVED[name]):
        yield f"only {' and '.join(RESERVED[name])} may import {name}"
    if found.eager and (name := match(found.name, LAZY)):
        yield f"imports {name} outside of a function"


def match(imported: str, names: tuple[str, ...] | dict[str, tuple[str, ...]]) -> str | None:
    return next((n for n in names if imported == n or imported.startswith(f"{n}.")), None)


def inside(path: str, places: tuple[str, ...]) -> bool:
    """Whether `path` is one of `places`, which may each be a module or a folder."""
    return any(path in (place, f"{place}.py") or path.startswith(f"{place}/") for place in places)


def imports(file: Path, root: Path) -> Iterator[Import]:
    package = file.relative_to(root).parent.parts

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        for name in imported_names(node, package):
            yield Import(name, node.lineno, eager)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            eager = False
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, eager)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager)

    return visit(ast.parse(file.read_text()), True)


def imported_names(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parent = package[: len(package) - level + 1] if level else ()
            base = ".".join([*parent, *([module] if module else [])])
            return [f"{base}.{alias.name}".lstrip(".") for alias in names]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def circles(root: Path) -> list[str]:
    """Modules that import each other in a circle, in whatever way, as `a -> b -> a`."""
    files = [f for f in source_files(root) if inside(f.relative_to(root).as_posix(), SHIPPED)]
    modules = {module_name(file.relative_to(root)): file for file in files}
    graph = {
        name: {
            known
            for found in imports(file, root)
            if (known := longest_module(found.name, modules)) and known != name
        }
        for name, file in modules.items()
    }
    return sorted(" -> ".join(circle) for circle in strongly_connected(graph))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest_module(name: str, modules: Collection[str]) -> str | None:
    """The module that an imported name is, or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def strongly_connected(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """The shortest circle through each group of modules that reach each other."""
    seen: set[str] = set()
    for start in graph:
        paths, queue = {start: [start]}, [start]
        while queue and start not in seen:
            here = queue.pop(0)
            for there in sorted(graph[here]):
                if there == start:
                    seen.update(paths[here])
                    yield [*paths[here], start]
                    queue = []
                    break
                if there not in paths:
                    paths[there] = [*paths[here], there]
                    queue.append(there)


def test_the_code_keeps_to_the_directions():
    assert violations(ROOT) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circles(ROOT) == []


def test_a_circle_is_found_however_it_is_imported(tmp_path):
    tree(tmp_path, "sync/b.py", "import torch\nfrom sync.c import C")
    tree(tmp_path, "sync/c.py", "from sync.a import A")
    tree(tmp_path, "sync/d.py", "from sync.a import A")
    ways = ("from sync.b import B", "from . import b", "def f():\n    import sync.b")
    for way in (*ways, f"{TYPE_CHECKING}\n    from sync.b import B"):
        tree(tmp_path, "sync/a.py", way)
        assert circles(tmp_path) == ["sync.a -> sync.b -> sync.c -> sync.a"], way


def test_forbidden_imports_are_found_in_every_form(tmp_path):
    for path, code in (
        ("harness/a.py", "import run"),
        ("collectors/a.py", "from harness.run.training_loop import TrainingLoop"),
        ("collectors/inner/a.py", "from ...harness.config import Config"),
        ("sync/a.py", "def f():\n    import torch, collectors"),
        ("sync/a.py", f"{TYPE_CHECKING}\n    import harness"),
        ("sync/a.py", "import importlib\nimportlib.import_module('harness.config')"),
        ("sync/a.py", "from gymnasium.spaces import Box"),
        ("harness/run/training_loop.py", "import wandb"),
        ("harness/models/a.py", "from harness.algorithms.returns import gae"),
        ("harness/measures/a.py", f"{TYPE_CHECKING}\n    from harness.logging import Logger"),
        ("harness/a.py", "from benchmarks import models"),
        ("lockstep_check/a.py", "import sync"),
        ("lockstep_check/a.py", "def f():\n    import numpy"),
        ("collectors/data/a.py", "from collectors.workers.messages import Filled"),
        ("collectors/simulation/a.py", "def f():\n    import collectors.remote.host"),
        ("sync/ray.py", "class A:\n    import ray"),
        ("sync/rpc.py", "from torch.distributed.rpc import rpc_sync"),
        ("examples/a.py", "def f():\n    import stable_baselines3"),
    ):
        folder = tmp_path / path.replace("/", "-") / str(len(code))
        (found,) = violations(tree(folder, path, code))
        assert found.startswith(f"{path}:")
    # A module that only has such a name in its own, and one that may import it.
    for path, code in (
        ("collectors/ray.py", "import rays\nf = lambda: __import__('ray')"),
        ("harness/logging/wandb.py", "import wandb"),
    ):
        assert violations(tree(tmp_path / path.replace("/", "-"), path, code)) == [], code


def tree(root: Path, path: str, code: str) -> Path:
    """A project of one file."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    return root
