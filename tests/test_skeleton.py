"""What the packaging files promise each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = (
    "requirements.lock",
    "requirements-peers.lock",
    "requirements-trl.lock",
)  # those with torch

# Of one machine only: where it keeps things, and where its packages come from.
MACHINE = re.compile(
    r"(?<![\w.~])/(?:work|root|home|opt|tmp|Users)/\w+"
    r"|index[-]url|find[-]links|python[h]osted|https?://[\w.:-]*(?:pypi|/simple\b)"
)


def pins(lock: str) -> dict[str, str]:
    """Version by canonical name; every line of a lock pins exactly one."""
    lines = (ROOT / lock).read_text().splitlines()
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line[:1] != "#"]
    assert all(pairs), f"{lock}: a line is not name==version, without a local suffix"
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs}


def git(*arguments: str) -> str:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30
    ).stdout


def test_each_lock_pins_its_packages_within_their_ranges():
    extras = PROJECT["optional-dependencies"]
    for lock, requirements in (
        ("requirements.lock", [*PROJECT["dependencies"], *extras["test"]]),
        ("requirements-peers.lock", extras["peers"]),
        ("requirements-docs.lock", extras["docs"]),
        ("requirements-trl.lock", [*PROJECT["dependencies"], *extras["trl"]]),
    ):
        for wanted in map(Requirement, requirements):
            assert wanted.specifier.contains(pins(lock)[canonicalize_name(wanted.name)]), wanted


def test_uv_takes_what_decides_the_numbers_of_a_run_as_locked():
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    locked = pins("requirements.lock")
    names = ("gymnasium", "numpy", "torch")
    assert uv["constraint-dependencies"] == [f"{name}=={locked[name]}" for name in names]


def test_both_environments_run_the_same_torch():
    assert len({pins(lock)["torch"] for lock in LOCKS}) == 1


def test_the_changelog_and_the_citation_name_the_version():
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    (day,) = re.findall(r'^date-released: "(.+)"$', (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == PROJECT["version"]
    assert f"\n## {cited} ({day})\n" in (ROOT / "CHANGELOG.md").read_text()


def test_every_range_is_bounded_below():
    for requirement in PROJECT["dependencies"]:
        assert ">=" in requirement


def test_no_committed_file_knows_a_machine():
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    texts = {name: read_text(ROOT / name) for name in listed if name and (ROOT / name).is_file()}
    found = {name: MACHINE.findall(text) for name, text in texts.items() if MACHINE.search(text)}
    assert found == {}


def test_the_makefile_has_every_target_that_the_readme_names():
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    targets = set(re.findall(r"^make (\w+)", shown.stdout, re.MULTILINE))
    named = set(re.findall(r"`make (\w+)", (ROOT / "README.md").read_text()))
    assert {"run", "test"} <= named <= targets
    assert targets >= {"run", "test", "check", "bench", "peers", "clean"}


def test_every_place_in_the_layout_exists():
    layout = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1]
    rows = re.findall(r"^\| `([^`]+)`", layout, re.MULTILINE)
    assert {"sync/", "collectors/", "harness/"} <= set(rows)
    assert [row for row in rows if not (ROOT / row).exists()] == []


def read_text(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError:  # an image, say
        return ""
