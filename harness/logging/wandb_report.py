"""A report as a W&B run of its own, in the group of the sweep that it is about."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def upload(
    page: Path,
    *,
    mode: str,
    project: str,
    name: str,
    group: str | None,
    numbers: Mapping[str, float],
    figures: Mapping[str, bytes],
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> None:
    """Write the run beside the page, and online to the server; `RuntimeError` if that cannot be.

    numbers: for the run's summary. figures: PNG. columns, rows: of the table of results.
    """
    import wandb

    try:
        with wandb.init(
            dir=str(page.parent),
            mode=mode,  # type: ignore[arg-type]
            project=project,
            name=name,
            group=group,
            job_type="report",
            settings=quiet(),
        ) as run:
            pictures = {
                f"figures/{slug}": wandb.Image(open_png(png)) for slug, png in figures.items()
            }
            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            run.log({"results": table, **pictures})
            run.summary.update(dict(numbers))
            run.save(str(page), base_path=str(page.parent), policy="now")
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
