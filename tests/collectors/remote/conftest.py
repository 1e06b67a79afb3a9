from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import psutil
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def a_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """One Ray start-up for all tests of a module that has any with Ray."""
    needs = any("ray" in item.name for item in request.session.items if item.path == request.path)
    if not needs or importlib.util.find_spec("ray") is None:
        yield
        return
    from sync.remote.ray_engine import use_token_authentication

    use_token_authentication()
    import ray

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which a host lives. What Ray keeps running is its own."""
    before = _hosts()
    yield
    _, alive = psutil.wait_procs([*(_hosts() - before)], timeout=10.0)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"


def _hosts() -> set[psutil.Process]:
    """Descendants that are none of Ray's, nor the helpers that multiprocessing keeps."""
    found = set()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(w in line for w in _OTHERS):
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


_OTHERS = ("ray", "multiprocessing.resource_tracker", "multiprocessing.forkserver import main")
