"""The engine over Ray, without a cluster."""

from __future__ import annotations

import pytest

from sync.remote import ray
from sync.remote.engine import PeerDied


def test_a_place_without_an_actor_cannot_be_called_and_says_so(monkeypatch):
    monkeypatch.setattr(ray, "is_connected", lambda: True)
    engine = ray.RayEngine([None])
    with pytest.raises(PeerDied, match="peer 0 is gone: there is no such actor"):
        engine.call(0, abs, -1).result(0)
