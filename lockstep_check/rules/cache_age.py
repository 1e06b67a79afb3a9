"""What a call reads from a cache was computed by the version that acts.

prime-rl 1650: the mismatch rose, since the prefix cache was never reset. NeMo-RL 4018: caches 17
refits old. SkyRL 1836, torchtitan 4761: the version as the cache's salt.
"""

from __future__ import annotations

from lockstep_check.ages import age
from lockstep_check.rules.rule import Event, Limit, Rule, Story


class CacheAge(Rule):
    """Compares `cache` of each act with its version."""

    name = "the cache is as new as the weights"
    needs = "the version of the cache in its acts"
    advice = "Reset the cache when weights change, or make the version part of its keys."

    def __init__(self, limit: Limit):
        super().__init__(limit)
        self._worst = 0

    def on_act(self, event: Event, story: Story) -> str | None:
        cache = event.get("cache")
        if cache is None:
            return None
        self.judged += 1
        found = age(cache, event["version"])
        self._worst = max(self._worst, found)
        if not found:
            return None
        return (
            f"worker {event['worker']} acts with version {event['version']} on a cache of "
            f"version {cache}"
        )

    @property
    def note(self) -> str:
        return f"oldest cache: {self._worst} versions" if self._worst else ""
