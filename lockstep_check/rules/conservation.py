"""What is made is trained on, dropped or in flight, each exactly once.

TRL 7274: one dropped group pins the position from which a resumed run goes on, and others are
trained on again. miles 2589: groups whose requests were aborted at a version bump were lost.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Limit, Rule, Story, TracedSample

KEPT_UPDATES = 100_000


class Conservation(Rule):
    """Follows each sample, and compares the program's own counts with the events."""

    name = "made = trained + dropped + in flight"
    needs = "acts, and trains or drops"
    recorded = frozenset({"act"})
    advice = (
        "Give each sample a number, count it once when it is taken, and say with a drop what is "
        "given up and why."
    )

    def __init__(self, limit: Limit):
        super().__init__(limit)
        self._in_flight = 0
        self._delivered = {0: 0}  # by update, as counted
        self._before: int | None = 0  # what counts have beyond the takes of this trace, if known

    def on_act(self, event: Event, story: Story) -> str | None:
        return story.trouble or None

    def on_enqueue(self, event: Event, story: Story) -> str | None:
        return story.trouble or None

    def on_take(self, event: Event, story: Story) -> str | None:
        return story.trouble or None

    def on_drop(self, event: Event, story: Story) -> str | None:
        self.judged += 1
        return story.trouble or None

    def on_train(self, event: Event, story: Story) -> str | None:
        self.judged += 1
        sample = story.sample
        if sample is not None and sample.update is not None and sample.update != event["update"]:
            return f"{sample} is trained on in update {event['update']} and in {sample.update}"
        return story.trouble or None

    def on_counts(self, event: Event, story: Story) -> str | None:
        self.judged += 1
        collected, in_flight = event["collected"], event["in_flight"]
        delivered, dropped = event["delivered"], event["dropped"]
        if collected != delivered + dropped + in_flight:
            return (
                f"{collected} {story.unit} were collected, and {delivered} delivered + {dropped} "
                f"dropped + {in_flight} in flight are {delivered + dropped + in_flight}"
            )
        if self._before is None:
            self._before = delivered - story.delivered
        taken = story.delivered + self._before
        if delivered != taken:
            return f"{delivered} {story.unit} count as delivered, and {taken} were taken"
        self._delivered[story.update] = delivered
        if len(self._delivered) > KEPT_UPDATES:
            del self._delivered[next(iter(self._delivered))]
        return None

    def on_resume(self, event: Event, story: Story) -> None:
        """The counts are again those of the checkpoint, which may be older than the trace."""
        counted = self._delivered.get(event["update"])
        self._before = None if counted is None else counted - story.delivered

    def on_closed(self, sample: TracedSample, story: Story) -> str | None:
        if sample.update is not None and sample.dropped >= sample.made > 0:
            return f"{sample} is trained on in update {sample.update}, and was dropped as a whole"
        return None

    def on_end(self, story: Story) -> str | None:
        self._in_flight = sum(sample.left for sample in story.in_flight.values())
        return None

    @property
    def note(self) -> str:
        return f"{self._in_flight} in flight at the end" if self._in_flight else ""
