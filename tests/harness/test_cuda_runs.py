"""Runs whose learner, policies or both are on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.test_every_algorithm import (
    ALGORITHMS,
    check_learned,
    check_repeats,
    check_replayed,
    start,
)
from tests.harness.test_run import records

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.cuda, pytest.mark.timeout(300)]
LEARNER = ("device=cuda",)
WORKERS = ("collector.devices.policy=cuda",)
COLLECTORS = {
    "single": ("collector=single", "sync=shared_mem"),
    "multi_sync": ("collector=multi_sync", "sync=shared_mem"),
    "multi_async": ("collector=multi_async", "sync=multiprocess"),
    "simulated": ("collector=simulated", "collector.num_workers=3"),
    "distributed": ("collector=distributed", "sync=distributed"),
    "rpc": ("collector=rpc", "sync=rpc"),
}
PPO = ALGORITHMS["ppo"]
LSTM = ("model=lstm", "model.hidden_sizes=[8]", "model.lstm_size=8", "model.sequence_length=8")
COMPILED = ("collector.compile_policy=true",)
AS_GRAPH = ("collector.cudagraph_policy=true",)


@pytest.mark.parametrize("on_gpu", [LEARNER, WORKERS, (*LEARNER, *WORKERS)], ids=" ".join)
@pytest.mark.parametrize("collector", COLLECTORS)
def test_any_collector(collector, on_gpu):
    given = (*PPO, *COLLECTORS[collector], "sync.verify=every", *on_gpu)
    check_learned(start(*given, into="run"), "ppo")
    if "device=cuda" in on_gpu:
        assert records(Path("run"))[0]["system/cuda_memory_mb"] > 0


def test_a_policy_that_is_the_learners_own():
    check_learned(
        start(*PPO, "collector=single", "sync=none", *LEARNER, *WORKERS, into="run"), "ppo"
    )


@pytest.mark.parametrize(
    "how",
    [LSTM, COMPILED, AS_GRAPH, (*LSTM, *AS_GRAPH), (*COMPILED, *AS_GRAPH)],
    ids=" ".join,
)
@pytest.mark.parametrize("collector", ["single", "multi_async"])
def test_models_with_memory_compiled_and_as_graphs(collector, how):
    from torch._inductor import config as inductor  # not for all who collect these tests

    given = (*PPO, *COLLECTORS[collector], *how, *LEARNER, *WORKERS)
    with inductor.patch(compile_threads=1):  # more would be processes that are left behind
        check_learned(start(*given, into="run"), "ppo")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_synchronous_run_has_the_same_bits_twice_and_when_it_is_resumed(algorithm):
    check_repeats(algorithm, (*COLLECTORS["multi_sync"], *LEARNER, *WORKERS))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_asynchronous_run_is_replayed_to_the_bit(algorithm, capsys):
    check_replayed(algorithm, (*COLLECTORS["multi_async"], *LEARNER), capsys)
