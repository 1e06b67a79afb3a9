"""The stamp of a sample is the version that acted; of several, the oldest.

verl 7568: "rollouts do not record which policy version generated them". verl 7569: the last version
of a trajectory was used where the oldest counts. TorchRL 3759: batches had the version before.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Rule, Story


class Stamp(Rule):
    """Compares `version` of enqueue, take and train with the acts of the sample."""

    name = "the stamp is the version that acted"
    needs = "a version in its enqueues, takes or trains"
    advice = (
        "Stamp each frame or token with the version inside the weights that computed it, and judge "
        "a sample by its oldest stamp."
    )

    def on_enqueue(self, event: Event, story: Story) -> str | None:
        sample, stamp = story.sample, event.get("version")
        if sample is None or stamp is None or sample.oldest is None:
            return None
        self.judged += 1
        if stamp == sample.oldest:
            return None
        acted = (
            f"version {sample.oldest}"
            if sample.oldest == sample.newest
            else f"versions {sample.oldest} to {sample.newest}"
        )
        return f"{sample} is stamped with version {stamp}, and {acted} acted"

    on_take = on_enqueue
    on_train = on_enqueue
