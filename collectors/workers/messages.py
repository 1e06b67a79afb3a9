"""What a worker sends to the trainer, in the order in which it may."""

from __future__ import annotations

from typing import Any, NamedTuple

from collectors.rollout.frame_block import FrameLayout


class Hello(NamedTuple):
    """The worker has created its policy and environments."""

    num_envs: int
    environment: str


class Met(NamedTuple):
    """The worker uses the first version of every model."""


class Blocks(NamedTuple):
    """The layout of the worker's blocks, which are shared memory now."""

    layout: FrameLayout


class Filled(NamedTuple):
    """A batch is finished.

    serial: the number of its order. block: the number of the worker's block that it is in.
    steps: the rows of the block that are filled. num_frames: without those that are no frames.
    made_s: how long it took.
    ended_ns: when it was finished, by the `time.perf_counter_ns()` of this machine; 0 if it was
        made on another one.
    """

    serial: int
    block: int
    steps: int
    num_frames: int
    made_s: float
    ended_ns: int


class CallResult(NamedTuple):
    """What a control call returned, pickled; or, if it raised, the error's text."""

    number: int
    ok: bool
    value: Any


class Failed(NamedTuple):
    """The worker raised an error or, with `died`, is gone. Messages add the text to its name."""

    text: str
    died: bool = False


Event = Hello | Met | Filled | CallResult | Failed
