"""Every command in the pages parses, and every run that they name can be composed: `make docs`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.command import main
from harness.config.plan import plan_run
from tests.docs.pages import ROOT, Command, commands, pages, read
from tests.harness.config.experiments import write_recording

COMMANDS = commands()
OURS = [one for one in COMMANDS if one.program == "run.py" or one.program.startswith("harness.")]
PAGES_WITH_COMMANDS = {"README.md", "docs/quickstart.md", "docs/tutorial.md", "docs/sweeps.md"}
STORED = "outputs/2026-01-31/12-00-00-ppo-CartPole-v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files that the pages' commands name."""
    folder = tmp_path_factory.mktemp("reader")
    stored = plan_run(["logger=jsonl"]).yaml
    small = (
        "total_frames=4096",
        "collector.num_workers=8",
        "logger=jsonl",
        "evaluation.at_end=false",
    )
    assert main([*small, f"hydra.run.dir={folder / 'RUN'}"]) == 0
    for directory in (STORED, "outputs/2026-01-31/12-00-00-mine"):
        (folder / directory).mkdir(parents=True)
        (folder / directory / "config.yaml").write_text(stored)
        (folder / directory / "status.json").write_text("{}")  # of resume=latest
    for seed in range(1, 11):
        write_recording(folder / f"outputs/recorded/seed={seed}", seed)
    experiment = re.search(r"```yaml\n(.*?)```", read("docs/tutorial.md"), re.DOTALL)
    assert experiment
    package = re.search(
        r"```python\n(# my_package/.*?)```", read("docs/environments.md"), re.DOTALL
    )
    assert package
    objective = re.search(
        r"```python\n(# my_objectives.*?)```", read("docs/extending.md"), re.DOTALL
    )
    assert objective
    own = ROOT / "examples/my_project/conf/experiment/reinforce_cartpole.yaml"
    files = {
        "conf/experiment/old_weights.yaml": experiment[1],
        "conf/experiment/reinforce_cartpole.yaml": own.read_text(),
        "my_conf/experiment/mine.yaml": "# @package _global_\ntotal_frames: 1000\n",
        "my_package/__init__.py": package[1],
        "my_package/parts.py": "",
        "my_objectives.py": objective[1],
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def compose(folder: Path, commands: Sequence[Command]) -> list[tuple[int, str]]:
    """Exit status and errors of each command, composed in one process of their own."""
    paths = [str(folder), str(ROOT), str(ROOT / "examples/my_project")]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.docs.compose"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        input=json.dumps([[command.program, command.arguments] for command in commands]),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_composes_or_shows_the_error_that_its_page_says(folder):
    alike = {f"{one.program} {one.arguments}": one for one in OURS}  # pages repeat each other
    distinct = list(alike.values())
    assert len(distinct) > 50
    assert {one.page for one in OURS} >= PAGES_WITH_COMMANDS
    halves = distinct[::2], distinct[1::2]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda half: compose(folder, half), halves))
    failures = [
        f"{command}: status {status}, {errors}"
        for half, answers in zip(halves, results, strict=True)
        for command, (status, errors) in zip(half, answers, strict=True)
        if "pip install" not in errors  # an extra is missing
        and (status or command.error)
        and (status, errors.strip()) != (2, command.error)
    ]
    assert failures == []


def test_every_module_that_a_page_names_exists():
    modules = {one.program for one in COMMANDS} - {"run.py"}
    own = [name for name in modules if name.split(".")[0] in ("harness", "tests", "benchmarks")]
    assert [name for name in own if importlib.util.find_spec(name) is None] == []


def test_every_make_target_and_every_file_that_the_pages_name_exists():
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    folders = "benchmarks|collectors|conf|examples|harness|sync|tests"
    places = re.compile(rf"`((?:{folders})/(?:[\w./]+\.(?:py|md|yaml)|[\w/]+/))`")
    missing = []
    for page in pages():
        text = read(page)
        named = re.findall(r"(?:^ {4}|`)make ([a-z]+)", text, re.MULTILINE)
        missing += [f"{page}: make {name}" for name in named if name not in targets]
        missing += [f"{page}: {path}" for path in places.findall(text) if not is_there(page, path)]
    assert missing == ["docs/tutorial.md: conf/experiment/old_weights.yaml"]  # the reader's own


def is_there(page: str, path: str) -> bool:
    """Whether the repository, or the folder of the page, has the path."""
    return (ROOT / path).exists() or ((ROOT / page).parent / path).exists()
