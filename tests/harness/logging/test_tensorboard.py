"""Event files, decoded here independently of how they were written."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from harness.logging import Histogram
from harness.logging.tensorboard import TensorBoardLogger, _checksum


def frames(data: bytes) -> list[bytes]:
    """The records of a file, their checksums checked."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == _checksum(data[:8])
        record, data = data[12 : 12 + length], data[12 + length :]
        assert data[:4] == _checksum(record)
        data = data[4:]
        found.append(record)
    return found


def fields(message: bytes) -> list[tuple[int, object]]:
    """A protocol buffer's fields, by number."""
    found, i = [], 0

    def varint() -> int:
        nonlocal i
        value = shift = 0
        while True:
            byte = message[i]
            i += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while i < len(message):
        key = varint()
        match key & 7:
            case 0:
                value: object = varint()
            case 1:
                (value,) = struct.unpack("<d", message[i : i + 8])
                i += 8
            case 5:
                (value,) = struct.unpack("<f", message[i : i + 4])
                i += 4
            case 2:
                length = varint()
                value = message[i : i + length]
                i += length
            case other:
                pytest.fail(f"wire type {other}")
        found.append((key >> 3, value))
    return found


def events(folder: Path) -> list[dict[int, object]]:
    (file,) = folder.iterdir()
    assert ".tfevents." in file.name
    return [dict(fields(record)) for record in frames(file.read_bytes())]


def test_scalars_and_histograms_can_be_read_back(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log(300, {"train/loss": 0.5}, {"policy/lag": Histogram([2, 1], [0.0, 1.0, 2.0])})
    logger.finish({}, 0)
    version, event = events(tmp_path)
    assert version[3] == b"brain.Event:2"
    assert event[2] == 300
    (_, scalar), (_, drawn) = fields(event[5])
    assert fields(scalar) == [(1, b"train/loss"), (2, 0.5)]
    (_, name), (_, histogram) = fields(drawn)
    assert name == b"policy/lag"
    parts = dict(fields(histogram))
    assert (parts[1], parts[2], parts[3]) == (0.0, 2.0, 3.0)
    assert struct.unpack("<2d", parts[6]) == (1.0, 2.0)
    assert struct.unpack("<2d", parts[7]) == (2.0, 1.0)


def test_the_checksum_is_crc_32c():
    """The value that RFC 3720 gives for 32 zero bytes is 0x8a9136aa."""
    crc = 0x8A9136AA
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert _checksum(bytes(32)) == struct.pack("<I", masked)
