"""Check weight-sync schemes of any library, and print one table.

    lockstep conformance                                       Lockstep's own
    lockstep conformance my_adapter other_adapter@path/to/python

Each scheme runs in a process group of its own. If it hangs or fails in one check, that is what the
table says, and the remaining checks run in a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .checks import CHECKS, COLUMNS, DELIVERED_S, NOTICED_S, Finding

START_S = 150.0  # imports and the start of the workers, on a busy machine
PATIENCE_S = NOTICED_S + 2 * DELIVERED_S + 10.0  # for one check, beside a storm
CLOSE_S = 5.0
PACKAGE = __package__ or "lockstep_conformance"
OUR_ADAPTER = f"{PACKAGE}.lockstep"
Row = dict[str, Any]


class Scheme:
    """One scheme of an adapter, checked by the interpreter of its library."""

    def __init__(self, adapter: str, python: str, scheme: str | None, options: list[str]):
        self._command = [python, "-m", f"{PACKAGE}.checks", adapter, *options]
        self._command += [] if scheme is None else ["--scheme", scheme]

    def messages(
        self, checks: list[str], first_s: float, each_s: float
    ) -> Iterator[dict[str, Any]]:
        """What the checks say, line by line; `TimeoutError` if it takes too long to the next."""
        command = self._command + (["--checks", *checks] if checks else [])
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, process_group=0
        )
        lines: queue.Queue[str] = queue.Queue()
        assert child.stdout is not None
        stdout = child.stdout

        def read() -> None:
            for line in stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        try:
            timeout_s = first_s
            while line := lines.get(timeout=timeout_s):
                message = json.loads(line)
                timeout_s = first_s if "library" in message else each_s
                yield message
        except queue.Empty:
            raise TimeoutError(f"nothing for {timeout_s:g} s") from None
        finally:
            end_group(child)

    def check(self, seconds: float) -> dict[str, Finding]:
        """All findings, by column; no check may take longer."""
        found: dict[str, Finding] = {}
        left = list(CHECKS)
        while left:
            current, error = left[0], ""
            try:
                for message in self.messages(left, START_S, seconds):
                    if "begins" in message:
                        current = message["begins"]
                    found |= message.get("found", {})
                    error = message.get("error", "")
                else:
                    error = error or "its process ended"
            except TimeoutError:
                error = f"hangs (ended after {seconds:g} s)"
            for name in list(left):
                if set(COLUMNS[name]) <= set(found):
                    left.remove(name)
            if left:
                broken = current if current in left else left[0]
                left.remove(broken)
                found |= {c: _failed(error) for c in COLUMNS[broken] if c not in found}
        return found


def _failed(text: str) -> Finding:
    return {"verdict": "FAIL", "text": text, "numbers": {}}


def end_group(child: subprocess.Popen[str]) -> None:
    """End a process and what it started.

    SIGTERM comes first: Python's resource tracker outlives it and unlinks what is left in /dev/shm.
    """
    deadline = time.monotonic() + CLOSE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            child.poll()
            os.killpg(child.pid, 0)  # raises when the group is empty
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def shown(finding: Finding) -> str:
    """A finding as a cell of the table."""
    text, numbers = finding["text"], finding["numbers"]
    if finding["verdict"] == "pass" and "after_s" in numbers:
        return f"pass, {numbers['after_s']:.1f} s"
    if finding["verdict"] == "pass" and "delivered_s" in numbers:
        return f"pass, {numbers['delivered_s']:.2f} s"
    return f"{finding['verdict']}: {text}" if text else str(finding["verdict"])


def table(rows: list[Row]) -> str:
    """Markdown, padded so that it can be read as it is."""
    columns = [column for names in COLUMNS.values() for column in names]
    cells = [["library", "scheme", *columns]]
    for row in rows:
        cells.append(
            [row["library"], row["scheme"], *(shown(row["found"][name]) for name in columns)]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every scheme of every adapter that is named; the exit status."""
    parser = argparse.ArgumentParser(
        prog="lockstep conformance", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    adapters = "adapters of libraries; by default Lockstep's"
    parser.add_argument(
        "adapters", nargs="*", default=[OUR_ADAPTER], metavar="MODULE[@PYTHON]", help=adapters
    )
    parser.add_argument("--schemes", nargs="+", help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of publishing without pause")
    parser.add_argument("--width", type=int, default=64, help="the largest tensors are width^2")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for a check")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if something fails")
    parser.add_argument("--output", type=Path, help="write conformance.json and .md there")
    args = parser.parse_args(arguments)
    options = ["--workers", str(args.workers), "--seconds", str(args.seconds)]
    options += ["--width", str(args.width)]
    rows: list[Row] = []
    for named in args.adapters:
        adapter, _, python = named.partition("@")
        python = python or sys.executable
        asked = Scheme(adapter, python, None, options)
        try:
            about = next(asked.messages([], START_S, START_S))
        except (StopIteration, TimeoutError):
            parser.error(f"{named}: this adapter could not be imported")
        for scheme in about["schemes"]:
            if args.schemes and scheme not in args.schemes:
                continue
            print(f"{about['library']}, {scheme} ...", file=sys.stderr, flush=True)
            found = Scheme(adapter, python, scheme, options).check(args.patience + args.seconds)
            rows.append({"library": about["library"], "scheme": scheme, "found": found})
    text = table(rows)
    print(text)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "conformance.md").write_text(text + "\n")
        (args.output / "conformance.json").write_text(json.dumps(rows, indent=1) + "\n")
    verdicts = {finding["verdict"] for row in rows for finding in row["found"].values()}
    return int(args.strict and "FAIL" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
