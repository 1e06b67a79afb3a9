"""Lockstep as an installed package, and a project outside of its repository that extends it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import site
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "collectors",
    "harness",
    "hydra_plugins",
    "lockstep_check",
    "lockstep_conformance",
    "lockstep_trl",
    "sync",
)
SOURCES = (*CODE, "conf")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FRAMES = 4096


class Installed:
    """A virtual environment with Lockstep and the project, and nothing of this checkout."""

    def __init__(self, folder: Path):
        self.bin = folder / "venv" / "bin"
        self.conf = folder / "sources" / "my_project" / "conf"
        sources = _copied(folder / "sources")
        wheels = folder / "wheels"
        options = ("--quiet", "--no-deps", "--no-index")
        _pip("wheel", *options, "--no-build-isolation", "-w", wheels, *sources)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        python = ("--python", self.bin / "python")
        _pip(*python, "install", *options, *sorted(wheels.glob("*.whl")))
        (own,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # The dependencies are the test environment's. A folder that is added in this way has its
        # own .pth files ignored, and with them an editable installation of Lockstep.
        (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")

    def run(self, command: str, *arguments: str, cwd: Path) -> str:
        """What a command of the environment prints; it must succeed."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        ended = subprocess.run(
            [self.bin / command, *arguments],
            cwd=cwd,
            env=environment | {"PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def experiment(self, *overrides: str, cwd: Path, flags: tuple[str, ...] = ()) -> None:
        """Run the project's experiment, or a sweep of it."""
        plugin = "plugins=[my_project.parts]"
        chosen = (plugin, "experiment=reinforce_cartpole", f"total_frames={FRAMES}", "logger=jsonl")
        flags = ("--config-dir", str(self.conf), *flags)
        self.run("lockstep", *flags, *chosen, *overrides, cwd=cwd)


def _copied(folder: Path) -> list[Path]:
    """Both packages' sources: a build leaves files beside them."""
    lockstep, project = folder / "lockstep", folder / "my_project"
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, lockstep / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, lockstep)
    shutil.copytree(ROOT / "examples" / "my_project", project)
    return [lockstep, project]


def _pip(*arguments: Any) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    for needed in ("pip", "setuptools"):
        if find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    return Installed(tmp_path_factory.mktemp("installed"))


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_is_imported_is_the_installed_copy(installed, tmp_path):
    code = (
        "import collectors, harness, sync, my_project, hydra_plugins.lockstep.sweeper as plugins\n"
        "from harness.config.compose import CONF\n"
        "for module in (collectors, harness, sync, my_project, plugins): print(module.__file__)\n"
        "print(CONF)"
    )
    places = installed.run("python", "-c", code, cwd=tmp_path).splitlines()
    assert len(places) == 6
    for place in places:
        assert Path(place).is_relative_to(installed.bin.parent)


def test_the_wheel_holds_every_module_and_every_config(installed, tmp_path):
    (own,) = (installed.bin.parent / "lib").glob("python*/site-packages")
    for name in SOURCES:
        place = own / ("harness/conf" if name == "conf" else name)
        for file in (ROOT / name).rglob("*"):
            if file.suffix in (".py", ".yaml", ".typed"):
                assert (place / file.relative_to(ROOT / name)).is_file(), file


def test_another_projects_commit_is_not_taken_for_the_codes(installed, tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    repository = installed.bin.parent  # as if the environment lay in a project's checkout
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    try:
        subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
        commit = ["git", *identity, "commit", "-q", "--allow-empty", "-m", "theirs"]
        subprocess.run(commit, cwd=repository, check=True)
        code = "from harness.run.provenance import git; print(git())"
        assert installed.run("python", "-c", code, cwd=tmp_path) == "None\n"
    finally:
        shutil.rmtree(repository / ".git", ignore_errors=True)


@pytest.mark.parametrize(
    "collector",
    [
        pytest.param("single", marks=pytest.mark.slow),
        pytest.param("multi_sync", marks=pytest.mark.slow),
        "multi_async",
    ],
)
def test_the_projects_parts_work_together_in_an_empty_directory(installed, tmp_path, collector):
    installed.experiment(f"collector={collector}", "hydra.run.dir=run", cwd=tmp_path)
    run = tmp_path / "run"
    *found, evaluated = records(run)
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert found[-1]["step"] == evaluated["step"] == FRAMES
    assert evaluated["eval/return"] > 0
    assert found[-1]["train/policy_loss"] != 0  # the algorithm
    # The scheme: what it moved itself, and the versions that computed the frames.
    (moved,) = json.loads((run / "summary.json").read_text())["moved"].items()
    assert moved[0] == "unix socket"
    assert moved[1]["bytes"] > moved[1]["versions"] > 0
    assert found[-1]["policy/version"] >= FRAMES / 512
    assert found[-1]["policy/lag_max"] < found[-1]["policy/version"]
    # The callback: in each record, and in a file.
    assert all(record["my_project/mean_reward"] == 1 for record in found)  # CartPole's
    rows = list(csv.DictReader((run / "mean_reward.csv").open()))
    assert [int(row["frames"]) for row in rows] == [record["step"] for record in found]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["packages"]["lockstep-rl"]
    assert manifest["git"] is None
    # The model.
    (checkpoint,) = (run / "checkpoints").glob("*.safetensors")
    with safe_open(checkpoint, "pt") as tensors:
        assert any("encoder.blocks.1.2.weight" in name for name in tensors.keys())  # noqa: SIM118


@pytest.mark.slow
def test_a_sweep_of_the_project_has_a_report(installed, tmp_path):
    by_path = 'env.wrappers=["my_project.wrappers:ObservationNoise"]'
    swept = ("sync=unix_socket,shared_mem", "sweep=mine", by_path)
    installed.experiment(*swept, flags=("-m",), cwd=tmp_path)
    runs = [file.parent for file in (tmp_path / "outputs/mine").glob("*/summary.json")]
    assert len(runs) == 2
    installed.run("python", "-m", "harness.report", "outputs/mine", cwd=tmp_path)
    (report,) = (tmp_path / "outputs/mine").rglob("*.html")
    assert "unix_socket" in report.read_text()


@pytest.mark.slow
def test_a_run_of_the_project_goes_on_from_its_checkpoint(installed, tmp_path):
    installed.experiment("hydra.run.dir=run", cwd=tmp_path)
    more = ("plugins=[my_project.parts]", "resume=run", f"total_frames={2 * FRAMES}")
    installed.run("lockstep", *more, cwd=tmp_path)
    assert records(tmp_path / "run")[-1]["step"] == 2 * FRAMES


@pytest.mark.slow
def test_help_lists_what_lockstep_has_and_what_a_plugin_adds(installed, tmp_path):
    text = installed.run("lockstep", "--help", cwd=tmp_path)
    assert "ppo_cartpole" in text
    assert "unix_socket" not in text
    text = installed.run("lockstep", "--help", "plugins=[my_project.parts]", cwd=tmp_path)
    for name in ("reinforce", "residual_mlp", "unix_socket", "mean_reward", "observation_noise"):
        assert name in text
