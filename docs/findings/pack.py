"""All runs of a sweep as one small file: what the tables and figures of a study are made of.

    .venv/bin/python docs/findings/pack.py outputs/rate_lag docs/findings/records/rate_lag.tar.xz

The file unpacks to run directories, which `harness.report` and the programs of the studies read:

    tar xf docs/findings/records/rate_lag.tar.xz -C outputs
    python -m harness.report outputs/rate_lag --x sync.lag --hue algo.learning_rate

They hold the config, the manifest and the status; of metrics.jsonl the columns `COLUMNS`, with six
significant digits; and of summary.json the numbers `NUMBERS`. Times, phases, latencies, losses and
health by lag are left out, and with them the parts of a report that show them. Of the state that a
branch begins with there is the name, which has the frames of the moment.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.files import write_atomic  # noqa: E402
from harness.report.runs import FILES, search  # noqa: E402
from harness.run.branch_start import START  # noqa: E402

DIGITS = 6
COLUMNS = {
    "step",
    "episode/return",
    "episodes/length",
    "episodes/length_used",
    "eval/return",
    "eval/return_sampled",
    "eval/entropy",
    "train/entropy",
    "train/gradient_steps",
    "policy/lag_updates_mean",
    "policy/lag_steps_mean",
    "policy/lag_steps_max",
    "policy/ess",
    "policy/kl",
    "policy/ratio_max",
}
NUMBERS = COLUMNS | {
    "frames",
    "updates",
    "gradient_steps",
    "wall_s",
    "fps",
    "time/evaluate_s",
    "episode/count",
    "policy/dropped",
    "sim/time_s",
    "sync/tear_rate",
}


def pack(sweep: Path, archive: Path) -> int:
    """Write the archive; how many runs it holds."""
    runs = sorted(search(sweep))
    if not runs:
        raise SystemExit(f"{sweep}: there are no runs")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as packed:
        for name in FILES:  # files of one kind beside each other compress best
            for file in (run / name for run in runs):
                if file.exists():
                    add(packed, sweep, file, CHOICES.get(name, Path.read_bytes)(file))
        for file in (file for run in runs for file in run.glob(f"{START}/*.safetensors")):
            add(packed, sweep, file, b"")
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(archive, content.getvalue())  # two at once would write into each other
    return len(runs)


def records(file: Path) -> bytes:
    """The columns of metrics.jsonl, with `DIGITS` significant digits."""
    lines = (json.loads(line) for line in file.read_text().splitlines())
    kept = ({name: rounded(one[name]) for name in one if name in COLUMNS} for one in lines)
    return "".join(json.dumps(one) + "\n" for one in kept if len(one) > 1).encode()


def numbers(file: Path) -> bytes:
    """The numbers of summary.json."""
    summary = json.loads(file.read_text())
    return json.dumps({name: summary[name] for name in summary if name in NUMBERS}).encode()


def origin(file: Path) -> bytes:
    """The manifest, without the folders of the program and of a branch's parent."""
    manifest = json.loads(file.read_text())
    if isinstance(command := manifest.get("command"), str):
        command = re.sub(r"^python \S*/command\.py", "lockstep", command)
        manifest["command"] = re.sub(r"^python \S*/run\.py", "python run.py", command)
    if isinstance(branch := manifest.get("branch"), dict):
        branch["parent"] = Path(branch["parent"]).name
    return json.dumps(manifest, indent=2).encode()


def rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


CHOICES: dict[str, Callable[[Path], bytes]] = {
    "metrics.jsonl": records,
    "summary.json": numbers,
    "manifest.json": origin,
}


def add(packed: tarfile.TarFile, sweep: Path, file: Path, content: bytes) -> None:
    """Add a file without owner and times, so that the same runs make the same archive."""
    entry = tarfile.TarInfo(str(Path(sweep.name) / file.relative_to(sweep)))
    entry.size = len(content)
    packed.addfile(entry, io.BytesIO(content))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="the directory of a sweep")
    parser.add_argument("archive", type=Path, help="the file to write, .tar.xz")
    arguments = parser.parse_args(argv)
    count = pack(arguments.sweep, arguments.archive)
    print(f"{arguments.archive}: {count} runs, {arguments.archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
