"""The programs of examples/from_torchrl learn, and stop at Ctrl-C, in the peers' environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
RETURN = re.compile(r"mean return +(-?[\d.]+)")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PEERS.exists(), reason="there is no .venv-peers: see `make peers`"),
]


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PEERS, ROOT / "examples" / "from_torchrl" / name, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def returns(name: str) -> list[float]:
    process = start(name)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return [float(value) for value in RETURN.findall(output)]


def test_ppo_learns_cartpole():
    found = returns("ppo.py")
    assert found[0] < 50
    assert max(found) > 300


def test_sac_learns_pendulum():
    found = returns("sac.py")
    assert found[0] < -800
    assert max(found) > -400


@pytest.mark.parametrize("name", ["ppo.py", "sac.py"])
def test_ctrl_c_stops_a_program(name):
    process = start(name)
    assert process.stdout is not None
    assert any("mean return" in line for line in process.stdout)  # after torchrl's own lines
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "stopped"
    assert "Traceback" not in errors
