"""Every row of every batch is what must have happened, whoever collects it and however."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from sync import SharedMemWeightSyncScheme
from tests.collectors.support import (
    CAN_RESET_SOME,
    KINDS,
    RESET_BY_STEPS,
    Checker,
    CodeEnv,
    CodePolicy,
    Gate,
    GatedEnv,
    all_accounted_for,
    make_env,
    num_envs_of,
    workers_of,
)
from tests.collectors.troubled import wait_until

MULTI = [MultiSyncCollector, MultiAsyncCollector]
ALL = [Collector, *MULTI]


def build(make, kind="sync_same_step", *, steps=11, policy=True, workers=2, **options):
    """A collector of the coding environments, and the checker of its batches."""
    n = num_envs_of(kind)
    counts = [n] if make is Collector else [n] * workers
    told = workers_of(kind, len(counts))
    if make is Collector:
        options["create_env_kwargs"] = told[0]
    else:
        options |= {"create_env_kwargs": told, "num_workers": workers}
    shared = workers if make is MultiSyncCollector else 1
    options.setdefault("frames_per_batch", steps * n * shared)
    checking = {"max_frames": options.get("max_frames_per_traj"), "policy": policy}
    checking |= {"set_truncated": options.get("set_truncated", False)}
    return make(make_env, CodePolicy() if policy else None, **options), counts, checking


def check(collector, checker, batches):
    """Verify so many batches, with new weights after every second one."""
    for number, batch in enumerate(itertools.islice(collector, batches)):
        assert checker.check(batch) > 0
        assert all_accounted_for(collector.stats())
        if number % 2 and collector.policy is not None:
            with torch.no_grad():
                collector.policy.number += 1
            collector.update_policy_weights_()


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "reused"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_every_frame_is_what_happened(make, kind, copy):
    collector, counts, checking = build(make, kind, copy=copy)
    checker = Checker(counts, **checking)
    with collector:
        check(collector, checker, 24)
        stats = collector.stats()
    assert stats["delivered"] == checker.counts["frames"] == collector.frames
    assert stats["dropped"] == 0
    assert checker.counts["terminated"] > 5
    assert checker.counts["truncated"] > 5
    if kind not in RESET_BY_STEPS:
        assert checker.counts["padding"] == 0


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_batches_that_were_copied_stay_as_they_were(make):
    collector, counts, checking = build(make)
    with collector:
        batches = [collector.next() for _ in range(8)]
    checker = Checker(counts, **checking)
    for batch in batches:
        checker.check(batch)


@pytest.mark.parametrize("make", [Collector, MultiAsyncCollector], ids=["single", "async"])
def test_without_copies_batches_use_the_same_memory_again(make):
    collector, *_ = build(make, copy=False)
    with collector:
        batches = [collector.next() for _ in range(12)]
        places = {batch["observation"].data_ptr() for batch in batches}
    assert len(places) < len(batches)


def test_without_buffers_every_batch_has_a_block_of_its_own():
    collector, counts, checking = build(Collector, use_buffers=False)
    with collector:
        batches = [collector.next() for _ in range(8)]
    assert len({batch["observation"].data_ptr() for batch in batches}) == 8
    checker = Checker(counts, **checking)
    for batch in batches:
        checker.check(batch)


@pytest.mark.parametrize("kind", CAN_RESET_SOME)
def test_long_trajectories_are_cut_as_truncated(kind):
    collector, counts, checking = build(Collector, kind, max_frames_per_traj=3)
    checker = Checker(counts, **checking)
    with collector:
        check(collector, checker, 20)
    assert checker.counts["too long"] > 10


@pytest.mark.parametrize("kind", [*RESET_BY_STEPS, "native_same_step"])
def test_vectors_that_reset_only_as_a_whole_cannot_be_cut(kind):
    with pytest.raises(ValueError, match=r"max_frames_per_traj=3.*only be reset all at once"):
        build(Collector, kind, max_frames_per_traj=3)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_reset_at_each_iter_starts_every_batch_with_new_episodes(make):
    collector, counts, checking = build(make, reset_at_each_iter=True, steps=5)
    checker = Checker(counts, **checking, cuts=True, skips=True)
    with collector:
        for _ in range(12):
            batch = collector.next()
            assert batch["is_init"][:, 0].all()
            checker.check(batch)
    assert checker.counts["cut"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], ids=["single", "sync"])
def test_reset_in_the_middle_starts_new_episodes(make, kind):
    collector, counts, checking = build(make, kind, steps=5)
    checker = Checker(counts, **checking, cuts=True, skips=True)
    with collector:
        for _ in range(6):
            check(collector, checker, 3)
            collector.reset()
            checker.expect_start()
        check(collector, checker, 3)
    assert not checker.must_start


@pytest.mark.parametrize("kind", CAN_RESET_SOME)
@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], ids=["single", "sync"])
def test_reset_of_some_leaves_the_others_alone(make, kind):
    collector, counts, checking = build(make, kind, steps=5)
    checker = Checker(counts, **checking, cuts=True, skips=True)
    places = [(worker, env) for worker, n in enumerate(counts) for env in range(n)]
    with collector:
        for place in range(len(places)):
            check(collector, checker, 2)
            before = checker.counts["cut"]
            under_way = {p for p in places if not checker.last[p]["done"]}
            collector.reset([place])
            checker.expect_start(places[place])
            checker.check(collector.next())
            cut = checker.counts["cut"] - before
            assert cut == (places[place] in under_way)
        checker.cuts = checker.skips = False
        for nobody in ([], np.zeros(len(places), bool)):
            collector.reset(nobody)
            checker.check(collector.next())
    assert not checker.must_start


@pytest.mark.parametrize("kind", ["one", "sync_disabled", "native_next_step"])
def test_a_running_worker_ends_what_is_reset_as_truncated(kind):
    collector, counts, checking = build(MultiAsyncCollector, kind)
    checker = Checker(counts, **checking, cuts=True, skips=True)
    with collector:
        for number in range(24):
            checker.check(collector.next())
            if number % 3 == 0:
                collector.reset()
            elif number % 3 == 1:
                collector.set_seed(number)
    assert checker.counts["cut"] > 0


@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], ids=["single", "sync"])
def test_set_seed_in_the_middle_starts_new_episodes(make):
    collector, counts, checking = build(make, steps=5)
    checker = Checker(counts, **checking, cuts=True, skips=True)
    with collector:
        for seed in range(4):
            check(collector, checker, 3)
            assert collector.set_seed(seed) != seed
            checker.expect_start()
        check(collector, checker, 3)
        seeded = collector.getattr_env("seeded")
    assert not checker.must_start
    members = [member for worker in seeded for member in worker]
    assert {len(member) for member in members} == {5}  # at the start, and four times since
    assert len({seed for member in members for seed in member}) == 5 * len(members)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["one", "sync_same_step", "native_next_step"])
def test_set_truncated_marks_the_last_frame_of_every_environment(make, kind):
    collector, counts, checking = build(make, kind, set_truncated=True, steps=5)
    checker = Checker(counts, **checking)
    with collector:
        check(collector, checker, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], ids=["single", "sync"])
def test_without_reset_when_done_there_is_one_episode_each(make, kind):
    collector, counts, checking = build(make, kind, reset_when_done=False, steps=9)
    checker = Checker(counts, **checking, skips=kind != "one")  # vectors step all their members
    with collector:
        for round_ in range(1, 4):
            batch = collector.next()
            checker.check(batch)
            assert checker.counts["episodes"] == round_ * sum(counts)
            ended = checker.counts["terminated"] + checker.counts["truncated"]
            assert ended == checker.counts["episodes"]
            collector.reset()
        assert all_accounted_for(collector.stats())
        assert collector.stats()["delivered"] == checker.counts["frames"]
        assert collector.stats()["preempted"] == 0


def test_when_every_episode_has_ended_and_none_may_start_the_next_batch_says_so():
    collector, *_ = build(Collector, reset_when_done=False, steps=9)
    with collector:
        collector.next()
        with pytest.raises(RuntimeError, match=r"reset_when_done=False.*reset\(\)"):
            collector.next()
        collector.reset()
        collector.next()


class Dawdler(CodeEnv):
    """Of worker 1, and slow."""

    def reset(self, **kwargs):
        if self.worker == 1 and self.episode < 0:
            time.sleep(0.5)  # it is cut before its first step
        return super().reset(**kwargs)

    def step(self, action):
        if self.worker == 1:
            time.sleep(0.02)
        return super().step(action)


def test_preemption_masks_what_stragglers_did_not_do_and_counts_it():
    checker = Checker([1, 1])
    with MultiSyncCollector(
        [lambda: Dawdler(0), lambda: Dawdler(1)],
        CodePolicy(),
        frames_per_batch=100,
        preemptive_threshold=0.5,
    ) as collector:
        for _ in range(6):
            batch = collector.next()
            checker.check(batch)
            assert batch["collector", "mask"][0].all()
            assert not batch["collector", "mask"][1].all()
            collector.policy.number.data += 1
            collector.update_policy_weights_()
        stats = collector.stats()
        assert stats["preempted"] == checker.counts["padding"] > 0
        assert stats["delivered"] == checker.counts["frames"] == collector.frames
        assert all_accounted_for(stats)


def test_nobody_is_preempted_where_all_are_to_be_waited_for():
    collector, counts, checking = build(MultiSyncCollector, preemptive_threshold=1.0)
    checker = Checker(counts, **checking)
    with collector:
        check(collector, checker, 5)
        assert collector.stats()["preempted"] == checker.counts["padding"] == 0


def test_workers_may_make_different_numbers_of_frames():
    collector, counts, checking = build(MultiSyncCollector, frames_per_batch=[12, 30])
    checker = Checker(counts, **checking)
    with collector:
        assert collector.frames_per_batch == 42
        check(collector, checker, 10)
    assert checker.counts["padding"] == 10 * (30 - 12)
    collector, counts, checking = build(MultiAsyncCollector, frames_per_batch=[12, 30])
    checker = Checker(counts, **checking)
    with collector:
        for _ in range(10):
            batch = collector.next()
            worker = int(batch["collector", "worker"][0, 0])
            assert batch.batch_size == ((3, 4), (3, 10))[worker]
            checker.check(batch)


@pytest.mark.parametrize(
    ("how", "shape"),
    [(None, [6, 5]), (0, [6, 5]), (1, [3, 10]), (-1, [3, 10]), ("stack", [2, 3, 5])],
)
def test_cat_results_says_how_workers_are_put_together(how, shape):
    collector, counts, checking = build(MultiSyncCollector, steps=5, cat_results=how)
    checker = Checker(counts, **checking)
    with collector:
        for _ in range(6):
            batch = collector.next()
            assert batch.batch_size == tuple(shape)
            if how == "stack":
                batch = batch.reshape(6, 5)
            elif how in (1, -1):
                batch = torch.cat(list(batch.split(5, 1)), 0)
            checker.check(batch)


class Mortal(CodeEnv):
    """Kills its process in the middle of an episode, if it finds a file at its path."""

    def __init__(self, worker, env, path):
        super().__init__(worker, env)
        self.path = path

    def step(self, action):
        if os.path.exists(self.path) and self.np_random.random() < 0.1:
            os.unlink(self.path)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def mortals(worker, path):
    return SyncVectorEnv(
        [lambda env=env: Mortal(worker, env, path) for env in range(3)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


@pytest.mark.parametrize("make", MULTI, ids=lambda make: make.__name__)
def test_what_was_there_before_a_worker_was_killed_and_what_comes_after_is_true(make, tmp_path):
    paths = [tmp_path / str(worker) for worker in range(2)]
    checker, kills = Checker([3, 3], restarts=True), 4
    with make(
        mortals,
        CodePolicy(),
        create_env_kwargs=[{"worker": i, "path": str(paths[i])} for i in range(2)],
        num_workers=2,
        frames_per_batch=120,
        on_worker_failure="restart",
        max_restarts=kills,
    ) as collector:
        for kill in range(1, kills + 1):
            check(collector, checker, 3)
            paths[kill % 2].touch()
            for _ in range(200):  # a block has a hundred chances to die, and there may be luck
                check(collector, checker, 1)
                if checker.counts["newcomers"] == 3 * kill:
                    break
            assert checker.counts["newcomers"] == 3 * kill
            assert collector.stats()["restarts"] == kill
        stats = collector.stats()
    assert stats["delivered"] == checker.counts["frames"] == collector.frames
    assert stats["dropped"] <= kills * 120
    assert checker.counts["padding"] == 0


def test_split_trajs_gives_a_row_to_every_piece_of_a_trajectory():
    collector, *_ = build(MultiSyncCollector, "native_next_step", split_trajs=True)
    whole, *_ = build(MultiSyncCollector, "native_next_step")
    with collector, whole:
        for _ in range(6):
            pieces, batch = collector.next(), whole.next()
            mask, ids = pieces["collector", "mask"], pieces["collector", "traj_ids"]
            assert int(mask.sum()) == int(batch["collector", "mask"].sum())
            for row in range(len(ids)):
                assert len(ids[row][mask[row]].unique()) == 1
                done = pieces["next", "done"][row][mask[row]]
                assert not done[:-1].any()
            told = batch["observation"][batch["collector", "mask"]]
            assert torch.equal(pieces["observation"][mask], told)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_trajs_per_batch_gives_whole_trajectories(make):
    collector, *_ = build(make, trajs_per_batch=5)
    rows = {}
    with collector:
        for _ in range(8):
            batch = collector.next()
            assert batch.batch_size[0] == 5
            for row in batch:
                frames = row[row["collector", "mask"]]
                assert frames["is_init"].nonzero().flatten().tolist() == [0]
                assert frames["next", "done"].nonzero().flatten().tolist() == [len(frames) - 1]
                assert frames["observation"][:, 3].tolist() == list(range(len(frames)))
                worker, env, episode = frames["observation"][0, :3].int().tolist()
                rows.setdefault((worker, env), []).append(episode)
    for episodes in rows.values():
        assert episodes == list(range(len(episodes)))  # none is missing, and in their order


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["sync_same_step", "native_next_step"])
def test_random_frames_at_first_and_their_stamp_says_so(make, kind):
    collector, counts, checking = build(make, kind, init_random_frames=60)
    checker = Checker(counts, **checking)
    random = dict.fromkeys(range(len(counts)), 0)
    chosen = dict.fromkeys(range(len(counts)), 0)
    with collector:
        while min(chosen.values()) == 0:  # of itself a slow worker may not be heard of for long
            batch = collector.next()
            checker.check(batch)
            stamps, mask = batch["policy_version"], batch["collector", "mask"]
            for worker in range(len(counts)):
                mine = mask & (batch["collector", "worker"] == worker)
                drawn = int((stamps[mine] == -1).sum())
                assert not (drawn and chosen[worker])
                random[worker] += drawn
                chosen[worker] += int(mine.sum()) * (drawn == 0)
    each = 60 // len(counts)
    for worker in range(len(counts)):
        assert each <= random[worker] < each + counts[worker]


def test_without_a_policy_all_actions_are_random_and_none_has_a_version():
    collector, counts, checking = build(Collector, policy=False)
    checker = Checker(counts, **checking)
    with collector:
        batches = [collector.next() for _ in range(20)]
    for batch in batches:
        checker.check(batch)
        assert (batch["policy_version"] == -1).all()
    assert len(torch.cat([batch["action"] for batch in batches]).unique()) == 7


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_postproc_has_the_last_word(make):
    collector, counts, checking = build(make, postproc=lambda batch: ("mine", batch))
    checker = Checker(counts, **checking)
    with collector:
        for _ in range(3):
            said, batch = collector.next()
            assert said == "mine"
            checker.check(batch)


def test_batches_are_handed_out_on_the_storing_device():
    collector, *_ = build(Collector, storing_device="meta")
    with collector:
        assert collector.next()["observation"].device.type == "meta"


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_total_frames_ends_the_iteration(make):
    collector, counts, checking = build(make, steps=4)
    each = collector.frames_per_batch
    collector.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector, *_ = build(make, steps=4, total_frames=each * 5)
    checker = Checker(counts, **checking)
    with collector:
        assert len(collector) == 5
        assert sum(checker.check(batch) for batch in collector) == each * 5
        assert list(collector) == []


def test_an_indivisible_total_is_warned_of_once_and_overshot():
    with pytest.warns(UserWarning, match="66 will be collected") as caught:
        collector, *_ = build(Collector, total_frames=60)
    assert len(caught) == 1
    with collector:
        assert len(collector) == 2
        assert sum(batch.numel() for batch in collector) == 66


@pytest.mark.parametrize("make", [Collector, MultiSyncCollector], ids=lambda make: make.__name__)
def test_trajectories_that_ended_within_the_total_are_handed_out(make):
    def collect(**options):
        collector, *_ = build(make, steps=20, **options)
        total = 2 * collector.frames_per_batch
        collector.shutdown()
        collector, *_ = build(make, steps=20, total_frames=total, **options)
        with collector:
            return list(collector)

    ended = sum(int(batch["next", "done"].sum()) for batch in collect())
    batches = collect(trajs_per_batch=2)
    assert len(batches) == ended // 2
    assert all(batch["next", "done"].sum() == 2 for batch in batches)


@pytest.mark.parametrize("options", [{}, {"total_frames": 60, "trajs_per_batch": 2}])
def test_where_nobody_knows_how_many_batches_come_there_is_no_length(options):
    collector, *_ = build(Collector, steps=5, **options)
    with collector, pytest.raises(TypeError, match="no length"):
        len(collector)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_versions_are_stamped_as_told(make):
    collector, *_ = build(make, track_policy_version=False)
    with collector:
        assert "policy_version" not in collector.next().keys()  # noqa: SIM118
    collector, *_ = build(make, track_policy_version="uuid")
    with collector:
        batch = collector.next()
        assert batch["policy_version"].shape == (*batch.batch_size, 2)
        stamp = collector.tracked.read(batch["policy_version"][0, 0])
        assert str(stamp) == collector.policy_version


def test_multi_collector_makes_one_or_the_other():
    for sync, make in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector(CodeEnv, CodePolicy(), sync=sync, frames_per_batch=8) as collector:
            assert type(collector) is make
            Checker([1]).check(collector.next())


def test_update_at_each_batch_publishes_without_being_asked():
    collector, counts, checking = build(MultiSyncCollector, update_at_each_batch=True)
    checker = Checker(counts, **checking)
    with collector:
        for version in range(5):
            batch = collector.next()
            assert (batch["policy_version"] == version).all()
            batch["weights"] += version  # the weights themselves were not changed
            checker.check(batch)


def test_by_batch_no_batch_mixes_versions():
    collector, counts, checking = build(MultiAsyncCollector, apply_at="batch")
    checker = Checker(counts, **checking)
    with collector:
        for _ in range(30):
            batch = collector.next()
            checker.check(batch)
            assert len(batch["policy_version"].unique()) == 1
            with torch.no_grad():
                collector.policy.number += 1
            collector.update_policy_weights_()


def test_the_batch_that_was_full_first_is_first_whoever_is_faster(tmp_path):
    gates = [Gate(tmp_path / str(worker)) for worker in range(2)]
    kwargs = [{"worker": worker, "gate": gate.path} for worker, gate in enumerate(gates)]
    checker = Checker([1, 1])
    with MultiAsyncCollector(
        GatedEnv, CodePolicy(), create_env_kwargs=kwargs, num_workers=2, frames_per_batch=10
    ) as collector:

        def fill(worker, batches):
            """Have a worker fill so many blocks, and see them arrive."""
            gates[worker].let(10 * batches)
            member = collector.pool.handles[worker]
            there = len(member.finished) + batches
            wait_until(lambda: bool(collector.stats()) and len(member.finished) == there)

        def take():
            batch = collector.next()
            checker.check(batch)
            return int(batch["collector", "worker"][0, 0])

        for fast, slow in [(0, 1), (1, 0)] * 2:
            fill(fast, 2)
            fill(slow, 1)
            came = []
            for _ in range(3):
                came.append(take())
                if came[-1] == fast:
                    fill(fast, 1)  # there is always another of the fast one's
            assert came == [fast, fast, slow]
            assert [take(), take()] == [fast, fast]
        for gate in gates:
            gate.let(1000)
    for gate in gates:
        gate.close()


class Slow(CodeEnv):
    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_paced_workers_make_no_batch_that_is_too_old(max_lag):
    """Versions are applied before a batch only, and one worker is slow."""
    kwargs = [{"worker": worker} for worker in range(3)]
    schemes = {"policy": SharedMemWeightSyncScheme(sync=False)}  # a slow worker is not waited for
    options = {"frames_per_batch": 10, "apply_at": "batch", "weight_sync_schemes": schemes}
    checker, lags, workers = Checker([1, 1, 1]), [], set()
    with MultiAsyncCollector(
        [Slow, CodeEnv, CodeEnv],
        CodePolicy(),
        create_env_kwargs=kwargs,
        max_lag=max_lag,
        **options,
    ) as collector:
        while checker.counts["frames"] < 400:
            batch = collector.next()
            checker.check(batch)
            workers.add(int(batch["collector", "worker"][0, 0]))
            lags.append(collector.policy_version - int(batch["policy_version"].min()))
            with torch.no_grad():
                collector.policy.number += 1
            collector.update_policy_weights_()
        assert collector.stats()["dropped"] == 0
    assert max(lags) == max_lag
    assert workers == {0, 1, 2}


@pytest.mark.parametrize("batches_ahead", [1, 3])
def test_a_worker_is_ahead_by_so_many_batches_and_then_waits(batches_ahead):
    options = {"frames_per_batch": 10, "batches_ahead": batches_ahead}
    checker = Checker([1])
    with MultiAsyncCollector(CodeEnv, CodePolicy(), **options) as collector:
        for _ in range(5):
            wait_until(lambda: collector.stats()["in_flight"] == 10 * batches_ahead)
            assert collector.stats()["workers"][0]["stage"] in ("handing over", "idle")
            checker.check(collector.next())
