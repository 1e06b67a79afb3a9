"""How old weights are. Nothing else subtracts versions, updates or gradient steps.

Some weights act in a frame, and later ones are trained on it. The age of the frame is how far the
learner has come in between, in one of three units:

    versions   weights that were published
    updates    batches that the learner learned from
    steps      gradient steps, of which an update has one or many

It grows from one moment of the frame's life to the next:

    acted ------ made ------- taken --------------- used -------- trained
          collect      wait         publish               train

    acted    the weights that computed the action
    made     the newest published weights when the frame's batch was finished
    taken    the newest published weights when the learner takes the batch
    used     the learner's own weights before the update that uses the frame
    trained  the weights of the gradient step at hand, one after another of the update

Arguments are whole numbers, or arrays and tensors of them, in one unit.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def age(acted: Any, current: Any) -> Any:
    """From the weights that acted to those that are current."""
    return current - acted


def of_age(age: Any, current: Any) -> Any:
    """The weights that have this age when others are current."""
    return current - age


def is_within(acted: Any, current: Any, most: Any) -> Any:
    """Whether the age is at most `most`."""
    return age(acted, current) <= most


class Parts(NamedTuple):
    """The age of a frame at its use, by where it arose."""

    collect: Any
    wait: Any
    publish: Any

    @property
    def queue(self) -> Any:
        """Between the weights that acted and the newest published ones."""
        return self.collect + self.wait

    @property
    def total(self) -> Any:
        """The age at the start of the update."""
        return self.queue + self.publish


def parts(acted: Any, made: Any, taken: Any, used: Any) -> Parts:
    """The parts of an age, from the weights of each moment."""
    return Parts(age(acted, made), age(made, taken), age(taken, used))


def in_training(steps: float) -> float:
    """How many gradient steps a frame ages on average inside an update of so many.

    The first step uses the frame at the age that it has before the update, the last one when it is
    steps - 1 older.
    """
    return (steps - 1) / 2
