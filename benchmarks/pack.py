"""All runs of a sweep as one compressed file, without checkpoints and recordings.

    .venv/bin/python benchmarks/pack.py outputs/rate_lag docs/findings/records/rate_lag.tar.xz

`harness.report` makes its report from what the file holds:

    tar xf docs/findings/records/rate_lag.tar.xz -C outputs
    python -m harness.report outputs/rate_lag --x sync.lag --hue algo.learning_rate

Numbers in `metrics.jsonl` have six significant digits, which halves the file.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.files import write_atomic  # noqa: E402
from harness.report.runs import FILES, search  # noqa: E402

DIGITS = 6


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
                    place = Path(sweep.name) / file.relative_to(sweep)
                    add(
                        packed,
                        place,
                        rounded(file) if name == "metrics.jsonl" else file.read_bytes(),
                    )
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(archive, content.getvalue())  # two at once would write into each other
    return len(runs)


def rounded(file: Path) -> bytes:
    """The records, with `DIGITS` significant digits."""
    records = (json.loads(line) for line in file.read_text().splitlines())
    return "".join(
        json.dumps({k: shorter(v) for k, v in one.items()}) + "\n" for one in records
    ).encode()


def shorter(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def add(packed: tarfile.TarFile, place: Path, content: bytes) -> None:
    """Add a file without owner and times, so that the same runs make the same archive."""
    entry = tarfile.TarInfo(str(place))
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
