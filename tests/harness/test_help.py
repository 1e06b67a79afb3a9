from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import run
from harness import COMMANDS
from harness.config.help import EXAMPLES, groups, page, reference

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_names_every_group_and_each_of_its_options():
    text = page()
    for group, names in groups().items():
        assert f"\n    {group}\n" in text
        for name in names:
            assert f" {name} " in text


def test_the_page_fits_a_terminal():
    assert [line for line in page().splitlines() if len(line) > 100] == []


def test_there_are_five_examples():
    assert len(EXAMPLES) == 5
    for text, arguments in EXAMPLES:
        assert text in page()
        assert f"python run.py {arguments}".rstrip() in page()


@pytest.mark.parametrize("group", groups())
def test_every_choice_is_described_by_a_sentence(group):
    lines = page(group).splitlines()
    for name in groups()[group]:
        sentence = lines[lines.index(f"{group}={name}") + 1].strip()
        assert sentence.endswith("."), sentence
        assert "@" not in sentence


def test_an_experiment_s_options_have_the_names_that_set_them():
    assert "\n    sync.link.preset=wan\n" in page("experiment")
    assert "\n    experiment." not in page("experiment")


@pytest.mark.parametrize("group", groups())
def test_a_group_has_a_page_of_its_own(group):
    text = page(group)
    for name in groups()[group]:
        assert f"{group}={name}\n" in text
    assert page(f"{group}=whatever") == text


def test_an_unknown_group_is_refused_with_the_known(capsys):
    assert run.main(["--help", "nonsense"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--help nonsense: there is no such group; groups: algo, collector, sync" in captured.err


def test_help_loads_nothing_heavy():
    code = "import sys, run; run.main(['--help']); print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.endswith("False\n"), ended.stderr


@pytest.mark.parametrize("group", [[], ["env"]])
def test_who_stops_reading_gets_no_traceback(group):
    with subprocess.Popen(
        [sys.executable, "run.py", "--help", *group],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_the_page_of_options_is_that_of_the_code():
    """Made anew by: python -m harness.config.help > docs/options.md"""
    assert (ROOT / "docs/options.md").read_text() == reference() + "\n"


def test_options_of_every_run_that_are_groups_have_a_page(capsys):
    assert run.main(["--help", "checkpoint"]) == 0
    assert "    checkpoint.keep=3 " in capsys.readouterr().out


TOLD = """
from harness.callbacks import Callback
from harness.options import Options
from harness.registry import callbacks

@callbacks.register("told", options=Options)
class Told(Callback):
    \"\"\"Says it.\"\"\"
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help", "callbacks", "plugins=[told]"], ["plugins=[told]", "--help", "callbacks"]],
)
def test_the_page_of_a_group_shows_parts_of_plugins(arguments, tmp_path):
    (tmp_path / "told.py").write_text(TOLD)
    ended = start(*arguments, folder=tmp_path)
    assert ended.stdout.startswith("callbacks=events\n"), ended.stderr
    assert "\ncallbacks=told\n" in ended.stdout


OWN_OBJECTIVE = """
from dataclasses import dataclass
from harness.options.base import Options
from harness.registry import objectives

@dataclass
class Mine(Options):
    strength: float = 1.0  # how strong it is

@objectives.register("own", options=Mine)
def own(frames, config, options):
    \"\"\"The mean of what I like.\"\"\"
"""


def test_what_an_objective_is_stands_in_its_function_if_its_options_do_not_say(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_OBJECTIVE)
    ended = start("--help", "algo", "plugins=[mine]", folder=tmp_path)
    assert "algo.objective={own: {...}}\n    The mean of what I like.\n" in ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_of_lockstep_s(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        run.main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lockstep {command} ")


def test_a_file_of_the_user_s_called_harness_is_in_nobody_s_way(tmp_path):
    (tmp_path / "harness.py").write_text("")
    ended = start("report", "nowhere", folder=tmp_path)
    assert (ended.returncode, ended.stderr[:8]) == (2, "report: ")


def start(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_version_is_that_of_lockstep(capsys):
    assert run.main(["--version"]) == 0
    assert re.fullmatch(r"lockstep \d+\.\d+.*\n", capsys.readouterr().out)
