"""Control calls work in the middle of iteration, from any thread, on every collector."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from collectors import ReplayBuffer
from collectors.weights.publisher import Publisher
from sync import (
    Link,
    MultiProcessedRemoteWeightUpdate,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VanillaLocalWeightUpdater,
)
from tests.collectors.support import COLLECTORS, MULTI
from tests.collectors.troubled import ActorCritic, Plain, balance, hold, make, wait_until

EACH = pytest.mark.parametrize("kind", COLLECTORS)


def settled(collector: Any) -> Any:
    """A batch that was begun after this call.

    A worker's next ones were begun before: one that waits to be taken, and two ordered before it.
    """
    seen: Counter[int] = Counter()
    while True:
        batch = collector.next()
        workers = batch["collector", "worker"].unique().tolist()
        seen.update(workers)
        if all(seen[worker] > 3 for worker in workers):
            return batch


def collector_workers(collector: Any) -> list[Any]:
    workers: list[Any] = collector.stats().get("workers", [None])
    return workers


@EACH
def test_control_calls_are_answered_in_the_middle_of_iteration(kind):
    policy = Plain()
    with make(kind, policy) as collector:
        workers, waited = len(collector_workers(collector)), 0.0
        for number, _ in zip(range(1, 9), collector, strict=False):
            stats = collector.stats()
            assert stats["batches"] == number
            assert stats["wait_s"] > waited
            waited = stats["wait_s"]
            assert balance(collector) == 0
            assert collector.getattr_env("worker") == list(range(workers))
            assert collector.getattr_policy("weight") is policy.weight
            assert collector.getattr_policy("weight.dtype") == torch.float32
            assert collector.get_model() is policy
            hold(policy, number)
            assert collector.get_cached_weights()["weight"].item() == number
            assert collector.get_cached_weights("critic") is None
            assert collector.get_policy_version() == number - 1
            collector.update_policy_weights_()
            assert collector.get_policy_version() == collector.policy_version == number
            state = collector.state_dict()
            assert state["frames"] == collector.frames
            assert len(state["workers"]) == workers
        with collector.pause(), pytest.raises(RuntimeError, match="paused"):
            collector.next()
        collector.next()
        with pytest.raises(AttributeError, match="nothing"):
            collector.getattr_policy("nothing")
        with pytest.raises(AttributeError, match="'written': this collector has no replay buffer"):
            collector.getattr_rb("written")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_batches_are_counted_where_workers_make_unequal_numbers_of_frames(kind):
    with make(kind, frames_per_batch=[12, 30]) as collector:
        for _ in range(6):
            collector.next()
        assert collector.stats()["batches"] == 6
        state = collector.state_dict()
    with make(kind, frames_per_batch=[12, 30]) as collector:
        collector.load_state_dict(state)
        collector.next()
        assert collector.stats()["batches"] == 7


def test_the_version_that_each_worker_uses_is_told():
    with make("sync") as collector:
        for whom, used in ((None, [0, 0]), ([1], [0, 1]), (None, [2, 2])):
            if any(used):
                collector.update_policy_weights_(worker_ids=whom)
            collector.next()
            assert [worker["version"] for worker in collector.stats()["workers"]] == used


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_a_collector_that_was_shut_down_says_so(kind):
    with make(kind) as collector:
        collector.next()
    for call in (
        collector.next,
        collector.stats,
        collector.state_dict,
        collector.reset,
        collector.update_policy_weights_,
        lambda: collector.set_seed(1),
        lambda: collector.getattr_env("worker"),
        lambda: collector.pause().__enter__(),
    ):
        with pytest.raises(RuntimeError, match="the collector was shut down"):
            call()


def test_a_replay_buffer_is_asked_through_its_collector():
    with make("single", replay_buffer=ReplayBuffer(100)) as collector:
        assert collector.next() is None
        assert collector.getattr_rb("written") == 40
        assert collector.getattr_rb("capacity") == 100
        with pytest.raises(AttributeError, match="'nothing'"):
            collector.getattr_rb("nothing")


@EACH
def test_control_calls_are_answered_while_another_thread_iterates(kind):
    policy = Plain()
    stop = threading.Event()
    raised: list[BaseException] = []

    with make(kind, policy) as collector:

        def iterate() -> None:
            try:
                while not stop.is_set():
                    batch = collector.next()
                    stamps = batch["policy_version"]
                    assert torch.equal(batch["weight"], stamps.float())
            except BaseException as error:  # noqa: BLE001 - raised below
                raised.append(error)

        thread = threading.Thread(target=iterate)
        thread.start()
        try:
            for number in range(1, 8):
                assert balance(collector) == 0
                assert collector.getattr_env("worker")[0] == 0
                hold(policy, number)
                collector.update_policy_weights_()
                collector.state_dict()
                with collector.pause():
                    frames = collector.stats()["collected"]
                    assert collector.stats()["collected"] == frames
                collector.set_seed(number)
                collector.reset()
        finally:
            stop.set()
            thread.join(30.0)
    assert not thread.is_alive()
    assert raised == []


@pytest.mark.parametrize("kind", MULTI)
def test_stats_do_not_wait_for_a_worker_that_hangs(kind):
    collector = make(kind, trouble={"where": "step", "what": "hang", "at": 5})
    thread = threading.Thread(target=lambda: _until_shut_down(collector))
    thread.start()
    wait_until(lambda: collector.stats()["workers"][1]["stage"] == "stepping")
    for _ in range(200):
        assert balance(collector) == 0
    first = collector.pool.handles[0]
    assert collector.pool.call("getattr_env", lambda handle: ("worker",), [first]) == [0]
    collector.shutdown(timeout=0.2)
    thread.join(20.0)
    assert not thread.is_alive()


def _until_shut_down(collector: Any) -> None:
    with pytest.raises(RuntimeError, match="shut down"):
        _for_ever(collector)


def _for_ever(collector: Any) -> None:
    while True:
        collector.next()


def test_a_batch_is_counted_before_anybody_else_can_look(monkeypatch):
    """What is saved in the middle of a thread's iteration is counted and in the buffer."""
    seen: list[tuple[int, int]] = []
    buffer = ReplayBuffer(1000)
    with make("single", replay_buffer=buffer) as collector:

        def look() -> None:
            seen.append((collector.state_dict()["frames"], len(buffer)))

        other = threading.Thread(target=look)
        extend = buffer.extend

        def look_and_extend(batch: Any) -> None:
            if other.ident is None:
                other.start()
                other.join(0.5)  # it has the chance to be too early
            extend(batch)

        monkeypatch.setattr(buffer, "extend", look_and_extend)
        collector.next()
        other.join(30.0)
        assert seen == [(collector.frames, collector.frames)]


@pytest.mark.parametrize("kind", ["single", "async"])
def test_set_seed_and_reset_start_new_episodes(kind):
    with make(kind) as collector:
        collector.next()
        follow_up = collector.set_seed(11)
        assert follow_up != 11
        seeds = [seeded[-1] for seeded in collector.getattr_env("seeded")]
        assert len(set(seeds)) == len(seeds)
        collector.set_seed(11, static_seed=True)
        assert {seeded[-1] for seeded in collector.getattr_env("seeded")} == {11}
        before = [calls["reset"] for calls in collector.getattr_env("calls")]
        collector.reset()
        after = [calls["reset"] for calls in collector.getattr_env("calls")]
        assert all(late > early for early, late in zip(before, after, strict=True))
        collector.next()


@pytest.mark.parametrize("kind", ["single", "async"])
def test_weights_can_be_given_in_any_form(kind):
    policy, other = Plain(), Plain()
    with make(kind, policy) as collector:
        hold(other, 1)
        collector.update_policy_weights_(other)
        assert set(settled(collector)["weight"].flatten().tolist()) == {1.0}
        hold(other, 2)
        collector.update_policy_weights_(policy=other)
        assert set(settled(collector)["weight"].flatten().tolist()) == {2.0}
        collector.update_policy_weights_(weights=TensorDict({"weight": torch.tensor(3.0)}))
        assert set(settled(collector)["weight"].flatten().tolist()) == {3.0}
        collector.update_policy_weights_({"weight": torch.tensor(4.0)})
        assert set(settled(collector)["weight"].flatten().tolist()) == {4.0}
        collector.update_policy_weights_(weights_dict={"policy": other})
        batch = settled(collector)
        assert set(batch["weight"].flatten().tolist()) == {2.0}
        assert set(batch["policy_version"].flatten().tolist()) == {5}
        assert policy.weight.item() == 0
        with pytest.raises(ValueError, match="pass the weights once"):
            collector.update_policy_weights_(other, weights=other)
        with pytest.raises(ValueError, match="no weights are sent for model 'critic'"):
            collector.update_policy_weights_(model_id="critic")


@pytest.mark.parametrize("kind", MULTI)
def test_two_models_have_a_scheme_each(kind):
    model = ActorCritic()
    schemes = {"actor": SharedMemWeightSyncScheme(), "critic": MultiProcessWeightSyncScheme()}
    with make(kind, model, weight_sync_schemes=schemes) as collector:
        hold(model.actor, 1)
        hold(model.critic, 2)
        collector.update_policy_weights_(model_id="critic")
        batch = settled(collector)
        assert set(batch["weight"].flatten().tolist()) == {0.0}
        assert set(batch["value"].flatten().tolist()) == {2.0}
        collector.update_policy_weights_()
        batch = settled(collector)
        assert set(batch["weight"].flatten().tolist()) == {1.0}
        assert set(batch["policy_version"].flatten().tolist()) == {1}
        collector.update_policy_weights_(
            weights_dict={"actor": {"weight": torch.tensor(7.0)}, "critic": model.actor}
        )
        batch = settled(collector)
        assert set(batch["weight"].flatten().tolist()) == {7.0}
        assert set(batch["value"].flatten().tolist()) == {1.0}


def test_a_tensor_is_sent_by_one_scheme():
    schemes = {name: SharedMemWeightSyncScheme() for name in ("policy", "policy.critic")}
    with pytest.raises(ValueError, match=r"'weight' of 'policy.critic' is also in 'policy'"):
        make("sync", ActorCritic(), weight_sync_schemes=schemes)
    tied = ActorCritic()
    tied.critic.weight = tied.actor.weight
    schemes = {name: SharedMemWeightSyncScheme() for name in ("actor", "critic")}
    with pytest.raises(ValueError, match="'weight' of 'critic' is also in 'actor'"):
        make("single", tied, weight_sync_schemes=schemes)


def test_a_scheme_serves_one_collector():
    policy, scheme = Plain(), SharedMemWeightSyncScheme()
    with make("single", policy, weight_sync_schemes={"policy": scheme}) as collector:
        with pytest.raises(ValueError, match="the scheme of 'policy' serves another collector"):
            make("single", Plain(), weight_sync_schemes={"policy": scheme})
        hold(policy, 3)
        collector.update_policy_weights_()
        assert (collector.next()["weight"] == 3).all()


@pytest.mark.parametrize("weights", [Plain(), Plain().state_dict()], ids=["module", "dict"])
def test_weights_to_be_applied_are_not_taken_for_a_time_to_wait(weights):
    with (
        make("single") as collector,
        pytest.raises(TypeError, match=r"timeout=<\w+>.*call update_policy_weights_\(\)"),
    ):
        collector.receive_weights(weights)


@pytest.mark.parametrize(("kind", "placed"), [("sync", {}), ("async", {"devices": ["cpu", "cpu"]})])
def test_an_updater_pushes_to_workers(kind, placed):
    policy = Plain()
    updater = MultiProcessedRemoteWeightUpdate(lambda: policy, {"cpu": policy}, **placed)
    with make(kind, policy, weight_updater=updater) as collector:
        assert list(updater.all_worker_ids()) == [0, 1]
        assert updater.collector is collector
        hold(policy, 1)
        collector.update_policy_weights_()
        batch = settled(collector)
        assert set(batch["weight"].flatten().tolist()) == {1.0}
        assert set(batch["policy_version"].flatten().tolist()) == {1}


def test_an_updater_that_is_told_of_other_workers_or_devices_is_refused():
    policy = Plain()
    told = MultiProcessedRemoteWeightUpdate(None, {"cpu": policy}, devices=["cpu"])
    with told.scheme, pytest.raises(ValueError, match=r"initialised for 1 workers.*has 2"):
        make("sync", policy, weight_updater=told)
    elsewhere = MultiProcessedRemoteWeightUpdate(None, {"meta": policy})
    with elsewhere.scheme, pytest.raises(ValueError, match="policy_weights has no entry for cpu"):
        make("sync", policy, weight_updater=elsewhere, policy_device="cpu")


def test_a_worker_that_an_updater_leaves_out_waits_for_nothing():
    class Picky(MultiProcessedRemoteWeightUpdate):
        def _skip_update(self, worker_id):
            return worker_id == 0

    policy = Plain()
    updater = Picky(lambda: policy, {"cpu": policy}, devices=["cpu", "cpu"])
    with make("sync", policy, weight_updater=updater) as collector:
        collector.update_policy_weights_()
        assert settled(collector)["policy_version"].unique(dim=1).flatten().tolist() == [0, 1]


def test_an_updater_pulls_into_the_policy():
    server, policy = Plain(), Plain()
    updater = VanillaLocalWeightUpdater(lambda: server, policy)
    with make("single", policy, weight_updater=updater) as collector:
        hold(server, 5)
        assert set(settled(collector)["weight"].flatten().tolist()) == {0.0}
        collector.update_policy_weights_()
        assert policy.weight.item() == 5
        batch = settled(collector)
        assert set(batch["weight"].flatten().tolist()) == {5.0}
        assert set(batch["policy_version"].flatten().tolist()) == {1}


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_a_batch_waits_for_weights_that_are_still_on_their_way(scheme):
    late = scheme(sync=False, link=Link(latency_ms=100))
    policy = Plain()
    with make("sync", policy, weight_sync_schemes={"policy": late}) as collector:
        for number in range(1, 4):
            hold(policy, number)
            collector.update_policy_weights_()
            batch = collector.next()
            assert (batch["policy_version"] == number).all()
            assert (batch["weight"] == number).all()


def test_several_collectors_in_one_process_and_in_threads_do_not_meet():
    results: dict[str, set[float]] = {}

    def work(name: str, number: int) -> None:
        policy = Plain()
        with make(name, policy) as collector:
            hold(policy, number)
            collector.update_policy_weights_()
            for _ in range(5):
                batch = settled(collector)
            results[f"{name} {number}"] = set(batch["weight"].flatten().tolist())
            assert balance(collector) == 0

    threads = [
        threading.Thread(target=work, args=(name, number))
        for number in (1, 2)
        for name in ("sync", "async")
    ]
    for thread in threads:
        thread.start()
    work("single", 3)
    for thread in threads:
        thread.join(50.0)
    assert results == {
        "sync 1": {1.0},
        "sync 2": {2.0},
        "async 1": {1.0},
        "async 2": {2.0},
        "single 3": {3.0},
    }


def test_the_newest_version_is_told_while_another_one_is_published():
    policy = nn.Linear(1, 1)
    publisher = Publisher(policy, {"policy": NoWeightSyncScheme()}, devices=[None], timeout=60.0)
    for _ in range(2):
        publisher.publish({"policy": None}, None)

    class Moment:
        def __ge__(self, published_ns: int) -> bool:
            publisher.publish({"policy": None}, None)
            return False

    assert publisher.newest_at(time.perf_counter_ns()) == publisher.version
    assert publisher.newest_at(Moment()) == publisher.version - 4  # before all four
