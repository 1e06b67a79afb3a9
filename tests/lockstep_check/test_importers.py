"""Traces of what other programs record, and the rules that these cannot have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep_check.__main__ import main
from lockstep_check.check import CheckResult, check
from lockstep_check.events import TraceError
from lockstep_check.importers import IMPORTERS, write
from lockstep_check.rules import Limit

# Written by the programs' own writers: serialize_rollout_summaries_from_groups of tinker-cookbook,
# Episode.to_record of prime-rl's verifiers 0.4.0, PPOTrainer._write_generations of verl.
RECORDS = Path(__file__).parent / "records"
AGE = "age within the limit"
CONSERVED = "made = trained + dropped + in flight"


def imported(source: str, directory: Path, tmp_path: Path, limit: int) -> CheckResult:
    write(source, directory, tmp_path / "events.jsonl")
    return check(tmp_path / "events.jsonl", Limit(limit))


def holds(result: CheckResult) -> list[str]:
    return [finding.rule.name for finding in result.findings if finding.holds]


def lines(path: Path, *records: dict[str, Any], end: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records) + end)


def episode(name: str, start: int | None, end: int = 0) -> dict[str, Any]:
    work: dict[str, Any] = {"type": "train", "step": 1}
    if start is not None:
        work["policy"] = {"start": start, "end": end}
    return {"id": name, "run": {"type": "train", "work": work}, "num_output_tokens": 7}


@pytest.mark.parametrize("source", sorted(IMPORTERS))
def test_the_oldest_age_of_each_programs_records_is_measured(source: str, tmp_path: Path) -> None:
    result = imported(source, RECORDS / source, tmp_path, 2)
    assert not result.broken
    assert result.program == source
    (finding,) = [one for one in result.findings if one.rule.name == AGE]
    assert finding.note == "oldest at its use: 2 updates"
    (broken,) = imported(source, RECORDS / source, tmp_path, 1).broken
    assert broken.rule.name == AGE


def test_rules_about_inferred_events_are_not_checked(tmp_path: Path) -> None:
    """tinker-cookbook records what was trained on, and neither what was made nor a publish."""
    assert holds(imported("tinker-cookbook", RECORDS / "tinker-cookbook", tmp_path, 2)) == [AGE]
    assert holds(imported("prime-rl", RECORDS / "prime-rl", tmp_path, 2)) == [AGE, CONSERVED]


def test_an_episode_of_prime_rl_that_is_trained_on_twice_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        for subset in ("all", "effective"):
            place = tmp_path / f"rollouts/step_{step}/train/{subset}/traces.jsonl"
            lines(place, episode("a", 0), episode("frozen", None))
    (broken,) = imported("prime-rl", tmp_path, tmp_path, 2).broken
    assert broken.rule.name == CONSERVED
    assert broken.first == "sample 0 of worker 0 is trained on in update 2, and was finished before"


def test_the_oldest_version_of_an_episode_of_prime_rl_counts(tmp_path: Path) -> None:
    lines(tmp_path / "rollouts/step_6/train/effective/traces.jsonl", episode("a", 2, 5))
    (broken,) = imported("prime-rl", tmp_path, tmp_path, 2).broken
    assert broken.first.startswith("sample 0 of worker 0 is 3 updates old at its use")


def test_rollouts_of_verl_without_versions_are_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(tmp_path / "run/1.jsonl", {"input": "a", "output": "b", "score": 1.0, "step": 1})
    assert main(["--from", "verl", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "1.jsonl, line 1: no 'min_global_steps'" in error


def test_iterations_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Not in that of their names: 10.jsonl is after 9.jsonl."""
    for step in range(1, 12):
        record = {"step": step, "min_global_steps": max(0, step - 2)}
        lines(tmp_path / f"run/{step}.jsonl", record)
    assert not imported("verl", tmp_path / "run", tmp_path, 1).broken


def test_a_last_line_that_is_cut_is_left_out_and_another_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "run/1.jsonl"
    lines(place, {"min_global_steps": 0}, end='{"min_glo')
    assert imported("verl", tmp_path / "run", tmp_path, 0).events == 4
    lines(place, {"min_global_steps": 0}, end='{"min_glo\n')
    with pytest.raises(TraceError, match="line 2: not JSON"):
        imported("verl", tmp_path / "run", tmp_path, 0)


@pytest.mark.parametrize("source", sorted(IMPORTERS))
def test_a_directory_without_records_is_a_clear_error(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--from", source, str(tmp_path)]) == 2
    assert f"{tmp_path} has no " in capsys.readouterr().err
    assert main(["--from", source, str(tmp_path / "absent")]) == 2
    assert "absent is not a directory" in capsys.readouterr().err


def test_the_trace_is_kept_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "kept.jsonl"
    arguments = ["--from", "tinker-cookbook", str(RECORDS / "tinker-cookbook")]
    assert main([*arguments, "--limit", "2", "--write", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert str(RECORDS / "tinker-cookbook") in printed
    assert main([str(trace), "--limit", "2"]) == 0
