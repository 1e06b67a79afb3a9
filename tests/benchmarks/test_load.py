"""What `make load` does, in small."""

from __future__ import annotations

import pytest

from benchmarks.load import send_versions, try_workers


@pytest.mark.parametrize("kind", ["shared_mem", "multiprocess"])
def test_a_flood_ends_with_the_newest_version_everywhere_and_none_torn(kind):
    found = send_versions(kind, 1000, 300, wait=False)
    assert [worker["newest"] for worker in found["workers"]] == [300, 300]
    assert all(worker["torn"] == worker["back"] == 0 for worker in found["workers"])


def test_workers_are_started_and_all_frames_found():
    found = try_workers(2, batches=2)
    assert (found["environments"], found["frames_astray"]) == (16, 0)
