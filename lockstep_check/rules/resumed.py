"""A resume loses nothing in silence, and its ages go on.

verl 4199 and OpenRLHF 1322: samples in flight are lost on resume, and "silently skips generated
prompts that had not yet been trained". AReaL 1345: ages after a recovery.
"""

from __future__ import annotations

from lockstep_check.rules.rule import Event, Rule, Story


class Resumed(Rule):
    """Compares what was in flight at a resume with what the resume says is given up."""

    name = "a resume loses nothing in silence"
    needs = "a resume"
    advice = "Keep what is in flight in the checkpoint, or say how much is given up."

    def on_resume(self, event: Event, story: Story) -> str | None:
        self.judged += 1
        dropped = event.get("dropped") or 0
        if dropped == story.lost:
            return None
        return (
            f"{story.lost} {story.unit} were in flight at the resume from update "
            f"{event['update']}, and {dropped} count as dropped"
        )
