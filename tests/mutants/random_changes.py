"""Changes drawn at random from the code, and which test notices each: `make mutants-random`.

A change is a comparison, an arithmetic operator, a constant, a condition or a statement of a
function's body: another one, or none. A seed draws them by a hash of what they are, so most drawn
changes stay the same while other code changes. Each is run against the tests that touch its line,
then against others that touch its function or its file, the cheapest first, until one fails that
passes without the change. Dear tests (tests/selection.py) take part after `--touches`, which
measures what they touch. random.jsonl keeps who noticed; what stands there is not run again.
`equivalent` in a row says why nothing could notice it; that is written by hand.

Before tests are deleted, `--without` runs the changes that they noticed against the other tests:
what is not noticed then, only they notice.

    tests in a process that has imported everything ── fork ──> one change, its tests

The copy of the working tree that the tests run in has the change in its file, for the processes
that tests start. The forked process takes it over from the code of the changed function.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import hashlib
import itertools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest

from tests.costs import import_what_is_large
from tests.mutants.__main__ import copy_tree
from tests.mutants.table import RANDOM, ROOT, read_rows
from tests.selection import WHOLE, function_of, read_dear

TOUCHED = ROOT / "outputs" / "mutants" / "touched.json"  # which test touches which line
SCOPE = ("harness/algorithms", "harness/measures", "harness/report", "sync", "collectors")
TESTS = ("tests/harness", "tests/sync", "tests/collectors", "tests/promises")
SHARED = "a fixture of "  # begins a context of coverage
TESTS_S = 20  # processor time of the tests of a change, as long as nothing is changed
PROCESSOR_S = 90  # with the change; beyond, it counts as noticed
WALL_S = 900  # beyond, it counts as not noticed: the machine may be loaded
NOT_APPLIED = "not applied"

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}


# -- the changes


@dataclass(frozen=True)
class Change:
    """One node of a file's syntax tree, and what becomes of it."""

    file: str
    function: str  # the outermost one that holds the node
    kind: str
    number: int  # of the node in the tree
    line: int
    lines: range  # of the function
    text: str
    nth: int  # of those with the same text in the function

    @property
    def name(self) -> str:
        return f"{self.file}::{self.function}::{self.kind}::{self.text}::{self.nth}"

    def applied_to(self, tree: ast.Module) -> ast.Module:
        """A changed copy of the tree."""
        changed = copy.deepcopy(tree)
        node: Any = list(ast.walk(changed))[self.number]
        if self.kind == "comparison":
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        elif self.kind == "arithmetic":
            node.op = OPERATORS[type(node.op)]()
        elif self.kind == "and, or":
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif self.kind == "sign":
            node.op = ast.UAdd()
        elif self.kind == "constant":
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        elif self.kind == "condition":
            node.test = ast.UnaryOp(ast.Not(), node.test)
        else:
            replace(changed, node, ast.Pass())
        return ast.fix_missing_locations(changed)


def replace(tree: ast.Module, old: ast.stmt, new: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and old in value:
                value[value.index(old)] = ast.copy_location(new, old)


def changes_of(file: str) -> list[Change]:
    """All changes of the functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    counts: Counter[tuple[str, str, str]] = Counter()
    changes = []
    for name, function in functions(tree):
        for node in (node for statement in function.body for node in inside(statement)):
            if kind := kind_of(node):
                text = " ".join(ast.unparse(node).split())[:80]
                nth = counts[name, kind, text]
                counts[name, kind, text] += 1
                number = numbers[id(node)]
                lines = range(function.lineno, (function.end_lineno or 0) + 1)
                changes.append(Change(file, name, kind, number, node.lineno, lines, text, nth))
    return changes


def functions(
    tree: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def inside(node: ast.AST) -> Iterator[Any]:
    """A node and those below it, without errors' texts, annotations and what f-strings print."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from inside(child)


def kind_of(node: ast.AST) -> str:
    """What can be changed about a node, or ""."""
    match node:
        case ast.Compare():
            return "comparison"
        case ast.BinOp() if type(node.op) in OPERATORS and not is_text(node.left):
            return "arithmetic"
        case ast.BoolOp():
            return "and, or"
        case ast.UnaryOp(op=ast.USub()):
            return "sign"
        case ast.Constant(value=int() | float()):
            return "constant"
        case ast.If() | ast.IfExp() | ast.While():
            return "condition"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "" if "super()" in ast.unparse(node) else "statement"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "statement"
    return ""


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def draw(seed: int, count: int, only: Sequence[str]) -> list[Change]:
    """`count` changes of the scope, or of those files that have one of `only` in their path."""
    paths = [path for folder in SCOPE for path in (ROOT / folder).rglob("*.py")]
    files = [str(path.relative_to(ROOT)) for path in sorted(paths)]
    chosen = [file for file in files if not only or any(part in file for part in only)]
    changes = [change for file in chosen for change in changes_of(file)]

    def rank(change: Change) -> bytes:
        return hashlib.sha256(f"{seed} {change.name}".encode()).digest()

    return sorted(changes, key=rank)[:count]


# -- which tests touch which lines


class Touches:
    """A plugin of pytest that measures the lines and the time of every test function."""

    def __init__(self) -> None:
        source = [str(ROOT / folder) for folder in SCOPE]
        self.coverage = coverage.Coverage(data_file=None, source=source, config_file=False)
        self.seconds: dict[str, float] = defaultdict(float)
        self.users: dict[str, set[str]] = defaultdict(set)  # of a fixture that tests share
        self.function = ""

    def pytest_collection_finish(self) -> None:
        import_what_is_large()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.function = function_of(item.nodeid)
        for name in getattr(item, "fixturenames", ()):
            self.users[name].add(self.function)
        start = sum(os.times()[:4])
        self.coverage.start()  # anew for each test, since some take the tracer away
        # A test that is interrupted inside of the tracer would leave its lock locked for good.
        self.coverage._collector.data_lock = None  # type: ignore[union-attr]
        self.coverage.switch_context(self.function)
        result = yield
        self.coverage.switch_context("")
        self.coverage.stop()
        self.seconds[self.function] += sum(os.times()[:4]) - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What a fixture touches that tests share, each of them touches."""
        if fixturedef.scope == "function":
            return (yield)
        self.coverage.switch_context(f"{SHARED}{fixturedef.baseid} {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.coverage.switch_context(self.function)

    def tests_in(self, contexts: Iterable[str]) -> Iterator[str]:
        for context in filter(None, contexts):
            if context.startswith(SHARED):
                folder, _, name = context.removeprefix(SHARED).rpartition(" ")
                yield from (test for test in self.users[name] if test.startswith(folder))
            else:
                yield context

    def save(self, file: Path) -> None:
        """Add to what is known of other tests."""
        known = json.loads(file.read_text()) if file.exists() else {"seconds": {}, "lines": {}}
        lines: dict[str, dict[str, list[str]]] = known["lines"]
        data = self.coverage.get_data()
        for path in sorted(data.measured_files()):
            of_file = lines.setdefault(str(Path(path).relative_to(ROOT)), {})
            for line, names in data.contexts_by_lineno(path).items():
                others = set(of_file.get(str(line), ())) - self.seconds.keys()
                of_file[str(line)] = sorted(others | set(self.tests_in(names)))
        seconds = {name: round(value, 2) for name, value in self.seconds.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"seconds": known["seconds"] | seconds, "lines": lines}))


def measure_touches(file: Path, tests: Sequence[str]) -> None:
    """Run tests once; tests and options of pytest."""
    touches = Touches()
    pytest.main([*PYTEST, *tests], plugins=[touches])
    touches.save(file)


PYTEST = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=no", "-rN"]


# -- the tests of a change


class Changed:
    """A plugin of pytest that runs the tests of each change in a process forked for it."""

    def __init__(self, changes: Sequence[Change], output: Path):
        self.changes, self.output = changes, output
        self.touched = json.loads(TOUCHED.read_text())
        self.failed = ""
        self.passes: dict[str, bool] = {}  # without a change, of tests that have noticed one

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_function: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            by_function[function_of(item.nodeid)].append(item)
        gc.freeze()
        for change in self.changes:
            names = self.tests_of(change)
            items = [item for name in names for item in by_function.get(name, ())]
            start = time.monotonic()
            noticed_by, seconds = self.who_notices(change, items)
            row = {
                "name": change.name,
                "line": change.line,
                "tests": len(items),
                "noticed_by": noticed_by,
                "processor_s": round(seconds, 1),
            }
            with self.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            word = noticed_by or "NOT NOTICED"
            print(f"{time.monotonic() - start:6.1f} s  {change.name}: {word}", file=sys.__stderr__)
        return True

    def tests_of(self, change: Change) -> list[str]:
        """Functions that touch the line, then the function, then the file; each time the cheapest
        first, as many as the time allows. What only workers run is not measured line by line."""
        lines, seconds = self.touched["lines"].get(change.file, {}), self.touched["seconds"]
        parts = ([change.line], change.lines, map(int, lines))
        names: dict[str, None] = {}
        for part in parts:
            touching = {name for line in part for name in lines.get(str(line), ())}
            names |= dict.fromkeys(sorted(touching - names.keys(), key=lambda name: seconds[name]))
        sums = itertools.accumulate(seconds[name] for name in names)
        return [name for name, total in zip(names, sums, strict=True) if total <= TESTS_S]

    def who_notices(self, change: Change, items: Sequence[pytest.Item]) -> tuple[str, float]:
        """The test that fails twice with the change and passes without it, or "", and the seconds.

        A test that fails once, on a loaded machine, has not noticed the change.
        """
        seconds = 0.0
        while items:
            failed, used = self.run(change, items)
            seconds += used
            witness = next((item for item in items if item.nodeid == failed), None)
            if witness is None:
                return failed, seconds
            if failed not in self.passes:
                self.passes[failed] = not self.run(None, [witness])[0]
            if self.passes[failed] and self.run(change, [witness])[0]:
                return failed, seconds
            items = items[items.index(witness) + 1 :]
        return "", seconds

    def run(self, change: Change | None, items: Sequence[pytest.Item]) -> tuple[str, float]:
        """The test that failed, or "", and the seconds of processor time."""
        if change is None:
            return self.run_in_a_fork(items, lambda: None)
        path = ROOT / change.file
        original = path.read_text()
        tree = change.applied_to(ast.parse(original))
        path.write_text(ast.unparse(tree) + "\n")
        try:
            return self.run_in_a_fork(
                items, lambda: take_over(change, compile(tree, str(path), "exec"))
            )
        finally:
            path.write_text(original)

    def run_in_a_fork(
        self, items: Sequence[pytest.Item], prepare: Callable[[], None]
    ) -> tuple[str, float]:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
                answer = NOT_APPLIED
                try:
                    prepare()
                    answer = "an error while the tests were run"
                    answer = self.first_failure(items) or "-"
                except BaseException:
                    traceback.print_exc(file=sys.__stderr__)
                    raise
                finally:
                    os.write(writer, answer.encode())
                    os._exit(0)
            os.close(writer)
            is_ready = select.select([reader], [], [], WALL_S)[0]
            answer = os.read(reader, 65536).decode() if is_ready else "-"
        finally:
            os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        if answer == NOT_APPLIED:
            raise RuntimeError("the process of the tests could not load the change: see above")
        answer = answer or f"the end of the process: status {status}"
        return ("" if answer == "-" else answer), usage.ru_utime + usage.ru_stime

    def first_failure(self, items: Sequence[pytest.Item]) -> str:
        for item in items:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        return self.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def take_over(change: Change, code: CodeType) -> None:
    """Let the loaded function have the code of the changed one. A test that imports the file later
    reads the change there."""
    (changed,) = (c for c in codes(code) if c.co_qualname == change.function)
    path = str(ROOT / change.file)
    if path not in {getattr(module, "__file__", "") for module in sys.modules.values()}:
        return
    gc.unfreeze()
    functions = [x for x in gc.get_objects() if type(x) is FunctionType]
    loaded = [
        f
        for f in functions
        if f.__code__.co_filename == path
        and f.__code__.co_qualname == change.function
        and f.__code__.co_firstlineno == changed.co_firstlineno
    ]
    assert loaded, f"{change.function} is not loaded"
    for function in loaded:
        function.__code__ = changed


def codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:  # in a copy of the working tree
        names, without = json.loads(Path(options.worker).read_text())
        known = {change.name: change for change in draw(options.seed, sys.maxsize, ())}
        plugin = Changed([known[name] for name in names], Path(options.output))
        measured = {test.partition("::")[0] for test in plugin.touched["seconds"]}
        files = sorted(file for file in measured if (ROOT / file).exists())
        deselected = [f"--deselect={test}" for test in without]
        return int(pytest.main([*PYTEST, *deselected, *files], plugins=[plugin]))
    if options.touches is not None:
        measure_touches(TOUCHED, options.touches or TESTS)
    elif not TOUCHED.exists():
        measure_touches(TOUCHED, [*TESTS, *(f"--deselect={test}" for test in read_dear())])
    rows = read_rows(RANDOM)
    forget_what_is_gone(rows)
    changes = draw(options.seed, options.draw, options.only)
    noticed_by = {name: row["noticed_by"] for name, row in rows.items()}
    if options.without:
        prefixes = tuple(options.without)
        left = [x for x in changes if noticed_by.get(x.name, "").startswith(prefixes)]
    elif options.again:
        left = [change for change in changes if noticed_by.get(change.name) == ""]
    else:
        left = [change for change in changes if change.name not in rows]
    print(f"{len(changes)} changes drawn, {len(left)} to be run", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-mutants-") as folder:
        output = Path(folder) / "rows.jsonl" if options.without else RANDOM
        run_all(left, options, Path(folder), output)
        rows = read_rows(output)
    print_result([rows[change.name] for change in changes if change.name in rows])
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants-random", description=__doc__)
    parser.add_argument("--seed", type=int, default=61, help="of the draw (%(default)s)")
    parser.add_argument("--draw", type=int, default=600, help="changes (%(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="parts of files' paths to draw from")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="at a time (%(default)s)")
    parser.add_argument(
        "--touches",
        nargs="*",
        metavar="TEST",
        help="measure what these tests touch, or all; at first, those that are not dear",
    )
    parser.add_argument("--again", action="store_true", help="run what was not noticed again")
    parser.add_argument("--without", nargs="*", default=[], metavar="TEST", help="see above")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_all(
    changes: Sequence[Change], options: argparse.Namespace, folder: Path, output: Path
) -> None:
    """Each job has a copy of the working tree."""
    jobs = []
    for index in range(min(options.jobs, len(changes))):
        tree = copy_tree(folder / str(index))
        (tree / TOUCHED.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (tree / TOUCHED.relative_to(ROOT)).write_text(TOUCHED.read_text())
        part = folder / f"{index}.json"
        names = [change.name for change in changes[index :: options.jobs]]
        part.write_text(json.dumps([names, options.without]))
        command = [sys.executable, "-m", "tests.mutants.random_changes", f"--seed={options.seed}"]
        command += [f"--worker={part}", f"--output={output}"]
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        jobs.append(subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL))
    for job in jobs:
        job.wait()


def forget_what_is_gone(rows: dict[str, dict[str, Any]]) -> None:
    """Leave out of the file what is no change of today's code."""
    names = {change.name for change in draw(0, sys.maxsize, ())}
    kept = [json.dumps(row) + "\n" for name, row in rows.items() if name in names]
    RANDOM.write_text("".join(kept))


def print_result(rows: Sequence[dict[str, Any]]) -> None:
    survivors = [row for row in rows if not row["noticed_by"]]
    equivalent = [row for row in survivors if row.get("equivalent")]
    for row in survivors:
        print(f"{row.get('equivalent') or 'NOT NOTICED'}: line {row['line']} of {row['name']}")
    dear = set(read_dear())
    noticed = [row["noticed_by"] for row in rows if row["noticed_by"]]
    by_dear = [x for x in noticed if function_of(x) in dear and not x.startswith(WHOLE)]
    print(
        f"{len(rows)} changes: {len(noticed)} noticed, {len(by_dear)} of them by dear tests, "
        f"{len(equivalent)} equivalent, {len(survivors) - len(equivalent)} neither"
    )


if __name__ == "__main__":
    sys.exit(main())
