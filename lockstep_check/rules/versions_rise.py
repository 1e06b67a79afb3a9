"""A worker's versions never go back.

vLLM 52689: "a silent weight-update failure turns into off-policy training".
SkyRL 1836, prime-rl 2270: state of earlier versions was used again after an update.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Limit, Rule, Story


class VersionsRise(Rule):
    """Compares the versions of each worker's applies, and those of the acts of each sample."""

    name = "versions never go back"
    needs = "acts, or versions that workers applied"
    recorded = frozenset({"publish"})
    advice = "Refuse a version that is not newer than the one in use, and say so."

    def __init__(self, limit: Limit):
        super().__init__(limit)
        self._applied: dict[int, int] = {}
        self._published: int | None = None

    def on_publish(self, event: Event, story: Story) -> str | None:
        version, before = event["version"], self._published
        self._published = version
        self.judged += 1
        if before is not None and version <= before:
            return f"version {version} is published after version {before}"
        return None

    def on_applied(self, event: Event, story: Story) -> str | None:
        worker, version = event["worker"], event["version"]
        before = self._applied.get(worker)
        self._applied[worker] = version
        self.judged += 1
        if before is not None and version < before:
            return f"worker {worker} goes back from version {before} to {version}"
        return None

    def on_act(self, event: Event, story: Story) -> str | None:
        sample = story.sample
        self.judged += 1
        if sample is not None and sample.newest is not None and event["version"] < sample.newest:
            return f"{sample} goes back from version {sample.newest} to {event['version']}"
        return None

    def on_resume(self, event: Event, story: Story) -> str | None:
        self._applied.clear()
        self._published = None
        return None
