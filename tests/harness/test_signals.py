from __future__ import annotations

import os
import signal

import pytest

from harness.run import signals
from harness.run.signals import WRITTEN, Interrupted, Interruption


def test_a_signal_raises_at_once_where_nothing_is_held():
    with Interruption(), pytest.raises(Interrupted) as ended:
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.exit_status == 130
    assert not ended.value.whole


def test_the_first_signal_waits_for_a_whole_state():
    reached = []

    def loop(interruption: Interruption) -> None:
        with interruption.whole():
            interruption.check()
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end of the step")
            interruption.check()

    with Interruption() as interruption, pytest.raises(Interrupted) as ended:
        loop(interruption)
    assert reached
    assert ended.value.exit_status == 143
    assert ended.value.whole


def test_a_second_signal_does_not_wait():
    def loop(interruption: Interruption) -> None:
        with interruption.whole():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it waited")

    with Interruption() as interruption, pytest.raises(Interrupted) as ended:
        loop(interruption)
    assert not ended.value.whole


def test_a_whole_state_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(signals, "GRACE_S", 0.01)

    def loop(interruption: Interruption) -> None:
        with interruption.whole():
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                signal.pause()

    with Interruption() as interruption, pytest.raises(Interrupted) as ended:
        loop(interruption)
    assert ended.value.exit_status == 130
    assert not ended.value.whole


def test_afterwards_the_signals_are_as_before():
    before = signal.getsignal(signal.SIGINT)
    with Interruption():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_while_something_is_written_signals_wait_until_the_program_is_somewhere_else():
    reached = []

    def write(interruption: Interruption) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end of the file")
        with interruption.anywhere():
            pytest.fail("it went on")

    with Interruption(WRITTEN) as interruption, pytest.raises(Interrupted) as ended:
        write(interruption)
    assert reached
    assert ended.value.exit_status == 130


def test_a_signal_that_a_destructor_swallows_is_not_lost():
    def swallow() -> None:
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)

    with Interruption() as interruption:
        swallow()
        with pytest.raises(Interrupted):
            interruption.check()


def test_once_all_is_over_signals_do_nothing():
    with Interruption(WRITTEN) as interruption:
        interruption.over()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def test_where_nothing_changes_the_state_is_whole_whenever_a_signal_raises():
    with Interruption() as interruption, interruption.whole():
        os.kill(os.getpid(), signal.SIGINT)
        with interruption.unchanged(), pytest.raises(Interrupted) as ended:
            os.kill(os.getpid(), signal.SIGINT)
        assert ended.value.whole
        with pytest.raises(Interrupted) as ended:
            os.kill(os.getpid(), signal.SIGINT)
        assert not ended.value.whole
