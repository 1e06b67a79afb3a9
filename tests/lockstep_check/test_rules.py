"""Each rule names the faults that are planted in a sound trace, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep_check.check import CheckResult, check
from lockstep_check.rules import RULES, Limit
from tests.lockstep_check.traces import (
    Event,
    Plant,
    change,
    insert,
    move,
    remove,
    resume,
    sound,
    write,
)

LIMIT = Limit(most=2, at="use", unit="updates")
SAMPLE: Event = {"worker": 1, "sample": 3}
UNMADE: Event = {"worker": 1, "sample": 50}


def run(path: Path, events: list[Event], limit: Limit = LIMIT) -> CheckResult:
    return check(write(path / "events.jsonl", events), limit)


def verdicts(result: CheckResult) -> dict[str, str]:
    return {finding.rule.name: finding.verdict for finding in result.findings}


def test_a_sound_trace_breaks_no_rule(tmp_path: Path) -> None:
    result = run(tmp_path, resume(sound(), 0))
    assert verdicts(result) == {rule.name: "holds" for rule in RULES}
    assert result.most_in_flight == 4
    assert result.resumed == 1


AGE = "age within the limit"
REPORTED = "the reported age is the age at use"
STAMP = "the stamp is the version that acted"
CONSERVED = "made = trained + dropped + in flight"
LENGTH = "trained as long as made"
RISE = "versions never go back"
FIRST = "published before it is used"
CHECKSUM = "one version, one checksum"
CALL = "one version a call"
CACHE = "the cache is as new as the weights"
DENOMINATOR = "the ratio's denominator acted"

PLANTED: list[tuple[str, Plant, str]] = [
    (AGE, change("act", {**SAMPLE, "version": 1}, version=0), "sample 3 of worker 1 is 3 updates"),
    (AGE, change("train", {"update": 6, "worker": 0}, update=8), "sample 5 of worker 0 is 4"),
    (REPORTED, change("train", {**SAMPLE, "epoch": 0}, age=1), "is 2 versions old at its use"),
    (REPORTED, change("train", {"update": 1}, age=-1), "the program reports -1"),
    (STAMP, change("enqueue", SAMPLE, version=2), "stamped with version 2, and versions 1 to 2"),
    (STAMP, change("train", {**SAMPLE, "epoch": 1}, version=3), "stamped with version 3"),
    (STAMP, change("take", SAMPLE, version=0), "stamped with version 0"),
    (
        CONSERVED,
        insert({"event": "train", "update": 6, "worker": 1, "sample": 3}, "train", update=6),
        "sample 3 of worker 1 is trained on in update 6, and was finished before",
    ),
    (
        CONSERVED,
        insert({"event": "train", "update": 4, **UNMADE}, "train", update=4),
        "sample 50 of worker 1 is trained on in update 4, and was never made",
    ),
    (
        CONSERVED,
        insert({"event": "drop", "reason": "old", **SAMPLE}, "publish", update=4),
        "was dropped as a whole",
    ),
    (
        CONSERVED,
        insert({"event": "act", **SAMPLE, "version": 3, "length": 1}, "publish", update=5),
        "which is finished",
    ),
    (CONSERVED, change("counts", {"collected": 64}, in_flight=8), "64 tokens were collected"),
    (
        CONSERVED,
        change("counts", {"collected": 64}, delivered=60, in_flight=4),
        "60 tokens count as delivered, and 64 were taken",
    ),
    (
        LENGTH,
        change("train", {**SAMPLE, "epoch": 1}, length=15),
        "epoch 1 of update 4 trains on 15",
    ),
    (LENGTH, change("enqueue", SAMPLE, length=17), "enqueued or taken with 17 tokens, and 16"),
    (
        LENGTH,
        insert({"event": "drop", "reason": "mask", "length": 4, **SAMPLE}, "publish", update=4),
        "trains on 16, 4 dropped",
    ),
    (RISE, change("applied", {"version": 4, "worker": 1}, version=2, checksum="c2"), "goes back"),
    (
        RISE,
        insert({"event": "publish", "version": 2, "update": 4}, "publish", update=5),
        "version 2 is published after version 4",
    ),
    (RISE, change("act", {**SAMPLE, "version": 2}, version=0, cache=0), "from version 1 to 0"),
    (
        FIRST,
        move("publish", {"version": 3}, "take", {"worker": 1, "sample": 4}),
        "version 3, which is not published yet",
    ),
    (FIRST, remove("publish", version=6), "applies version 6, which is not published yet"),
    (CHECKSUM, change("applied", {"version": 3, "worker": 1}, checksum="c2"), "worker 1 has"),
    (CHECKSUM, change("publish", {"version": 5}, checksum="x"), "it was published with x"),
    (CALL, change("act", {**SAMPLE, "call": 7}, call=6), "call 6 of worker 1 acts with version 1"),
    (
        CALL,
        insert(
            {"event": "act", **SAMPLE, "version": 3, "length": 0, "call": 7}, "enqueue", **SAMPLE
        ),
        "with version 2 and with version 3",
    ),
    (CACHE, change("act", {**SAMPLE, "version": 2}, cache=1), "on a cache of version 1"),
    (CACHE, change("act", {"worker": 0, "sample": 5}, cache=0), "acts with version 3 on a cache"),
    (DENOMINATOR, change("train", {**SAMPLE, "epoch": 1}, logprob=-3.1), "epoch 1 of update 4"),
    (DENOMINATOR, change("act", {**SAMPLE, "version": 1}, logprob=-1.4), "acted with a log-prob"),
]


@pytest.mark.parametrize(("rule", "plant", "words"), PLANTED)
def test_a_planted_fault_is_named_by_its_rule(
    rule: str, plant: Plant, words: str, tmp_path: Path
) -> None:
    events = sound()
    plant(events)
    findings = {finding.rule.name: finding for finding in run(tmp_path, events).findings}
    assert findings[rule].verdict == "broken"
    assert words in findings[rule].first
    assert 1 < findings[rule].line <= len(events) + 1


def test_every_rule_has_two_planted_faults() -> None:
    planted = [rule for rule, _, _ in PLANTED]
    resumed = "a resume loses nothing in silence"  # below
    assert {rule.name for rule in RULES if planted.count(rule.name) < 2} == {resumed}


@pytest.mark.parametrize(("dropped", "words"), [(0, "16 tokens were in flight"), (20, "and 20")])
def test_what_a_resume_loses_in_silence_is_named(dropped: int, words: str, tmp_path: Path) -> None:
    events = sound()
    in_flight = {"worker": 0, "sample": 60, "version": 6, "length": 16}
    events.append({"event": "act", **in_flight})
    result = run(tmp_path, resume(events, dropped))
    assert [finding.rule.name for finding in result.broken] == ["a resume loses nothing in silence"]
    assert words in result.broken[0].first
    assert not run(tmp_path, resume(events, 16)).broken


def counted_after(resumed: list[Event], delivered: int) -> list[Event]:
    """The events of two updates after a resume, with the program's own counts after each."""
    events: list[Event] = []
    for event in resumed:
        events.append(event)
        if event["event"] == "applied" and event["worker"] == 1:
            delivered += 32
            counts = {"collected": delivered, "delivered": delivered}
            events.append({"event": "counts", **counts, "dropped": 0, "in_flight": 0})
    return events


@pytest.mark.parametrize("update", [0, 4, 6])
def test_counts_go_on_from_the_update_that_a_run_is_resumed_after(
    update: int, tmp_path: Path
) -> None:
    """Its checkpoint may be older than the end of the trace."""
    again = sound(2, first_update=update, first_sample=100)
    again = [event for event in again if event["event"] != "counts"]
    resumed: Event = {"event": "resume", "update": update}
    trace = [*sound(), resumed, *counted_after(again, 32 * update)]
    assert not run(tmp_path, trace).broken
    wrong = [*sound(), resumed, *counted_after(again, 32 * update + 8)]
    (broken,) = run(tmp_path, wrong).broken
    assert broken.rule.name == CONSERVED
    count = 32 * update + 32
    assert broken.first == f"{count + 8} tokens count as delivered, and {count} were taken"


def test_the_limit_holds_after_a_resume_too(tmp_path: Path) -> None:
    events = resume(sound(), 0)
    for event in events:
        if event["event"] == "train" and event["update"] == 10:
            event["update"] = 12
    result = run(tmp_path, events)
    (broken,) = result.broken
    assert broken.rule.name == AGE
    assert broken.broken == 4


def test_what_is_dropped_of_a_sample_by_its_version_has_no_age_at_use(tmp_path: Path) -> None:
    """Half of a sample is older than the limit, and the program drops just that half."""
    events = sound()
    change("act", {**SAMPLE, "version": 1}, version=0, cache=0)(events)
    assert [one.rule.name for one in run(tmp_path, events).broken] == [AGE, REPORTED, STAMP]
    change("enqueue", SAMPLE, version=0)(events)
    change("take", SAMPLE, version=0)(events)
    drop = {"event": "drop", **SAMPLE, "reason": "old", "length": 8, "version": 0}
    insert(drop, "train", **SAMPLE)(events)
    for event in events:
        if event["event"] == "train" and all(event[name] == SAMPLE[name] for name in SAMPLE):
            event.update(version=2, age=1, length=8)
    assert run(tmp_path, events).broken == []


LIMITS: list[tuple[Limit, Any]] = [
    (Limit(2, "use", "updates"), 2),
    (Limit(2, "use", "versions"), 2),
    (Limit(5, "use", "steps"), 5),  # an update has two gradient steps, and epochs count
    (Limit(2, "made", "updates"), 2),
    (Limit(2, "taken", "versions"), 2),
]


@pytest.mark.parametrize(("limit", "oldest"), LIMITS)
def test_an_age_has_a_unit_and_a_moment(limit: Limit, oldest: int, tmp_path: Path) -> None:
    tight = Limit(oldest - 1, limit.at, limit.unit)
    assert verdicts(run(tmp_path, sound(), limit))[AGE] == "holds"
    broken = {finding.rule.name: finding for finding in run(tmp_path, sound(), tight).broken}
    assert f"{oldest} {limit.unit}" in broken[AGE].first


def test_a_rule_whose_fields_are_missing_is_not_checked(tmp_path: Path) -> None:
    kept = {"event", "worker", "sample", "version", "length", "update", "epoch"}
    events = [{name: one[name] for name in one if name in kept} for one in sound()]
    events = [one for one in events if one["event"] not in ("counts", "applied")]
    found = verdicts(run(tmp_path, events))
    assert {name for name, verdict in found.items() if verdict == "not checked"} == {
        *(REPORTED, CHECKSUM, CALL, CACHE, DENOMINATOR),
        "a resume loses nothing in silence",
    }
    assert "broken" not in found.values()


def test_memory_holds_what_is_in_flight_and_no_more(tmp_path: Path) -> None:
    assert run(tmp_path, sound(5)).most_in_flight == run(tmp_path, sound(50)).most_in_flight
