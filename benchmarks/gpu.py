"""What needs a GPU, in one command that ends within ten minutes: tests of CUDA, sends from it.

    make gpu        or, with any Python that has a torch with CUDA and the packages of the tests,
    python benchmarks/gpu.py [--output FOLDER]      by default $OUT, or outputs/gpu

Each part's output goes to FOLDER as well as to the terminal, with `gpu.json`, which says what ran,
where, how long, and how it ended. Without a CUDA device nothing runs, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.host import end_group  # noqa: E402

TESTS_S, SENDS_S = 380.0, 180.0


class Part(NamedTuple):
    """A command, and after how many seconds it is ended."""

    name: str
    command: Sequence[str]
    limit_s: float


class Ending(NamedTuple):
    """How a part ended. status: its exit status; None if it was ended for its time."""

    name: str
    command: str
    status: int | None
    seconds: float


def parts(output: Path) -> list[Part]:
    """The tests of CUDA, whose files are found by their mark, and the benchmark of sends."""
    files = sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.cuda" in file.read_text()
    )
    tests = [sys.executable, "-m", "pytest", "-n", "4", "-m", "cuda", "-ra", *files]
    sends = [sys.executable, "benchmarks/sync_cuda.py", "--output", str(output)]
    return [Part("tests", tests, TESTS_S), Part("sends", sends, SENDS_S)]


def run(part: Part, output: Path) -> Ending:
    """Run it, in a process group of its own that is ended with it."""
    begun = time.monotonic()
    file = output / f"{part.name}.txt"
    with file.open("wb") as sink:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process.pid)
            process.wait()
    seconds = round(time.monotonic() - begun, 1)
    print(file.read_text(errors="replace"), flush=True)
    return Ending(part.name, " ".join(part.command), status, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = os.environ.get("OUT") or ROOT / "outputs" / "gpu"
    parser.add_argument("--output", type=Path, default=Path(default))
    output = parser.parse_args().output.resolve()
    if not torch.cuda.is_available():
        print(f"there is no CUDA device here (torch {torch.__version__}): nothing was run")
        return 2
    output.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    endings = []
    for part in parts(output):
        endings.append(run(part, output))
        record = {**about, "parts": [ending._asdict() for ending in endings]}
        (output / "gpu.json").write_text(json.dumps(record, indent=2))
    for ending in endings:
        how = "ended for its time" if ending.status is None else f"exit status {ending.status}"
        print(f"{ending.name}: {how} after {ending.seconds:.0f} s, {output / ending.name}.txt")
    return int(any(ending.status != 0 for ending in endings))


if __name__ == "__main__":
    sys.exit(main())
