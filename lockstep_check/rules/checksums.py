"""One version has one checksum, on every worker.

vLLM 52689 and 51350, miles' audit: a checksum of every engine after every sync.
SkyRL 1737: every sync of a mixture of experts in several parts was corrupted, silently.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Rule, Story


class Checksums(Rule):
    """Compares the checksum of each apply with that of the publish."""

    name = "one version, one checksum"
    needs = "checksums in its publishes and applies"
    advice = "Compare the bytes that arrived with those that were sent, before they are used."

    def on_applied(self, event: Event, story: Story) -> str | None:
        published = story.versions.get(event["version"])
        checksum = event.get("checksum")
        if published is None or published.checksum is None or checksum is None:
            return None
        self.judged += 1
        if checksum == published.checksum:
            return None
        return (
            f"worker {event['worker']} has version {event['version']} with checksum {checksum}, "
            f"and it was published with {published.checksum}"
        )
