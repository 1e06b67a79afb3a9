"""Every row of every batch is what must have happened, on whatever host."""

from __future__ import annotations

import itertools

import pytest
import torch

from collectors import (
    MultiAsyncCollector,
    RecordedSchedule,
    SimulatedCollector,
    next_observations,
)
from tests.collectors.remote.support import KINDS, build, make
from tests.collectors.support import (
    Checker,
    CodePolicy,
    all_accounted_for,
    make_env,
    num_envs_of,
    publish,
    same_bits,
    workers_of,
)


def check(collector, checker, batches):
    for number, batch in enumerate(itertools.islice(collector, batches)):
        assert checker.check(batch) > 0
        assert all_accounted_for(collector.stats())
        if number % 2:
            publish(collector)


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_is_what_happened(kind, sync):
    collector, counts = build(kind, sync=sync)
    checker = Checker(counts)
    with collector:
        check(collector, checker, 16)
        stats = collector.stats()
    assert stats["delivered"] == checker.counts["frames"] == collector.frames
    assert stats["dropped"] == 0
    assert checker.counts["terminated"] > 5
    assert checker.counts["truncated"] > 5


def test_only_the_final_observations_may_be_sent():
    whole, final = ({"seed": 5, "next_observation": form} for form in ("all", "final"))
    with build("distributed", **whole)[0] as one, build("distributed", **final)[0] as other:
        for _ in range(4):
            full, short = one.next(), other.next()
            assert "observation" not in short["next"].keys()  # noqa: SIM118
            mask = full["collector", "mask"]
            wanted = full["next", "observation"][mask]
            assert torch.equal(next_observations(short, mask), wanted)


@pytest.mark.parametrize("hosted", [None, MultiAsyncCollector], ids=["multi_sync", "multi_async"])
@pytest.mark.parametrize("kind", KINDS)
def test_hosts_can_have_workers_of_their_own(kind, hosted):
    collector = make(
        kind,
        make_env,
        CodePolicy(),
        num_workers_per_collector=2,
        collector_class=hosted,
        sync=hosted is None,
        create_env_kwargs=workers_of("one", 4),
        frames_per_batch=40 if hosted is None else 20,
    )
    with collector:
        assert collector.num_envs == 4
        rows: dict[int, set[int]] = {}
        for number in range(10):
            batch = collector.next()
            assert (batch["weights"] == batch["policy_version"]).all()
            if hosted is None:
                assert (batch["policy_version"] == number).all()
            for env, worker in zip(
                batch["collector", "env"][:, 0].tolist(),
                batch["observation"][:, 0, 0].int().tolist(),
                strict=True,
            ):
                rows.setdefault(env, set()).add(worker)
            publish(collector)
            assert all_accounted_for(collector.stats())
        assert {env: list(workers) for env, workers in rows.items()} == {i: [i] for i in range(4)}
        assert len(collector.getattr_env("seeded")) == 4


def test_a_batch_holds_all_hosts_in_their_order_and_random_frames_come_first():
    collector, counts = build("distributed", frames_per_batch=[12, 30], init_random_frames=60)
    checker, drawn = Checker(counts), 0
    with collector:
        assert collector.frames_per_batch == 42
        for _ in range(5):
            batch = collector.next()
            assert batch.batch_size == (6, 10)
            assert batch["collector", "worker"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
            checker.check(batch)
            drawn += int((batch["policy_version"] == -1).sum())
    assert checker.counts["padding"] == 5 * (30 - 12)
    assert 60 <= drawn < 66


def changes_version_within(path):
    """Whether a version came within one of the recorded batches."""
    return any(step for plan in RecordedSchedule(path).batches for step, _ in plan.versions)


@pytest.mark.parametrize("hosted", [None, MultiAsyncCollector], ids=["together", "apart"])
def test_the_recording_of_nodes_is_replayed(hosted, tmp_path):
    path, kind, steps, n = str(tmp_path / "schedule.jsonl"), "native_next_step", 11, 4
    frames = steps * num_envs_of(kind) * (2 if hosted is None else 1)
    options = {"frames_per_batch": frames, "seed": 5, "create_env_kwargs": workers_of(kind, n)}
    collector = make(
        "distributed",
        make_env,
        CodePolicy(),
        num_workers_per_collector=2,
        collector_class=hosted,
        sync=False,
        record_schedule=path,
        **options,
    )
    with collector:
        recorded = []
        while len(recorded) < 8 or not changes_version_within(path):
            recorded.append(collector.next())
            publish(collector)
    schedule = RecordedSchedule(path)
    with SimulatedCollector(
        make_env, CodePolicy(), schedule=schedule, num_workers=n, **options
    ) as replay:
        for batch in recorded:
            assert same_bits(batch, replay.next())
            publish(replay)
    assert len({step for plan in schedule.batches for step, _ in plan.versions}) > 1
