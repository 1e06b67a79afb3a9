"""Stops a run at one traced point, so that chaos can do its worst exactly there.

Python imports this file at its start, in every process of a run, if its folder is on PYTHONPATH.
What to trace is in the JSON file that LOCKSTEP_CHAOS names:

    socket    where to report; the process waits there until it is told to go on
    point     "module:name.of.function", or "module" for the moment in which it is imported
    workers   whether only workers stop there, or only the trainer
    nth       the how manieth call; counted by each process for itself
    once      a file that the first to get there makes; nobody else stops
    clock     a seed: the wall clock jumps by years, four times a second
"""

import functools
import importlib.util
import inspect
import json
import os
import random
import socket
import sys
import time

YEARS = 3600 * 24 * 365


class Tracer:
    """Finds modules like Python does, and wraps the one function that is traced."""

    def __init__(self, plan):
        self.plan = plan
        self.module, _, self.name = plan["point"].partition(":")
        self.calls = 0

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if not self.name:
            self.reached()
        elif spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module):
                execute(module)
                self.wrap(module)

            spec.loader.exec_module = execute_and_wrap
        return spec

    def wrap(self, module):
        *owners, name = self.name.split(".")
        owner = functools.reduce(getattr, owners, module)
        found = inspect.getattr_static(owner, name)
        kind = type(found) if isinstance(found, classmethod | staticmethod) else None
        plain = found.__func__ if kind else found

        @functools.wraps(plain)
        def traced(*args, **kwargs):
            self.reached()
            return plain(*args, **kwargs)

        setattr(owner, name, kind(traced) if kind else traced)

    def reached(self):
        """Report, and wait for leave to go on; a signal may end the wait by an exception."""
        if in_worker() != self.plan["workers"]:
            return
        self.calls += 1
        if self.calls != self.plan["nth"]:
            return
        try:
            os.close(os.open(self.plan["once"], os.O_CREAT | os.O_EXCL))
        except OSError:
            return
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self.plan["socket"])
            line.sendall(f"{os.getpid()}\n".encode())
            line.recv(1)


def in_worker():
    process = sys.modules.get("multiprocessing.process")
    of_ray = os.path.basename(sys.argv[0]) == "default_worker.py"  # where its actors live
    return of_ray or (process is not None and process.parent_process() is not None)


def jump(seed):
    """Have the wall clock jump. `datetime` has a clock of its own, which does not."""
    real, start = time.time, time.monotonic()

    def jumping():
        moment = int((time.monotonic() - start) * 4)
        return real() + random.Random(f"{seed}/{moment}").uniform(-10 * YEARS, 10 * YEARS)

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)


def begin(file):
    with open(file, encoding="utf-8") as stream:
        plan = json.load(stream)
    if plan.get("clock") is not None:
        jump(plan["clock"])
    if plan.get("point"):
        sys.meta_path.insert(0, Tracer(plan))


if os.environ.get("LOCKSTEP_CHAOS"):
    begin(os.environ["LOCKSTEP_CHAOS"])
