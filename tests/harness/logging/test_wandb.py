"""W&B for real, offline: what it wrote is read back as its own records."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import wandb

import run
from harness.config.plan import plan_run
from harness.errors import ConfigError
from harness.logging import RunInfo
from harness.logging.wandb import WandbConfig, WandbLogger
from harness.measures.meters import Histogram
from harness.run_directory import RunDir
from tests.harness.logging.wandb_file import read
from tests.harness.small import SMALL

INFO = RunInfo(
    "a-run",
    {"algo": {"name": "ppo"}, "seed": 3},
    group="sweep-1",
    job_type="shared_mem/multi_async",
    wandb_id="abcd1234",
)


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def start(folder: Path, info: RunInfo = INFO) -> WandbLogger:
    return WandbLogger(WandbConfig(tags=["tagged"]), RunDir(folder), info)


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_everything_of_a_run_is_in_its_file(tmp_path):
    logger = start(tmp_path)
    logger.log(10, {"train/loss": 0.5}, {"policy/lag": Histogram([2, 1], [-0.5, 0.5, 1.5])})
    logger.log(20, {"train/loss": 0.25}, {})
    logger.finish({"eval/return": 475.0}, exit_code=130)
    records = read(tmp_path)

    (run,) = (r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.project) == ("abcd1234", "a-run", "lockstep")
    assert (run.run_group, run.job_type) == ("sweep-1", "shared_mem/multi_async")
    assert list(run.tags) == ["tagged"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["algo"] == {"name": "ppo"}
    assert config["seed"] == 3

    first, second = (values(r.history.item) for r in records if r.history.item)
    assert (first["_step"], first["train/loss"]) == (10, 0.5)
    assert first["policy/lag/values"] == [2, 1]
    assert first["policy/lag/bins"] == [-0.5, 0.5, 1.5]
    assert (second["_step"], second["train/loss"]) == (20, 0.25)

    summaries = [values(r.summary.update) for r in records if r.summary.update]
    assert any(summary.get("eval/return") == 475.0 for summary in summaries)
    (exit_record,) = (r.exit for r in records if r.WhichOneof("record_type") == "exit")
    assert exit_record.exit_code == 130


def test_a_failure_in_mid_run_lets_the_run_go_on(tmp_path, monkeypatch, caplog):
    failed = threading.Event()

    def fail(self, *args, **kwargs):
        failed.set()
        raise OSError("no space left")

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", fail)
    with caplog.at_level(logging.WARNING):
        logger = start(tmp_path)
        logger.log(1, {"a": 1.0}, {})
        assert failed.wait(60)
        logger.log(2, {"a": 2.0}, {})
        logger.finish({}, 0)
    assert "W&B failed, and the run continues without it: no space left" in caplog.text


def test_a_run_does_not_wait_for_wandb_to_start(tmp_path, monkeypatch):
    release = threading.Event()
    original = wandb.init

    def slow(*args, **kwargs):
        assert release.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(wandb, "init", slow)
    logger = start(tmp_path)
    logger.log(1, {"a": 1.0}, {})  # neither of these waits
    release.set()
    logger.finish({}, 0)
    assert any(values(r.history.item).get("a") == 1.0 for r in read(tmp_path))


def test_online_without_an_account_the_run_goes_on(tmp_path, caplog):
    logger = WandbLogger(WandbConfig(mode="online"), RunDir(tmp_path), INFO)
    with caplog.at_level(logging.WARNING):
        logger.log(1, {"a": 1.0}, {})
        logger.finish({}, 0)
    assert "W&B could not be reached, and has the run offline: No API key" in caplog.text
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert logger.remark.endswith(f"wandb sync {folder}")
    assert any(values(r.history.item).get("a") == 1.0 for r in read(tmp_path))


def test_what_is_to_be_uploaded_is_said_again_beside_the_end_of_the_run(tmp_path, capsys):
    online = ("logger=wandb", "logger.wandb.mode=online", "evaluation.at_end=false")
    assert run.main([*SMALL, *online, f"hydra.run.dir={tmp_path}/run"]) == 0
    (folder,) = tmp_path.glob("run/wandb/offline-run-*")
    assert f"wandb sync {folder}" in capsys.readouterr().out.split("run done")[1]


def test_a_log_of_wandbs_that_cannot_be_written_prints_no_traceback(tmp_path, capsys, monkeypatch):
    init, handlers = wandb.init, logging.getLogger("wandb").handlers
    replaced = []

    def on_a_full_disk(**options):
        run = init(**options)
        for handler in handlers:
            if getattr(handler, "baseFilename", "").endswith("debug.log"):
                handler.setStream(open("/dev/full", "w"))  # noqa: SIM115
                replaced.append(handler)
        return run

    monkeypatch.setattr("wandb.init", on_a_full_disk)
    logger = start(tmp_path)
    logger.log(1, {"episode/return": 1.0}, {})
    logger.finish({"frames": 1}, 0)
    assert replaced
    assert capsys.readouterr().err == ""


def test_a_wandb_that_hangs_is_waited_for_so_long_and_said_at_the_end(
    tmp_path, caplog, monkeypatch
):
    release = threading.Event()
    logger = start(tmp_path)
    logger._put(lambda run: release.wait(60))
    monkeypatch.setattr("harness.logging.wandb.FINISH_S", 0.1)
    with caplog.at_level(logging.WARNING):
        logger.finish({}, 0)
    release.set()
    assert "W&B did not finish within 0.1 s" in caplog.text
    assert "this program may wait for it at its end" in logger.remark
    logger._thread.join(60)
    assert not logger._thread.is_alive()


def test_frames_are_the_x_axis_and_the_customary_names_are_there(tmp_path):
    logger = start(tmp_path)
    logger.log(10, {"episode/return": 21.0, "episode/length": 7.0, "collector/fps": 99.0}, {})
    logger.finish({}, 0)
    records = read(tmp_path)
    (logged,) = (values(r.history.item) for r in records if r.history.item)
    assert logged["global_step"] == 10
    assert logged["charts/episodic_return"] == logged["episode/return"] == 21
    assert logged["charts/episodic_length"] == 7
    assert logged["charts/SPS"] == 99
    defined = {
        r.metric.name or r.metric.glob_name: r.metric for r in records if r.metric.step_metric
    }
    assert defined["*"].step_metric == "global_step"


def artifacts(folder: Path) -> dict[str, list[str]]:
    """The files of each artifact by its type."""
    kept = [r.artifact for r in read(folder) if r.WhichOneof("record_type") == "artifact"]
    return {one.type: [entry.path for entry in one.manifest.contents] for one in kept}


def run_once(*overrides: str) -> Path:
    folder = Path("run")
    small = [option for option in SMALL if not option.startswith("logger")]
    assert run.main([*small, "logger=wandb", *overrides, f"hydra.run.dir={folder}"]) == 0
    return folder


def test_a_run_keeps_its_manifest_and_what_else_is_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run_once("logger.wandb.artifacts=[manifest,checkpoint]")
    kept = artifacts(folder)
    assert kept["manifest"] == ["config.yaml", "manifest.json"]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert kept["checkpoint"] == [checkpoint.name]
    assert not [file for file in tmp_path.rglob("**/staging/**") if file.is_file()]


def test_an_artifact_of_code_is_refused_and_the_manifest_named():
    with pytest.raises(ConfigError, match="take manifest, which has the commit"):
        plan_run(["logger.wandb.artifacts=[code]"])
