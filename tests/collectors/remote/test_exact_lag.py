"""Exact lag of hosts elsewhere, whose workers have a scheme of their own."""

from __future__ import annotations

import pytest

from sync import DistributedWeightSyncScheme, RPCWeightSyncScheme
from tests.collectors.remote.support import build
from tests.collectors.support import publish
from tests.collectors.test_exact_lag import frames

SCHEMES = {"distributed": DistributedWeightSyncScheme, "rpc": RPCWeightSyncScheme}


@pytest.mark.parametrize("kind", ["distributed", pytest.param("rpc", marks=pytest.mark.slow)])
def test_every_frame_has_the_weights_of_exactly_so_many_updates_ago(kind):
    collector, _ = build(kind, weight_sync_schemes={"policy": SCHEMES[kind](lag=2)})
    with collector:
        for n in range(7):
            versions, weights = frames(collector.next())
            assert (versions == max(0, n - 2)).all()
            assert (weights == versions).all()
            publish(collector)
