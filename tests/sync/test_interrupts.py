"""An interrupt (Ctrl-C) anywhere in a call is survived: the next versions come as if it had not."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import time

import pytest

from sync import scheme as scheme_module
from tests.sync.support import bits, policy
from tests.sync.test_same_process import in_one_thread
from tests.sync.test_scheme import EVERY, sender

PACKAGE = scheme_module.__file__.removesuffix("scheme.py")


# The interpreter looks for signals when a function begins, when a call ends, and in loops; never
# between taking a lock by `with` and the first instruction under it.
LOOKS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")


class Interrupt:
    """Raises KeyboardInterrupt the `number`th time that the package could be interrupted here."""

    def __init__(self, number):
        self.left, self.fired = number, False

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, kind, *rest):
        sys.settrace(None)
        return kind is KeyboardInterrupt and self.fired

    def _call(self, frame, event, argument):
        if self.fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = [""]

        def instruction(frame, event, argument):
            if event == "opcode" and not self.fired:
                self.left -= before[0] in LOOKS
                before[0] = opcodes(frame.f_code)[frame.f_lasti]
                if self.left == 0:
                    self.fired = True
                    raise KeyboardInterrupt
            return instruction

        return instruction


@functools.cache
def opcodes(code):
    return {each.offset: each.opname for each in dis.get_instructions(code)}


def nothing(scheme, receiver, model):
    """Nothing comes before a send."""


def send(scheme, receiver, model):
    scheme.send_async(model)


def receive(scheme, receiver, model):
    receiver.receive()


def collect(scheme, receiver, model):
    scheme.acknowledged  # noqa: B018


def send_and_receive(scheme, receiver, model):
    send(scheme, receiver, model)
    receive(scheme, receiver, model)


@pytest.mark.parametrize(
    ("before", "call"), [(nothing, send), (send, receive), (send_and_receive, collect)]
)
@pytest.mark.parametrize("kind", EVERY)
def test_an_interrupt_at_any_instruction_cuts_nobody_off(kind, before, call):
    with in_one_thread(scheme := sender(kind)) as (receiver,):
        for number in itertools.count(1):
            before(scheme, receiver, model := policy(number))
            with Interrupt(number) as interrupt:
                call(scheme, receiver, model)
            # The next version comes, is acknowledged, and is what the worker has.
            scheme.send_async(policy(-number))
            # A feeder thread may be at it, too; it is given time, but never more than it needs.
            deadline = time.monotonic() + 5.0
            while receiver.version != scheme.version and time.monotonic() < deadline:
                receive(scheme, receiver, model)
                collect(scheme, receiver, model)
            assert bits(receiver.model) == bits(policy(-number)), f"instruction {number}"
            scheme.wait_async(5.0)
            if not interrupt.fired:
                return
