"""From blocks to batches: everything in its place, and what is no frame nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.data.batch import TrajectoryNumbers, WorkerBatch, assemble, buffer_for, frames_of
from collectors.rollout.frame_block import (
    ALIGNMENT,
    FrameLayout,
    allocate,
    from_message,
    to_message,
)
from collectors.rollout.spaces import action_leaf, observation_leaves
from tests.collectors.support import same_bits

SPACE = spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Discrete(1000))


def block(num_envs, num_steps, live, ends):
    """A block whose every place says its step and environment: 100 * step + environment."""
    leaves = observation_leaves(SPACE)
    action = action_leaf(spaces.Discrete(9))
    layout = FrameLayout.of(num_envs, num_steps, leaves, action, {("out",): torch.zeros(num_envs)})
    frames = allocate(layout)
    frames.begin()
    place = 100 * np.arange(num_steps + 1)[:, None] + np.arange(num_envs) + 1
    for array in frames.observation_arrays:
        array[...] = place.reshape(*place.shape, *[1] * (array.ndim - 2))
    for array in (tensor.numpy() for tensor in frames.finals):
        array[...] = -place[:-1].reshape(num_steps, num_envs, *[1] * (array.ndim - 2))
    frames.outputs[0].copy_(torch.from_numpy(place[:-1]))
    frames.action.copy_(torch.from_numpy(place[:-1] % 9))
    frames.reward[...] = np.where(live, place[:-1], np.nan)
    frames.live[...] = live
    frames.terminated[...] = ends & live
    frames.version[...] = np.arange(num_steps)[:, None]
    frames.place[...] = np.arange(num_steps * num_envs).reshape(num_steps, num_envs)
    return frames


def filled_of(frames, steps, worker, first_env, trajectories):
    return WorkerBatch(frames, steps, 0, worker, first_env, 0, trajectories)


@st.composite
def blocks(draw):
    envs, steps = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    bits = st.lists(st.booleans(), min_size=envs * steps, max_size=envs * steps)
    live, ends = (np.array(draw(bits)).reshape(steps, envs) for _ in range(2))
    return block(envs, steps, live, ends), draw(st.integers(0, steps))


@settings(max_examples=100, deadline=None)
@given(made=blocks())
def test_each_environments_frames_come_first_and_in_order(made):
    frames, steps = made
    total = frames.layout.num_steps
    filled = filled_of(frames, steps, 1, 4, TrajectoryNumbers(1, 2))
    batch = assemble([filled])
    assert batch.batch_size == (frames.layout.num_envs, total)
    assert frames_of(batch) == int(frames.live[:steps].sum())
    for env, row in enumerate(batch):
        ts = np.flatnonzero(frames.live[:steps, env])
        mask = row["collector", "mask"]
        assert mask.tolist() == [True] * len(ts) + [False] * (total - len(ts))
        told = torch.from_numpy(100 * ts + env + 1)
        ended = torch.from_numpy(frames.terminated[ts, env])
        follows = torch.where(ended, -told, told + 100)
        kept = row[mask]
        assert torch.equal(kept["a"], told.float()[:, None].expand(-1, 2))
        assert torch.equal(kept["b"], told)
        assert torch.equal(kept["out"], told.float())
        assert torch.equal(kept["action"], told % 9)
        assert torch.equal(kept["next", "reward"], told.float())
        assert torch.equal(kept["next", "a"][:, 0], follows.float())
        assert torch.equal(kept["next", "b"], follows)
        assert torch.equal(kept["next", "done"], ended)
        assert kept["policy_version"].tolist() == ts.tolist()
        for key in row.keys(True, True):
            if key[0] != "collector":
                assert not row[key][~mask].any(), key
    assert (batch["collector", "worker"] == 1).all()
    assert torch.equal(batch["collector", "env"][:, 0], 4 + torch.arange(len(batch)))


@settings(max_examples=100, deadline=None)
@given(made=blocks())
def test_a_batch_in_used_memory_says_the_same(made):
    frames, steps = made
    buffer = buffer_for([filled_of(frames, steps, 0, 0, TrajectoryNumbers())])
    for tensor in buffer.values():
        tensor.fill_(1)
    fresh, reused = (
        assemble([filled_of(frames, steps, 0, 0, TrajectoryNumbers())], buffer=memory)
        for memory in (None, buffer)
    )
    assert same_bits(fresh, reused)


def test_workers_lie_one_below_the_other_and_short_ones_are_padded():
    ones = block(2, 3, np.ones((3, 2), bool), np.zeros((3, 2), bool))
    others = block(1, 5, np.ones((5, 1), bool), np.zeros((5, 1), bool))
    parts = [
        filled_of(ones, 3, 0, 0, TrajectoryNumbers(0, 2)),
        filled_of(others, 4, 1, 2, TrajectoryNumbers(1, 2)),
    ]
    batch = assemble(parts)
    assert batch["collector", "mask"].sum(1).tolist() == [3, 3, 4]
    assert batch["collector", "worker"][:, 0].tolist() == [0, 0, 1]
    assert batch["collector", "env"][:, 0].tolist() == [0, 1, 2]
    assert batch["b"][2].tolist() == [1, 101, 201, 301, 0]
    assert "policy_version" not in assemble(parts, stamps=False)


def test_a_message_is_a_copy_of_the_rows_of_a_block_that_are_in_use():
    layout = FrameLayout.of(2, 7, observation_leaves(SPACE), action_leaf(spaces.Discrete(2)), {})
    frames = allocate(layout)
    frames.begin()
    for number, tensor in enumerate(frames.tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape).add(number))
    frames.terminated[:], frames.truncated[:] = False, False
    ended = np.array([True, False])
    for t in (1, 3, 5):
        frames.terminated[t, 0] = True
        frames.keep_finals(t, ended)
    expected = {key: tensor.clone() for key, tensor in frames.tensors.items()}
    pieces = to_message(frames, 4)
    for tensor in frames.tensors.values():
        tensor.zero_()
    copy = from_message(layout, pieces)
    finals = {field.key for field in layout.finals}
    for key, tensor in copy.tensors.items():
        rows = 1 if key in finals else 4 + layout.fields[key].rows - layout.num_steps
        assert torch.equal(tensor, expected[key][:rows])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_fields_of_a_block_are_aligned_and_do_not_overlap(num_envs):
    leaves = observation_leaves(SPACE)
    layout = FrameLayout.of(num_envs, 7, leaves, action_leaf(spaces.Discrete(2)), {})
    frames = allocate(layout)
    for number, tensor in enumerate(frames.tensors.values()):
        assert (tensor.data_ptr() - frames.observations[0].data_ptr()) % ALIGNMENT == 0
        tensor.fill_(number % 2)
    for number, tensor in enumerate(frames.tensors.values()):
        assert (tensor == number % 2).all()
