"""A line's two ends in one process: what is sent arrives, whatever its size and whoever is slow."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from sync.remote.engine import PeerDied
from sync.remote.line import Line, make_group
from sync.remote.wire import Later

WAIT_S = 30.0
SIZES = (0, 1, 18_000, 18_000, 18_000, 300_000, 300_000, 300_000, 70_000)


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = pool.map(lambda rank: make_group(store, "test", rank, "127.0.0.1", 20.0), range(2))
    lines = [Line(g, 1 - r, f"rank {1 - r}", silence_s=20.0) for r, g in enumerate(groups)]
    yield lines[0], lines[1]
    for line in lines:
        line.close()


def one_more(tensor):
    return tensor + 1


def one_more_of_each(*tensors):
    return [tensor + 1 for tensor in tensors]


def total(block, start):
    return start + int(block.sum(dtype=torch.int64))


def block_of(size, seed):
    return torch.randint(
        0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_blocks_of_all_sizes_arrive_as_they_were_sent_in_both_directions_at_once(ends):
    def talk(line, seed):
        draw, sent = random.Random(seed), []
        for number in range(150):
            block = block_of(draw.choice(SIZES), number)
            if draw.random() < 0.5:
                wanted = number + int(block.sum(dtype=torch.int64))
                sent.append((line.post(total, block, number), wanted))
            else:
                others = [block, block_of(draw.choice(SIZES), number + 1)]
                sent.append((line.call(one_more_of_each, *others), [b + 1 for b in others]))
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
        for talking in [pool.submit(talk, line, seed) for seed, line in enumerate(ends)]:
            talking.result(2 * WAIT_S)


def test_a_block_that_was_kept_stays_what_it_was(ends):
    for number in range(12):
        ends[0].post(keep, block_of(300_000, number)).result(WAIT_S)
    for number, block in enumerate(_kept):
        assert torch.equal(block, block_of(300_000, number))
    _kept.clear()


def keep(block):
    _kept.append(block)


_kept: list[torch.Tensor] = []


def test_who_answers_later_keeps_nobody_waiting(ends):
    slow = [ends[0].post(when_told, torch.zeros(8, dtype=torch.uint8)) for _ in range(3)]
    assert ends[0].call(one_more, torch.zeros(2)).result(WAIT_S).tolist() == [1.0, 1.0]
    assert ends[0].post(total, torch.ones(8, dtype=torch.uint8), 1).result(WAIT_S) == 9
    assert not any(future.done() for future in slow)
    _told.set()
    assert [future.result(WAIT_S) for future in slow] == ["told"] * 3


def when_told(block):
    return Later(lambda: "told" if _told.wait(WAIT_S) else "not told")


_told = threading.Event()


@pytest.mark.parametrize("later", [False, True])
def test_what_a_post_raises_is_raised_here_with_its_traceback(ends, later):
    with pytest.raises(ZeroDivisionError) as raised:
        ends[0].post(divide, torch.zeros(4, dtype=torch.uint8), later).result(WAIT_S)
    assert "in rank 1" in raised.value.__notes__[0]
    assert "1 // int(block.sum())" in raised.value.__notes__[0]


def divide(block, later):
    def now():
        return 1 // int(block.sum())

    return Later(now) if later else now()


def test_both_ends_end_when_one_is_closed_and_say_so(ends):
    waiting = ends[0].post(until_the_end, torch.zeros(4, dtype=torch.uint8))
    ends[1].close()
    with pytest.raises(PeerDied, match="rank 1 is gone: it left"):
        waiting.result(WAIT_S)
    assert ends[0].ended.wait(WAIT_S)
    _over.set()


def until_the_end(block):
    return Later(lambda: _over.wait(WAIT_S))


_over = threading.Event()


def test_an_end_that_can_read_no_more_says_why(ends):
    def none_left(nbytes):
        raise OSError("no memory is left")

    _over.clear()
    waiting = ends[1].post(until_the_end, torch.zeros(4, dtype=torch.uint8))
    ends[1]._memory.take = none_left
    ends[0].post(total, torch.zeros(300_000, dtype=torch.uint8), 0)
    with pytest.raises(PeerDied, match="rank 0 is gone: OSError: no memory is left"):
        waiting.result(WAIT_S)
    assert ends[1].ended.wait(WAIT_S)
    _over.set()
