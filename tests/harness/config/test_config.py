from __future__ import annotations

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import pytest
import torch
import yaml
from gymnasium.envs.registration import EnvSpec

from harness.algorithms.ppo import PPOConfig
from harness.algorithms.sac import SACConfig
from harness.config.compose import CONF, compose_run
from harness.config.help import groups
from harness.config.plan import plain, plan_run
from harness.errors import install_command, installing
from harness.options import ConfigError, ImpossiblePair
from harness.options.base import comments, summary
from harness.options.run import EnvConfig
from harness.registry import GROUPS, algorithms
from tests.harness.config.composed import config_of, error_of
from tests.harness.config.experiments import jobs_of_experiment, write_recording
from tests.harness.small import ROOT

# -- the options


def test_every_option_of_every_part_has_a_comment():
    for part in itertools.chain(*GROUPS):
        own = {field.name for field in dataclasses.fields(part.options)}
        nested = {f.name for f in dataclasses.fields(part.options) if "Config" in str(f.type)}
        assert own - nested <= set(comments(part.options)), part.name


def test_an_environments_file_says_what_it_is_and_names_its_id():
    for file in CONF.glob("env/*.yaml"):
        assert file.read_text().startswith("# "), file
        options = yaml.safe_load(file.read_text())
        assert options.pop("defaults") == ["gymnasium"], file
        assert "id" in options, file
        assert set(options) <= {field.name for field in dataclasses.fields(EnvConfig)}, file


@pytest.mark.parametrize("part", list(algorithms), ids=lambda part: part.name)
def test_an_algorithm_is_composed_with_the_defaults_of_its_dataclass(part):
    composed = compose_run([f"algo={part.name}"])
    assert plain(composed)["algo"] == dataclasses.asdict(part.options())


def test_a_part_has_its_own_options_and_no_others():
    composed = compose_run(["sync=hogwild", "model=lstm"])
    options = plain(composed)
    assert not {"wire", "link", "zero_copy", "lag", "tear"} & set(options["sync"])
    assert "lstm_size" in options["model"]
    composed = compose_run([])
    options = plain(composed)
    assert {"wire", "link", "zero_copy", "lag", "tear"} <= set(options["sync"])
    assert "lstm_size" not in options["model"]


def test_what_several_options_refer_to_is_named_itself():
    assert error_of("seed=abc").startswith("seed=abc: ")


def test_the_default_run_is_sound():
    plan = plan_run([])
    assert isinstance(plan.config.algo, PPOConfig)
    assert plan.config.collector.name == "multi_async"
    assert plan.config.sync.name == "shared_mem"
    assert plan.directory.parent.parent == Path("outputs")
    assert plan.directory.name.endswith(f"-{plan.config.name}")


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    """A folder with what `experiment=replayed` follows."""
    write_recording(tmp_path / "outputs/recorded/seed=1", seed=1)
    monkeypatch.chdir(tmp_path)


SWEEPS = {file.stem for file in CONF.glob("experiment/*.yaml") if "params:" in file.read_text()}
SEARCHES = {"ppo_search", "sac_search"}


@pytest.mark.parametrize("experiment", sorted({*groups()["experiment"]} - SWEEPS | SEARCHES))
def test_an_experiment_is_taken_without_a_plus_and_is_sound(experiment, recordings):
    try:
        plan_run([f"experiment={experiment}"])
    except ConfigError as error:
        if "pip install" not in str(error):
            raise


@pytest.mark.parametrize("experiment", sorted(SWEEPS - SEARCHES))
def test_the_jobs_of_an_experiment_are_sound_or_left_out(experiment, recordings):
    """The first one, and those that differ from it in one option."""
    jobs = jobs_of_experiment(experiment, "env=cartpole", "seed=1")
    for job in jobs:
        if sum(map(str.__ne__, jobs[0], job)) > 1:
            continue
        try:
            config_of(*job)
        except ImpossiblePair:
            assert compose_run(job).skip_impossible, job


def test_a_run_that_is_resumed_must_be_there():
    with pytest.raises(ConfigError, match="not a run directory"):
        plan_run(["resume=does/not/exist"])


def test_the_command_line_wins_over_an_experiment():
    plan = plan_run(["experiment=sac_pendulum", "total_frames=77", "algo.gamma=0.5"])
    assert isinstance(plan.config.algo, SACConfig)
    assert (plan.config.total_frames, plan.config.algo.gamma) == (77, 0.5)


def test_values_may_be_written_in_the_usual_ways():
    config = plan_run(
        [
            "total_frames=1e5",
            "collector.devices.policy=[cpu,cpu]",
            "algo.target_kl=0.02",
            "model.hidden_sizes=[8]",
            "env.kwargs.sutton_barto_reward=true",
            "sync.max_lag=2",
        ]
    ).config
    assert config.total_frames == 100_000
    assert config.collector.devices.policy == ["cpu", "cpu"]
    assert config.env.kwargs == {"sutton_barto_reward": True}
    assert isinstance(config.algo, PPOConfig)
    assert (config.algo.target_kl, config.algo.max_lag) == (0.02, 2)
    assert config.model.hidden_sizes == [8]


def test_a_runs_name_is_one_file_name():
    plan = plan_run(["name=a/b c"])
    assert plan.directory.name.endswith("-a_b_c")
    assert plan.config.name == "a/b c"


# -- mistakes


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        # unknown names
        (["algo.learning_rat=1"], ["algo.learning_rat=1", "algo.learning_rate?"]),
        (["algo.lr=1"], ["algo.learning_rate?"]),
        (["frames_per_batch=64"], ["collector.frames_per_batch?"]),
        (["collectr=single"], ["collector?"]),
        (["+nonsense.more=1"], ["nonsense", "no such option"]),
        (["sync=sharedmem"], ["sync=shared_mem?", "multiprocess"]),
        (["sync=qqq"], ["shared_mem", "multiprocess"]),
        (["algo.name=td3"], ["ppo", "sac"]),
        (["env.vectorisation=none"], ["env.num_envs=8", "expected 1"]),
        (["env.id=CartPole-v7"], ["CartPole-v1"]),
        (["env.wrappers=[flaten_observation]"], ["flatten_observation"]),
        # wrong types and values
        (["seed=abc"], ["seed=abc", "whole number"]),
        (["seed=-1"], ["seed=-1", "0 or more"]),
        (["total_frames=1.5"], ["1.5", "whole number"]),
        (["algo.learning_rate=fast"], ["fast", "a number"]),
        (["sync.blocking=yes"], ["true or false"]),
        (["collector.exploration=rand"], ["random, mode", "random?"]),
        (["model.hidden_sizes=64"], ["list", "whole number"]),
        (["collector.devices=cpu"], ["group"]),
        (["sync={a:1}"], ["sync.x="]),
        (["sync.timeout_s=0"], ["more than 0"]),
        # impossible combinations
        (["sync=none"], ["multi_async", "collector=single"]),
        (["sync=hogwild", "collector=single"], ["hogwild", "single", "sync=none"]),
        (["sync.lag.k=2"], ["sync.lag is a single option", "sync.lag={k: ...}"]),
        (["sync.verify=always"], ["sync.verify=always", "off, sampled, every"]),
        (["sync=hogwild", "sync.verify=every"], ["sync=hogwild has no", "sync=shared_mem"]),
        (
            ["sync=none", "collector=single", "sync.verify=every"],
            ["sync=none has no", "sync=shared_mem"],
        ),
        (
            ["sync=multiprocess", "sync.zero_copy=true"],
            ["sync=multiprocess has no", "sync=shared_mem"],
        ),
        (["sync.zero_copy=true", "sync.wire=int8"], ["sync.wire=int8", "sync.wire=float32"]),
        (["sync.apply_at=episode"], ["env.num_envs=8", "env.num_envs=1"]),
        (
            ["sync.apply_at=episode", "env.num_envs=1", "sync=hogwild"],
            ["sync=hogwild", "change at once", "sync=shared_mem"],
        ),
        (["sync.state_on_update=zero"], ["model=mlp", "model=lstm"]),
        (["sync.check_finite=some"], ["sync.check_finite=some"]),
        (["collector=single", "collector.num_workers=2"], ["multi_sync"]),
        (["collector.devices.policy=[cpu,cpu,cpu]"], ["3 devices", "2 workers"]),
        (["collector.frames_per_batch=1001"], ["8 environments", "1000"]),
        (
            ["collector=multi_sync", "collector.num_workers=3", "collector.frames_per_batch=1000"],
            ["3 workers", "1008"],
        ),
        (["collector.batches_ahead=0"], ["collector.batches_ahead=0", "1 or more"]),
        (["collector.preemptive_threshold=0.5"], ["multi_sync"]),
        (["algo=sac", "env=pendulum", "collector.next_observation=final"], ["SAC", "algo=ppo"]),
        (["algo=sac", "model=lstm"], ["SAC", "model=mlp"]),
        (["collector.free_running=true"], ["algo=sac"]),
        (["collector.overwrite=true"], ["collector.free_running=true"]),
        (
            ["collector.free_running=true", "algo=sac", "env=pendulum", "algo.buffer_size=1000"],
            ["algo.buffer_size=1000", "1024 or more", "collector.frames_per_batch=512"],
        ),
        (
            ["collector=single", "collector.on_worker_failure=raise"],
            ["collector=single has no such"],
        ),
        (
            ["collector=single", "collector.num_threads=2"],
            ["collector=single has no such", "multi_sync"],
        ),
        (["device=quda"], ["cuda"]),
        (["device=cuda:99"], ["CUDA devices"]),
        # what is no override
        (["blub"], ["blub", "option=value"]),
        (["list"], ["'list'", "the commands are ", "report", "play", "reproduce"]),
        (["algo.objective=leaky"], ["algo.objective=leaky", "(yours? plugins=[module])"]),
        (["logger.wandb.project=Ü 1"], ["Ü 1", "name='é 1%'"]),
        (["=3"], ["names no option"]),
        (["--flag"], ["--help"]),
        (["seed=1,2"], ["--multirun"]),
        (["algo.clip=interval(0.1,0.2)"], ["--multirun", "hydra/sweeper=optuna"]),
        (["hydra.launcher.parallel=2"], ["one of hydra/launcher=local"]),
        (["hydra.sweeper.n_trials=2"], ["one of hydra/sweeper=optuna"]),
        (["name=${nowhere}"], ["nowhere"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_with_the_nearest_right_thing(overrides, parts):
    error = error_of(*overrides)
    for part in parts:
        assert part in error


def test_what_installs_packages_is_what_this_interpreter_has(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/uv")
    for has_pip, begin in ((True, f"{sys.executable} -m pip install x"), (False, "uv pip install")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, has=has_pip: has or None)
        assert installing("x").startswith(begin)
    assert installing("x").endswith(f"--python {sys.executable}")


def test_a_module_of_plugins_that_is_mistyped_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("my_parts.py").touch()
    assert "did you mean my_parts?" in error_of("plugins=[my_partz]")


def test_a_signature_that_dataclasses_make_is_no_help():
    @dataclass
    class Silent:
        every: int = 10

    assert summary(Silent) == ""


@pytest.mark.parametrize(("env", "extra"), [("halfcheetah", "mujoco"), ("lunarlander", "box2d")])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(env, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"pip install -e '.[{extra}]'" in error_of(f"env={env}")


def test_what_is_only_there_as_a_vector_cannot_be_evaluated(monkeypatch):
    made = gym.spec("CartPole-v1").vector_entry_point
    monkeypatch.setitem(
        gym.registry, "OnlyVector-v0", EnvSpec("OnlyVector-v0", vector_entry_point=made)
    )
    given = ("env.id=OnlyVector-v0", "env.vectorisation=native")
    assert "use evaluation.at_end=false" in error_of(*given)
    assert plan_run([*given, "evaluation.at_end=false"]).config.env.num_envs == 8


@pytest.mark.parametrize("given", ["device=cuda", "collector.devices.policy=cuda:1"])
def test_a_policy_that_is_the_learners_own_is_where_the_learner_is(given, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    single = ("collector=single", "sync=none")
    assert "name one device for both; or use sync=shared_mem" in error_of(*single, given)
    config_of(*single, "device=cuda:0", "collector.devices.policy=cuda")


@pytest.mark.parametrize(
    ("is_checkout", "here", "command"),
    [
        (True, ROOT, "pip install -e '.[ray]'"),
        (True, Path("/"), f"pip install -e '{ROOT}[ray]'"),
        (False, ROOT, "pip install 'lockstep-rl[ray]'"),
    ],
)
def test_the_command_that_installs_an_extra_works_where_it_is_typed(
    is_checkout, here, command, monkeypatch, tmp_path
):
    if not is_checkout:
        monkeypatch.setattr("harness.errors.ROOT", tmp_path)
    monkeypatch.chdir(here)
    monkeypatch.setattr("shutil.which", lambda name: str(Path(sys.executable).parent / name))
    assert install_command("ray") == command


def test_the_command_that_installs_an_extra_names_the_interpreter_if_pip_is_another_s(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert install_command("ray") == f"{sys.executable} -m pip install -e '.[ray]'"


def test_an_environment_variable_sets_an_option_of_any_type(monkeypatch):
    values = {"RATE": "0.003", "FRAMES": "1e4", "LAG": "2", "NO": "False", "NOTHING": "null"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    plan = plan_run(
        [
            *("algo.learning_rate=${oc.env:RATE}", "total_frames=${oc.env:FRAMES}"),
            *("name=${oc.env:LAG}", "sync.lag=${oc.env:LAG}", "sync.blocking=${oc.env:NO}"),
            *(
                "collector.max_frames_per_traj=${oc.env:NOTHING}",
                "model.hidden_sizes=[${oc.env:LAG},8]",
            ),
        ]
    )
    config, options = plan.config, plan.options
    assert (config.algo.learning_rate, config.total_frames, config.name) == (0.003, 10_000, "2")
    assert (config.sync.lag, config.sync.blocking, config.model.hidden_sizes) == (2, False, [2, 8])
    assert options["algo"]["learning_rate"] == 0.003
    assert (options["total_frames"], options["name"]) == (10_000, "2")
    assert (options["sync"]["lag"], options["sync"]["blocking"]) == (2, False)
    assert options["model"]["hidden_sizes"] == [2, 8]
    assert options["collector"]["max_frames_per_traj"] is None
    monkeypatch.setenv("RATE", "fast")
    said = "algo.learning_rate=fast: expected a number (more than 0)"
    assert error_of("algo.learning_rate=${oc.env:RATE}") == said


def test_a_list_of_one_device_is_that_device():
    one = ("collector=single", "sync=none", "collector.devices.policy=[cpu]")
    assert config_of(*one).collector.devices.policy == ["cpu"]
