"""No version is used before its publish is complete.

vLLM 49040: a version counted before its weights had all arrived. NeMo-RL 3839: a refit raced the
forward pass. TRL 5937: "Version bumps without transfer".
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Rule, Story


class PublishedFirst(Rule):
    """Looks for a publish above each act and each apply."""

    name = "published before it is used"
    needs = "publishes"
    recorded = frozenset({"publish"})
    advice = "Raise the version after the last byte has arrived, never before."

    def on_act(self, event: Event, story: Story) -> str | None:
        return self._judge(event, story, "acts with")

    def on_applied(self, event: Event, story: Story) -> str | None:
        return self._judge(event, story, "applies")

    def _judge(self, event: Event, story: Story, what: str) -> str | None:
        version = event["version"]
        if story.newest is None and not self.judged:
            return None  # a program without publishes in its trace
        self.judged += 1
        if version in story.versions:
            return None
        if story.newest is not None and version < next(iter(story.versions)):
            return None  # older than all that are remembered
        return f"worker {event['worker']} {what} version {version}, which is not published yet"
