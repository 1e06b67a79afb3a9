"""What the prediction for a cluster says about links."""

from __future__ import annotations

import pytest

from benchmarks.scaling import copies_from_the_trainer, copies_in_a_row


@pytest.mark.parametrize("kind", ["distributed", "rpc"])
@pytest.mark.parametrize("nodes", [1, 4, 128])
def test_the_trainer_sends_a_version_to_each_node(kind, nodes):
    assert copies_in_a_row(kind, nodes) == nodes
    assert copies_from_the_trainer(kind, nodes) == nodes


def test_rays_nodes_have_it_from_each_other():
    assert copies_in_a_row("ray", 127) == 7
    assert copies_from_the_trainer("ray", 127) == 1
