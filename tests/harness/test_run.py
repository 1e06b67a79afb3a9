"""The command as a user runs it: short, but with real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import run
from harness.files import read_json
from harness.run.build import describe_sync
from harness.run.checkpoints import Checkpoints
from harness.run.training_loop import TrainingLoop
from tests.harness.config.composed import config_of, error_of
from tests.harness.logging import wandb_file

pytestmark = pytest.mark.usefixtures("here")

SMALL = (
    "total_frames=384",
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "algo.minibatch_size=64",
    "algo.epochs=2",
    "model.hidden_sizes=[16]",
    "evaluation.num_episodes=1",
    "logger=jsonl",
)
SMALL_SAC = (
    "algo=sac",
    "env=pendulum",
    "total_frames=96",
    "collector.frames_per_batch=16",
    "env.num_envs=4",
    "algo.learning_starts=32",
    "algo.batch_size=16",
    "algo.buffer_size=1000",
    "model.hidden_sizes=[16]",
    "evaluation.num_episodes=1",
    "logger=jsonl",
)

# The pairs of collector and scheme that go together, each with some of the options that both have.
OPTIONS = {
    ("single", "none"): ("collector.exploration=mode", "env.vectorisation=native"),
    ("single", "shared_mem"): ("sync.blocking=true", "sync.check_finite=false"),
    ("single", "multiprocess"): (
        *("sync.interval=2", "sync.strategy=state_dict", "collector.max_frames_per_traj=10"),
        *("model=lstm", "sync.state_on_update=zero"),
    ),
    ("multi_sync", "shared_mem"): (
        *("sync.interval=2", "collector.reset_at_each_iter=true", "collector.num_threads=2"),
        *("env.vectorisation=async", "collector.next_observation=final"),
    ),
    ("multi_sync", "multiprocess"): (
        *("sync.apply_at=batch", "sync.check_finite=false", "collector.on_worker_failure=restart"),
        *("model=lstm", "sync.state_on_update=recompute", "collector.devices.policy=[cpu,cpu]"),
    ),
    ("multi_sync", "hogwild"): ("collector.preemptive_threshold=0.5",),
    ("multi_async", "shared_mem"): (
        *("sync.apply_at=episode", "env.num_envs=1", "env.vectorisation=none"),
        *("sync.strategy=state_dict", "collector.resume_episodes=false"),
    ),
    ("multi_async", "multiprocess"): ("sync.blocking=true", "model=lstm", "sync.interval=2"),
    ("multi_async", "hogwild"): ("env.vectorisation=native",),
}

MECHANISMS = {
    "none": "no weights travel",
    "shared_mem": "shared memory, read in place",
    "multiprocess": "messages",
    "hogwild": "the trainer's own memory",
}
IMPOSSIBLE = {
    ("none", "multi_sync"): "its workers would keep their initial weights",
    ("none", "multi_async"): "its workers would keep their initial weights",
    ("hogwild", "single"): "there is no other process to share memory with",
}

# What only the clock and the machine decide.
TIMES = re.compile(r"time.*|sync/.*_ms|system/.*|collector/(fps|wait_ms)")


def start(*overrides: str, into: str = "run") -> tuple[int, Path]:
    status = run.main([*overrides, f"hydra.run.dir={into}"])
    return status, Path(into)


def records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_times(directory: Path) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not TIMES.fullmatch(name)}
        for record in records(directory)
    ]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    _, state = Checkpoints(directory / "checkpoints").load()
    return state["learner"]["algorithm"]["policy"]


def same_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="module")
def _ended(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ended") / "run"
    assert start(*SMALL, "collector=multi_sync", into=str(directory))[0] == 0
    return directory


@pytest.fixture
def ended(_ended, tmp_path) -> Path:
    """A run that is done."""
    return Path(shutil.copytree(_ended, tmp_path / "ended"))


# -- what a run leaves


def test_how_weights_travel_is_said_in_a_line():
    """The mechanism and the number format are the scheme's, the rest is the config's."""
    scheme = SimpleNamespace(mechanism="pigeons", wire="bfloat16")
    for options, rest in {
        (): "2 workers on this machine, bfloat16, added lag 0",
        ("collector=single", "sync.lag=1"): "1 worker in this process, bfloat16, added lag 1",
        ("collector=simulated", "sync.lag={kind: uniform, low: 0, high: 1}"): (
            "8 workers in virtual time, bfloat16, added lag uniform"
        ),
        ("collector=distributed", "sync=distributed"): (
            "2 workers on this machine, bfloat16, added lag 0"
        ),
    }.items():
        assert describe_sync(config_of(*options), scheme) == f"pigeons, {rest}"


def test_a_run_leaves_its_directory_and_its_last_record_holds_what_no_record_has_told(capfd):
    status, directory = start(*SMALL, "collector=single", "log_every_frames=1000000")
    assert status == 0
    said = "sync: shared memory, read in place, 1 worker in this process, float32, added lag 0"
    assert f"\n{said}\nwriting to" in capfd.readouterr().out
    assert {file.name for file in directory.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "run.log",
        "status.json",
        "summary.json",
    }
    assert read_json(directory / "status.json")["state"] == "done"
    assert read_json(directory / "manifest.json")["ended"] is not None
    assert len(Checkpoints(directory / "checkpoints").files()) == 1
    (record,) = records(directory)
    assert record["step"] == 384
    assert {"train/policy_loss", "episode/return", "eval/return"} <= set(record)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """A run with an evaluation and a checkpoint after each batch."""
    directory = tmp_path_factory.mktemp("evaluated") / "run"
    given = ("collector=multi_sync", "sync.blocking=true", "evaluation.every_frames=128")
    more = ("checkpoint.every_frames=128", "checkpoint.keep=99", "log_every_frames=300")
    assert start(*SMALL, *given, *more, into=str(directory))[0] == 0
    return directory


def test_checkpoints_and_evaluations_are_of_the_frames_at_which_they_were_made(evaluated):
    names = [file.name.split("-")[0] for file in Checkpoints(evaluated / "checkpoints").files()]
    assert [int(name) for name in names] == [128, 256, 384]
    with_scores = [record for record in records(evaluated) if "eval/return" in record]
    assert [record["step"] for record in with_scores] == [128, 256, 384]
    assert all("train/policy_loss" in record for record in with_scores)


def test_records_and_summary_hold_what_the_design_names(evaluated):
    record = records(evaluated)[1]
    names = {
        *("step", "time", "train/policy_loss", "eval/return", "episode/return", "episode/length"),
        *("sync/publish_ms", "sync/ack_ms", "sync/apply_ms", "sync/bytes", "policy/version"),
        *("policy/lag_mean", "policy/lag_p95", "policy/lag_max", "policy/mixed_batches"),
        *("policy/lag_updates_mean", "policy/lag_updates_p95", "policy/lag_updates_max"),
        *("policy/lag_publish_mean", "policy/lag_queue_mean", "policy/lag_train_mean"),
        *("policy/ess", "policy/kl", "policy/ratio_max"),
        *("collector/fps", "collector/wait_ms", "collector/collected", "collector/delivered"),
        *("collector/dropped", "time/collect_s", "time/train_s", "time/sync_s", "time/log_s"),
        *("system/cpu_s", "system/memory_mb"),
    }
    assert names <= set(record)
    summary = read_json(evaluated / "summary.json")
    percentiles = {f"sync/{name}_ms_{p}" for name in ("publish", "ack", "apply") for p in ("p50", "p95", "p99")}  # fmt: skip # noqa: E501
    totals = {"frames", "fps", "wall_s", "eval/return", "policy/lag_mean", "workers"}
    assert percentiles | totals <= set(summary)
    assert {name for name in names if name.startswith("policy/")} <= set(summary)
    assert summary["frames"] == 384
    assert set(summary["workers"]) == {"0", "1"}


def test_wandb_gets_everything_offline_and_tensorboard_an_event_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ("logger=[wandb,tensorboard]", "collector=multi_async", "logger.wandb.tags=[t]")
    status, directory = start(*SMALL, *given)
    assert status == 0
    (file,) = (directory / "tensorboard").iterdir()
    assert b"train/policy_loss" in file.read_bytes()
    found = wandb_file.read(directory)
    (named,) = (r.run for r in found if r.WhichOneof("record_type") == "run")
    assert named.run_id == read_json(directory / "manifest.json")["wandb_id"]
    assert named.job_type == "shared_mem/multi_async"
    config = {item.key: json.loads(item.value_json) for item in named.config.update}
    assert config["collector"]["name"] == "multi_async"
    history = [
        {"/".join(item.nested_key) or item.key for item in record.history.item}
        for record in found
        if record.history.item
    ]
    written = {name for name in records(directory)[0] if name not in ("step", "time")}
    assert written <= history[0]
    names = ("lag", "ack_ms", "lag_updates", "log_ratio")
    assert {f"histogram/{name}/values" for name in names} <= set().union(*history)
    (ended,) = (r.exit for r in found if r.WhichOneof("record_type") == "exit")
    assert ended.exit_code == 0


def test_frames_that_lag_too_much_are_dropped_and_counted():
    given = ("collector=multi_async", "sync.max_lag=0", "total_frames=1280")
    _, directory = start(*SMALL, *given)
    summary = read_json(directory / "summary.json")
    late = sum(
        record["train/dropped"] for record in records(directory) if "train/dropped" in record
    )
    assert summary["policy/dropped"] == late > 0


# -- every pair


@pytest.mark.parametrize(("collector", "sync"), OPTIONS)
def test_every_possible_pair_runs_with_each_option_of_its_parts(collector, sync, capfd):
    chosen = (f"collector={collector}", f"sync={sync}", "evaluation.at_end=false")
    options = OPTIONS[collector, sync]
    status, directory = start(*SMALL, *chosen, *options)
    assert status == 0
    last = records(directory)[-1]
    (line,) = re.findall(r"^sync: (.*), \d workers? ", capfd.readouterr().out, re.MULTILINE)
    assert line == MECHANISMS[sync]
    preempts = "collector.preemptive_threshold=0.5" in options
    assert ("collector/preempted" in last) == preempts
    assert last["step"] >= 384
    if not preempts and "env.vectorisation=native" not in options:  # else batches have gaps
        assert last["step"] == 384
        assert last["policy/version"] == (1 if "sync.interval=2" in options else 3)


@pytest.mark.parametrize("collector", ["single", "multi_sync"])
def test_a_run_has_the_same_bits_whether_its_workers_copy_the_weights(collector):
    directories, resolved = {}, {}
    for value in ("null", "true", "false"):
        given = (*SMALL, f"collector={collector}", f"sync.zero_copy={value}")
        status, directory = start(*given, into=f"zero_copy_{value}")
        assert status == 0
        directories[value] = directory
        resolved[value] = read_json(directory / "manifest.json")["resolved"]
    for value in ("true", "false"):
        assert without_times(directories[value]) == without_times(directories["null"])
        assert same_weights(directories[value], directories["null"])
    assert resolved == {"null": {"sync.zero_copy": True}, "true": {}, "false": {}}


@pytest.mark.parametrize(("sync", "collector"), IMPOSSIBLE)
def test_every_impossible_pair_is_refused_with_a_reason(sync, collector):
    line = error_of(f"sync={sync}", f"collector={collector}")
    assert f"sync={sync} collector={collector}: {IMPOSSIBLE[sync, collector]}" in line


@pytest.mark.parametrize(
    "collector", [pytest.param("multi_sync", marks=pytest.mark.slow), "multi_async"]
)
def test_sac_learns_beside_a_collector_that_runs_free(collector):
    given = (f"collector={collector}", "collector.free_running=true", "collector.timeout_s=20")
    status, directory = start(*SMALL_SAC, *given)
    assert status == 0
    summary = read_json(directory / "summary.json")
    assert summary["frames"] == 96
    assert summary["collector/delivered"] == 96
    assert "train/critic_loss" in records(directory)[-2]


RING = (
    *("algo=dqn", "collector=multi_async", "collector.free_running=true"),
    *("collector.num_workers=1", "total_frames=640", "collector.frames_per_batch=32"),
    *("env.num_envs=4", "env.max_episode_steps=8", "algo.learning_starts=32"),
    *("algo.batch_size=16", "algo.updates_per_frame=0.25", "algo.buffer_size=96"),
    *("log_every_frames=32", "evaluation.at_end=false", "logger=jsonl", "model.hidden_sizes=[8]"),
)


def learned(monkeypatch, *given, behind):
    """The summary, and the gradient steps of all updates, of a learner that lets workers run
    `behind` frames ahead before each update, if they do."""
    update, steps = TrainingLoop.update, []

    def late(runner, batch):
        replay = runner.learner.replay
        wanted = min(replay.written + behind, runner.config.total_frames)
        deadline = time.monotonic() + 1.0
        while replay.written < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        updated = update(runner, batch)
        steps.append(runner.meters["trained"].read().get("train/gradient_steps", 0.0))
        return updated

    monkeypatch.setattr(TrainingLoop, "update", late)
    status, directory = start(*RING, *given)
    assert status == 0
    return read_json(directory / "summary.json"), sum(steps)


def test_workers_that_run_free_overwrite_no_frame_that_the_learner_has_not_seen(monkeypatch):
    summary, steps = learned(monkeypatch, behind=96)
    assert (summary["updates"], steps) == (20, 640 * 0.25)
    assert summary["collector/overwritten"] == 0
    assert summary["episode/count"] == 640 // 8


def test_overwritten_frames_are_counted_and_answered_by_updates_if_they_are_allowed(monkeypatch):
    summary, steps = learned(monkeypatch, "collector.overwrite=true", behind=160)
    assert summary["frames"] == 640
    assert steps == 640 * 0.25
    assert summary["collector/overwritten"] >= 160 - 96
    assert summary["episode/count"] < 640 // 8


# -- resumed runs


def test_a_resumed_run_keeps_what_its_checkpoint_holds_and_may_change_options(ended, capsys):
    before = picture(ended)
    for option, said in (
        ("seed=2", "seed=2: a resumed run keeps "),
        ("algo.name=sac", "algo.name=sac: a resumed run keeps "),
        ("model.name=lstm", "model.name=lstm: a resumed run keeps "),
        ("collector.num_workers=3", "collector.num_workers=3: a resumed run keeps "),
        ("collector.name=single", "collector.name=single: a resumed run keeps "),
        ("collector=single", "keeps its parts"),
        ("sync.max_lag=1", "set algo.max_lag"),
    ):
        assert run.main([f"resume={ended}", option]) == 2
        assert said in capsys.readouterr().err
    assert picture(ended) == before
    assert run.main([f"resume={ended}", "total_frames=512"]) == 0
    assert read_json(ended / "summary.json")["frames"] == 512
    assert ["eval/return" in record for record in records(ended)].count(True) == 2


def test_a_finished_run_is_left_alone_when_it_is_resumed(ended, capsys):
    before = picture(ended)
    assert run.main([f"resume={ended}", "seed=1"]) == 0
    assert "is done already" in capsys.readouterr().out
    assert picture(ended) == before
    (ended / "summary.json").write_text("{")
    assert run.main([f"resume={ended}"]) == 0
    assert read_json(ended / "summary.json")["frames"] == 384


def test_a_run_whose_path_has_an_apostrophe_is_resumed(ended):
    place = ended.rename(ended.parent / "it's=1")
    assert run.main([f"resume={place}", "total_frames=512"]) == 0
    assert read_json(place / "summary.json")["frames"] == 512


def test_a_run_is_resumed_with_its_own_config_however_it_is_named(ended, tmp_path, capsys):
    before = picture(ended)
    config = tmp_path / "mine.yaml"
    config.write_text(f"defaults: [config, _self_]\nresume: {ended}\ntotal_frames: 512\n")
    assert run.main(["--config-dir", str(tmp_path), "--config-name", "mine"]) == 2
    assert f"resume={ended} in a config file" in capsys.readouterr().err
    assert picture(ended) == before
    stored = yaml.safe_load((ended / "config.yaml").read_text())
    assert run.main([f"++resume={ended}", "total_frames=512"]) == 0
    found = yaml.safe_load((ended / "config.yaml").read_text())
    assert found == stored | {"total_frames": 512}


def test_a_sweep_resumes_nothing(ended, capsys):
    before = picture(ended)
    assert run.main(["-m", f"resume={ended}", "total_frames=512,640"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: resume={ended} with --multirun: ")
    assert picture(ended) == before


def picture(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


# -- when it goes wrong


def test_a_failing_run_says_so_and_how(capsys):
    status, directory = start(*SMALL, "collector=multi_sync", "algo.learning_rate=1e30")
    assert status == 1
    found = read_json(directory / "status.json")
    assert found["state"] == "failed"
    assert "Traceback" in found["traceback"]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("lockstep: failed: ")
    assert said[1:] == [f"lockstep: the traceback is in {directory.absolute() / 'traceback.txt'}"]
    assert (directory / "traceback.txt").read_text() == found["traceback"]


def test_no_traceback_is_promised_where_none_could_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        TrainingLoop, "publish", lambda _: (tmp_path / "run").rename(tmp_path / "away")
    )
    given = (*SMALL, "collector=single", "total_frames=128")
    assert start(*given, into=tmp_path / "run")[0] == 1
    assert "failed: FileNotFoundError" in (said := capsys.readouterr().err)
    assert "the traceback is in" not in said


def test_what_does_not_fit_the_environment_is_refused_before_anything_starts(capsys):
    status, directory = start(*SMALL_SAC, "env=cartpole")
    assert status == 2
    assert not directory.exists()
    assert "algo=sac acts in Box spaces" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_is_a_mistake_in_the_config(capsys):
    assert start(*SMALL, "env.kwargs.nonsense=1")[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nonsense" in line


# -- sweeps


@pytest.mark.parametrize("wrong", ["env.kwargs={},{nonsense:1}", "model=mlp,minatar_cnn"])
def test_a_sweep_is_refused_for_each_job_that_would_be_refused_by_itself(wrong, capsys):
    assert run.main(["-m", *SMALL, "collector=single", wrong, "sweep=mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nonsense" in line or "minatar_cnn reads images" in line
    assert not Path("outputs").exists()


def test_a_sweep_with_one_impossible_job_starts_none(capsys):
    assert run.main(["-m", *SMALL, "collector=single,multi_sync", "sync=none", "sweep=mine"]) == 2
    assert "in the job" in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_told_so_a_sweep_leaves_out_what_is_impossible_and_says_why(capsys):
    given = ("collector=single,multi_sync", "sync=none", "sweep=mine", "skip_impossible=true")
    assert run.main(["-m", *SMALL, *given]) == 0
    said = capsys.readouterr().out
    assert "skipped: sync=none collector=multi_sync" in said
    assert "outputs/mine: 1 done" in said
    jobs = [path.name for path in Path("outputs/mine").iterdir() if path.is_dir()]
    assert jobs == ["collector=single,seed=1"]
    assert run.main(["-m", *SMALL, "collector=multi_sync", *given[1:]]) == 2


@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_a_run_learns_the_same_without_the_next_observations_that_it_has_twice(model):
    """Both are the same bits: the learner looks at those of ends and rows alone."""
    weights = []
    for how in ("all", "final"):
        options = ("collector=single", f"model={model}", "model.hidden_sizes=[16]")
        _, directory = start(*SMALL, *options, f"collector.next_observation={how}", into=how)
        last = records(directory)[-1]
        weights.append({key: value for key, value in last.items() if key.startswith("train/")})
    assert weights[0] == weights[1]


def test_workers_that_wait_make_no_frame_that_lags_more_than_max_lag():
    options = ["collector.batches_ahead=4", "sync.max_lag=1", "sync.on_stale=wait"]
    status, directory = start(
        *SMALL, "collector=multi_async", "sync.apply_at=batch", *options, "evaluation.at_end=false"
    )
    assert status == 0
    lags = [record["policy/lag_max"] for record in records(directory)]
    assert max(lags) <= 1
    assert records(directory)[-1]["policy/dropped"] == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["sync.on_stale=wait"], "sync.on_stale=wait needs sync.max_lag"),
        (["sync.on_stale=mask"], "sync.on_stale=mask needs sync.max_lag"),
        (["sync.on_stale=wait", "sync.max_lag=1"], "needs collector=multi_async"),
        (
            ["collector.batches_ahead=1"],
            "collector=multi_sync has no such option; it is one of collector=multi_async",
        ),
    ],
)
def test_options_of_pacing_that_cannot_work_are_refused(options, complaint):
    assert complaint in error_of("collector=multi_sync", *options)


def test_the_latest_run_can_be_resumed_without_its_name(ended, capsys):
    assert run.main(["resume=latest"]) == 2
    assert "there is no run below outputs/" in capsys.readouterr().err
    for age_s, name in ((60, "older"), (0, "newer")):
        status = Path(shutil.copytree(ended, f"outputs/day/{name}")) / "status.json"
        os.utime(status, (time.time() - age_s,) * 2)
    shutil.copytree("outputs/day/newer", "outputs/day/.earlier/newer-1")
    assert run.main(["resume=latest", "total_frames=512"]) == 0
    frames = {
        name: read_json(Path(f"outputs/day/{name}/summary.json"))["frames"]
        for name in ("older", "newer")
    }
    assert frames == {"older": 384, "newer": 512}


def test_a_debug_config_runs_three_checked_batches_without_a_logger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("collector=single", "collector.frames_per_batch=64", "env.num_envs=4")
    for debug, sync, verify in (("default", "shared_mem", "every"), ("short", "none", None)):
        assert run.main([f"debug={debug}", f"sync={sync}", *small, f"hydra.run.dir={debug}"]) == 0
        assert read_json(Path(debug, "summary.json"))["updates"] == 3
        options = yaml.safe_load(Path(debug, "config.yaml").read_text())
        assert not options.get("logger")
        assert options["sync"].get("verify") == verify


def test_an_error_in_the_last_evaluation_leaves_the_trained_weights(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("the simulator crashed")

    into = tmp_path / "run"
    options = [*SMALL, "collector=single", f"hydra.run.dir={into}"]
    with monkeypatch.context() as broken:
        broken.setattr("harness.environments.evaluate.play", fails)
        assert run.main(options) == 1
    frames, _ = Checkpoints(into / "checkpoints").load()
    assert frames == 384
