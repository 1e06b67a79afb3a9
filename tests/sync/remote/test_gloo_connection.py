"""Both ends of a connection in one process: everything arrives, whatever its size and speed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch.distributed import HashStore

from sync.remote.engine import PeerDied
from sync.remote.gloo_connection import _ALIVE, GlooConnection, _Frame, _spare, make_group
from sync.remote.gloo_engine import DistributedEngine
from tests.promises.probe import wait_until

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
SIZES = (0, 1, 18_000, 18_000, 18_000, 300_000, 300_000, 300_000, 70_000)


@pytest.fixture
def ends() -> Iterator[tuple[GlooConnection, GlooConnection]]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = pool.map(lambda rank: make_group(store, "test", rank, "127.0.0.1", 20.0), range(2))
    ends = [GlooConnection(g, 1 - r, f"rank {1 - r}", silence_s=20.0) for r, g in enumerate(groups)]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_many_connections_share_a_few_of_gloos_threads(ends):
    """Each of them wakes a hundred times a second, even if nothing happens."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = [
            list(pool.map(partial(make_pair_end, store, name), range(2)))
            for name in map(str, range(8))
        ]
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that one just ended
            names.append((task / "comm").read_text().strip())
    assert 1 <= names.count("gloo_tcp_loop") <= 4
    del groups


def make_pair_end(store, name, rank):
    return make_group(store, name, rank, "127.0.0.1", 20.0)


def one_more(tensor):
    return tensor + 1


def one_more_of_each(*tensors):
    return [tensor + 1 for tensor in tensors]


def total(block, start):
    return ended(lambda: start + int(block.sum(dtype=torch.int64)))


def ended(call):
    """A future of what the call returns or raises."""
    future = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - the caller must hear of it
        future.set_exception(error)
    return future


def block_of(size, seed):
    return torch.randint(
        0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_blocks_of_all_sizes_arrive_as_they_were_sent_in_both_directions_at_once(ends):
    def talk(end, seed):
        draw, sent = random.Random(seed), []
        for number in range(150):
            block = block_of(draw.choice(SIZES), number)
            if draw.random() < 0.5:
                wanted = number + int(block.sum(dtype=torch.int64))
                sent.append((end.call(total, block, number), wanted))
            else:
                others = [block, block_of(draw.choice(SIZES), number + 1)]
                sent.append((end.call(one_more_of_each, *others), [b + 1 for b in others]))
            if len(sent) > 8:
                check(*sent.pop(0))
        for future, wanted in sent:
            check(future, wanted)

    def check(future, wanted):
        found = future.result(WAIT_S)
        if isinstance(wanted, list):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        else:
            assert found == wanted

    with ThreadPoolExecutor(2) as pool:
        for talking in [pool.submit(talk, end, seed) for seed, end in enumerate(ends)]:
            talking.result(2 * WAIT_S)


def test_a_block_that_was_kept_stays_what_it_was(ends):
    for number in range(12):
        ends[0].call(keep, block_of(300_000, number)).result(WAIT_S)
    for number, block in enumerate(_kept):
        assert torch.equal(block, block_of(300_000, number))
    _kept.clear()


def test_memory_of_a_large_block_is_used_again_once_the_block_is_released(ends):
    blocks = [block_of((16 << 20) + 8, number).numpy() for number in range(3)]
    for block in blocks[:2]:
        ends[0].call(keep, block).result(WAIT_S)
    places = [block.ctypes.data for block in _kept]
    assert len(set(places)) == 2
    part = _kept[0][8:]  # refers to the memory of the whole block
    _kept.clear()
    # The thread that served the last call refers to the block until it ends.
    wait_until(lambda: any(len(region) == blocks[0].nbytes for region in _spare), WAIT_S)
    ends[0].call(keep, blocks[2]).result(WAIT_S)
    assert _kept[0].ctypes.data == places[1]
    assert (part == blocks[0][8:]).all()
    _kept.clear()


def keep(block):
    return ended(lambda: _kept.append(block))


_kept: list[torch.Tensor] = []


def test_a_call_without_an_answer_yet_delays_no_other_call(ends):
    slow = [ends[0].call(when_told, torch.zeros(8, dtype=torch.uint8)) for _ in range(3)]
    assert ends[0].call(one_more, torch.zeros(2)).result(WAIT_S).tolist() == [1.0, 1.0]
    assert ends[0].call(total, torch.ones(8, dtype=torch.uint8), 1).result(WAIT_S) == 9
    assert not any(future.done() for future in slow)
    for answer in _answers:
        answer.set_result("told")
    assert [future.result(WAIT_S) for future in slow] == ["told"] * 3


def when_told(block):
    _answers.append(Future())
    return _answers[-1]


_answers: list[Future] = []


@pytest.mark.parametrize("later", [False, True])
def test_what_a_call_raises_is_raised_here_with_its_traceback(ends, later):
    with pytest.raises(ZeroDivisionError) as raised:
        ends[0].call(divide, torch.zeros(4, dtype=torch.uint8), later).result(WAIT_S)
    assert "in rank 1" in raised.value.__notes__[0]
    assert "1 // int(block.sum())" in raised.value.__notes__[0]


def divide(block, later):
    def now():
        return 1 // int(block.sum())

    return ended(now) if later else now()


def test_both_ends_end_when_one_is_closed_and_say_so(ends):
    waiting = ends[0].call(when_told, torch.zeros(4, dtype=torch.uint8))
    ends[1].close()
    with pytest.raises(PeerDied, match="rank 1 is gone: it left"):
        waiting.result(WAIT_S)
    assert ends[0].ended.wait(WAIT_S)


def test_an_end_that_can_read_no_more_says_why(ends):
    def none_left(nbytes):
        raise OSError("no memory is left")

    waiting = ends[1].call(when_told, torch.zeros(4, dtype=torch.uint8))
    ends[1]._receive = none_left
    ends[0].call(total, torch.zeros(300_000, dtype=torch.uint8), 0)
    with pytest.raises(PeerDied, match="rank 0 is gone: OSError: no memory is left"):
        waiting.result(WAIT_S)
    assert ends[1].ended.wait(WAIT_S)


def test_calls_that_were_answered_are_forgotten_however_soon_the_answer_comes(ends):
    class Slow(SimpleQueue):
        def put(self, message):
            """Return only when the answer is there."""
            super().put(message)
            wait_until(lambda: message.ticket not in ends[0]._calls)

    queued, ends[0]._outgoing = ends[0]._outgoing, Slow()
    queued.put(_Frame(_ALIVE))  # wakes the writing thread
    futures = [ends[0].call(abs, -n) for n in range(5)]
    assert [future.result(WAIT_S) for future in futures] == list(range(5))
    assert not ends[0]._calls


def test_a_call_that_never_ends_does_not_keep_the_interpreter():
    program = """
import threading, time
from torch.distributed import HashStore
from sync.remote.gloo_engine import DistributedEngine
from sync.remote.gloo_connection import GlooConnection, make_group
store, ends = HashStore(), {}
def make(rank):
    group = make_group(store, "test", rank, "127.0.0.1", 20.0)
    ends[rank] = GlooConnection(group, 1 - rank, str(1 - rank), silence_s=20.0)
both = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in both]
[thread.join() for thread in both]
ends[0].call(time.sleep, 3600)
assert ends[0].call(abs, -1).result(20.0) == 1
[end.close() for end in ends.values()]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60.0, cwd=ROOT)


def test_the_interface_is_chosen_for_the_group_alone(ends):
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with pytest.raises(ValueError, match="is not of this machine"):
        make_group(HashStore(), "elsewhere", 0, "192.0.2.7", 1.0)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


class SlowWork:
    """A transfer over a network that moves a megabyte a second, on a clock of its own."""

    def __init__(self, work, nbytes):
        self._work, self._seconds = work, nbytes / 1e6

    def wait(self, timeout):
        if self._seconds > timeout.total_seconds():
            raise RuntimeError("Timed out waiting")
        self._work.wait(timeout)


class SlowGroup:
    def __init__(self, group):
        self._group, self.recv = group, group.recv

    def send(self, tensors, rank, tag):
        return SlowWork(self._group.send(tensors, rank, tag), tensors[0].numel())


def test_a_block_that_takes_longer_than_silence_may_last_is_not_taken_for_death(ends):
    ends[0]._group = SlowGroup(ends[0]._group)
    block = torch.ones(64 << 20, dtype=torch.uint8)  # more than a minute; 20 s may be silent
    assert ends[0].call(total, block, 1).result(WAIT_S) == block.numel() + 1


def test_all_peers_of_an_engine_are_closed_in_the_time_of_one():
    events = []

    class Peer:
        def say_goodbye(self):
            events.append("goodbye")

        def close(self, deadline=None):
            events.append(deadline)

    engine = DistributedEngine(3, timeout=5.0)
    engine._connections = {peer: Peer() for peer in range(3)}
    engine.close()
    assert events[:3] == ["goodbye"] * 3
    assert len(events) == 6
    assert len(set(events[3:])) == 1
