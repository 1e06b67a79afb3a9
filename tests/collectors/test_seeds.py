"""The process's random streams, kept while somebody else uses them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch

from collectors import Collector, MultiSyncCollector
from collectors.rollout.seeds import Seeds, Streams, untouched_streams
from tests.collectors.support import CodeEnv

DRAWS: list[Callable[[], float]] = [
    np.random.rand,
    np.random.randn,  # makes two numbers and keeps one
    lambda: float(np.random.randint(1 << 30)),
    random.random,
    lambda: random.gauss(0, 1),
    lambda: float(torch.rand(())),
    lambda: float(torch.randn(())),
]


@pytest.fixture(autouse=True)
def _as_it_was():
    before = Streams()
    yield
    before.resume()


def seed(number: int) -> None:
    np.random.seed(number)
    random.seed(number)
    torch.manual_seed(number)


def alone(number: int, draws: list[int]) -> list[float]:
    seed(number)
    return [DRAWS[draw]() for draw in draws]


@pytest.mark.parametrize("chance", range(8))
def test_streams_that_take_turns_draw_what_they_would_have_drawn_alone(chance):
    """Also with nothing drawn in a turn, or only the number that was kept."""
    chance = random.Random(chance)
    plans = {n: [chance.randrange(len(DRAWS)) for _ in range(60)] for n in (1, 2, 3)}
    expected = {n: alone(n, plan) for n, plan in plans.items()}
    streams, drawn = {}, {n: [] for n in plans}
    for number in plans:
        seed(number)
        streams[number] = Streams()
    while any(len(drawn[n]) < len(plans[n]) for n in plans):
        number = chance.choice(list(plans))
        outside = Streams()
        streams[number].resume()
        for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
            if len(drawn[number]) < len(plans[number]):
                drawn[number].append(DRAWS[plans[number][len(drawn[number])]]())
        streams[number].keep()
        outside.resume()
    assert drawn == expected


def test_a_state_outlives_its_process_as_plain_numbers():
    seed(5)
    for draw in DRAWS[:2]:
        draw()
    for _ in range(2):
        state = Streams().state_dict()
        expected = [draw() for draw in DRAWS]
        seed(6)
        later = Streams()
        later.load_state_dict(state)
        later.resume()
        assert later.state_dict()["numpy"] == state["numpy"]
        assert [draw() for draw in DRAWS] == expected


def test_another_generator_of_numpys_is_kept_too():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        streams = Streams()
        expected = np.random.rand(3).tolist()
        streams.resume()
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_state_without_cuda_says_so_and_initialises_nothing():
    with untouched_streams():
        Seeds(3).seed_streams()
    state = Streams().state_dict()
    later = Streams()
    later.load_state_dict({**state, "cuda": [torch.arange(16, dtype=torch.uint8)]})
    if not torch.cuda.is_initialized():
        assert state["cuda"] == []
        later.resume()
        assert not torch.cuda.is_initialized()
    assert [one.tolist() for one in later.state_dict()["cuda"]] == [list(range(16))]
    older = {name: value for name, value in state.items() if name != "cuda"}
    later.load_state_dict(older)
    assert later.state_dict()["cuda"] == []


def test_streams_differ_by_seed_worker_generation_and_purpose():
    places = list(itertools.product(range(3), range(3), range(3)))
    found = {
        number
        for place in places
        for number in (Seeds(*place).environments(1)[0], Seeds(*place).actions())
    }
    made = {Seeds(*place).factory() for place in places}
    assert len(found) == 2 * len(places)
    assert len(made) == len(places)
    assert Seeds(3, 1).of_worker(2) == Seeds(3, 3)


@pytest.mark.cuda
def test_cudas_streams_are_kept_and_restored():
    def draw() -> list[float]:
        return torch.rand(3, device="cuda").tolist()

    torch.manual_seed(5)
    draw()
    streams = Streams()
    expected = draw()
    streams.resume()
    with untouched_streams():
        Seeds(3).seed_streams()
        assert draw() != expected
    assert draw() == expected
    later = Streams()
    later.load_state_dict(streams.state_dict())
    later.resume()
    assert draw() == expected


@pytest.mark.cuda
def test_a_collector_leaves_cudas_streams_as_they_were():
    def policy(observation: torch.Tensor) -> torch.Tensor:
        return (torch.rand(len(observation), device="cuda") * 7).long()

    def actions_after(draws: int) -> tuple[list[int], list[float]]:
        torch.cuda.manual_seed(1)
        with Collector(CodeEnv, policy, frames_per_batch=20) as collector:
            collector.set_seed(0)
            torch.rand(draws, device="cuda")
            actions = collector.next()["action"].flatten().tolist()
            return actions, torch.rand(2, device="cuda").tolist()

    torch.cuda.manual_seed(1)
    torch.rand(4, device="cuda")
    expected = torch.rand(2, device="cuda").tolist()
    actions, after = actions_after(4)
    assert after == expected
    assert actions_after(9)[0] == actions


class Drawn(gym.Env):
    """Draws its level when it is made, and observes it."""

    observation_space = gym.spaces.Box(0, 1, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.level = np.array([np.random.rand(), float(torch.rand(())), random.random()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.level, {}

    def step(self, action):
        return self.level, 0.0, False, False, {}


def test_environments_that_draw_when_they_are_made_follow_the_seed_and_the_worker():
    def levels(kind, outside: int, **given):
        seed(outside)
        before = torch.rand(())
        seed(outside)
        with kind(Drawn, None, seed=0, **given) as collector:
            found = collector.next()["observation"][:, 0]
        assert torch.equal(torch.rand(()), before)  # the trainer's own streams are where they were
        return found.tolist()

    workers = levels(MultiSyncCollector, 1, num_workers=2, frames_per_batch=2)
    assert levels(MultiSyncCollector, 2, num_workers=2, frames_per_batch=2) == workers
    assert workers[0] != workers[1]
    alone = levels(Collector, 1, frames_per_batch=1)
    assert levels(Collector, 2, frames_per_batch=1) == alone == workers[:1]
