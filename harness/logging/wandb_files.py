"""The files of a run that W&B keeps as artifacts: manifest, code, last checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.run.provenance import ROOT

MANIFEST, CODE, CHECKPOINT = "manifest", "code", "checkpoint"
PACKAGES = ("harness", "collectors", "sync", "conf", "hydra_plugins/lockstep")
CODE_SUFFIXES = (".py", ".yaml")


@dataclass
class Files:
    """What is kept of a run."""

    folder: Path
    chosen: Sequence[str]
    plugins: Sequence[str] = ()


def keep(run: Any, files: Files) -> None:
    """Log the chosen files; a file that the run does not have is left out."""
    import wandb

    for kind in files.chosen:
        found = dict(_found(files, kind))
        if not found:
            continue
        artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
        for name, file in found.items():
            if kind in (MANIFEST, CODE):  # which may change before the run is sent
                file = _copied(file, Path(run.dir, "artifacts", kind, name))
            # Else W&B copies the file into the home directory.
            artifact.add_file(str(file), name=name, policy="immutable")
        run.log_artifact(artifact)


def _copied(file: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(file, place))


def _found(files: Files, kind: str) -> Iterator[tuple[str, Path]]:
    """Names and places of the files of one kind."""
    if kind == MANIFEST:
        for name in ("manifest.json", "config.yaml"):
            if (files.folder / name).is_file():
                yield name, files.folder / name
    elif kind == CHECKPOINT:
        saved = sorted((files.folder / "checkpoints").glob("[0-9]*.safetensors"))
        yield from ((file.name, file) for file in saved[-1:])
    elif kind == CODE:
        yield from _code(files.plugins)


def _code(plugins: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Lockstep's own files, and those of the plugins that the run named."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*")):
            if file.suffix in CODE_SUFFIXES and file.is_file():
                yield file.relative_to(ROOT).as_posix(), file
    if (ROOT / "run.py").is_file():  # a checkout
        yield "run.py", ROOT / "run.py"
    for plugin in plugins:
        source = getattr(sys.modules.get(plugin), "__file__", None)
        if source is not None:
            yield f"plugins/{plugin}.py", Path(source)
