"""Schemes by name."""

from __future__ import annotations

import pytest

from sync import (
    SCHEMES,
    DistributedWeightSyncScheme,
    HogwildWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

NAMES = {
    "none": NoWeightSyncScheme,
    "direct": NoWeightSyncScheme,
    "shared_mem": SharedMemWeightSyncScheme,
    "multiprocess": MultiProcessWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "thread": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "multiprocessing": MultiProcessWeightSyncScheme,
    "hogwild": HogwildWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}


def test_a_name_stands_for_its_scheme_and_there_is_no_other():
    assert {name: type(WeightSyncScheme.from_backend(name)) for name in NAMES} == NAMES
    own = {name for name, kind in SCHEMES.items() if kind.__module__.startswith("sync.")}
    assert own == set(NAMES)


def test_options_go_to_the_scheme():
    scheme = WeightSyncScheme.from_backend(
        "shared", strategy="state_dict", sync=False, per_worker_weights=True, timeout=3.0
    )
    assert scheme.strategy.extract_as == "state_dict"
    assert (scheme.sync, scheme.per_worker_weights, scheme.timeout) == (False, True, 3.0)
    with pytest.raises(TypeError, match="speed"):
        WeightSyncScheme.from_backend("shared", speed="high")


def test_the_distributed_scheme_is_named_by_its_backend_and_takes_its_strategy_by_name():
    scheme = DistributedWeightSyncScheme("gloo", False, strategy="state_dict", timeout=3.0)
    assert scheme.strategy.extract_as == "state_dict"
    assert (scheme.sync, scheme.timeout) == (False, 3.0)
    options = {"backend": "gloo", "strategy": "state_dict"}
    found = WeightSyncScheme.from_backend("distributed", **options)
    assert found.strategy.extract_as == "state_dict"
    assert DistributedWeightSyncScheme("gloo", False, 3.0).timeout == 3.0
    with pytest.raises(ValueError, match="backend='nccl': expected 'gloo'"):
        DistributedWeightSyncScheme("nccl")


@pytest.mark.parametrize(
    ("name", "says"),
    [("sharred", r"'sharred'; did you mean 'shared'\?"), ("xyzzy", r"'xyzzy'[;.:,] [Kk]nown")],
    ids=["near", "far"],
)
def test_an_unknown_name_is_an_error_that_lists_the_known(name, says):
    with pytest.raises(ValueError, match=says) as error:
        WeightSyncScheme.from_backend(name)
    assert all(known in str(error.value) for known in NAMES)
