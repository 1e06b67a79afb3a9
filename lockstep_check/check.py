"""Reads a trace once, with all rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_check.events import FIELDS, Event, Reading, TraceError, read
from lockstep_check.rules import RULES, Limit, Rule
from lockstep_check.story import Story

Handler = Callable[[Event, Story], str | None]


@dataclass
class Finding:
    """What one rule found."""

    rule: type[Rule]
    judged: int
    note: str = ""
    broken: int = 0  # events
    first: str = ""  # what the first of them does
    line: int = 0  # of the first; 0 at the end of the trace

    @property
    def holds(self) -> bool | None:
        """None if the trace lacks what the rule needs."""
        if self.broken:
            return False
        return True if self.judged else None

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "broken", None: "not checked"}[self.holds]


@dataclass
class CheckResult:
    """What a check found."""

    findings: list[Finding]
    events: int
    reading: Reading
    program: str = ""
    resumed: int = 0
    most_in_flight: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.broken]


def check(path: Path, limit: Limit | None = None) -> CheckResult:
    """Check a trace with every rule; `TraceError` if it is none."""
    rules = [kind(limit or Limit()) for kind in RULES]
    findings = [Finding(type(rule), 0) for rule in rules]
    handlers = {
        event: [
            (handler, finding)
            for rule, finding in zip(rules, findings, strict=True)
            if (handler := getattr(rule, f"on_{event}", None)) is not None
        ]
        for event in FIELDS
    }
    closing = [
        (rule, finding)
        for rule, finding in zip(rules, findings, strict=True)
        if type(rule).on_closed is not Rule.on_closed
    ]
    story, reading = Story(), Reading()
    result = CheckResult(findings, 0, reading)

    def note(finding: Finding, problem: str | None, line: int) -> None:
        if problem:
            finding.broken += 1
            if finding.broken == 1:
                finding.first, finding.line = problem, line

    line, inferred = 0, set[str]()
    for line, event in read(path, reading):
        result.events += 1
        if event["event"] == "trace":
            result.program = event.get("program", "")
            inferred |= set(event.get("inferred", "").split())
        story.take_in(event)
        for handler, finding in handlers[event["event"]]:
            if problem := handler(event, story):
                note(finding, problem, line)
        for sample in story.closed:
            for rule, finding in closing:
                note(finding, rule.on_closed(sample, story), line)
    if not result.events:
        raise TraceError(f"{path} holds no event of a trace")
    story.end()
    for rule, finding in zip(rules, findings, strict=True):
        for sample in story.closed:
            note(finding, rule.on_closed(sample, story), line)
        note(finding, rule.on_end(story), 0)
        finding.judged, finding.note = rule.judged, rule.note
        if inferred & rule.recorded:
            finding.judged = finding.broken = 0
    result.resumed, result.most_in_flight = story.resumed, story.most_in_flight
    return result
