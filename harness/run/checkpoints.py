"""Checkpoints: atomic, hashed, rotated, and loaded without executing anything.

A checkpoint is one safetensors file. Its tensors are those of the state; the rest of the state
(numbers, text, lists, names) is JSON in the file's header, with `{"tensor": name}` where a tensor
belongs. The header also says in what format, by which run and at which frame it was written. The
file's name holds that frame, too, and the start of the file's SHA-256:

    checkpoints/000000102400-1f2e3d4c5b6a7988.safetensors

The hash detects damage but not forgery, since anyone can compute it. A forged checkpoint can
contain wrong numbers, but nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.files import check_ordinary, one_line, sync_folder

log = logging.getLogger(__name__)

State = dict[str, Any]
NAME = re.compile(r"([0-9]{12,})-([0-9a-f]{16})\.safetensors")
TENSOR = "tensor"
FORMAT = "4"


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or there is none."""


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay.

    run: the run's id, by which a checkpoint of another run is told; not looked at if it is None.
    """

    def __init__(self, folder: Path, *, keep: int = 3, run: str | None = None):
        self.folder = folder
        self.keep = keep
        self.run = run

    def files(self) -> list[Path]:
        """Oldest first."""
        files = self.folder.glob("*.safetensors") if self.folder.is_dir() else ()
        return sorted((f for f in files if NAME.fullmatch(f.name)), key=frames_of)

    def save(self, frames: int, state: State) -> Path:
        """Write the state after `frames` frames; returns when it would survive a power cut."""
        self.folder.mkdir(exist_ok=True)  # but not the run directory: somebody moved it
        beside = self.folder / f".writing-{os.getpid()}"
        try:
            beside.unlink(missing_ok=True)  # never through a link that somebody laid there
            write(beside, state, frames=frames, run=self.run)
            file = self.folder / f"{frames:012d}-{digest(beside)}.safetensors"
            beside.replace(file)
        except (OSError, SafetensorError) as error:
            raise OSError(f"no checkpoint can be written in {self.folder}: {error}") from error
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(self.folder)
        self._rotate(file)
        return file

    def load(self) -> tuple[int, State]:
        """The newest valid checkpoint: its frame and state. Damaged ones are logged."""
        files = self.files()
        for file in reversed(files):
            try:
                return frames_of(file), read(file, run=self.run)
            except CheckpointError as error:
                log.error("%s; trying the previous one", error)
        tried = f"none of the {len(files)} there can be read" if files else "there is none"
        raise CheckpointError(f"no checkpoint to load in {self.folder}: {tried}")

    def _rotate(self, written: Path) -> None:
        files = self.files()
        for file in files:
            replaced = frames_of(file) == frames_of(written)
            if file != written and (replaced or file in files[: -self.keep]):
                file.unlink(missing_ok=True)


def frames_of(file: Path) -> int:
    """The frame that a checkpoint was written at."""
    match = NAME.fullmatch(file.name)
    if match is None:
        raise CheckpointError(f"{file.name} is no checkpoint's name")
    return int(match[1])


def write(file: Path, state: State, *, frames: int, run: str | None = None) -> None:
    """Write a state, synced but not yet under its name."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _take_apart(state, "", tensors)
    header = {"format": FORMAT, "run": run or "", "frames": str(frames)}
    save_file(_apart(tensors), file, metadata={**header, "state": json.dumps(skeleton)})
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def read(file: Path, *, run: str | None = None) -> State:
    """The state in a checkpoint; `CheckpointError` if it is not what that run wrote."""
    match = NAME.fullmatch(file.name)
    if match is None:
        raise CheckpointError(f"{file.name} is no checkpoint's name")
    try:
        check_ordinary(file)
        if digest(file) != match[2]:
            raise CheckpointError(f"{file} is damaged: its hash differs from that in its name")
        with safe_open(file, framework="pt") as stored:
            header = stored.metadata() or {}
            _check_header(header, file, run)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        state = _put_together(json.loads(header["state"]), tensors)
    except CheckpointError:
        raise
    except Exception as error:  # whatever the parsers make of a file that is no checkpoint
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds no state")
    return state


def _check_header(header: dict[str, str], file: Path, run: str | None) -> None:
    if (format_ := header.get("format")) != FORMAT:
        written = "does not say its format" if format_ is None else f"is of format {format_}"
        raise CheckpointError(f"{file} {one_line(written)}, expected {FORMAT}")
    if header.get("frames") != str(frames_of(file)):
        raise CheckpointError(f"{file} was written at frame {one_line(header.get('frames'))}")
    if run is not None and header.get("run") != run:
        writer = one_line(header.get("run") or "no run that is known")
        raise CheckpointError(f"{file} belongs to another run: {writer}, but this is {run}")


def digest(file: Path) -> str:
    """The start of a file's SHA-256."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {TENSOR: path}
    if isinstance(value, dict):
        pairs = [[_key(k, path), _take_apart(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {"mapping": pairs}
    if isinstance(value, list | tuple):
        items = [_take_apart(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    raise TypeError(
        f"{path or 'state'} is a {kind}: a checkpoint holds tensors, numbers, text, lists and dicts"
    )


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"{path or 'state'} has the key {key!r}: expected text or a whole number")


def _put_together(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "mapping":
            return {key: _put_together(item, tensors) for key, item in content}
        case "list":
            return [_put_together(item, tensors) for item in content]
        case "tuple":
            return tuple(_put_together(item, tensors) for item in content)
    raise ValueError(f"unknown kind {kind!r}")


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values without shared memory, which safetensors refuses."""
    storages: set[int] = set()
    return {name: _own(tensor, storages) for name, tensor in tensors.items()}


def _own(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    if storage.data_ptr() in storages or not whole:
        return tensor.clone()
    storages.add(storage.data_ptr())
    return tensor
