"""Event files that TensorBoard reads, written without it.

A file is a row of records, each framed by its length and checksums; a record is one protocol
buffer, of which only the few fields that scalars and histograms need are encoded here.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.logging.base import Histogram, Logger, Metrics, RunInfo
from harness.options.loggers import TensorBoardConfig
from harness.run_dir import RunDir


def make(options: TensorBoardConfig, run_dir: RunDir, info: RunInfo) -> TensorBoardLogger:
    """`logger=tensorboard`."""
    return TensorBoardLogger(run_dir.path / "tensorboard")


CASTAGNOLI = 0x82F63B78


class TensorBoardLogger(Logger):
    """Scalars and histograms into one event file."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._stream = open(folder / name, "wb")  # noqa: SIM115
        self._write(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        values = [_bytes(1, name.encode()) + _float(2, value) for name, value in metrics.items()]
        values += [
            _bytes(1, name.encode()) + _bytes(5, _encode_histogram(histogram))
            for name, histogram in histograms.items()
        ]
        summary = b"".join(_bytes(1, value) for value in values)
        self._write(_double(1, time.time()) + _whole(2, step) + _bytes(5, summary))
        self._stream.flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._stream.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._stream.write(length + _checksum(length) + event + _checksum(event))


def _encode_histogram(histogram: Histogram) -> bytes:
    counts, edges = histogram.counts, histogram.edges
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    moments = [
        edges[0],
        edges[-1],
        float(sum(counts)),
        sum(n * m for n, m in zip(counts, middles, strict=True)),
        sum(n * m * m for n, m in zip(counts, middles, strict=True)),
    ]
    fields = [_double(number, value) for number, value in enumerate(moments, start=1)]
    return b"".join(fields) + _doubles(6, edges[1:]) + _doubles(7, [float(n) for n in counts])


# -- protocol buffer fields


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _whole(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _key(number, 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _key(number, 5) + struct.pack("<f", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, 2) + _varint(len(value)) + value


def _doubles(number: int, values: list[float]) -> bytes:
    return _bytes(number, struct.pack(f"<{len(values)}d", *values))


# -- checksums


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ CASTAGNOLI * (byte & 1)
    return byte


_ROWS = [_row(byte) for byte in range(256)]


def _checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as the format wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _ROWS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
