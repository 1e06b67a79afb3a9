"""What a rule is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep_check.events import Event
from lockstep_check.story import Story, TracedSample


@dataclass(frozen=True)
class Limit:
    """The promise to check: no age beyond `most`."""

    most: int | None = None  # None: nothing was promised
    at: str = "use"  # made, taken or use
    unit: str = "updates"  # updates, steps or versions


class Rule:
    """Something that must hold. A rule has the methods of the events that it looks at.

    `on_act(event, story)`, say, is called after `story` has taken in the event; it returns what is
    wrong in a sentence, or None. `judged` counts what a rule could judge.
    """

    name: ClassVar[str]
    needs: ClassVar[str]  # without which it cannot judge
    advice: ClassVar[str]  # for a program that breaks it
    recorded: ClassVar[frozenset[str]] = frozenset()  # events that it cannot judge if inferred

    def __init__(self, limit: Limit):
        self.limit = limit
        self.judged = 0

    def on_closed(self, sample: TracedSample, story: Story) -> str | None:
        """A sample was trained on or dropped as a whole."""
        return None

    def on_end(self, story: Story) -> str | None:
        """The trace ends."""
        return None

    @property
    def note(self) -> str:
        """More to say beside the verdict."""
        return ""

    @property
    def is_asked(self) -> bool:
        """Whether the rule is to be checked at all."""
        return True


__all__ = ["Event", "Limit", "Rule", "Story", "TracedSample"]
