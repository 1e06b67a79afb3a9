"""Turn run directories into a report: numbers with intervals, figures, and failures."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.report.text import show_progress

USAGE_ERROR = 2
INTERRUPTED = 130
SCORES = ("training", "acting", "evaluation")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    line = parser()
    options = line.parse_intermixed_args(arguments)
    if not options.places and not options.imports:
        line.error("expected a directory of runs, or --import")
    # Threads of numpy's, which its small products only wait for. Read when it loads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from harness.report.make import make  # after the options, whose mistakes are told at once

    try:
        while make(options) and options.watch is not None:
            time.sleep(options.watch)
    except (ValueError, OSError, RuntimeError) as error:
        show_progress("")
        print(f"report: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        prog="lockstep report",
        description=__doc__,
        epilog="Writes report.html (one self-contained page), report.md, figures/ and "
        "data/. Exit status: 0 written, 2 nothing to report on.",
    )
    add = line.add_argument
    add("places", nargs="*", type=Path, metavar="dir", help="directory of a sweep or a run")
    imports = "runs of another program: a log file, or a directory of such; can be repeated"
    add(
        "--import",
        action="append",
        dest="imports",
        default=[],
        type=Path,
        metavar="P",
        help=imports,
    )
    maps = (
        "what their names mean: cleanrl, sb3, torchrl, verl, prime-rl or a YAML file; one for all "
        "--import, or one for each"
    )
    add("--map", action="append", dest="maps", default=[], metavar="MAP", help=maps)
    add("--out", type=Path, help="where to write; by default <the first dir>/report")
    add("--title", help="title of the page; by default the names of the dirs")
    add("--x", metavar="OPTION", help="draw the score over this option: --x sync.lag")
    add("--hue", metavar="OPTION", help="one line per value of this option; several as a+b")
    add("--facet", metavar="OPTION", help="one panel per value of this option; several as a+b")
    interaction = (
        "whether option B changes the effect of option A: --interaction sync.lag*algo.clip"
    )
    add("--interaction", metavar="A*B", help=interaction)
    score = (
        "what the verdict is about: mean over training of the newest weights where runs were "
        "evaluated, else of the acting ones (training, the default); of the acting weights "
        "(acting); or the evaluation at the end (evaluation)"
    )
    add("--score", choices=SCORES, help=score)
    baseline = "what others are compared with: a setting's name, a part of it, or option=value"
    add("--baseline", help=baseline)
    margin = "differences below this share of the baseline's mean count as none; by default 0.1"
    margins = line.add_mutually_exclusive_group()
    margins.add_argument("--margin", type=positive, default=0.1, metavar="SHARE", help=margin)
    points = "the same in points of the score, where its mean may be near 0"
    margins.add_argument("--margin-points", type=positive, metavar="POINTS", help=points)
    final = "number of summary.json for the final results, and the verdict; by default eval/return"
    add("--metric", help=final)
    add("--target", type=number, help="score that counts as reached; by default gymnasium's")
    watch = "make the report again every S seconds while one of the runs is running"
    add("--watch", type=positive, metavar="S", help=watch)
    add("--compare", action="store_true", help="compare the dirs, setting by setting")
    return line


def number(text: str) -> float:
    """A finite number; argparse reports any other text."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def positive(text: str) -> float:
    """A number above zero; argparse reports any other text."""
    value = number(text)
    if value <= 0:
        raise ValueError(text)
    return value
