"""Parts from other packages: imported when a person names them, by workers too, and else not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import run
from harness.callbacks import Callback
from harness.files import parse_yaml
from harness.options import AlgorithmConfig, Options
from harness.play import main as play
from harness.registry import Registry, algorithms, callbacks, models, objectives, wrappers
from harness.reproduce import main as reproduce
from tests.harness.small import SMALL

ROOT = Path(__file__).resolve().parents[2]
TINY = (*SMALL, "total_frames=256", "evaluation.at_end=false")
PARTS = """
from dataclasses import dataclass
import gymnasium as gym
from harness.algorithms.objectives import behaviour
from harness.algorithms.ppo import PPO
from harness.callbacks import Callback
from harness.algorithms.ppo import PPOConfig
from harness.options import Options, Positive
from harness.registry import algorithms, callbacks, objectives, wrappers

@dataclass
class TimidConfig(PPOConfig):
    \"\"\"PPO whose steps are small.\"\"\"
    name: str = "timid"
    learning_rate: Positive = 1e-5  # of Adam

algorithms.add("timid", PPO, TimidConfig)

@dataclass
class ScaledConfig:
    factor: Positive = 1.0  # of the gain

@objectives.register("scaled", options=ScaledConfig)
def scaled(frames, config, options):
    plain = behaviour(frames, config, None)
    metrics = {"factor": plain.gain.new_tensor(options.factor)}
    return plain._replace(gain=plain.gain * options.factor, metrics=metrics)

@dataclass
class RewardConfig:
    reward: float = 2.0  # of every step

@wrappers.register("same_reward", options=RewardConfig)
class SameReward(gym.RewardWrapper):
    def __init__(self, env, options=None):
        super().__init__(env)
        self.same = options.reward if options else 3.0
    def reward(self, reward):
        return self.same

@callbacks.register("noting", options=Options)
class Noting(Callback):
    def on_run_start(self, run):
        self.note(run, "run_start")
    def on_batch(self, run, batch):
        self.note(run, f"batch {batch['next', 'reward'].mean():g}")
    def on_update(self, run, metrics):
        self.note(run, "update")
        metrics["mine/update"] = float(run.updates)
    def on_publish(self, run, version):
        self.note(run, f"publish {version}")
    def on_log(self, run, metrics):
        self.note(run, "log")
        metrics["mine/frames"] = float(run.frames)
    def on_checkpoint(self, run, file):
        self.note(run, "checkpoint " + str(file.exists()))
    def on_run_end(self, run, summary):
        self.note(run, "run_end")
        summary["mine/end"] = 1
    def note(self, run, what):
        with open(run.directory / "notes", "a") as file:
            file.write(what + "\\n")

@callbacks.register("failing", options=Options)
class Failing(Callback):
    def on_update(self, run, metrics):
        raise RuntimeError("not like this")
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module in the current directory, by a name that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"parts_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    for registry in (algorithms, objectives, wrappers, callbacks):
        monkeypatch.setattr(registry, "_parts", {**registry._parts})
    yield name
    sys.modules.pop(name, None)


def records(directory: str = "run") -> list[dict]:
    return [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]


def test_a_module_in_the_current_directory_brings_an_algorithm(module):
    assert run.main([*TINY, f"plugins=[{module}]", "algo=timid", "hydra.run.dir=run"]) == 0
    assert records()[0]["train/learning_rate"] == 1e-5


HASTY = """
from dataclasses import dataclass
from harness.algorithms.ppo import PPO, PPOConfig
from harness.options import Positive
from harness.registry import algorithms

@dataclass
class HastyConfig(PPOConfig):
    \"\"\"PPO whose steps are large.\"\"\"
    name: str = "hasty"
    learning_rate: Positive = 0.5  # of Adam

@algorithms.register("hasty", options=HastyConfig)
class Hasty(PPO):
    pass
"""


def test_a_file_that_is_added_to_the_folder_of_algorithms_is_one(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("harness", "collectors", "sync", "lockstep_check", "hydra_plugins", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "run.py", tmp_path)
    (tmp_path / "harness/algorithms/hasty.py").write_text(HASTY)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "run.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert "      hasty                    PPO whose steps are large.\n" in command("--help").stdout
    ended = command(*TINY, "algo=hasty", "hydra.run.dir=run")
    assert ended.returncode == 0, ended.stderr
    assert records(str(tmp_path / "run"))[0]["train/learning_rate"] == 0.5


@pytest.mark.parametrize("place", ["command line", "environment"])
def test_an_experiment_of_a_users_own_chooses_parts_of_a_plugin_that_is_named(
    module, tmp_path, monkeypatch, place, capsys
):
    file = tmp_path / "my_conf/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\ndefaults:\n  - override /algo: timid\n")
    given = ["--config-dir", "my_conf", "experiment=mine", *TINY, "hydra.run.dir=run"]
    assert run.main(given) == 2
    assert "algo=timid: there is no such algo" in (line := capsys.readouterr().err)
    assert "yours? plugins=[module]" in line
    if place == "environment":
        monkeypatch.setenv("LOCKSTEP_PLUGINS", f"json, {module}")
    else:
        given.append(f"plugins=[{module}]")
    assert run.main(given) == 0
    assert records()[0]["train/learning_rate"] == 1e-5


def test_a_config_file_may_name_the_plugin_whose_options_it_sets(module, tmp_path):
    file = tmp_path / "my_conf/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    text = (
        f"# @package _global_\nplugins: [{module}]\nalgo:\n  objective: {{scaled: {{factor: 2}}}}\n"
    )
    file.write_text(text)
    given = ("--config-dir", "my_conf", "experiment=mine", *TINY, "hydra.run.dir=run")
    assert run.main([*given]) == 0
    assert records()[0]["train/factor"] == 2


def test_a_module_of_the_variable_that_cannot_be_imported_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("LOCKSTEP_PLUGINS", "not_there")
    assert run.main([*TINY]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "LOCKSTEP_PLUGINS=not_there cannot be imported" in line


def test_an_installed_package_is_loaded_by_its_entry_point(module, tmp_path, monkeypatch):
    from harness import registry

    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lockstep.plugins]\ntheirs = {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._load_installed.cache_clear()
    assert run.main([*TINY, "algo=timid", "hydra.run.dir=run"]) == 0
    registry._load_installed.cache_clear()


@pytest.mark.parametrize("text", ["1/0", "def", "raise SystemExit(3)", None])
def test_a_plugin_that_cannot_be_imported_is_one_line(tmp_path, capsys, text):
    name = f"broken_{abs(hash((tmp_path, text)))}"
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    assert run.main([*TINY, f"plugins=[{name}]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"plugins=[{name}] cannot be imported" in line


def test_an_environment_and_a_wrapper_of_the_current_directory_are_found_by_the_installed_command(
    tmp_path,
):
    """Whose own directory is the first in sys.path, and not the current one."""
    own = """
import gymnasium as gym
gym.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=50)
class Wrapper(gym.Wrapper):
    pass
"""
    (tmp_path / "own_things.py").write_text(own)
    options = ["env.id=own_things:Mine-v0", "env.wrappers=[own_things:Wrapper]", *TINY]
    code = "from harness.command import run_command; run_command()"
    start = [sys.executable, "-P", "-c", code]
    environment = os.environ | {"PYTHONPATH": str(Path(run.__file__).parent)}
    workers = ["collector=multi_sync", "sync=shared_mem", "collector.num_workers=2"]
    subprocess.run([*start, *options, *workers], cwd=tmp_path, env=environment, check=True)
    absent = [*start, "env.id=not_there.envs:Mine-v0", *TINY]
    said = subprocess.run(absent, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.returncode == 2
    (line,) = said.stderr.splitlines()
    assert "there is no module not_there.envs, neither installed nor in the current dir" in line


def test_a_name_is_registered_once_and_with_options_of_its_group():
    registry = Registry("algorithm", "algo", AlgorithmConfig)
    registry.add("mine", "module:Mine", AlgorithmConfig)
    registry.add("mine", "module:Mine", AlgorithmConfig)
    with pytest.raises(ValueError, match="'mine' is registered already: module:Mine"):
        registry.add("mine", "module:Other", AlgorithmConfig)
    with pytest.raises(TypeError, match="must derive from AlgorithmConfig"):
        registry.add("other", "module:Other", Options)
    with pytest.raises(TypeError, match="expected a dataclass"):
        registry.add("other", "module:Other", dict)


@pytest.mark.parametrize(
    ("wrapper", "reward"), [("{same_reward:{reward:5}}", 5), ("'MODULE:SameReward'", 3)]
)
def test_wrappers_reach_spawned_workers_by_name_and_by_path(module, wrapper, reward):
    wrapper = wrapper.replace("MODULE", module)
    given = ("collector=multi_async", f"env.wrappers=[{wrapper}]", "callbacks=[noting]")
    assert run.main([*TINY, f"plugins=[{module}]", *given, "hydra.run.dir=run"]) == 0
    notes = Path("run/notes").read_text().splitlines()
    assert {note for note in notes if note.startswith("batch")} == {f"batch {reward}"}


def test_an_objective_has_options_of_its_own(module, capsys):
    given = (f"plugins=[{module}]", "algo.objective={scaled:{factor:2}}", "hydra.run.dir=run")
    assert run.main([*TINY, *given]) == 0
    assert records()[0]["train/factor"] == 2
    wrong = (f"plugins=[{module}]", "algo.objective={scaled:{factor:-1}}")
    assert run.main([*TINY, *wrong]) == 2
    assert "algo.objective.scaled.factor=-1: expected a number (more than 0)" in (
        capsys.readouterr().err
    )


def test_every_hook_of_a_callback_is_called_and_may_change_metrics(module):
    given = (f"plugins=[{module}]", "callbacks=[noting]", "hydra.run.dir=run")
    assert run.main([*TINY, *given]) == 0
    notes = Path("run/notes").read_text().splitlines()
    a_batch = ["batch 1", "update", "publish 1", "log"]
    assert notes[:5] == ["run_start", *a_batch]
    assert notes[5:9] == [note.replace("publish 1", "publish 2") for note in a_batch]
    assert notes[9:] == ["run_end", "checkpoint True"]
    assert [record["mine/frames"] for record in records()] == [128, 256]
    assert records()[1]["mine/update"] == 1
    assert json.loads(Path("run/summary.json").read_text())["mine/end"] == 1


@pytest.mark.parametrize(
    ("hook", "hint"), [("on_updates", "did you mean on_update?"), ("on_batchs", "on_batch?")]
)
def test_a_hook_that_no_run_calls_is_refused(hook, hint, tmp_path, monkeypatch, capsys):
    with pytest.raises(TypeError, match=rf"Noter\.{hook}: a run calls no such hook"):
        type("Noter", (Callback,), {hook: lambda *_: None})
    type("Fine", (Callback,), {"on_update": lambda *_: None, "_on_update": None, "once": None})
    name = f"misspelt_{hook}"
    text = f"""
from harness.callbacks import Callback
class Noter(Callback):
    def {hook}(self, run, metrics): ...
"""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert run.main([f"plugins=[{name}]", "hydra.run.dir=run"]) == 2
    assert hint in capsys.readouterr().err


def test_a_record_of_an_evaluation_alone_goes_through_callbacks_too(module):
    given = ("evaluation.at_end=true", "callbacks=[noting]", "hydra.run.dir=run")
    assert run.main([*TINY, f"plugins=[{module}]", *given]) == 0
    *_, last = records()
    assert "eval/return" in last
    assert "train/policy_loss" not in last
    assert last["mine/frames"] == 256


def test_a_callback_that_raises_ends_the_run_as_failed(module):
    given = (f"plugins=[{module}]", "callbacks=[noting,failing]", "hydra.run.dir=run")
    assert run.main([*TINY, *given]) == 1
    status = json.loads(Path("run/status.json").read_text())
    assert (status["state"], status["error"]) == ("failed", "RuntimeError: not like this")
    assert "on_update" in status["traceback"]
    assert Path("run/notes").read_text().splitlines()[-1] == "run_end"


def test_stored_plugins_are_imported_only_if_they_are_named_again(module, capsys):
    assert run.main([*TINY, f"plugins=[{module}]", "algo=timid", "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    for command in (lambda: run.main(["resume=run"]), lambda: play(["run"])):
        assert command() == 2
        assert f"would import {module}" in capsys.readouterr().err
    assert reproduce(["run"]) == 2
    assert f"--plugin {module}" in capsys.readouterr().err
    assert run.main(["resume=run", f"plugins=[{module}]", "total_frames=384"]) == 0
    assert reproduce(["run", "--plugin", module, "--out", "again"]) in (0, 1)


def test_a_stored_wrapper_by_path_is_imported_only_if_a_person_allows_it(module, capsys):
    wrapper = f"env.wrappers=['{module}:SameReward']"
    sys.path.append(str(Path.cwd()))
    assert run.main([*TINY, wrapper, "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    assert run.main(["resume=run"]) == 2
    assert f"env.wrappers={module}:SameReward, stored in run" in capsys.readouterr().err
    assert run.main(["resume=run", wrapper, "total_frames=384"]) == 0


def test_the_objective_of_the_page_about_extensions_works(module, tmp_path):
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    (example,) = re.findall(r"```python\n(# my_objectives.py\n.*?)```", page, re.DOTALL)
    (tmp_path / f"{module}.py").write_text(example)
    chosen = "algo.objective={penalised: {strength: 0.5}}"
    assert run.main([*TINY, f"plugins=[{module}]", chosen, "hydra.run.dir=run"]) == 0
    assert records()[-1]["train/penalty"] > 0


def test_the_model_of_the_page_about_extensions_works(module, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_parts", {**models._parts})
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    (example,) = re.findall(r"```python\n(# my_models.py\n.*?)```", page, re.DOTALL)
    (tmp_path / f"{module}.py").write_text(example)
    chosen = (f"plugins=[{module}]", "model=sine", "model.width=8", "hydra.run.dir=run")
    tiny = [text for text in TINY if not text.startswith("model.")]
    assert run.main([*tiny, *chosen]) == 0
    assert parse_yaml(Path("run/config.yaml").read_text())["model"]["width"] == 8
