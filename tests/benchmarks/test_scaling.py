"""What the prediction for a cluster says of the way that versions take."""

from __future__ import annotations

import pytest

from benchmarks.scaling import copies_from_the_trainer, copies_in_a_row
from sync.remote.relay import CHILDREN, LEAST_BYTES, LEAST_WORKERS, has_children, parent


@pytest.mark.parametrize("nodes", [5, 6, 7, 14, 15, 128])
def test_the_last_node_has_a_version_after_as_many_copies_as_there_are_on_its_way(nodes):
    def copies_until(node):
        """Each giver serves its two at the same time, so they take what two copies take."""
        giver = parent(node)
        return CHILDREN + (0 if giver is None else copies_until(giver))

    assert copies_in_a_row("rpc", nodes, LEAST_BYTES) == max(map(copies_until, range(nodes)))
    givers = {parent(node) for node in range(nodes)} - {None}
    assert givers == {node for node in range(nodes) if has_children(node, nodes)}
    direct = [node for node in range(nodes) if parent(node) is None]
    assert copies_from_the_trainer("rpc", nodes, LEAST_BYTES) == len(direct)


def test_few_nodes_and_small_versions_are_sent_to_each_from_the_trainer():
    for nodes, nbytes in ((LEAST_WORKERS - 1, LEAST_BYTES), (128, LEAST_BYTES - 1)):
        assert copies_in_a_row("distributed", nodes, nbytes) == nodes
        assert copies_from_the_trainer("distributed", nodes, nbytes) == nodes


def test_rays_nodes_have_it_from_each_other():
    assert copies_in_a_row("ray", 127, 1) == 7
    assert copies_from_the_trainer("ray", 127, 1) == 1
