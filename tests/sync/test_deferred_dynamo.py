"""torch's compiler is loaded when somebody compiles, and then knows what tensordict told it."""

from __future__ import annotations

import subprocess
import sys

LOADED = "import sys; assert 'torch._dynamo' not in sys.modules, 'the compiler is loaded'; "

EACH = """
import importlib, os, sys, torch  # torch alone loads no compiler; the rest, each module for itself
for module in sys.argv[1:]:
    if not (child := os.fork()):
        importlib.import_module(module)
        os._exit("torch._dynamo" in sys.modules)
    if os.waitpid(child, 0)[1]:
        print(module)
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_nothing_loads_the_compiler_by_being_imported():
    modules = ["sync", "sync.remote.rpc", "collectors.workers.worker_loop", "collectors.single"]
    assert run(EACH, *modules, "harness.config") == ""


MARKED = """
import importlib.util, tensordict.utils, torch
importlib.util.find_spec("torch._dynamo")  # as those do who only want to know whether it is there
functions = [tensordict.utils._lock_warn]
assert not hasattr(functions[0], "_dynamo_marked_constant")
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
import torch._dynamo.trace_rules as rules
print(functions[0]._dynamo_marked_constant, len(rules._allowed_callable_ids.function_ids))
"""


def test_whoever_compiles_finds_the_marks_that_were_put_off():
    marked, allowed = run(f"import sync; {LOADED}{MARKED}").split()
    assert marked == "True"
    without = MARKED.replace("assert not", "assert")
    assert run(f"import tensordict.nn; {without}").split() == [marked, allowed]
