"""The notice board: each word has one writer, and means what the protocol says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sync.board import ABSENT, ERROR_BYTES, EVENTS, FREE, GREETED, LEFT, Board, Event, Word
from sync.memory import wait_for
from tests.sync.support import Handed, Worker


def word(version, slot):
    """A version and a slot in one 64-bit word, as the sender announces them."""
    return (version + 1) << 16 | slot


@given(version=st.integers(0, (1 << 46) - 1), slot=st.integers(0, 0xFFFF))
def test_version_and_slot_come_out_of_one_word_and_no_word_is_zero(version, slot):
    assert Word.unpack(word(version, slot)) == (version, slot)
    assert 0 < word(version, slot) < 1 << 63


def test_a_new_board_has_nothing_to_say():
    board = Board(2)
    for row in board.rows.values():
        assert (row.latest, row.state, row.pid, row.event_count, row.error_count) == (0,) * 5
        assert row.held() == {FREE}
        assert row.pin(0) is None
    assert not board.closed


def test_a_worker_pins_what_is_announced_until_it_lets_go():
    row = Board(1).rows[0]
    row.announce(word(0, 4))
    assert row.pin(0) == (word(0, 4), 0)
    assert row.held() == {4, FREE}
    row.announce(word(1, 2))
    assert row.held() == {2, 4, FREE}
    assert row.pin(1) == (word(1, 2), 0)
    row.unpin(0)
    assert row.held() == {2, FREE}
    row.unpin(1)
    assert row.held() == {2, FREE}  # the newest, which may be taken yet


def test_a_pin_on_a_slot_that_is_the_newest_no_more_is_taken_again():
    row = Board(1).rows[0]
    row.announce(word(0, 1))
    moves = iter([word(1, 2), word(2, 3)])

    class Meanwhile:
        """What stands between the pin and the second look: here, the sender is quick."""

        def __call__(self):
            if (moved := next(moves, None)) is not None:
                row.announce(moved)

    row.order = Meanwhile()
    assert row.pin(0) == (word(2, 3), 2)
    assert row.held() == {3, FREE}


def test_events_are_kept_in_order_and_in_a_ring():
    row = Board(1).rows[0]
    events = [Event(n, 10 * n, 10 * n + 1, 10 * n + 2, n % 3) for n in range(EVENTS + 5)]
    for event in events:
        row.done(event)
    assert row.event_count == EVENTS + 5
    kept = [row.event(number) for number in range(5, row.event_count)]
    assert kept == events[5:]


def test_of_a_long_traceback_the_end_is_kept():
    row = Board(1).rows[0]
    row.fail(0, "short")
    assert (row.error_count, row.error()) == (1, "short")
    row.fail(0, "ä" * ERROR_BYTES + "the end")
    assert row.error_count == 2
    assert row.error().endswith("ää" + "the end")


def test_who_greets_takes_the_row_over_from_whoever_had_it():
    board = Board(1)
    row = board.rows[0]
    row.announce(word(0, 1))
    row.pin(0)
    row.done(Event(0, 1, 2, 3, 0))
    row.idle(True)
    row.leave()
    assert (row.state, row.held()) == (LEFT, {1, FREE})
    row.pin(1)
    row.greet()
    assert (row.state, row.events_before, row.held()) == (GREETED, 1, {1, FREE})
    assert row.pid > 0
    row.wake()
    assert wait_for([board.bells[0].fd], 0) == []


def test_only_an_idle_worker_is_woken_by_its_own_bell():
    board = Board(2)
    first, second = board.rows.values()
    bells = [bell.fd for bell in board.bells.values()]
    first.wake()
    assert wait_for(bells, 0) == []
    first.idle(True)
    second.wake()
    assert wait_for(bells, 0) == []
    first.wake()
    assert wait_for(bells, 0) == bells[:1]


def rings(board):
    """Whether the sender's bell rings; it is silent afterwards."""
    ringing = wait_for([board.sender_bell.fd], 0) != []
    board.sender_bell.silence()
    return ringing


def event(version):
    return Event(version, 1, 2, 3, 0)


def test_a_worker_rings_the_sender_only_when_it_is_waited_for():
    board = Board(1)
    row = board.rows[0]
    for says in (row.greet, row.leave, lambda: row.fail(0, "x"), lambda: row.done(event(5))):
        says()
        assert not rings(board)
        row.expect(5)
        says()
        assert rings(board)
        row.expect(-1)
        says()
        assert not rings(board)


def test_of_all_workers_that_are_waited_for_the_last_rings():
    board = Board(4)
    for row in list(board.rows.values())[:3]:
        row.done(event(4))
        row.expect(5)
    board.rows[3].done(event(4))  # nobody waits for this one
    for row in list(board.rows.values())[:2]:
        row.done(event(5))
    assert not rings(board)
    board.rows[2].done(event(4))
    assert not rings(board)
    board.rows[2].done(event(6))
    assert rings(board)


def test_closing_wakes_everybody():
    board = Board(3)
    board.close()
    bells = [bell.fd for bell in board.bells.values()]
    assert board.closed
    assert wait_for(bells, 0) == bells


def test_rows_are_seen_by_another_process_and_do_not_touch_each_other():
    board = Board(2)

    def write(handed, model):
        handed.board.rows[1].greet()
        handed.board.rows[1].done(Event(7, 1, 2, 3, 4))
        handed.board.rows[1].fail(0, "x" * 2 * ERROR_BYTES)
        return handed.board.sender_pid, handed.board.rows[1].latest

    board.rows[1].announce(word(7, 3))
    with Worker(Handed(board=board), None) as worker:
        pid = worker.process.pid
        assert worker.do(write) == (board.sender_pid, word(7, 3))
    first, second = board.rows.values()
    assert (second.pid, second.event(0)) == (pid, Event(7, 1, 2, 3, 4))
    assert second.error() == "x" * ERROR_BYTES
    assert (first.state, first.event_count, first.error_count) == (ABSENT, 0, 0)


def test_one_workers_board_has_its_row_and_bell_and_no_other():
    board = Board(3)
    alone = board.for_worker(1)
    assert (list(alone.rows), list(alone.bells)) == ([1], [1])
    board.rows[1].announce(word(4, 2))
    board.rows[1].expect(4)
    assert alone.rows[1].latest == word(4, 2)
    alone.rows[1].done(event(4))
    assert rings(board)
    assert board.rows[1].event_count == 1
