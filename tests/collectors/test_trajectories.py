"""Trajectories are numbered, split and padded without losing a frame."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from collectors.data.batch import TrajectoryNumbers, split


def batch_of(starts, ends, lengths=None, *, first=0, numbering=None):
    """A batch whose frames are numbered, with these starts and ends [environments, time]."""
    starts, ends = torch.tensor(starts).bool(), torch.tensor(ends).bool()
    numbering = numbering or TrajectoryNumbers()
    rows, steps = starts.shape
    mask = torch.ones(rows, steps, dtype=torch.bool)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = False
    ids = torch.from_numpy(numbering.number(starts.T.numpy()).T.copy())
    return TensorDict(
        {
            "frame": torch.arange(first, first + rows * steps).reshape(rows, steps),
            "is_init": starts,
            "next": {"done": ends, "terminated": ends, "truncated": torch.zeros_like(ends)},
            "collector": {
                "traj_ids": ids,
                "mask": mask,
                "env": torch.arange(rows)[:, None].expand(rows, steps).clone(),
            },
        },
        batch_size=[rows, steps],
    )


@settings(max_examples=80, deadline=None)
@given(
    blocks=st.lists(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=6),
        min_size=1,
        max_size=5,
    ),
    worker=st.integers(0, 2),
)
def test_numbers_change_at_starts_only_and_are_those_of_no_other_worker(blocks, worker):
    numbering, seen, current = TrajectoryNumbers(worker, 3), set(), [None] * 3
    for block in blocks:
        starts = np.array(block, bool).reshape(len(block), 3)
        ids = numbering.number(starts)
        assert ids.shape == starts.shape
        for row, starting in zip(ids.tolist(), starts.tolist(), strict=True):
            for env, number in enumerate(row):
                if starting[env] or current[env] is None:
                    assert number not in seen
                    assert number % 3 == worker
                    seen.add(number)
                    current[env] = number
                assert number == current[env]
    assert sorted(seen) == [3 * i + worker for i in range(len(seen))]


@pytest.mark.parametrize("under_way", [True, False])
def test_numbering_goes_on_where_it_was(under_way):
    first, second = TrajectoryNumbers(), TrajectoryNumbers()
    ids = first.number(np.array([[True, True], [False, True]]))
    second.load_state_dict(first.state_dict(), under_way=under_way)
    following = second.number(np.zeros((1, 2), bool))
    assert following.tolist() == ([ids[-1].tolist()] if under_way else [[3, 4]])


def test_new_environments_begin_new_trajectories():
    numbering = TrajectoryNumbers()
    assert numbering.number(np.zeros((2, 2), bool)).tolist() == [[0, 1], [0, 1]]
    numbering.restart()
    assert numbering.number(np.zeros((1, 2), bool)).tolist() == [[2, 3]]


def test_pieces_are_padded_to_the_longest():
    batch = batch_of([[1, 0, 1, 0], [1, 0, 0, 0]], [[0, 1, 0, 0], [0, 0, 0, 0]], [4, 3])
    pieces = split(batch)
    assert pieces.batch_size == (3, 3)
    assert pieces["frame"].tolist() == [[0, 1, 0], [2, 3, 0], [4, 5, 6]]
    assert pieces["collector", "mask"].sum(1).tolist() == [2, 2, 3]


def test_a_batch_without_frames_has_no_pieces():
    assert len(split(batch_of([[1]], [[0]], [0]))) == 0
