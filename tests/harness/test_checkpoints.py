from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest
import torch

from harness.run.checkpoints import CheckpointError, Checkpoints, read

STATE = {
    "weights": {"a.b": torch.arange(6.0).reshape(2, 3), 3: torch.tensor([True, False])},
    "stream": torch.arange(5, dtype=torch.uint8),
    "count": 2**80,
    "rate": 0.1,
    "names": ["x", ("y", None)],
    "empty": {},
    "flag": True,
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b and type(a) is type(b)


def test_a_state_comes_back_as_it_was(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1024, STATE)
    frames, state = checkpoints.load()
    assert frames == 1024
    assert same(state, STATE)


def test_tensors_that_share_memory_are_kept_each_by_itself(tmp_path):
    base = torch.arange(10.0)
    Checkpoints(tmp_path).save(1, {"all": base, "part": base[2:4], "again": base, "t": base[::3]})
    _, state = Checkpoints(tmp_path).load()
    assert torch.equal(state["part"], base[2:4])
    assert torch.equal(state["again"], base)
    assert torch.equal(state["t"], base[::3])


def test_a_checkpoint_and_its_folder_are_synced_before_older_ones_are_removed(
    tmp_path, monkeypatch
):
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), len(checkpoints.files())))

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, STATE)
    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints.save(2, STATE)
    assert synced == [(str(tmp_path / f".writing-{os.getpid()}"), 1), (str(tmp_path), 2)]


def test_the_newest_so_many_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for frames in (1, 20, 300):
        checkpoints.save(frames, {"frames": frames})
    assert [read(file) for file in checkpoints.files()] == [{"frames": 20}, {"frames": 300}]


def test_of_one_frame_the_newest_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for told in (1, 2):
        checkpoints.save(20, {"told": told})
    assert [read(file) for file in checkpoints.files()] == [{"told": 2}]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_newest_one_falls_back_loudly(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"frames": 1})
    newest = checkpoints.save(2, {"frames": 2, "t": torch.ones(100)})
    spoil(newest, damage)
    with caplog.at_level(logging.ERROR):
        assert checkpoints.load() == (1, {"frames": 1})
    assert newest.name in caplog.text
    assert "trying the previous one" in caplog.text


def spoil(file: Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[-1] ^= 1
    else:
        data.clear()
    file.write_bytes(data)


def test_without_a_sound_one_the_error_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="there is none"):
        checkpoints.load()
    spoil(checkpoints.save(1, {}), "empty")
    with pytest.raises(CheckpointError, match="none of the 1 there can be read"):
        checkpoints.load()


def test_what_a_write_left_unfinished_is_not_taken_for_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"frames": 1})
    (tmp_path / ".writing-123").write_bytes(b"half")
    (tmp_path / "notes.safetensors").write_bytes(b"mine")
    assert checkpoints.load() == (1, {"frames": 1})


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError, match=r"/optimiser is a Parts: a checkpoint holds tensors"):
        Checkpoints(tmp_path).save(1, {"optimiser": Parts()})
    assert list(tmp_path.iterdir()) == []


class Parts:
    pass


def test_loading_executes_nothing(tmp_path):
    """A pickle under a checkpoint's name, hash and all, is refused and not run."""
    ran = tmp_path / "ran"
    file = tmp_path / "new"
    file.write_bytes(pickle.dumps(Bomb(ran)))
    from harness.run.checkpoints import digest

    file = file.rename(tmp_path / f"{1:012d}-{digest(file)}.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(file)
    assert not ran.exists()


class Bomb:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))
