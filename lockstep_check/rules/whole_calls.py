"""No policy call mixes two versions.

TorchRL's documentation of `atomic=False`: "a policy call can read a mix of two weight versions".
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Limit, Rule, Story
from lockstep_check.story import KEPT_CALLS


class WholeCalls(Rule):
    """Compares the versions of acts that have one call, among each worker's latest calls."""

    name = "one version a call"
    needs = "calls in its acts"
    advice = "Change weights between calls only: apply a version as a whole, or lock the call."

    def __init__(self, limit: Limit):
        super().__init__(limit)
        self._calls: dict[int, dict[int, int]] = {}  # version by call, by worker

    def on_act(self, event: Event, story: Story) -> str | None:
        call = event.get("call")
        if call is None:
            return None
        self.judged += 1
        calls = self._calls.setdefault(event["worker"], {})
        version = calls.setdefault(call, event["version"])
        if len(calls) > KEPT_CALLS:
            del calls[next(iter(calls))]
        if version == event["version"]:
            return None
        return (
            f"call {call} of worker {event['worker']} acts with version {version} and with "
            f"version {event['version']}"
        )
