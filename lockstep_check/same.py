"""Lag zero equals synchronous: two traces with the same training.

SkyRL 579 has "async(0) equals sync" unticked on its list.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lockstep_check.events import read
from lockstep_check.story import Story

Update = dict[str, Any]


def first_difference(one: Path, other: Path) -> tuple[int, str]:
    """The updates that both traces share, and how they differ after these; empty if they do not.

    An update is the same if it trains as many frames or tokens of the same versions, and the
    publish that follows has the same checksum.
    """
    count = 0
    for mine, yours in zip_longest(_updates(one), _updates(other)):
        if mine is None or yours is None:
            longer, shorter = (one, other) if yours is None else (other, one)
            return count, f"{shorter} ends after {count} updates, and {longer} goes on"
        for name, value in mine.items():
            if value != yours[name] and value is not None and yours[name] is not None:
                return count, (
                    f"update {count + 1}: {name} is {value} in {one} and {yours[name]} in {other}"
                )
        count += 1
    return count, ""


def _updates(path: Path) -> Iterator[Update]:
    story, update = Story(), None
    for _, event in read(path):
        story.take_in(event)
        kind = event["event"]
        if kind == "train" and (event.get("epoch") or 0) == 0 and story.sample is not None:
            if update is None or update["number"] != event["update"]:
                if update is not None:
                    yield _finished(update)
                update = {"number": event["update"], "lengths": 0, "versions": set(), "sum": None}
            length = event.get("length")
            update["lengths"] += story.sample.made if length is None else length
            update["versions"].update(story.sample.spans)
        elif kind == "publish" and update is not None:
            update["sum"] = event.get("checksum")
    if update is not None:
        yield _finished(update)


def _finished(update: Update) -> Update:
    return {
        "the length of what is trained on": update["lengths"],
        "the set of versions that acted": sorted(update["versions"], key=str),
        "the checksum of the weights": update["sum"],
    }
