"""Checkpoints damaged, forged, swapped or cut off: never loaded wrongly, never executed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.run.checkpoints import FORMAT, CheckpointError, Checkpoints, digest, read
from tests.harness.small import little_room

META = "__metadata__"
SMALL = {"count": 3, "t": torch.arange(4.0)}
BIG = {f"t{i}": torch.arange(700.0) + i for i in range(40)} | {"names": ["x"] * 300}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", run="aaaa")


def forge(folder: Path, content: bytes, frames: int = 2) -> Path:
    """Whatever it is, under a checkpoint's name with the right hash."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "forged"
    file.write_bytes(content)
    return file.rename(folder / f"{frames:012d}-{digest(file)}.safetensors")


def forge_header(folder: Path, **header: str) -> Path:
    """A sound file with this header."""
    known = {"format": FORMAT, "run": "aaaa", "frames": "2", "state": '{"mapping": []}'}
    file = folder / "made"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.ones(2)}, file, metadata={**known, **header})
    return forge(folder, file.read_bytes())


def refused(file: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        read(file, run="aaaa")
    assert "\n" not in str(found.value)
    return str(found.value)


def loads(file: Path) -> bool:
    try:
        return isinstance(read(file), dict)
    except CheckpointError:
        return False


# -- damage


def test_cut_at_any_byte_a_checkpoint_is_refused(checkpoints):
    file = checkpoints.save(1, SMALL)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert "damaged" in refused(file)
    file.write_bytes(whole + b"\0")
    assert "damaged" in refused(file)


def test_with_any_bit_flipped_a_checkpoint_is_refused(checkpoints):
    file = checkpoints.save(1, SMALL)
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        assert "damaged" in refused(file)


def test_a_large_checkpoint_cut_at_every_border_or_anywhere_falls_back(checkpoints):
    checkpoints.save(1, {"sound": True})
    file = checkpoints.save(2, BIG)
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    stored = json.loads(whole[8:start])
    ends = [end for name, found in stored.items() if name != META for end in found["data_offsets"]]
    borders = {start + end for end in ends}
    anywhere = random.Random(0).sample(range(len(whole)), 60)
    for length in sorted({0, 7, 8, 9, start - 1, *borders, *anywhere} - {len(whole)}):
        file.write_bytes(whole[:length])
        assert checkpoints.load() == (1, {"sound": True})


def test_the_parser_itself_takes_no_damage_for_a_checkpoint(checkpoints):
    """With the hash made to fit, as a forger would: it loads, or is refused in one line."""
    whole = checkpoints.save(1, SMALL).read_bytes()
    folder = checkpoints.folder.with_name("forged")
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in range(len(whole)):
        refused(forge(folder, whole[:length], frames=1))
    for place in range(header):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        file = forge(folder, bytes(damaged), frames=1)
        if not loads(file):
            refused(file)


# -- forgery

NESTED = '{"list": [' * 100_000 + "1" + "]}" * 100_000


@pytest.mark.parametrize(
    "skeleton",
    [
        *("", "nonsense", "3", "[]", "null", "{}", '{"mapping": 3}', '{"mapping": [3]}'),
        *('{"mapping": [[[], 1]]}', '{"mapping": [["a", {"tensor": []}]]}', '{"tensor": "a"}'),
        *('{"mapping": [["a", {"tensor": "absent"}]]}', '{"mapping": [["a", {"list": null}]]}'),
        *('{"mapping": [["a", {"os.system": "touch x"}]]}', '{"mapping": [["a", {}]]}', NESTED),
        '{"mapping": [["a", {"list": [], "tuple": []}]]}',
    ],
    ids=lambda skeleton: skeleton[:40],
)
def test_a_forged_state_is_refused_in_one_line(tmp_path, skeleton):
    refused(forge_header(tmp_path, state=skeleton))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"format": "0"}, "is of format 0, expected 4"),
        ({"format": "3"}, "is of format 3, expected 4"),
        ({"frames": "3"}, "was written at frame 3"),
        ({"run": "bbbb"}, "belongs to another run: bbbb, but this is aaaa"),
        ({"run": ""}, "belongs to another run: no run that is known"),
    ],
)
def test_another_format_frame_or_run_is_refused_by_name(tmp_path, header, said):
    assert said in refused(forge_header(tmp_path, **header))


def test_from_before_formats_were_said_a_checkpoint_is_refused(tmp_path):
    file = tmp_path / "made"
    save_file({}, file, metadata={"state": '{"mapping": []}'})
    assert "does not say its format" in refused(forge(tmp_path, file.read_bytes()))


def test_renamed_to_another_frame_a_checkpoint_is_refused(checkpoints):
    file = checkpoints.save(1, SMALL)
    moved = file.rename(file.with_name(file.name.replace("000001-", "999999-")))
    assert "was written at frame 1" in refused(moved)


def test_of_two_runs_that_were_mixed_each_loads_its_own(tmp_path, caplog):
    mine, other = (Checkpoints(tmp_path / run, run=run) for run in ("aaaa", "bbbb"))
    mine.save(1, {"whose": "mine"})
    other.save(2, {"whose": "other"})
    shutil.copytree(other.folder, mine.folder, dirs_exist_ok=True)
    with caplog.at_level(logging.ERROR):
        assert mine.load() == (1, {"whose": "mine"})
    assert "belongs to another run" in caplog.text
    assert "trying the previous one" in caplog.text


def bombs(ran: Path) -> dict[str, bytes]:
    import io
    import zipfile

    simple = pickle.dumps(Bomb(ran))
    archive, saved = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("archive/data.pkl", simple)
    torch.save(Bomb(ran), saved)
    header = json.dumps({"__metadata__": {"format": FORMAT, "frames": "2", "state": repr(simple)}})
    framed = len(header).to_bytes(8, "little") + header.encode() + simple
    return {"pickle": simple, "zip": archive.getvalue(), "torch": saved.getvalue(), "in it": framed}


class Bomb:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.file,))


@pytest.mark.parametrize("kind", ["pickle", "zip", "torch", "in it"])
def test_a_bomb_does_not_go_off(tmp_path, kind):
    ran = tmp_path / "ran"
    content = bombs(ran)[kind]
    pickle.loads(pickle.dumps(Bomb(tmp_path / "armed")))
    assert (tmp_path / "armed").exists()
    refused(forge(tmp_path / "checkpoints", content))
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_ordinary_file_is_no_checkpoint(checkpoints, kind):
    file = checkpoints.save(1, SMALL)
    kept = file.rename(file.parent / "kept")
    if kind == "link":
        file.symlink_to(kept)
    elif kind == "folder":
        file.mkdir()
    else:
        os.mkfifo(file)
    assert "is a link" in refused(file) if kind == "link" else "is no file" in refused(file)


def test_a_checkpoint_is_not_written_through_a_link(checkpoints, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    checkpoints.folder.mkdir()
    (checkpoints.folder / f".writing-{os.getpid()}").symlink_to(precious)
    checkpoints.save(1, SMALL)
    assert precious.read_text() == "mine"


# -- a full disk


def test_on_a_full_disk_the_checkpoint_before_stays_and_nothing_else(checkpoints):
    before = checkpoints.save(1, SMALL)
    said = f"no checkpoint can be written in {checkpoints.folder}: .*too large"
    with little_room(65536), pytest.raises(OSError, match=f"(?i){said}"):
        checkpoints.save(2, {"t": torch.ones(100_000)})
    assert list(checkpoints.folder.iterdir()) == [before]
    assert checkpoints.load()[0] == 1
