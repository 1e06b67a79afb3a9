"""Whatever a run directory holds: to resume it ends in a right run, or in one line and status 2."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import run
from harness.config.plan import to_config
from harness.config.stored import read_options
from harness.errors import ConfigError
from harness.files import parse_yaml, read_json, to_yaml
from harness.run.checkpoints import Checkpoints
from harness.run_directory import RunDir
from tests.security import support
from tests.security.support import Said, made_run

DAMAGE = ("missing", "empty", "cut", "bytes", "nested", "list", "numbers")
FILES = ("config.yaml", "manifest.json", "status.json", "summary.json", "metrics.jsonl", "run.log")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def directory(finished: Path, tmp_path: Path) -> Path:
    return support.copy(finished, tmp_path / "run")


@pytest.fixture
def resume(capsys, directory) -> Callable[..., Said]:
    def resume(*overrides: str) -> Said:
        before = picture(directory)
        said = support.resume(capsys, directory, *overrides)
        assert "Traceback" not in said.err
        assert said.status in (0, 2)
        if said.status == 2:
            assert said.line
            if "the checkpoint does not fit" not in said.line:
                assert picture(directory) == before
        else:
            assert read_json(directory / "status.json")["state"] == "done"
        return said

    return resume


def picture(directory: Path) -> dict[str, Any]:
    """Everything in it but the log."""
    return {
        str(path.relative_to(directory)): (found.st_mode, found.st_size, found.st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if (found := path.lstat()) and path.name != "run.log"
    }


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return Checkpoints(directory / "checkpoints").load()[1]["learner"]["algorithm"]["policy"]


def spoil(file: Path, how: str) -> None:
    content = file.read_bytes() if file.exists() else b"{}"
    file.unlink(missing_ok=True)
    match how:
        case "missing":
            pass
        case "empty":
            file.touch()
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "bytes":
            file.write_bytes(bytes(range(256)) * 40)
        case "nested":
            file.write_text("[" * 50_000)
        case "list":
            file.write_text("[1, 2]")
        case "numbers":
            file.write_text(
                '{"state": NaN, "pid": 1e999, "step": -Infinity, "a": ' + "9" * 5000 + "}"
            )
        case "link":
            file.symlink_to("/etc/passwd")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "large":
            with file.open("wb") as stream:
                stream.truncate(1 << 40)


# -- files that are not what they should be


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_that_a_resumed_run_does_not_need_change_nothing(directory, resume, how):
    before = weights(directory)
    for name in ("status.json", "summary.json", "metrics.jsonl", "run.log"):
        spoil(directory / name, how)
    assert resume().status == 0
    assert all(torch.equal(before[k], v) for k, v in weights(directory).items())


def test_damaged_files_that_a_resumed_run_needs_are_refused(directory, resume):
    for name in ("config.yaml", "manifest.json"):
        sound = (directory / name).read_bytes()
        for how in DAMAGE:
            if (name, how) != ("manifest.json", "missing"):
                spoil(directory / name, how)
                assert resume().status == 2, f"{name} {how}"
                (directory / name).write_bytes(sound)


def test_a_run_without_its_manifest_is_resumed(directory, resume):
    (directory / "manifest.json").unlink()
    assert resume().status == 0


def test_links_folders_and_pipes_in_place_of_files_are_refused(finished, tmp_path, capsys):
    for name in FILES:
        for how in ("link", "folder", "pipe"):
            directory = support.copy(finished, tmp_path / f"{name}-{how}")
            spoil(directory / name, how)
            before = picture(directory)
            answer = support.resume(capsys, directory)
            assert (answer.status, picture(directory)) == (2, before), f"{name} {how}"
            assert answer.line


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
def test_a_file_beyond_all_bounds_is_refused_unread(directory, resume, name):
    spoil(directory / name, "large")
    assert "bytes, expected" in resume().line


@pytest.mark.parametrize("name", ["checkpoints", "wandb", "tensorboard"])
def test_a_folder_that_leads_elsewhere_is_not_written_to(directory, resume, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if (directory / name).exists():
        (directory / name).rename(elsewhere / "kept")
    (directory / name).symlink_to(elsewhere)
    assert "expected one of the run's own" in resume().line


# -- fields that are not what they should be

STRANGE = (None, True, -1, 2**70, 1.5, "x", "\x1b[2J\n\ud800", [], [[]], {}, {"a": {"b": 1}})


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_strange_values_of_status_and_manifest_harm_nothing(directory, resume, value):
    fields = {"state": "running", "pid": value, "error": value, "changed": value}
    (directory / "status.json").write_text(json.dumps(fields))
    known = read_json(directory / "manifest.json") | {"sweep": value, "resumed": value}
    (directory / "manifest.json").write_text(json.dumps(known | {"packages": value}))
    assert resume().status == 0


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_strange_records_are_cut(directory, value):
    run_dir = RunDir(directory)
    sound = run_dir.metrics.read_text()
    with run_dir.metrics.open("a") as stream:
        stream.write(json.dumps(value) + "\n" + json.dumps({"step": value, "time": 0}) + "\n")
    run_dir.cut_metrics(64, 64)
    kept = run_dir.metrics.read_text().removeprefix(sound).splitlines()
    assert all(0 <= json.loads(line)["step"] <= 64 for line in kept)


def options_of(directory: Path) -> dict[str, Any]:
    return parse_yaml((directory / "config.yaml").read_text())


def paths_of(options: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in options.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*above, key))


def complaint_about(options: dict[str, Any]) -> str:
    try:
        to_config(options)
    except ConfigError as error:
        return str(error)
    return ""


def test_each_option_may_be_strange_in_a_stored_config(directory):
    sound = read_options(directory)
    for *above, last in paths_of(sound):
        for value in STRANGE:
            options = group = copy.deepcopy(sound)
            for name in above:
                group = group[name]
            group[last] = value
            assert complaint_about(options).isprintable()
    assert run.main([f"resume={directory}"]) == 0


# -- what would run code, or read what is none of a run's business


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch ran']",
        "a: !!python/name:os.system",
        "a: !!python/object/new:subprocess.Popen [[touch, ran]]",
        "a: &a [1]\nb: [*a, *a]",
        "_target_: os.system",
    ],
)
def test_a_stored_config_runs_nothing(directory, resume, monkeypatch, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    with (directory / "config.yaml").open("a") as stream:
        stream.write(f"\n{text}\n")
    assert resume().status == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reference", ["${oc.env:SECRET}", "${oc.decode:'[1]'}", "${x", "${seed}"])
def test_a_stored_config_refers_to_nothing(directory, resume, monkeypatch, reference):
    monkeypatch.setenv("SECRET", "s3cret")
    options = options_of(directory) | {"name": reference}
    (directory / "config.yaml").write_text(to_yaml(options))
    assert resume().status == 0
    assert options_of(directory)["name"] == reference
    texts = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    assert not any(b"s3cret" in text for text in texts)


def test_a_package_that_a_stored_config_names_is_imported_only_if_it_is_named_again(
    directory, resume, tmp_path, monkeypatch
):
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nimport gymnasium as gym\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = options_of(directory)
    options["env"]["id"] = "evil:CartPole-v1"
    (directory / "config.yaml").write_text(to_yaml(options))
    assert "execute its code; if you trust it, use env.id=evil:CartPole-v1" in resume().line
    assert not ran.exists()
    assert resume("env.id=evil:CartPole-v1").status == 0
    assert ran.exists()


# -- forged checkpoints

PARTS = [
    *("learner", "collector", "streams", "frames", "updates", "dropped", "logged_at", "counts"),
    *("evaluated_at", "last_evaluation", "sync", "episodes", "lags"),
    *("trained", "published"),
]


def forge(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    checkpoints = Checkpoints(directory / "checkpoints", run=RunDir(directory).read_id())
    frames, state = checkpoints.load()
    change(state)
    (file,) = checkpoints.files()
    file.unlink()
    checkpoints.save(frames, state)


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_without_one_of_its_parts_is_refused(directory, resume, part):
    forge(directory, lambda state: state.pop(part))
    assert resume().status == 2


def test_a_checkpoint_with_a_part_of_another_kind_is_refused_or_harmless(
    finished, tmp_path, capsys
):
    for number, part in enumerate(PARTS):
        directory = support.copy(finished, tmp_path / part)
        value = ("x", [], {"a": 1})[number % 3]
        forge(directory, lambda state, part=part, value=value: state.update({part: value}))
        answer = support.resume(capsys, directory)
        assert "Traceback" not in answer.err
        assert answer.status == 0 or (answer.status == 2 and answer.line)


def test_another_runs_checkpoint_is_refused(directory, resume, tmp_path):
    other = made_run(tmp_path / "other")
    for file in (directory / "checkpoints").iterdir():
        file.unlink()
    for file in (other / "checkpoints").iterdir():
        file.rename(directory / "checkpoints" / file.name)
    said = resume()
    assert said.status == 2
    assert "belongs to another run" in said.err
