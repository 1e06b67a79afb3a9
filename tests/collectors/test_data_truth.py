"""Every row of every batch is what must have happened, whoever collects it and however."""

from __future__ import annotations

import os
import signal
import time
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from sync import SharedMemWeightSyncScheme
from tests.collectors.support import (
    CAN_RESET_SOME,
    COLLECTORS,
    KINDS,
    RESET_BY_STEPS,
    Checker,
    CodeEnv,
    CodePolicy,
    Gate,
    GatedEnv,
    all_accounted_for,
    build,
    publish,
)
from tests.collectors.troubled import wait_until

EACH = pytest.mark.parametrize("kind", COLLECTORS)
# A collector of this process meets every kind of environment, and workers one of each sort.
PAIRS = [
    *(("single", env) for env in KINDS),
    ("sync", "sync_same_step"),
    ("sync", "native_next_step"),
    ("async", "one"),
    ("async", "async_unshared"),
]
# copy=False and next_observation="final" each meet every kind of collector and of environment.
FORMS = [{}, {"copy": False, "next_observation": "final"}]


def check(collector, checker, batches):
    """Verify so many batches, with new weights after every second one."""
    for number, batch in enumerate(islice(collector, batches)):
        assert checker.check(batch) > 0
        assert all_accounted_for(collector.stats())
        if number % 2:
            publish(collector)


@pytest.mark.parametrize("options", FORMS, ids=["plain", "reused, finals"])
@pytest.mark.parametrize(("kind", "env"), PAIRS)
def test_every_frame_is_what_happened(kind, env, options):
    collector, checker = build(kind, env, **options)
    with collector:
        check(collector, checker, 24)
        stats = collector.stats()
    assert stats["delivered"] == checker.counts["frames"] == collector.frames
    assert stats["dropped"] == 0
    assert checker.counts["terminated"] > 5
    assert checker.counts["truncated"] > 5
    if env not in RESET_BY_STEPS:
        assert checker.counts["padding"] == 0


def test_memory_of_batches_is_used_again_only_where_that_is_said():
    for kind, options, reuses in (
        ("single", {}, False),
        ("single", {"use_buffers": False}, False),
        ("single", {"copy": False}, True),
        ("sync", {}, False),
        ("async", {}, False),
        ("async", {"copy": False}, True),
    ):
        collector, checker = build(kind, **options)
        with collector:
            batches = [collector.next() for _ in range(8)]
        places = {batch["observation"].data_ptr() for batch in batches}
        assert (len(places) < 8) == reuses, (kind, options)
        for batch in [] if reuses else batches:  # later ones have changed nothing in them
            checker.check(batch)


@pytest.mark.parametrize("env", CAN_RESET_SOME)
def test_long_trajectories_are_cut_as_truncated(env):
    for form in FORMS:
        collector, checker = build("single", env, max_frames_per_traj=3, **form)
        with collector:
            check(collector, checker, 12)
        assert checker.counts["too long"] > 5


@pytest.mark.parametrize("env", [*RESET_BY_STEPS, "native_same_step"])
def test_vectors_that_reset_only_as_a_whole_cannot_be_cut(env):
    with pytest.raises(ValueError, match=r"max_frames_per_traj=3.*only be reset all at once"):
        build("single", env, max_frames_per_traj=3)


@EACH
def test_reset_at_each_iter_starts_every_batch_with_new_episodes(kind):
    collector, checker = build(kind, reset_at_each_iter=True, steps=5, expecting=["cuts", "skips"])
    with collector:
        for _ in range(12):
            batch = collector.next()
            assert batch["is_init"][:, 0].all()
            checker.check(batch)
    assert checker.counts["cut"] > 0


@pytest.mark.parametrize(
    ("kind", "env"), [*(("single", env) for env in KINDS), ("sync", "native_next_step")]
)
def test_resets_and_seeds_between_batches_start_new_episodes(kind, env):
    collector, checker = build(kind, env, steps=5, expecting=["cuts", "skips"])
    with collector:
        for seed in range(3):
            for start in (collector.reset, lambda seed=seed: collector.set_seed(seed)):
                check(collector, checker, 3)
                assert start() != seed
                checker.expect_start()
        check(collector, checker, 3)
        seeded = collector.getattr_env("seeded") if env == "one" else []
    assert not checker.must_start
    if env == "one":
        assert len(set(seeded[0])) == len(seeded[0]) == 4  # at the start, and three times since


@pytest.mark.parametrize(
    ("kind", "env"), [*(("single", env) for env in CAN_RESET_SOME), ("sync", "sync_next_step")]
)
def test_a_reset_of_some_environments_leaves_the_others_alone(kind, env):
    collector, checker = build(kind, env, steps=5, expecting=["cuts", "skips"])
    counts = np.diff(checker.first_env)
    places = [(worker, env) for worker, n in enumerate(counts) for env in range(n)]
    with collector:
        for place in range(len(places)):
            check(collector, checker, 2)
            before = checker.counts["cut"]
            under_way = {p for p in places if not checker.last[p]["done"]}
            collector.reset([place])
            checker.expect_start(places[place])
            checker.check(collector.next())
            assert checker.counts["cut"] - before == (places[place] in under_way)
        checker.cuts = checker.skips = False
        for nobody in ([], np.zeros(len(places), bool)):
            collector.reset(nobody)
            checker.check(collector.next())
    assert not checker.must_start


@pytest.mark.parametrize("env", ["one", "sync_disabled", "native_next_step"])
def test_a_running_worker_ends_as_truncated_what_is_reset(env):
    for form in FORMS:
        collector, checker = build("async", env, expecting=["cuts", "skips"], **form)
        with collector:
            for number in range(18):
                checker.check(collector.next())
                if number % 3 == 0:
                    collector.reset()
                elif number % 3 == 1:
                    collector.set_seed(number)
        assert checker.counts["cut"] > 0


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        ("single", "one"),
        ("single", "native_next_step"),
        ("sync", "one"),
        ("async", "sync_disabled"),
    ],
)
def test_set_truncated_marks_the_last_frame_of_every_environment(kind, env):
    for form in FORMS:
        collector, checker = build(kind, env, set_truncated=True, steps=5, **form)
        with collector:
            check(collector, checker, 12)


@pytest.mark.parametrize(
    ("kind", "env"), [*(("single", env) for env in KINDS), ("sync", "sync_same_step")]
)
def test_without_reset_when_done_there_is_one_episode_each(kind, env):
    for form in FORMS:
        collector, checker = build(kind, env, reset_when_done=False, steps=9, **form)
        checker.skips = env != "one"  # vectors step all their members
        with collector:
            for round_ in range(1, 4):
                checker.check(collector.next())
                assert checker.counts["episodes"] == round_ * checker.first_env[-1]
                ended = checker.counts["terminated"] + checker.counts["truncated"]
                assert ended == checker.counts["episodes"]
                collector.reset()
            stats = collector.stats()
        assert all_accounted_for(stats)
        assert stats["delivered"] == checker.counts["frames"]
        assert stats["preempted"] == 0


def test_a_batch_after_the_last_episode_is_an_error_that_says_so():
    collector, _ = build("single", reset_when_done=False, steps=9)
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
        for _ in range(4):
            batch = collector.next()
            checker.check(batch)
            assert batch["collector", "mask"][0].all()
            assert not batch["collector", "mask"][1].all()
            publish(collector)
        stats = collector.stats()
        assert stats["preempted"] == checker.counts["padding"] > 0
        assert stats["delivered"] == checker.counts["frames"] == collector.frames
        assert all_accounted_for(stats)


def test_no_worker_is_preempted_where_all_are_to_be_waited_for():
    collector, checker = build("sync", preemptive_threshold=1.0)
    with collector:
        check(collector, checker, 5)
        assert collector.stats()["preempted"] == checker.counts["padding"] == 0


@pytest.mark.parametrize("form", FORMS, ids=["plain", "reused, finals"])
def test_workers_may_make_different_numbers_of_frames(form):
    collector, checker = build("sync", frames_per_batch=[12, 30], **form)
    with collector:
        assert collector.frames_per_batch == 42
        check(collector, checker, 8)
    assert checker.counts["padding"] == 8 * (30 - 12)
    collector, checker = build("async", frames_per_batch=[12, 30], **form)
    with collector:
        for _ in range(8):
            batch = collector.next()
            worker = int(batch["collector", "worker"][0, 0])
            assert batch.batch_size == ((3, 4), (3, 10))[worker]
            checker.check(batch)


@pytest.mark.parametrize("form", ["all", "final"])
@pytest.mark.parametrize(("how", "shape"), [(0, [6, 5]), (1, [3, 10]), ("stack", [2, 3, 5])])
def test_cat_results_says_how_workers_are_put_together(how, shape, form):
    collector, checker = build("sync", steps=5, cat_results=how, next_observation=form)
    with collector:
        for _ in range(4):
            batch = collector.next()
            assert batch.batch_size == tuple(shape)
            if how == "stack":
                batch = batch.reshape(6, 5)
            elif how == 1 and form == "final":
                continue  # its rows hold both workers' frames: see test_next_observations.py
            elif how == 1:
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


@pytest.mark.parametrize(("kind", "form"), [("sync", FORMS[0]), ("async", FORMS[1])])
def test_frames_before_and_after_a_workers_death_are_true(kind, form, tmp_path):
    paths = [tmp_path / str(worker) for worker in range(2)]
    checker, kills = Checker([3, 3], restarts=True), 2
    with COLLECTORS[kind](
        mortals,
        CodePolicy(),
        create_env_kwargs=[{"worker": i, "path": str(paths[i])} for i in range(2)],
        num_workers=2,
        frames_per_batch=120,
        on_worker_failure="restart",
        max_restarts=kills,
        **form,
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
    collector, _ = build("sync", "native_next_step", split_trajs=True)
    whole, _ = build("sync", "native_next_step")
    with collector, whole:
        for _ in range(4):
            pieces, batch = collector.next(), whole.next()
            mask, ids = pieces["collector", "mask"], pieces["collector", "traj_ids"]
            assert int(mask.sum()) == int(batch["collector", "mask"].sum())
            for row in range(len(ids)):
                assert len(ids[row][mask[row]].unique()) == 1
                assert not pieces["next", "done"][row][mask[row]][:-1].any()
            told = batch["observation"][batch["collector", "mask"]]
            assert torch.equal(pieces["observation"][mask], told)


@pytest.mark.parametrize(
    ("kind", "env"),
    [("single", "native_next_step"), ("sync", "sync_same_step"), ("async", "sync_same_step")],
)
def test_the_first_frames_are_random_and_their_stamp_says_so(kind, env):
    collector, checker = build(kind, env, init_random_frames=60)
    workers = range(1 if kind == "single" else 2)
    random, chosen = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    with collector:
        while min(chosen.values()) == 0:  # of itself a slow worker may not be heard of for long
            batch = collector.next()
            checker.check(batch)
            stamps, mask = batch["policy_version"], batch["collector", "mask"]
            for worker in workers:
                mine = mask & (batch["collector", "worker"] == worker)
                drawn = int((stamps[mine] == -1).sum())
                assert not (drawn and chosen[worker])
                random[worker] += drawn
                chosen[worker] += int(mine.sum()) * (drawn == 0)
    each = 60 // len(workers)
    assert all(each <= random[worker] < each + 3 for worker in workers)


def test_without_a_policy_all_actions_are_random_and_none_has_a_version():
    collector, checker = build("single", policy=None)
    with collector:
        batches = [collector.next() for _ in range(20)]
    for batch in batches:
        checker.check(batch)
        assert (batch["policy_version"] == -1).all()
    assert len(torch.cat([batch["action"] for batch in batches]).unique()) == 7


@EACH
def test_postproc_and_storing_device_have_the_last_word(kind):
    collector, _ = build(kind, postproc=lambda batch: ("mine", batch), storing_device="meta")
    with collector:
        said, batch = collector.next()
        assert said == "mine"
        assert batch["observation"].device.type == "meta"


@EACH
def test_total_frames_ends_the_iteration(kind):
    total = 4 * 3 * (2 if kind == "sync" else 1) * 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector, checker = build(kind, steps=4, total_frames=total)
    with collector:
        assert len(collector) == 5
        assert sum(checker.check(batch) for batch in collector) == total
        assert list(collector) == []


def test_an_indivisible_total_is_warned_of_once_and_overshot():
    with pytest.warns(UserWarning, match="66 will be collected") as caught:
        collector, _ = build("single", total_frames=60)
    assert len(caught) == 1
    with collector:
        assert len(collector) == 2
        assert sum(batch.numel() for batch in collector) == 66


def test_a_collector_whose_batches_nobody_can_count_has_no_length():
    collector, _ = build("single", steps=5)
    with collector, pytest.raises(TypeError, match="no length"):
        len(collector)


@EACH
def test_frames_have_no_stamps_if_versions_are_not_tracked(kind):
    collector, _ = build(kind, track_policy_version=False)
    with collector:
        assert "policy_version" not in collector.next().keys()  # noqa: SIM118


def test_multi_collector_makes_one_or_the_other():
    for sync, kind in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector(CodeEnv, CodePolicy(), sync=sync, frames_per_batch=8) as collector:
            assert type(collector) is kind
            Checker([1]).check(collector.next())
    for sync in ("async", None, 1):
        with pytest.raises(TypeError, match=f"sync={sync!r}: it must be True or False"):
            MultiCollector(CodeEnv, CodePolicy(), num_workers=1, sync=sync)


def test_update_at_each_batch_publishes_without_being_asked():
    collector, checker = build("sync", update_at_each_batch=True)
    with collector:
        for version in range(5):
            batch = collector.next()
            assert (batch["policy_version"] == version).all()
            batch["weights"] += version  # the weights themselves were not changed
            checker.check(batch)


def test_with_apply_at_batch_no_batch_mixes_versions():
    collector, checker = build("async", apply_at="batch")
    with collector:
        for _ in range(20):
            batch = collector.next()
            checker.check(batch)
            assert len(batch["policy_version"].unique()) == 1
            publish(collector)


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


@pytest.mark.parametrize("max_lag", [0, 3])
def test_paced_workers_make_no_batch_that_is_too_old(max_lag):
    """Versions are applied before a batch only, and one worker is slow."""
    schemes = {"policy": SharedMemWeightSyncScheme(sync=False)}  # a slow worker is not waited for
    checker, lags, workers = Checker([1, 1, 1]), [], set()
    with MultiAsyncCollector(
        [Slow, CodeEnv, CodeEnv],
        CodePolicy(),
        create_env_kwargs=[{"worker": worker} for worker in range(3)],
        max_lag=max_lag,
        frames_per_batch=10,
        apply_at="batch",
        weight_sync_schemes=schemes,
    ) as collector:
        while checker.counts["frames"] < 300:
            batch = collector.next()
            checker.check(batch)
            workers.add(int(batch["collector", "worker"][0, 0]))
            lags.append(collector.policy_version - int(batch["policy_version"].min()))
            publish(collector)
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
