"""Reads the file of an offline W&B run."""

from __future__ import annotations

from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

from harness.logging.wandb_offline import records


def read(folder: Path) -> list[Record]:
    """The records of the one run that was written to a folder."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return records(file.read_bytes())
