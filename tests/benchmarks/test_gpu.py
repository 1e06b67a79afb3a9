"""`make gpu`: what it runs, that each part is bounded, and what it says without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.host import living_members


def test_without_a_device_nothing_runs_and_the_status_is_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path / "found")])
    assert gpu.main() == 2
    assert capsys.readouterr().out.startswith("there is no CUDA device here")
    assert not (tmp_path / "found").exists()


def test_all_parts_together_end_within_ten_minutes_and_take_every_file_of_cuda_tests(tmp_path):
    tests, sends = gpu.parts(tmp_path)
    assert tests.limit_s + sends.limit_s < 600
    assert {"tests/promises/test_cuda.py", "tests/harness/test_cuda_runs.py"} <= {*tests.command}
    assert str(tmp_path) in sends.command


@pytest.mark.parametrize(
    ("program", "limit_s", "status"),
    [("print('measured')", 60.0, 0), ("print('measured'); raise SystemExit(3)", 60.0, 3)],
)
def test_a_part_leaves_its_output_and_its_status(tmp_path, program, limit_s, status):
    part = gpu.Part("sends", [sys.executable, "-c", program], limit_s)
    assert gpu.run(part, tmp_path).status == status
    assert (tmp_path / "sends.txt").read_text() == "measured\n"


def test_a_part_that_takes_too_long_is_ended_with_its_processes(tmp_path):
    part = gpu.Part("tests", ["bash", "-c", "echo $$; sleep 600 & wait"], 2.0)
    assert gpu.run(part, tmp_path).status is None
    for group in (tmp_path / "tests.txt").read_text().split():
        assert not living_members(int(group))
