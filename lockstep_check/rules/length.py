"""What is trained on is as long as what was made.

slime 2207: after the resume of a partial rollout the mask did not fit its tokens.
AReaL 1736: versions were aligned with tokens, and masks with the tokens that follow.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Rule, Story, TracedSample


class Length(Rule):
    """Adds up the lengths of each sample: in each epoch, what is trained on and what is dropped."""

    name = "trained as long as made"
    needs = "a length in its trains, takes or enqueues"
    recorded = frozenset({"act"})
    advice = "Carry the length beside the data, and compare it where parts are joined."

    def on_enqueue(self, event: Event, story: Story) -> str | None:
        sample, length = story.sample, event.get("length")
        if sample is None or length is None or not sample.made:
            return None
        self.judged += 1
        if length == sample.made:
            return None
        return f"{sample} is enqueued or taken with {length} {story.unit}, and {sample.made} acted"

    on_take = on_enqueue

    def on_train(self, event: Event, story: Story) -> str | None:
        if event.get("length") is not None and story.sample is not None and story.sample.made:
            self.judged += 1
        return None

    def on_closed(self, sample: TracedSample, story: Story) -> str | None:
        for epoch, length in sorted(sample.trained.items()):
            if sample.made and length + sample.dropped != sample.made:
                dropped = f", {sample.dropped} dropped" if sample.dropped else ""
                return (
                    f"{sample} has {sample.made} {story.unit}, and epoch {epoch} of update "
                    f"{sample.update} trains on {length}{dropped}"
                )
        return None
