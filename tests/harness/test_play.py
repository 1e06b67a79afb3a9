from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from harness import play
from harness.config.plan import plan_run
from harness.errors import installing
from harness.run.build import make_learner
from harness.run.checkpoints import Checkpoints

ROOT = Path(play.__file__).parent.parent
PAINTED = "tests.harness.painted:Painted-v0"


def run_dir(tmp_path: Path, *options: str) -> Path:
    """What a run leaves behind that is needed to play it."""
    plan = plan_run([f"env.id={PAINTED}", *options])
    learner = make_learner(plan.config)
    (tmp_path / "config.yaml").write_text(plan.yaml)
    Checkpoints(tmp_path / "checkpoints").save(12_345, {"learner": learner.state_dict()})
    return tmp_path


def pictures(file: Path) -> list[Image.Image]:
    with Image.open(file) as film:
        found = []
        for i in range(getattr(film, "n_frames", 1)):
            film.seek(i)
            found.append(film.convert("RGB"))
        return found


def test_the_command_renders_the_newest_checkpoint_to_a_gif(tmp_path):
    folder = run_dir(tmp_path)
    command = [sys.executable, "-m", "harness.play", str(folder), "--import-env"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "episode 0: return 10 in 5 steps" in done.stdout
    assert "the policy after 12345 frames, 6 pictures at 10 a second" in done.stdout
    film = pictures(folder / "play.gif")
    assert [picture.getpixel((0, 0))[0] for picture in film] == [0, 40, 80, 120, 160, 200]
    with Image.open(folder / "play.gif") as opened:
        assert opened.info["duration"] == 100


def test_a_package_that_is_missing_is_installed_by_the_pip_that_is_here(
    tmp_path, capsys, monkeypatch
):
    programs = {"uv": "/bin/uv"}
    monkeypatch.setattr(shutil, "which", programs.get)
    said = 'pygame is not installed, run `pip install "gymnasium[classic_control]"`'
    folder = run_dir(tmp_path, f"env.kwargs={{missing:'{said}'}}")
    assert play.main([str(folder), "--import-env"]) == 2
    how = installing('"gymnasium[classic_control]"')
    assert f"pygame is not installed, run `{how}`" in capsys.readouterr().err


def test_an_episode_without_an_end_is_cut(tmp_path, capsys):
    assert play.main([str(run_dir(tmp_path)), "--import-env", "--max-steps", "2"]) == 0
    assert "in 2 steps, where it was cut" in capsys.readouterr().out
    assert len(pictures(tmp_path / "play.gif")) == 3


def test_several_episodes_follow_each_other(tmp_path, capsys):
    out = tmp_path / "two.gif"
    arguments = [str(run_dir(tmp_path)), "--import-env", "--episodes", "2", "--out", str(out)]
    assert play.main(arguments) == 0
    assert "episode 1: return 10 in 5 steps" in capsys.readouterr().out
    assert len(pictures(out)) == 12


def test_wide_pictures_are_made_smaller(tmp_path):
    folder = run_dir(tmp_path, "env.kwargs={width: 1000}")
    assert play.main([str(folder), "--import-env"]) == 0
    assert pictures(folder / "play.gif")[0].size == (480, 240)


def test_a_policy_with_a_memory_can_be_played(tmp_path):
    assert play.main([str(run_dir(tmp_path, "model=lstm")), "--import-env"]) == 0


def test_the_weights_played_are_those_of_the_checkpoint(tmp_path):
    folder = run_dir(tmp_path)
    learner = make_learner(plan_run([f"env.id={PAINTED}"]).config)
    for parameter in learner.policy.parameters():
        parameter.data.fill_(0.125)
    Checkpoints(folder / "checkpoints").save(20_000, {"learner": learner.state_dict()})
    _, policy, frames = play.load(folder, import_env=True)
    assert frames == 20_000
    assert all((parameter == 0.125).all() for parameter in policy.parameters())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--out", "film.avi"], "expected a name that ends in .gif"),
        (["--episodes", "0"], "--episodes is 0, expected 1 or more"),
        ([], "is not a run directory: it has no config.yaml"),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(tmp_path, capsys, arguments, complaint):
    assert play.main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_run_without_a_checkpoint_is_refused(tmp_path, capsys):
    folder = run_dir(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    assert play.main([str(folder), "--import-env"]) == 2
    assert "no checkpoint to load" in capsys.readouterr().err


def test_a_package_that_a_run_directory_names_is_imported_only_if_allowed(tmp_path, capsys):
    folder = run_dir(tmp_path)
    assert play.main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "would import tests.harness.painted" in line
    assert "use --import-env" in line


def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(tmp_path, capsys):
    folder = run_dir(tmp_path)
    for state in ({}, {"learner": {"algorithm": {"policy": {"x": 1}}}}, {"learner": 3}):
        Checkpoints(folder / "checkpoints").save(20_000, state)
        assert play.main([str(folder), "--import-env"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "does not fit its config" in line


def test_a_film_is_not_written_through_a_link(tmp_path):
    folder = run_dir(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / "play.gif").symlink_to(precious)
    assert play.main([str(folder), "--import-env"]) == 0
    assert precious.read_text() == "mine"
    assert not (folder / "play.gif").is_symlink()
