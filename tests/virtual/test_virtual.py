"""Stories of the virtual machine: the same each time, right, and what was found by them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from collectors.workers.pipe import Pipe
from sync.effects.slow_link import Link
from tests.mutants.table import ROOT
from tests.virtual import modules, shrink
from tests.virtual.kernel import Kernel
from tests.virtual.planted import read_planted
from tests.virtual.sometimes import OCCURRENCES
from tests.virtual.story import SCHEDULE, Fault, Outcome, Plan, draw, tell
from tests.virtual.verdict import judge

QUIET = Plan(
    seed=1,
    batches=4,
    collector="multi_sync",
    scheme="shared_mem",
    scheme_options={"sync": True},
    options={"num_workers": 2, "on_worker_failure": "restart", "apply_at": "step", "seed": 3},
    machine={},
    num_envs=1,
    step_s=0.001,
)


def test_a_seed_is_one_story_to_the_event_and_takes_virtual_time_only():
    outcomes = [tell(QUIET, verbose=True) for _ in range(2)]
    assert [one.end for one in outcomes] == ["done", "done"]
    assert outcomes[0].kernel.log == outcomes[1].kernel.log
    assert outcomes[0].world.events == outcomes[1].world.events
    assert sum(event["event"] == "take" for event in outcomes[0].world.events) == 32
    assert judge(outcomes[0]) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_story_with_faults_is_right(seed):
    assert judge(tell(draw(seed))) == []


@pytest.mark.parametrize("tenth", range(10))
def test_a_hundred_stories_are_right(tenth):
    for seed in range(1000 + 10 * tenth, 1010 + 10 * tenth):
        assert judge(tell(draw(seed))) == [], seed


def test_every_line_that_must_occur_and_every_planted_fault_is_there():
    for one in OCCURRENCES:
        assert one.line() > 0
    for mutant in read_planted():
        assert mutant.applied_to((ROOT / mutant.file).read_text())


def test_a_story_that_is_wrong_is_shrunk_to_what_makes_it_wrong(monkeypatch):
    """Here every refused version is wrong."""
    plan = draw_with("refuse")

    def judge(outcome: Outcome) -> list[str]:
        return ["refused: a version"] * ("a worker refuses a version" in outcome.world.marks)

    monkeypatch.setattr(shrink, "judge", judge)
    monkeypatch.setattr(shrink, "MOST_TRIES", 40)
    smaller, tries = shrink.shrunk(plan, "refused: a version")
    assert [fault.kind for fault in smaller.faults] == ["refuse"]
    assert len(smaller.calls) <= len(plan.calls)
    assert 0 < tries <= shrink.MOST_TRIES


def draw_with(kind: str) -> Plan:
    plans = (draw(seed) for seed in range(1000))
    return next(plan for plan in plans if len(plan.faults) > 2 and is_shown(plan, kind))


def is_shown(plan: Plan, kind: str) -> bool:
    if kind not in {fault.kind for fault in plan.faults}:
        return False
    return "a worker refuses a version" in tell(plan).world.marks


@pytest.mark.parametrize("name", ["counted-twice", "late-stamp", "last-tensor-is-not-loaded"])
def test_a_planted_fault_is_found_and_named_by_a_rule_or_an_end(name):
    done = subprocess.run(
        [sys.executable, "-m", "tests.virtual.planted", "--seeds", "60", "--only", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    findings = {
        "counted-twice": "made = trained + dropped + in flight",
        "late-stamp": "the stamp is the version that acted",
        "last-tensor-is-not-loaded": "acts with weights 0 after it had acknowledged 1",
    }
    assert done.returncode == 0, done.stdout + done.stderr
    assert findings[name] in done.stdout


# -- faults of the product that stories have found


def test_a_worker_that_stops_while_it_is_idle_is_replaced_when_a_blocking_send_is_late():
    """It owes no batch then, so the pool did not see that it hangs."""
    at = moment_of("poll", process="lockstep-worker-0", batch=2)
    outcome = tell(replace(QUIET, faults=(Fault("stop", at + 2, 0, 30.0),)))
    assert judge(outcome) == []
    assert outcome.end == "done"
    assert len(outcome.kernel.processes) == 4


def test_a_schedule_that_cannot_be_written_loses_no_memory_and_counts_no_frame_as_delivered():
    """The batch whose line was not written counted as delivered, and its memory was never free."""
    options = {**QUIET.options, "batches_ahead": 1, "record_schedule": SCHEDULE}
    plan = replace(QUIET, batches=8, collector="multi_async", options=options)
    at = moment_of("write", process="trainer", batch=2, plan=plan)
    outcome = tell(replace(plan, faults=(Fault("disk", at, how=400.0),)))
    assert any("goes on after an error" in line for line in outcome.kernel.log)
    assert judge(outcome) == []
    assert outcome.end == "done"


def test_a_worker_that_cannot_be_replaced_for_want_of_descriptors_is_replaced_later():
    """The worker counted as serving, and its frames were counted again at each further try."""
    options = {**QUIET.options, "num_workers": 1, "max_restarts": 1000}
    plan = replace(QUIET, batches=60, collector="multi_async", options=options)
    plan = replace(plan, scheme_options={"sync": False})
    at = moment_of("poll", process="trainer", batch=2, plan=plan)
    goes_on = 0
    for more in range(-4, 2):
        faults = (Fault("descriptors", at, -1, float(more)), Fault("kill", at + 1))
        outcome = tell(replace(plan, faults=faults))
        assert judge(outcome) == [], more
        assert outcome.end == "done"
        goes_on += any("goes on after an error" in line for line in outcome.kernel.log)
    assert goes_on


def test_a_thread_that_watches_workers_does_not_meet_one_that_another_thread_replaces():
    """Both saw that the worker hangs; one replaced it, and the other one marked its successor."""
    plan = Plan(
        seed=3,
        batches=2,
        collector="multi_async",
        scheme="multiprocess",
        scheme_options={"sync": True, "link": Link(latency_ms=0.1, jitter_ms=1.0)},
        options={
            "num_workers": 1,
            "on_worker_failure": "restart",
            "start_method": "forkserver",
            "apply_at": "step",
            "seed": 807,
            "batches_ahead": 3,
            "record_schedule": SCHEDULE,
        },
        machine={"switch": 0.3},
        num_envs=1,
        step_s=0.001,
        is_free=True,
        calls={1: "attribute"},
        faults=(Fault("refuse", 289), Fault("stop", 530, 0, 30.0)),
    )
    assert judge(tell(plan)) == []


def test_a_message_that_is_being_sent_while_everything_is_suspended_is_not_given_up():
    """The pause counted as silence of the reader; half a message was followed by another one."""
    received = run_alone(send_while_suspended)
    assert received == [b"x" * 10_000]


def send_while_suspended() -> list[Any]:
    kernel = modules.kernel()
    near, far = Pipe.pair()
    sends = modules.Thread(target=lambda: near.send(b"x" * 10_000, timeout=60.0))
    sends.start()
    kernel.sleep(0.1)  # it waits for room
    kernel.stop(kernel.process, 1000.0)
    kernel.sleep(0.1)
    received: list[Any] = []
    while sends.is_alive() or not received:
        received += far.receive()
        kernel.sleep(0.1)
    return received


def run_alone(function: Callable[[], Any]) -> Any:
    """What a function returns as the first process of a machine with small pipes."""
    kernel = Kernel(seed=0, pipe_bytes=1000, most_events=10_000)
    results: list[Any] = []
    with modules.virtual(kernel):
        process = kernel.run(lambda: results.append(function()))
    assert process.error is None
    return results[0]


def moment_of(what: str, *, process: str, batch: int, plan: Plan = QUIET) -> int:
    """The event at which a process does this first, after so many batches of a quiet story."""
    log = tell(plan, verbose=True).kernel.log
    takes = [i for i, line in enumerate(log) if "trainer: takes" in line]
    line = next(one for one in log[takes[batch] :] if f"{process} " in one and one.endswith(what))
    return int(line.split()[0]) - 1
