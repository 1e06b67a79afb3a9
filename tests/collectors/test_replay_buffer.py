"""A ring of frames: what is in it, what is sampled, and what it says to those who wait."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from collectors import ReplayBuffer
from tests.collectors.support import same_bits


def frames(first, count):
    """Frames numbered from `first` on, with something nested that says the same."""
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {"number": numbers, "next": {"twice": torch.stack([numbers, numbers]).T}},
        batch_size=[count],
    )


def contents(buffer):
    return buffer[:]["number"].tolist() if len(buffer) else []


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 12), counts=st.lists(st.integers(0, 30), max_size=8))
def test_a_buffer_holds_the_newest_frames_in_their_order(capacity, counts):
    buffer, written = ReplayBuffer(capacity), 0
    for count in counts:
        buffer.extend(frames(written, count))
        written += count
        assert buffer.written == written
        assert len(buffer) == min(written, capacity)
        assert contents(buffer) == list(range(written))[-capacity:]


@settings(max_examples=40, deadline=None)
@given(capacity=st.integers(1, 9), counts=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_saved_buffer_goes_on_as_the_first_would_have(capacity, counts):
    first, written = ReplayBuffer(capacity, seed=3), 0
    for count in counts:
        first.extend(frames(written, count))
        written += count
    first.sample(5)
    second = ReplayBuffer(capacity)
    second.load_state_dict(first.state_dict())
    for buffer in (first, second):
        buffer.extend(frames(written, 2))
    assert contents(first) == contents(second)
    assert same_bits(first.sample(7), second.sample(7))


def test_a_saved_buffer_has_its_keys_again_whatever_they_are_called():
    first, second = ReplayBuffer(4), ReplayBuffer(4)
    batch = TensorDict({"arm/pos": torch.ones(2), ("next", "arm/pos"): torch.ones(2)}, [2])
    first.extend(batch)
    second.load_state_dict(first.state_dict())
    second.extend(batch)
    assert same_bits(second[:], torch.cat([batch, batch]))


def test_the_places_that_are_returned_hold_the_frames():
    buffer = ReplayBuffer(5)
    buffer.extend(frames(0, 3))
    assert buffer.extend(frames(3, 4)).tolist() == [3, 4, 0, 1]
    assert buffer.extend(frames(7, 8)).tolist() == [0, 1, 2, 3, 4]
    assert contents(buffer) == [10, 11, 12, 13, 14]
    places = buffer.extend(frames(15, 3))
    assert buffer.sample(places=places)["number"].tolist() == [15, 16, 17]
    assert buffer.sample(places=torch.arange(13, 18) % 5)["number"].tolist() == [*range(13, 18)]
    with pytest.raises(IndexError, match="places: expected 0 to 4"):
        buffer.sample(places=torch.tensor([2, 5]))
    with pytest.raises(ValueError, match="a batch_size or places, not both"):
        buffer.sample(2, places=places)


def test_samples_are_whole_frames_drawn_evenly():
    buffer = ReplayBuffer(10, batch_size=2000, seed=0)
    buffer.extend(frames(0, 25))
    sample = buffer.sample()
    assert torch.equal(sample["next", "twice"][:, 1], sample["number"])
    _, counts = sample["number"].unique(return_counts=True)
    assert len(counts) == 10
    assert counts.min() > 120
    sample["number"].zero_()
    assert contents(buffer) == list(range(15, 25))


def test_a_seed_makes_samples_repeatable_and_leaves_the_global_stream_alone():
    drawn = []
    for _ in range(2):
        buffer = ReplayBuffer(50, seed=1)
        buffer.extend(frames(0, 50))
        torch.manual_seed(0)
        drawn.append(buffer.sample(20))
        after = torch.rand(1)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(1), after)
    assert same_bits(*drawn)


def test_environments_follow_each_other_and_padding_is_left_out():
    batch = frames(0, 12).reshape(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    batch["collector", "mask"] = mask
    buffer = ReplayBuffer(100)
    buffer.extend(batch)
    assert contents(buffer) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]


def test_frames_that_do_not_fit_are_refused_and_change_nothing():
    buffer = ReplayBuffer(10)
    buffer.extend(frames(0, 4))
    surplus = frames(4, 2)
    surplus["odd"] = torch.zeros(2)
    with pytest.raises(TypeError, match="takes frames as a TensorDict, got list"):
        buffer.extend([])
    with pytest.raises(ValueError, match="differ in odd"):
        buffer.extend(surplus)
    misshapen = frames(4, 2)
    misshapen["number"] = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'number' is torch.int64 \[3\], in the buffer"):
        buffer.extend(misshapen)
    assert contents(buffer) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": True}, "capacity=True"),
        ({"capacity": 5, "batch_size": 0}, "batch_size=0"),
    ],
)
def test_sizes_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(**arguments)


@pytest.mark.parametrize("number", [2.5, "2", True])
def test_frames_come_in_whole_numbers(number):
    for name in ("capacity", "batch_size"):
        with pytest.raises(ValueError, match=f"^{name}={number!r}: "):
            ReplayBuffer(**{"capacity": 5, name: number})
    buffer = ReplayBuffer(5)
    buffer.extend(frames(0, 5))
    with pytest.raises(ValueError, match=f"^batch_size={number!r}: "):
        buffer.sample(number)
    with pytest.raises(ValueError, match=r"^batch_size=-1: "):
        buffer.sample(-1)


def test_sampling_says_what_it_lacks():
    buffer = ReplayBuffer(5)
    with pytest.raises(ValueError, match="needs a batch_size"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(2)
    with pytest.raises(ValueError, match="has capacity=6, but the saved one 5"):
        ReplayBuffer(6).load_state_dict(buffer.state_dict())


def test_waiting_ends_with_the_frames_with_the_time_or_with_the_failure():
    buffer = ReplayBuffer(5)
    buffer.extend(frames(0, 3))
    assert buffer.wait(3) == 3
    assert buffer.wait(4, timeout=0.01) == 3
    thread = threading.Thread(target=buffer.extend, args=(frames(3, 2),))
    thread.start()
    assert buffer.wait(5, timeout=30) == 5
    thread.join()
    buffer.fail(OSError("no more"))
    for ask in (lambda: buffer.wait(6), lambda: buffer.sample(1)):
        with pytest.raises(OSError, match="no more"):
            ask()


def test_waiting_ends_with_the_last_collector():
    buffer = ReplayBuffer(5)
    buffer.end()  # of one that has not begun
    buffer.begin()
    buffer.begin()
    buffer.end()
    timer = threading.Timer(0.1, buffer.extend, (frames(0, 1),))
    timer.start()
    assert buffer.wait(1, timeout=30) == 1  # the other one goes on
    timer.join()
    buffer.end()
    waiting = threading.Thread(target=buffer.wait, args=(2,), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


def test_collectors_wait_for_room_until_the_frames_that_are_kept_have_moved_on():
    buffer = ReplayBuffer(5)
    buffer.extend(frames(0, 4))
    assert buffer.await_room(0)  # nothing is kept
    buffer.keep_from(0, 2)
    assert not buffer.await_room(0)
    buffer.keep_from(1, 2)
    assert buffer.await_room(0)


def test_no_sample_holds_a_frame_that_is_being_written():
    buffer, done = ReplayBuffer(64), threading.Event()
    buffer.extend(frames(0, 64))

    def write():
        for first in range(64, 20_000, 48):
            buffer.extend(frames(first, 48))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        sample = buffer.sample(32)
        assert torch.equal(sample["next", "twice"][:, 0], sample["number"])
        assert torch.equal(sample["next", "twice"][:, 1], sample["number"])
        assert sample["number"].max() - sample["number"].min() < 64
    thread.join()
