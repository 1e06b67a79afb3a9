"""The denominator of the ratio is the policy that acted.

miles 1829, SkyRL 1315: a ratio to a policy that never acted. TRL's GRPOTrainer with `rollout_func`
takes log-probabilities and, without vLLM, uses them for nothing. verl 7196: a bypass hides it.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Rule, Story, TracedSample

TOLERANCE = 1e-4  # relative: the same numbers, added in another order


class Denominator(Rule):
    """Compares the sums of log-probabilities of acts and of each epoch's trains."""

    name = "the ratio's denominator acted"
    needs = "log-probabilities in its acts and trains"
    advice = "Train with the log-probabilities that the worker sent, or name the other objective."

    def on_closed(self, sample: TracedSample, story: Story) -> str | None:
        acted = sample.logprob
        if acted is None or sample.dropped:
            return None
        for epoch, denominator in sorted(sample.denominators.items()):
            if denominator is None:
                continue
            self.judged += 1
            if abs(denominator - acted) > TOLERANCE * max(1.0, abs(acted)):
                return (
                    f"{sample} acted with a log-probability of {acted:.6g}, and epoch {epoch} of "
                    f"update {sample.update} divides by one of {denominator:.6g}"
                )
        return None
