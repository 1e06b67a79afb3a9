"""The checks, each on a system of its library. Run as a program, once for each scheme.

Every finding is one JSON line on standard output as soon as it is known, after a line that says
which check begins. So whoever reads them knows which check a library hangs in.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from .protocol import System, Tally, Train
from .weights import NumberedModel

UNSENT = 1_000_000.0
UPDATES = 10
DELIVERED_S = 15.0
WATCH_S = 1.0
NOTICED_S = 20.0
Finding = dict[str, Any]


class NumberedSystem:
    """A system and the number of its last publish; the n-th publishes weights that say n.

    train: of the same scheme; None if the library does not offer it.
    """

    def __init__(self, system: System, width: int, train: Train | None = None):
        self.system = system
        self.train = train
        self.number = 0
        self._width = width

    def publish_own(self) -> None:
        """Change the trainer's model in place and publish it, as training loops do."""
        self.number += 1
        self.system.model.hold(self.number)
        self.system.publish(self.system.model, None)

    def publish_other(self, worker_ids: list[int] | None = None) -> None:
        """Publish weights in memory of their own, which is easier."""
        self.number += 1
        self.system.publish(NumberedModel(self._width, self.number), worker_ids)

    def await_number(self, workers: Collection[int] | None = None) -> float | None:
        """Seconds until these workers, or all, use the last publish; None if they never do."""
        start = time.monotonic()
        while time.monotonic() - start < DELIVERED_S:
            tallies = self.system.observe()
            chosen = range(len(tallies)) if workers is None else workers
            if all(tallies[worker].last == self.number for worker in chosen):
                return time.monotonic() - start
        return None

    def watch(self) -> list[Tally]:
        """What all workers see for a while, the last observation last."""
        seen = [self.system.observe()]
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            seen.append(self.system.observe())
        return [tally for tallies in seen for tally in tallies]


def check_aliasing(trial: NumberedSystem, seconds: float) -> dict[str, Finding]:
    """Do workers see a change of the trainer's weights that was not published?"""
    trial.publish_own()
    if trial.await_number() is None:
        return {"aliasing": failed("a published version did not arrive")}
    trial.system.model.hold(UNSENT)
    seen, workers = trial.watch(), len(trial.system.pids)
    saw = {i % workers for i, tally in enumerate(seen) if tally.highest >= UNSENT}
    trial.system.model.hold(trial.number)
    found = {"workers_that_saw_it": len(saw), "workers": workers}
    if saw:
        text = f"{len(saw)} of {workers} workers see unpublished changes"
        return {"aliasing": failed(text, **found)}
    return {"aliasing": passed(**found)}


def check_worker_ids(trial: NumberedSystem, seconds: float) -> dict[str, Finding]:
    """Does a publish to worker 0 change worker 0, and nothing else?"""
    trial.publish_own()
    before = trial.number
    if trial.await_number() is None:
        return {"worker_ids": failed("a published version did not arrive")}
    try:
        trial.publish_other(worker_ids=[0])
    except NotImplementedError:
        return {"worker_ids": not_offered()}
    arrived = trial.await_number([0]) is not None
    others = trial.watch()[-len(trial.system.pids) + 1 :]
    changed = sum(tally.last != before for tally in others)
    wrong = []
    if not arrived:
        wrong.append("worker 0 did not change")
    if changed:
        wrong.append(f"{changed} of {len(others)} other workers changed")
    if set(trial.system.model()) != {float(before)}:
        wrong.append("the trainer's own weights changed")
    found = {"others_changed": changed, "others": len(others)}
    return {"worker_ids": failed(" and ".join(wrong), **found) if wrong else passed(**found)}


def check_storm(trial: NumberedSystem, seconds: float) -> dict[str, Finding]:
    """Publish without pause: is each call made with one version, and stamped with that?

    Half of the time the trainer's own weights, changed in place, half of it weights in new memory.
    """
    trial.publish_own()
    trial.await_number()
    by_kind = {}
    publishes, spent_s = 0, 0.0
    for kind, publish in {"own": trial.publish_own, "other": trial.publish_other}.items():
        trial.system.observe()  # begin to count
        start = time.monotonic()
        while time.monotonic() - start < seconds / 2:
            publish()
            publishes += 1
            trial.system.take_turn()
        spent_s += time.monotonic() - start
        by_kind[kind] = _sum(trial.system.observe())
    trial.publish_other()
    delivered_s = trial.await_number()
    total = _sum(list(by_kind.values()))
    rate = publishes / spent_s
    shares = {kind: tally.torn / tally.calls for kind, tally in by_kind.items()}
    numbers: dict[str, Any] = {"calls": total.calls, "torn": total.torn, "torn_share": shares}
    tearing = passed(**numbers)
    if total.torn:
        tearing = failed(f"{_percent(total.torn, total.calls)} of calls torn", **numbers)
    numbers = {"stamped": total.stamped, "wrong": total.wrong_stamps}
    stamps = passed(**numbers) if total.stamped else not_offered()
    if total.wrong_stamps:
        share = _percent(total.wrong_stamps, total.stamped)
        stamps = failed(f"{share} of stamps wrong", **numbers)
    numbers = {"delivered_s": delivered_s, "publishes_per_s": rate}
    if delivered_s is None:
        delivery = failed(f"the last version did not arrive within {DELIVERED_S:g} s", **numbers)
    else:
        delivery = passed(**numbers)
    return {"tearing": tearing, "stamps": stamps, "delivery": delivery}


def check_lag_zero(trial: NumberedSystem, seconds: float) -> dict[str, Finding]:
    """Does an asynchronous trainer at staleness zero give the numbers of the synchronous one?"""
    if trial.train is None:
        return {"lag zero": not_offered()}
    synchronous = trial.train(asynchronous=False, updates=UPDATES)
    for asynchronous, who in ((False, "a second synchronous"), (True, "the asynchronous")):
        numbers = trial.train(asynchronous=asynchronous, updates=UPDATES)
        if numbers != synchronous:
            pairs = enumerate(zip(numbers, synchronous, strict=False), 1)
            first = next((n for n, (one, other) in pairs if one != other), len(numbers) + 1)
            text = f"{who} trainer differs from update {first} on"
            return {"lag zero": failed(text, numbers=numbers, synchronous=synchronous)}
    return {"lag zero": passed(updates=len(synchronous))}


def check_dead_workers(trial: NumberedSystem, seconds: float) -> dict[str, Finding]:
    """Is a worker that was killed an error at the trainer, soon?"""
    trial.publish_own()
    trial.await_number()
    os.kill(trial.system.pids[-1], signal.SIGKILL)
    start = time.monotonic()
    while time.monotonic() - start < NOTICED_S:
        try:
            trial.publish_own()
            trial.system.take_turn()
        except Exception as error:  # noqa: BLE001 - whichever the library raises
            after_s = time.monotonic() - start
            lines = [f"{type(error).__name__}:", *str(error).splitlines()]
            return {"dead workers": passed(after_s=after_s, error=" ".join(lines[:2]))}
    return {"dead workers": failed(f"no error within {NOTICED_S:g} s")}


CHECKS: dict[str, Callable[[NumberedSystem, float], dict[str, Finding]]] = {
    "aliasing": check_aliasing,
    "worker_ids": check_worker_ids,
    "storm": check_storm,
    "lag zero": check_lag_zero,
    "dead workers": check_dead_workers,
}
# The findings of each check: the columns of the table.
COLUMNS = {"aliasing": ["aliasing"], "worker_ids": ["worker_ids"]}
COLUMNS |= {"storm": ["tearing", "stamps", "delivery"], "lag zero": ["lag zero"]}
COLUMNS |= {"dead workers": ["dead workers"]}


def passed(**numbers: Any) -> Finding:
    """A finding of a check that the library passes."""
    return {"verdict": "pass", "text": "", "numbers": numbers}


def failed(text: str, **numbers: Any) -> Finding:
    """A finding of one that it does not."""
    return {"verdict": "FAIL", "text": text, "numbers": numbers}


def not_offered() -> Finding:
    """A finding of what the library has no such thing as."""
    return {"verdict": "not offered", "text": "", "numbers": {}}


def _sum(tallies: list[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.calls += tally.calls
        total.torn += tally.torn
        total.stamped += tally.stamped
        total.wrong_stamps += tally.wrong_stamps
    return total


def _percent(count: int, total: int) -> str:
    share = 100 * count / max(total, 1)
    digits = max(0, 1 - math.floor(math.log10(share))) if 0 < share < 10 else 0
    return f"{share:.{digits}f} %"


def end_with_parent() -> None:
    """End this process soon after the one that started it, whatever the library does."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the chosen checks on one scheme."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("adapter")
    parser.add_argument("--scheme", help="list them if it is not given")
    parser.add_argument("--checks", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    end_with_parent()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for whatever the library prints

    def say(**message: Any) -> None:
        output.write(json.dumps(message) + "\n")

    adapter = importlib.import_module(args.adapter)
    say(library=adapter.LIBRARY, schemes=list(adapter.SCHEMES))
    if args.scheme is not None:
        try:
            system = adapter.SCHEMES[args.scheme](args.workers, args.width)
            train = getattr(adapter, "TRAINERS", {}).get(args.scheme)
            trial = NumberedSystem(system, args.width, train)
            for name in args.checks:
                say(begins=name)
                say(found=CHECKS[name](trial, args.seconds))
            say(begins="close")
            trial.system.close()
        except Exception as error:  # noqa: BLE001 - the table has it
            traceback.print_exc()
            say(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    os._exit(0)  # workers see their pipes close; the library's threads may hang in an ordinary exit


if __name__ == "__main__":
    main()
