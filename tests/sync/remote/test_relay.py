"""Who is told to keep a block for others."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from torch import nn

from sync.binding import Binding
from sync.remote.engine import Engine
from sync.remote.hub import Hub, Way
from sync.slots import Slots
from sync.strategy import WeightStrategy

WORKERS = 6


class Noting(Engine):
    """Notes what it is to bring where, and brings nothing."""

    num_peers = WORKERS

    def __init__(self, hands_on):
        self.hands_on = hands_on
        self.kept = {}

    def call(self, peer, function, *args):
        self.kept[peer] = args[-1].keep
        return Future()

    def gone(self, peer):
        return None

    def describe(self, peer):
        return f"peer {peer}"

    def close(self):
        pass


@pytest.mark.parametrize(
    ("hands_on", "width", "keepers"),
    [(True, 512, {0, 1}), (True, 8, set()), (False, 512, set())],
    ids=["large", "small", "an engine whose peers cannot call each other"],
)
def test_only_who_will_be_asked_keeps_a_block(hands_on, width, keepers):
    binding = Binding(nn.Linear(width, width), WeightStrategy())
    slots = Slots(binding.layout, 3 * WORKERS)
    binding.pack(slots[0], 0, check_finite=True)
    hub = Hub(slots, "key", WORKERS, 1.0, 1.0)
    hub.engine = engine = Noting(hands_on)
    for worker in range(WORKERS):
        hub.post(worker, Way(0, 0, slots[0].published_ns))
    assert {worker for worker, keep in engine.kept.items() if keep} == keepers
