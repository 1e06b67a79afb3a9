"""The age that a program reports is the age at use.

TRL's AsyncGRPOTrainer reports 0 for samples that are one version old: accelerate pulls a batch
ahead, and the age is taken when a sample is pulled. AReaL 1736: reported ages were off by one
publish.
"""

from __future__ import annotations

from lockstep_check.ages import age
from lockstep_check.rules.rule import Event, Rule, Story


class ReportedAge(Rule):
    """Compares `age` of each train with the versions; in versions, the unit of most programs."""

    name = "the reported age is the age at use"
    needs = "an age in its trains, in versions"
    advice = "Take the age from the weights that are being trained, at the moment of the training."

    def on_train(self, event: Event, story: Story) -> str | None:
        sample, reported = story.sample, event.get("age")
        if sample is None or sample.oldest is None or reported is None or story.newest is None:
            return None
        self.judged += 1
        true = age(sample.oldest, story.newest)
        if reported == true:
            return None
        return f"{sample} is {true} versions old at its use, and the program reports {reported}"
