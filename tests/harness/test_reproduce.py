"""Running runs again: identical, within the interval, different; and runs nobody should trust."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import run
from harness.config.plan import plan_run
from harness.files import read_json, to_yaml, write_json
from harness.reproduce import differences, main, within
from harness.run_comparison import is_repeatable, unshared
from tests.harness.config.composed import config_of
from tests.harness.small import SMALL

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def original() -> Path:
    """A run that is done."""
    assert run.main([*SMALL, "hydra.run.dir=original"]) == 0
    return Path("original")


def stored(directory: Path, **changes: object) -> Path:
    """A directory that says it is a run that is done; nothing ran."""
    directory.mkdir()
    options = plan_run([*SMALL]).options | changes
    (directory / "config.yaml").write_text(to_yaml(options))
    write_json(directory / "status.json", {"state": "done"})
    write_json(directory / "summary.json", {"eval/return": 1.0})
    (directory / "metrics.jsonl").write_text('{"step": 128, "eval/return": 1.0}\n')
    return directory


def test_a_run_is_reproduced_to_the_bit_or_it_is_said_where_it_parts(original, capsys):
    assert main([str(original), "--out", "again"]) == 0
    out = capsys.readouterr().out
    assert "identical: all metrics but times, and the final weights, in again" in out

    records = (original / "metrics.jsonl").read_text().splitlines()
    last = json.loads(records[-1])
    step, value = last["step"], last["eval/return"]
    records[-1] = json.dumps(last | {"eval/return": value + 1})
    (original / "metrics.jsonl").write_text("\n".join(records) + "\n")
    assert main([str(original), "--out", "third"]) == 1
    out = capsys.readouterr().out
    parted = f"first difference: step {step}, eval/return: {value + 1} there, {value} here"
    assert parted in out
    assert "different: this config promises the same bits for a seed\n" in out

    manifest = json.loads((original / "manifest.json").read_text())
    manifest["hardware"]["processor"] = "Another 3000"
    (original / "manifest.json").write_text(json.dumps(manifest))
    assert main([str(original), "--out", "fourth"]) == 1
    out = capsys.readouterr().out
    assert "for a seed, on the same kind of processor: Another 3000 then, " in out


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ({"instructions": "torch SSE2"}, "processor: torch SSE2 then, "),
        ({"processor": "Another 3000"}, "processor: Another 3000 then, "),
        ({"instructions": None}, "processor. The manifest does not name the instructions of then"),
    ],
)
def test_a_processor_of_the_same_name_may_be_of_another_kind(original, then, said, capsys):
    (original / "metrics.jsonl").write_text('{"step": 128, "eval/return": 0.5}\n')
    manifest = read_json(original / "manifest.json")
    hardware = {name: value for name, value in (manifest["hardware"] | then).items() if value}
    write_json(original / "manifest.json", manifest | {"hardware": hardware})
    assert main([str(original), "--out", "again"]) == 1
    assert f"the same bits for a seed, on the same kind of {said}" in capsys.readouterr().out


def test_metrics_that_only_one_version_measures_are_named_and_not_compared(original, capsys):
    lines = (original / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record.pop("policy/lag_max", None)
        record["policy/of_old"] = 1.0
    (original / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert main([str(original), "--out", "again"]) == 1
    assert "policy/lag_max: None there, 0" in capsys.readouterr().out

    manifest = read_json(original / "manifest.json")
    earlier = {"sha": "0" * 40, "branch": "main", "diff": "", "untracked": []}
    write_json(original / "manifest.json", manifest | {"git": earlier})
    assert main([str(original), "--out", "third"]) == 0
    out = capsys.readouterr().out
    assert "not compared, since only the stored run has it: policy/of_old\n" in out
    assert "not compared, since only the new run has it: policy/lag_max\n" in out
    assert "identical: all metrics that both runs have, but times, and the final weights" in out

    records[-1]["eval/return"] += 1
    (original / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    assert main([str(original), "--out", "fourth"]) == 1
    assert "eval/return: " in capsys.readouterr().out

    (original / "metrics.jsonl").write_text('{"step": 128, "policy/of_old": 1.0}\n')
    assert main([str(original), "--out", "fifth"]) == 2
    assert "no metric in common" in capsys.readouterr().err


def test_a_run_that_went_on_with_other_options_is_not_said_to_break_a_promise(original, capsys):
    assert run.main(["resume=original", "total_frames=512"]) == 0
    assert main(["original", "--out", "again"]) == 1
    out = capsys.readouterr().out
    assert "first difference: step 256" in out
    assert "undecided: it was resumed, and the stored config is that of its last part" in out


def test_weights_that_differ_are_named(original, capsys):
    assert run.main([*SMALL, "seed=2", "hydra.run.dir=other"]) == 0
    (theirs,) = (original / "checkpoints").iterdir()
    (others,) = Path("other/checkpoints").iterdir()
    theirs.unlink()
    others.rename(original / "checkpoints" / others.name)
    assert main([str(original), "--out", "refused"]) == 0
    assert "identical: all metrics but times (weights could" in capsys.readouterr().out
    manifest = read_json(original / "manifest.json")
    writer = read_json(Path("other/manifest.json"))["wandb_id"]  # by which checkpoints are known
    write_json(original / "manifest.json", manifest | {"wandb_id": writer})
    assert main([str(original), "--out", "again"]) == 1
    assert "first difference: final weights, algorithm." in capsys.readouterr().out


def test_a_run_whose_bits_depend_on_timing_is_compared_with_several(capsys):
    given = ("collector=multi_async", "sync=hogwild", "hydra.run.dir=original")
    assert run.main([*SMALL, *given]) == 0
    summary = read_json(Path("original/summary.json"))
    write_json(Path("original/summary.json"), summary | {"eval/return": 1e6})
    records = Path("original/metrics.jsonl").read_text() + '{"step": 999}\n'
    Path("original/metrics.jsonl").write_text(records)
    assert main(["original", "--out", "again", "--repeats", "2"]) == 1
    out = capsys.readouterr().out
    assert "different: return 1,000,000 against" in out
    assert {path.name for path in Path("again").iterdir()} == {"1", "2"}


@pytest.mark.parametrize(
    ("score", "again", "word", "status"),
    [
        (9.0, [8.0, 10.0, 12.0], "within the interval", 0),
        (30.0, [8.0, 10.0, 12.0], "different", 1),
        (500.0, [500.0, 500.0], "within the interval", 0),
        (9.0, [9.0], "undecided", 1),
        (float("nan"), [1.0, 2.0], "undecided", 1),
    ],
)
def test_a_score_is_compared_with_the_interval_for_one_more_run(score, again, word, status):
    verdict = within(score, again)
    assert (verdict.word, verdict.status) == (word, status)


def test_the_interval_is_students_prediction_interval():
    # Mean 10, deviation 2, t of two degrees of freedom 4.3027: 4.3027 · 2 · sqrt(4/3) = 9.937.
    assert "interval for one more run 0.0634" in within(9.0, [8.0, 10.0, 12.0]).why
    assert "to 19.9366" in within(9.0, [8.0, 10.0, 12.0]).why
    assert within(19.93, [8.0, 10.0, 12.0]).word == "within the interval"
    assert within(19.94, [8.0, 10.0, 12.0]).word == "different"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["collector=single", "sync=none"], True),
        (["collector=multi_sync"], True),
        (["collector=multi_sync", "collector.preemptive_threshold=0.5"], False),
        (["collector=multi_sync", "sync=hogwild"], False),
        (["collector=multi_async"], False),
        (["collector=multi_async", "collector.free_running=true", "algo=sac"], False),
        (["collector=distributed", "sync=distributed"], True),
        (["collector=rpc", "sync=rpc", "collector.remote.asynchronous=true"], False),
        (["collector=rpc", "sync=rpc", "collector.devices.policy=cuda:0"], False),
    ],
)
def test_it_is_known_which_configs_promise_the_same_bits(overrides, expected):
    assert is_repeatable(config_of(*overrides)) is expected


def test_what_is_not_as_it_was_is_said(tmp_path):
    found = stored(tmp_path / "old")
    manifest = {"python": "2.7", "packages": {"torch": "0.1\x1b[2J"}, "git": {"sha": "abc"}}
    write_json(found / "manifest.json", manifest)
    said = list(differences(found))
    assert any(line.startswith("python: 2.7 then, 3.") for line in said)
    assert any(line.startswith("git commit: abc then, ") for line in said)
    (torch,) = (line for line in said if line.startswith("torch: 0.1"))
    assert "\x1b" not in torch


# -- what is not trusted


def test_a_stored_environment_is_not_imported_unless_that_is_asked_for(tmp_path, capsys):
    Path("evil.py").write_text("raise SystemExit('it ran')")
    sys.modules.pop("evil", None)
    found = stored(tmp_path / "theirs", env={"id": "evil:Env-v0", "num_envs": 1})
    assert main([str(found)]) == 2
    error = capsys.readouterr().err
    assert "would import evil and execute its code; if you trust it, use --import-env" in error
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch ran']",
        "algo: !!python/name:os.system ''",
        "seed: ${oc.env:HOME}",
        "_target_: os.system",
        "a: &a [*a]",
        "[" * 10_000,
    ],
)
def test_nothing_in_a_stored_config_runs(tmp_path, text, capsys):
    found = stored(tmp_path / "theirs")
    (found / "config.yaml").write_text(text)
    assert main([str(found)]) == 2
    assert capsys.readouterr().err.startswith("reproduce: ")
    assert not Path("ran").exists()
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("status.json", '{"state": "failed"}', "is failed: only a run that is done"),
        ("status.json", "{", "is damaged"),
        ("config.yaml", "", "holds no options"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    tmp_path, name, text, said, capsys
):
    found = stored(tmp_path / "theirs")
    (found / name).write_text(text)
    assert main([str(found)]) == 2
    assert said in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_nothing_is_sent_anywhere_by_a_run_that_is_repeated(tmp_path):
    from harness.reproduce import stored_plan

    logger = {"wandb": {"mode": "online", "project": "x"}, "tensorboard": {}}
    found = stored(tmp_path / "theirs", logger=logger)
    plan = stored_plan(found, None, import_env=False)
    assert plan.config.logger == {}


def test_metrics_after_the_end_of_a_shorter_run_are_not_called_unshared(tmp_path):
    for name, lines in (("short", ['{"step": 1, "a": 1.0}']), ("long", ['{"step": 1, "a": 1.0}'])):
        (tmp_path / name).mkdir()
        lines += ['{"step": 2, "b": 1.0}'] if name == "long" else []
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert unshared(tmp_path / "short", tmp_path / "long") == (set(), {"b"})
    assert unshared(tmp_path / "short", tmp_path / "long", whole=False) == (set(), set())
