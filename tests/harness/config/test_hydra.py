"""Hydra's flags and overrides work as its documentation says."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

import run
from harness.config.compose import Place
from harness.files import read_json
from harness.sweep.sweep import jobs_of
from tests.harness.small import ROOT, SMALL

pytestmark = pytest.mark.usefixtures("here")

TINY = (*SMALL, "total_frames=128", "evaluation.at_end=false")


@pytest.fixture(autouse=True)
def own_logging():
    """Hydra configures logging for its process, which goes on to other tests here."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def shown(capsys, *arguments: str) -> str:
    """What the command prints."""
    capsys.readouterr()
    assert run.main(list(arguments)) == 0
    return capsys.readouterr().out


def config_of(capsys, *overrides: str) -> dict:
    return yaml.safe_load(shown(capsys, "--cfg", "job", *overrides))


def stored(directory: str = "run") -> dict:
    return yaml.safe_load(Path(directory, "config.yaml").read_text())


# -- flags


def test_help_and_version(capsys):
    assert "GROUPS" in shown(capsys, "--help")
    assert "--shell-completion" in shown(capsys, "--hydra-help")
    assert shown(capsys, "--version").startswith("lockstep ")


@pytest.mark.parametrize(("what", "keys"), [("job", {"algo"}), ("hydra", {"hydra"})])
def test_cfg_shows_a_part_of_the_config(capsys, what, keys):
    found = yaml.safe_load(shown(capsys, "--cfg", what))
    assert keys <= set(found)
    assert ("hydra" in found) == (what == "hydra")
    assert {"algo", "hydra"} <= set(yaml.safe_load(shown(capsys, "--cfg", "all")))


def test_package_and_resolve_narrow_what_cfg_shows(capsys):
    link = yaml.safe_load(shown(capsys, "--cfg", "job", "--package", "sync.link", "seed=7"))
    assert link["seed"] == "${seed}"
    resolved = shown(capsys, "--cfg", "job", "--resolve", "-p", "sync.link", "seed=7")
    assert yaml.safe_load(resolved)["seed"] == 7


def test_info_says_how_a_config_is_composed(capsys):
    for what, part in {
        "all": "Defaults List",
        "config": "Config",
        "defaults": "Defaults List",
        "defaults-tree": "run_options",
        "plugins": "Installed Hydra Plugins",
        "searchpath": "Config search path",
    }.items():
        assert part in shown(capsys, "--info", what), what


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "# @package _global_\nsync.lag: 0,8,{kind: uniform}\n",
            "experiment/mine.yaml, line 2, column 20: mapping values are not allowed here; "
            "a value that holds ': ' goes in quotes",
        ),
        ("defaults: [override /env: cartpole]\n", "first line must be '# @package _global_'"),
    ],
)
def test_a_users_config_that_cannot_be_read_is_named(capsys, here, written, said):
    file = here / "my_conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(written)
    assert run.main(["--config-dir", "my_conf", "experiment=mine"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    # The help shows what it can read, or says the same.
    status = run.main(["--config-dir", "my_conf", "--help", "experiment"])
    assert status == (2 if "mapping" in said else 0)
    assert said in capsys.readouterr().err or status == 0


def test_a_users_config_directory_has_experiments_and_options_of_its_own(capsys, here):
    for name, text in {
        "experiment/mine.yaml": "# @package _global_\ndefaults: [override /algo: fast]\nseed: 9\n",
        "algo/fast.yaml": "defaults: [ppo]\nepochs: 7\n",
    }.items():
        file = here / "my_conf" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    for how in (("--config-dir", "my_conf"), (f"hydra.searchpath=[file://{here}/my_conf]",)):
        found = config_of(capsys, *how, "experiment=mine")
        assert (found["seed"], found["algo"]["epochs"], found["algo"]["name"]) == (9, 7, "ppo")
    assert "algo=fast\n" in shown(capsys, "--config-dir", "my_conf", "--help", "algo")
    assert "experiment=mine\n\n    seed=9\n" in shown(
        capsys, "--config-dir", "my_conf", "--help", "experiment"
    )
    assert run.main(["--config-dir", "nowhere", "--cfg", "job"]) == 2


def test_a_users_directory_is_searched_before_ours(capsys, here):
    file = here / "my_conf/algo/ppo.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [/options/algo/ppo@_here_, _self_]\nepochs: 7\n")
    found = config_of(capsys, "--config-dir", "my_conf")
    assert (found["algo"]["name"], found["algo"]["epochs"]) == ("ppo", 7)
    assert config_of(capsys)["algo"]["epochs"] == 4


def test_a_users_primary_config_may_include_ours(capsys, here):
    (here / "my_conf").mkdir()
    text = "defaults: [config, _self_]\ntotal_frames: 77\n"
    (here / "my_conf/mine.yaml").write_text(text)
    flags = ("--config-dir", "my_conf", "--config-name", "mine")
    assert config_of(capsys, *flags)["total_frames"] == 77
    assert run.main([*flags, "algo.lr=1"]) == 2
    assert "did you mean algo.learning_rate?" in capsys.readouterr().err


def test_completion_knows_groups_and_options(capsys, monkeypatch):
    def complete(line: str) -> list[str]:
        typed = f"python run.py {line}"
        monkeypatch.setenv("COMP_LINE", typed)
        monkeypatch.setenv("COMP_POINT", str(len(typed)))
        return shown(capsys, "-sc", "query=bash").split()

    assert {"sync=shared_mem", "sync=hogwild"} <= set(complete("sync="))
    assert "algo.learning_rate=" in complete("algo.learn")


def test_completion_can_be_installed(capsys):
    assert "complete -o" in shown(capsys, "-sc", "install=bash")


def test_an_unknown_flag_is_a_mistake(capsys):
    assert run.main(["--nonsense"]) == 2
    assert "--nonsense" in capsys.readouterr().err


def test_flags_that_make_no_sense_are_a_mistake(capfd):
    for flags in (["--resolve"], ["--run", "--multirun"], ["--cfg", "x"]):
        assert run.main(flags) == 2
        error = capfd.readouterr().err
        assert error
        assert "Traceback" not in error


def test_a_run_may_be_done_again_from_hydras_pickle():
    pickle = "hydra.experimental.callbacks.PickleJobInfoCallback"
    callback = f"+hydra.callbacks.pickle._target_={pickle}"
    given = ("hydra.run.dir=run", "hydra.output_subdir=.hydra", callback)
    assert run.main([*TINY, *given, "replace_done=true"]) == 0
    first = Path("run/metrics.jsonl").read_text()
    Path("config.pickle").write_bytes(Path("run/.hydra/config.pickle").read_bytes())
    with pytest.warns(UserWarning, match="rerun"):
        assert run.main(["--experimental-rerun", "config.pickle"]) == 0
    assert Path("run/metrics.jsonl").read_text() != first
    assert read_json(Path("run/status.json"))["state"] == "done"


def test_another_config_path_takes_the_place_of_ours(capsys, here):
    (here / "theirs").mkdir()
    text = "defaults: [run_options, {algo: sac}, _self_]\nseed: 4\n"
    (here / "theirs/config.yaml").write_text(text)
    found = config_of(capsys, "--config-path", str(here / "theirs"))
    assert (found["seed"], found["algo"]["name"]) == (4, "sac")
    assert "collector" not in found


def test_an_unknown_option_of_hydras_is_told_from_ours(capsys):
    assert run.main(["hydra.job.env_set.X=1"]) == 2
    assert "+hydra.job.env_set.X=... adds it" in capsys.readouterr().err


def test_a_traceback_may_be_asked_for(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Could not override"):
        run.main(["algo.lr=1"])


# -- overrides


def test_overrides_change_add_and_delete(capsys, monkeypatch):
    monkeypatch.setenv("LEVEL", "5")
    found = config_of(
        capsys,
        *(
            "seed=3",
            "+env.kwargs.a=1",
            "env.kwargs.b={c:[1,2]}",
            "++env.kwargs.a=2",
            "sync=hogwild",
        ),
        *("~model.activation", "~logger", "name='a b'", "checkpoint.keep=${oc.env:LEVEL}"),
    )
    assert found["env"]["kwargs"] == {"a": 2, "b": {"c": [1, 2]}}
    assert (found["seed"], found["sync"]["name"], found["name"]) == (3, "hogwild", "a b")
    assert found["checkpoint"]["keep"] == "${oc.env:LEVEL}"
    assert "activation" not in found["model"]
    assert "logger" not in found


def test_several_loggers_are_chosen_by_a_list(capsys):
    assert set(config_of(capsys, "logger=[wandb,tensorboard]")["logger"]) == {
        "wandb",
        "tensorboard",
    }


def test_sweeps_are_written_as_hydra_writes_them():
    with Place().opened():
        loader = GlobalHydra.instance().config_loader()
        for override, values in {
            "seed=1,2": ["1", "2"],
            "seed=range(1,3)": ["1", "2"],
            "seed=choice(4,5)": ["4", "5"],
            "sync=glob(*mem)": ["shared_mem"],
            "seed=sort(3,1,reverse=true)": ["3", "1"],
        }.items():
            option = override.partition("=")[0]
            expected = [[f"{option}={value}"] for value in values]
            assert jobs_of({}, [override], loader) == expected, override
        shuffled = jobs_of({}, ["seed=shuffle(range(6,8))"], loader)
        assert sorted(shuffled) == [["seed=6"], ["seed=7"]]


# -- Hydra's own settings


def test_a_run_goes_where_hydra_is_told():
    wanted = ("hydra.run.dir=run", "hydra.output_subdir=.hydra", "+hydra.job.env_set.MARK=x")
    assert run.main(["--run", *TINY, *wanted]) == 0
    assert read_json(Path("run/status.json"))["state"] == "done"
    assert stored()["total_frames"] == 128
    assert {"config.yaml", "hydra.yaml", "overrides.yaml"} <= {
        file.name for file in Path("run/.hydra").iterdir()
    }


def test_a_sweep_may_be_a_mode_of_the_config_and_its_jobs_go_where_hydra_is_told():
    wanted = ("hydra.sweep.dir=there", "hydra.sweep.subdir=${hydra.job.num}")
    assert run.main([*TINY, "hydra.mode=MULTIRUN", *wanted, "seed=2,1,2"]) == 0
    assert [stored(f"there/{number}")["seed"] for number in range(2)] == [2, 1]
    assert not Path("there/2").exists()
    assert Path("there/multirun.yaml").exists()


def test_a_job_may_change_into_its_directory(here):
    assert run.main([*TINY, "hydra.run.dir=run", "hydra.job.chdir=true"]) == 0
    assert Path.cwd() == here
    assert read_json(here / "run/status.json")["state"] == "done"


def test_hydras_logging_may_be_switched_on():
    wanted = ("hydra/job_logging=default", "hydra.verbose=true", "hydra.run.dir=run")
    assert run.main([*TINY, *wanted]) == 0
    assert Path("run/lockstep.log").stat().st_size > 0
    assert Path("run/run.log").exists()


CALLBACK = """
import json
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

class Note(Callback):
    def note(self, what):
        with open("notes", "a") as file:
            file.write(what + "\\n")
    def on_run_start(self, config, **kwargs):
        self.note("run start")
    def on_job_start(self, config, **kwargs):
        self.note("job start " + HydraConfig.get().job.name)
    def on_job_end(self, config, job_return, **kwargs):
        self.note("job end " + job_return.status.name)
"""


@pytest.mark.parametrize(
    ("given", "status", "end"), [((), 0, "COMPLETED"), (("algo.learning_rate=1e30",), 1, "FAILED")]
)
def test_hydras_callbacks_hear_of_a_run(here, monkeypatch, given, status, end):
    (here / f"noting_{end}.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(here)
    callback = f"+hydra.callbacks.mine._target_=noting_{end}.Note"
    options = (*TINY, "total_frames=384", *given, "hydra.run.dir=run")
    assert run.main([*options, callback]) == status
    expected = ["run start", "job start lockstep", f"job end {end}"]
    assert (here / "notes").read_text().splitlines() == expected
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert status or records


@pytest.mark.parametrize("group", ["experiment", "study"])
def test_a_config_file_without_its_package_is_told_which_line_is_missing(here, capsys, group):
    file = here / "my_conf" / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("total_frames: 5\n")
    chosen = f"{'+' * (group == 'study')}{group}=mine"
    assert run.main(["--config-dir", "my_conf", chosen]) == 2
    error = capsys.readouterr().err
    assert f"{group}=mine: the first line of its file must be '# @package _global_'" in error


def test_options_may_be_typed_as_an_agent_of_wandb_types_them(capsys):
    assert run.main(["--seed=7", "--algo.clip=0.1", "--collector=single", "--cfg=job"]) == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    assert (composed["seed"], composed["algo"]["clip"]) == (7, 0.1)
    assert composed["collector"]["name"] == "single"
    assert run.main(["--sead=7"]) == 2
    assert "did you mean seed?" in capsys.readouterr().err


def test_an_experiment_that_leads_back_to_itself_is_explained(tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - /experiment: ppo_cartpole\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert run.main(["--config-dir", str(tmp_path), "experiment=mine"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "leads back to the config itself" in error
    assert "`- ppo_cartpole` in place of" in error


LOCKSTEP = f"""\
#!{sys.executable}
from harness.command import run_command
run_command()
"""
ASK = """\
eval "$(lockstep -sc install=bash)"
COMP_LINE=$1 COMP_POINT=${#1} words=($1)
COMP_CWORD=$((${#words[@]} - 1))
case $1 in *' ') COMP_CWORD=$((COMP_CWORD + 1)) ;; esac
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lockstep rep", {"report", "reproduce", "replace_done="}),
        ("lockstep report ", {"mine/", "outputs/"}),
        ("lockstep report outputs/", {"outputs/first/", "outputs/seed=1,sync=hogwild/"}),
        ("lockstep resume=outputs/f", {"resume=outputs/first/"}),
        ("lockstep sync=hog", {"sync=hogwild"}),
        ("lockstep algo=nonsense algo.learn", {""}),
    ],
)
def test_a_real_shell_completes_commands_and_directories(line, expected, here):
    for name in ("outputs/first", "outputs/seed=1,sync=hogwild", "outputs/$(touch x)", "mine"):
        (here / name).mkdir(parents=True)
    (here / "outputs/first.txt").touch()
    program = here / ".bin/lockstep"
    program.parent.mkdir()
    program.write_text(LOCKSTEP)
    program.chmod(0o755)
    asked = subprocess.run(
        ["bash", "-c", ASK, "bash", line],
        env={
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.stderr == ""
    assert set(asked.stdout.split("\n")[:-1]) == expected
    assert not (here / "x").exists()
