"""A report as a W&B run of its own, in the group of the sweep that it is about."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Upload:
    """What goes there."""

    name: str
    group: str | None
    numbers: Mapping[str, float]  # for the run's summary
    figures: Mapping[str, bytes]  # PNG
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # of the table of results
    page: Path


def upload(report: Upload, folder: Path, *, mode: str, project: str) -> None:
    """Write the run to `folder`, and online to the server; `RuntimeError` if that cannot be."""
    import wandb

    try:
        with wandb.init(
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            project=project,
            name=report.name,
            group=report.group,
            job_type="report",
            settings=quiet(),
        ) as run:
            pictures = {
                f"figures/{name}": wandb.Image(open_png(png))
                for name, png in report.figures.items()
            }
            table = wandb.Table(
                columns=list(report.columns), data=[list(row) for row in report.rows]
            )
            run.log({"results": table, **pictures})
            run.summary.update(dict(report.numbers))
            run.save(str(report.page), base_path=str(report.page.parent), policy="now")
    except (wandb.Error, OSError) as error:
        raise RuntimeError(f"W&B did not take the report: {error}") from error
    finally:
        wandb.teardown()


def quiet(**given: Any) -> Any:
    """Settings of W&B that print nothing and record nothing of the machine or the code."""
    import wandb

    defaults = {"x_disable_stats": True}
    return wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, **{**defaults, **given}
    )


def open_png(data: bytes) -> Any:
    """A picture as W&B takes it."""
    from PIL import Image

    return Image.open(io.BytesIO(data))
