"""The age of what is trained on stays within the limit, also after a resume.

prime-rl 2812 and 3313: a limit that counts only what is in flight lets a sample age in the queue.
AReaL 1388: after a recovery "staleness would continue to rise way beyond" the limit.
TRL's AsyncGRPOTrainer: the age is taken when a sample is pulled, a batch before it is used.
"""

from __future__ import annotations

from lockstep_check.ages import age
from lockstep_check.rules.rule import Event, Limit, Rule, Story


class AgeLimit(Rule):
    """How old the oldest weights behind a sample are when it is made, taken or used."""

    name = "age within the limit"
    needs = "the version of each act, and publishes and trains with the limit's unit"
    advice = (
        "Judge the age when the sample is trained on, not when it is admitted or pulled, by its "
        "oldest version; and count anew after a resume."
    )

    def __init__(self, limit: Limit):
        super().__init__(limit)
        self.worst: int | None = None
        self.beyond = 0  # events

    def on_enqueue(self, event: Event, story: Story) -> str | None:
        newest = event.get("newest")
        return self._judge(event, story, newest) if self.limit.at == "made" else None

    def on_take(self, event: Event, story: Story) -> str | None:
        return self._judge(event, story) if self.limit.at == "taken" else None

    def on_train(self, event: Event, story: Story) -> str | None:
        return self._judge(event, story) if self.limit.at == "use" else None

    def _judge(self, event: Event, story: Story, newest: int | None = None) -> str | None:
        sample = story.sample
        if sample is None or sample.oldest is None:
            return None
        acted = _moment(story, sample.oldest, self.limit.unit)
        current = _moment(story, newest, self.limit.unit) if newest is not None else None
        if current is None:
            current = _now(event, story, self.limit)
        if acted is None or current is None:
            return None
        self.judged += 1
        found = age(acted, current)
        self.worst = found if self.worst is None else max(self.worst, found)
        if self.limit.most is None or found <= self.limit.most:
            return None
        self.beyond += 1
        return (
            f"{sample} is {found} {self.limit.unit} old at {_WHEN[self.limit.at]} "
            f"(version {sample.oldest} acted), and the limit is {self.limit.most}"
        )

    @property
    def note(self) -> str:
        if self.worst is None:
            return ""
        return f"oldest at {_WHEN[self.limit.at]}: {self.worst} {self.limit.unit}" + (
            "" if self.limit.most is not None else "; no limit was named (--limit)"
        )


_WHEN = {"made": "its end", "taken": "the take", "use": "its use"}


def _moment(story: Story, version: int | None, unit: str) -> int | None:
    """When these weights were the trainer's, in the limit's unit."""
    if version is None or unit == "versions":
        return version
    published = story.versions.get(version)
    if published is None:
        return None
    return published.update if unit == "updates" else published.step


def _now(event: Event, story: Story, limit: Limit) -> int | None:
    """The trainer's own weights at this event, in the limit's unit."""
    if event["event"] == "train":
        if limit.unit == "updates":
            return int(event["update"]) - 1
        if limit.unit == "steps" and event.get("step") is not None:
            return int(event["step"])
    return _moment(story, story.newest, limit.unit)
