"""The checker of batches, which hundreds of tests rely on: it notices every kind of wrong frame."""

from __future__ import annotations

import pytest

from collectors import Collector
from tests.collectors.support import Checker, CodePolicy, make_env

FRAME, END = (1, 7), (1, 10)  # of the second batch: in the middle of an episode, and its last


def batches(count=2, **options):
    """True batches of three environments."""
    told = {"create_env_kwargs": {"kind": "native_next_step"}, "frames_per_batch": 60}
    with Collector(make_env, CodePolicy(), **told, **options) as collector:
        return [collector.next() for _ in range(count)]


def changed(key, value, place=FRAME):
    """What gives one frame another value."""

    def change(batch):
        batch[key][place] = value

    return change


def shifted(batch):
    """A frame is lost, and all later ones of its row move up."""
    row = batch[1]
    row[6:-1] = row[7:].clone()


def repeated(batch):
    row = batch[1]
    row[7:] = row[6:-1].clone()


def swapped(batch):
    batch[:2] = batch[[1, 0]].clone()


def unmasked(batch):
    batch["collector", "mask"][1, 3] = False


def padded(batch):
    row = int((~batch["collector", "mask"]).nonzero()[0, 0])
    batch["next", "reward"][row, -1] = 1.0


WRONG = {
    "an observation": changed("observation", 5.0),
    "a next observation": changed(("next", "observation"), 5.0),
    "the final observation of an episode": changed(("next", "observation"), 0.0, END),
    "a reward": changed(("next", "reward"), 5.0),
    "an action": changed("action", 0),
    "a stamp": changed("policy_version", 3),
    "weights": changed("weights", 3.0),
    "what the policy saw": changed("seen", 5.0),
    "an end too early": changed(("next", "done"), True),
    "a termination too early": changed(("next", "terminated"), True),
    "a truncation too early": changed(("next", "truncated"), True),
    "an end too few": changed(("next", "done"), False, END),
    "a start too many": changed("is_init", True),
    "a worker": changed(("collector", "worker"), 1),
    "an environment": changed(("collector", "env"), 2),
    "a trajectory's number": changed(("collector", "traj_ids"), 99),
    "a lost frame": shifted,
    "a repeated frame": repeated,
    "rows in another order": swapped,
    "padding between frames": unmasked,
    "padding that is not zero": padded,
}


def test_the_checker_passes_true_batches_and_notices_every_wrong_frame():
    first, second = batches()
    assert not second["next", "done"][FRAME]
    assert second["next", "done"][END]
    unnoticed = []
    for name, change in WRONG.items():
        wrong, checker = second.clone(), Checker([3])
        checker.check(first)
        change(wrong)
        try:
            checker.check(wrong)
        except AssertionError:
            continue
        unnoticed.append(name)
    assert not unnoticed
    checker = Checker([3])
    assert checker.check(first) + checker.check(second) == checker.counts["frames"]
    assert checker.counts["padding"] == 120 - checker.counts["frames"] > 0


def test_the_checker_notices_a_batch_that_is_missing_and_one_that_comes_twice():
    first, second, third = batches(3)
    for wrong in ((first, third), (first, second, second)):
        checker = Checker([3])
        for batch in wrong[:-1]:
            checker.check(batch)
        with pytest.raises(AssertionError):
            checker.check(wrong[-1])


def test_only_a_checker_that_is_told_of_resets_passes_what_they_leave():
    with Collector(make_env, CodePolicy(), frames_per_batch=12) as collector:
        first = collector.next()
        assert not first["next", "done"][0, -1]
        collector.reset()
        second = collector.next()
    for flags, passes in ({"cuts": True}, True), ({"skips": True}, False), ({}, False):
        checker = Checker([1], **flags)
        checker.check(first)
        checker.expect_start((0, 0))
        if passes:
            checker.check(second)
            assert checker.counts["cut"] == 1
            assert not checker.must_start
        else:
            with pytest.raises(AssertionError, match="the one before it did not end"):
                checker.check(second)


def test_the_checker_notices_a_reset_that_did_not_happen():
    first, second = batches()
    checker = Checker([3])
    checker.check(first)
    checker.expect_start()
    assert not second["is_init"][:, 0].all()
    with pytest.raises(AssertionError, match="no start"):
        checker.check(second)


def test_the_checker_notices_trajectories_that_are_not_cut_at_their_limit():
    (batch,) = batches(1)
    with pytest.raises(AssertionError, match="truncated"):
        Checker([3], max_frames=3).check(batch)
