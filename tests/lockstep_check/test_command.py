"""`lockstep check`: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_check.__main__ import main
from lockstep_check.events import FIELDS
from tests.lockstep_check.traces import change, sound, write


def test_a_trace_that_breaks_nothing_ends_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "events.jsonl", sound())
    assert main([str(tmp_path), "--limit", "2"]) == 0
    assert "0 broken, 11 hold, 1 not checked" in capsys.readouterr().out


def test_a_broken_rule_ends_with_one_and_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = sound()
    change("applied", {"version": 3}, checksum="other")(events)
    trace = write(tmp_path / "trace.jsonl", events)
    assert main([str(trace), "--explain"]) == 1
    printed = capsys.readouterr().out
    assert "worker 0 has version 3 with checksum other" in printed
    assert "vLLM 52689" in printed
    assert "What to do: Compare the bytes that arrived" in printed


def test_a_cut_last_line_is_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "trace.jsonl", sound(), end='{"event": "tra')
    assert main([str(trace)]) == 0
    assert "is cut, and is left out" in capsys.readouterr().out


def test_events_of_other_kinds_are_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "trace.jsonl", [*sound(), {"event": "coffee"}])
    assert main([str(trace)]) == 0
    assert "1 events of an unknown kind, 'coffee', are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no event"),
        ("hello\n", "line 1: not JSON: 'hello'"),
        ("[1]\n", "expected an object with an"),
        ('{"event": "act", "worker": 0}\n', "act has no 'sample'"),
        ('{"event": "publish", "version": "one"}\n', "version='one', expected a whole number"),
        ('{"event": "publish", "version": 1, "update": 1.5}\n', "update=1.5, expected a whole"),
        ('{"event": "trace", "format": 7}\n', "format 7, and this version reads 1"),
    ],
)
def test_what_is_no_trace_is_a_clear_error(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    assert main([str(trace)]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_trace_is_told_how_to_write_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "callbacks=[events]" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert main([]) == 2


def test_lag_zero_is_compared_with_a_synchronous_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one.jsonl", sound())
    same = write(tmp_path / "same.jsonl", sound())
    events = sound()
    change("publish", {"version": 4}, checksum="c9")(events)
    change("applied", {"version": 4, "worker": 0}, checksum="c9")(events)
    change("applied", {"version": 4, "worker": 1}, checksum="c9")(events)
    other = write(tmp_path / "other.jsonl", events)
    shorter = write(tmp_path / "shorter.jsonl", sound(4))
    assert main([str(one), "--against", str(same)]) == 0
    assert "6 updates, as in" in capsys.readouterr().out
    assert main([str(one), "--against", str(other)]) == 1
    assert "update 4: the checksum of the weights is c4" in capsys.readouterr().out
    assert main([str(one), "--against", str(shorter)]) == 1
    assert "ends after 4 updates" in capsys.readouterr().out


def test_the_schema_names_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert [one["properties"]["event"]["const"] for one in schema["oneOf"]] == list(FIELDS)


def test_it_needs_only_the_standard_library(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", sound())
    root = Path(__file__).parents[2]
    program = (
        f"import sys; sys.path[:0] = [{str(root)!r}]; from lockstep_check.__main__ import main; "
    )
    loaded = "print(sorted(n for n in sys.modules if n in ('torch', 'numpy', 'sync', 'harness')))"
    command = [sys.executable, "-I", "-S", "-c", f"{program}main([{str(trace)!r}]); {loaded}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
