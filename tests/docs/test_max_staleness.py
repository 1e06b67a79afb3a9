"""docs/max_staleness/: virtual time, stubs, and records that `lockstep check` reads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.max_staleness import foreign, virtual_time
from docs.max_staleness.__main__ import run_once
from docs.max_staleness.record import WORKLOADS, Record
from docs.max_staleness.setup import Setup
from lockstep_check.check import check
from lockstep_check.rules import Limit

ROOT = Path(__file__).resolve().parents[2]


def order(seed: int) -> list[tuple[int, float]]:
    """In which order tasks that sleep equally long go on, and when."""
    events: list[tuple[int, float]] = []

    async def task(number: int) -> None:
        await asyncio.sleep(1000.0)
        events.append((number, round(asyncio.get_running_loop().time(), 3)))

    async def main() -> None:
        await asyncio.gather(*(task(number) for number in range(20)))

    virtual_time.run(main(), seed)
    return events


def test_a_seed_fixes_the_order_of_all_tasks_and_another_seed_has_another():
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert {time for _, time in order(1)} == {1000.0}


def test_tasks_that_all_wait_are_an_error():
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="all tasks wait"):
        virtual_time.run(forever(), 0)


def test_a_module_runs_unchanged_with_stubs_for_what_it_imports(tmp_path):
    (tmp_path / "limits.py").write_text(
        "import absent.deeply\n"
        "from absent import Base, decorate, json\n"
        "@decorate('name')\n"
        "def double(x: absent.deeply.Kind | None): return 2 * x\n"
        "class Own(Base):\n"
        "    value = 3\n"
    )
    module = foreign.load(tmp_path / "limits.py", ("absent",), {"absent": {"json": 7}})
    assert (module.double(4), module.Own().value, module.json) == (8, 3, 7)
    assert not any(name.startswith("absent") for name in sys.modules)


def test_a_framework_that_is_not_installed_is_an_error_with_a_command(monkeypatch, tmp_path):
    monkeypatch.setattr(foreign, "ENVIRONMENT", tmp_path / ".venv-controllers")
    with pytest.raises(foreign.Missing, match="run `make controllers`"):
        foreign.installed("areal/infra/staleness_manager.py")


def setup(lag: int) -> Setup:
    """A controller of our own: each sample is trained on `lag` updates after it was made."""

    async def run(record: Record) -> None:
        for sample in range(lag):
            record.act(sample, 0)
        while not record.done:
            record.act(record.version + lag, record.version)
            await asyncio.sleep(record.duration())
            record.train([record.version])
            record.trained()

    text = dict.fromkeys(
        ("framework", "option", "unit", "measured_at", "promise", "source", "bound", "theirs"), ""
    )
    return Setup(**text, ours="", limit=lag, most=lag, run=run)


def test_the_trace_of_a_record_has_the_ages_of_the_record(tmp_path):
    record = run_once(setup(3), WORKLOADS[0], seed=4, updates=20)
    assert record.ages == [0, 1, 2] + [3] * 17
    record.save(tmp_path / "events.jsonl", "ours")
    for limit, verdict in ((3, "holds"), (2, "broken")):
        findings = check(tmp_path / "events.jsonl", Limit(limit)).findings
        verdicts = {finding.rule.name: finding.verdict for finding in findings}
        assert verdicts["age within the limit"] == verdict
        assert verdicts["made = trained + dropped + in flight"] == "holds"


@pytest.mark.skipif(not foreign.ENVIRONMENT.exists(), reason="needs `make controllers`")
def test_slots_that_are_freed_too_early_break_the_bound():
    from docs.max_staleness import torchtitan

    sound, _ = torchtitan.setups()
    planted = torchtitan.planted()
    assert sound.most == planted.most == 2
    assert max(run_once(sound, WORKLOADS[2], seed=0, updates=40).ages) == 2
    assert max(run_once(planted, WORKLOADS[2], seed=0, updates=40).ages) > 2


def test_the_command_without_the_frameworks_ends_with_two(tmp_path):
    program = (
        "import pathlib, sys; from docs.max_staleness import foreign, __main__;"
        f"foreign.ENVIRONMENT = pathlib.Path({str(tmp_path)!r}) / 'none';"
        "sys.argv[1:] = ['--only', 'areal']; sys.exit(__main__.main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert (ended.returncode, "run `make controllers`" in ended.stderr) == (2, True)
