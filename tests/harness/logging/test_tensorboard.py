"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.config.plan import plan_run
from harness.errors import ConfigError
from harness.logging import RunInfo
from harness.logging.tensorboard import TensorBoardConfig, TensorBoardLogger
from harness.measures.meters import Histogram
from harness.run_directory import RunDir

ROOT = Path(__file__).resolve().parents[3]
HISTOGRAM = Histogram([2, 1], [0.0, 1.0, 2.0])


def read(folder: Path) -> EventAccumulator:
    (file,) = (folder / "tensorboard").iterdir()
    assert ".tfevents." in file.name
    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def start(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(TensorBoardConfig(), RunDir(folder), RunInfo("a-run", {}))


def test_scalars_and_histograms_can_be_read_back(tmp_path):
    logger = start(tmp_path)
    logger.log(300, {"train/loss": 0.5, "frames": 3}, {"policy/lag": HISTOGRAM})
    logger.log(400, {"train/loss": 0.25}, {})
    logger.finish({}, 0)
    events = read(tmp_path)
    assert events.file_version == 2
    loss = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert loss == [(300, 0.5), (400, 0.25)]
    assert events.Scalars("frames")[0].value == 3
    (event,) = events.Histograms("policy/lag")
    found = event.histogram_value
    assert event.step == 300
    assert (found.min, found.max, found.num) == (0.0, 2.0, 3.0)
    assert (found.sum, found.sum_squares) == (2 * 0.5 + 1.5, 2 * 0.25 + 2.25)
    assert (found.bucket_limit, found.bucket) == ([1.0, 2.0], [2.0, 1.0])


def test_a_record_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    """A killed run loses nothing that it logged."""
    before = threading.active_count()
    logger = start(tmp_path)
    logger.log(1, {"a": 1.0}, {})
    assert [event.value for event in read(tmp_path).Scalars("a")] == [1.0]
    assert threading.active_count() == before
    logger.finish({}, 0)


def test_a_logger_whose_disk_is_full_is_left_out_and_prints_no_traceback(tmp_path):
    code = f"""
import logging, resource, signal
from pathlib import Path
from harness.logging import Loggers, RunInfo
from harness.logging.tensorboard import TensorBoardLogger
from harness.logging.tensorboard import TensorBoardConfig
from harness.run_directory import RunDir
logging.basicConfig(format="%(message)s", level=logging.WARNING)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run_dir = RunDir(Path({str(tmp_path)!r}))
loggers = Loggers([TensorBoardLogger(TensorBoardConfig(), run_dir, RunInfo("a-run", {{}}))])
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
for step in range(100):
    loggers.log(step, {{"a": 1.0}})
loggers.finish({{}}, 0)
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "went on\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("TensorBoardLogger failed and is turned off: ")


def test_a_run_without_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tensorboard\]'"):
        plan_run(["logger=tensorboard"])
