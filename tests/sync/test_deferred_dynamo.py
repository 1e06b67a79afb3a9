"""torch's compiler is loaded when somebody compiles, and then knows what tensordict told it."""

from __future__ import annotations

import subprocess
import sys

# torch alone loads no compiler. Each code is run in a fork, where nothing else was imported.
PROGRAM = """
import os, sys, torch
for code in sys.argv[1:]:
    if not (child := os.fork()):
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
MODULES = ["sync", "sync.remote.rpc_engine", "collectors.workers.worker_loop", "collectors.single"]
LOADED = "import sys, {module}; print('{module}', 'torch._dynamo' in sys.modules)\n"
MARKED = """
import importlib.util, tensordict.utils
importlib.util.find_spec("torch._dynamo")  # as those do who only want to know whether it is there
functions = [tensordict.utils._lock_warn]
print(hasattr(functions[0], "_dynamo_marked_constant"))
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
import torch._dynamo.trace_rules as rules
print(functions[0]._dynamo_marked_constant, len(rules._allowed_callable_ids.function_ids))
"""


def output_of(*codes: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, *codes]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


def test_nothing_loads_the_compiler_by_being_imported_and_whoever_compiles_finds_the_marks():
    modules = [*MODULES, "harness.config"]
    codes = "".join(LOADED.format(module=module) for module in modules)
    *loaded, deferred, compiled, at_once, expected = output_of(
        codes, f"import sync\n{MARKED}", f"import tensordict.nn\n{MARKED}"
    )
    assert loaded == [f"{module} False" for module in modules]
    assert (deferred, at_once) == ("False", "True")
    assert compiled == expected
    assert compiled.startswith("True ")
