"""W&B for real, offline: what it wrote is read back as its own records."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import psutil
import pytest
import wandb

from harness.logging import Histogram, RunInfo
from harness.logging.wandb import WandbLogger
from tests.harness.logging.wandb_file import read

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
    where = {"mode": "offline", "project": "lockstep"}
    return WandbLogger(folder, info, tags=["tagged"], **where)


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
    assert "W&B failed, the run goes on without it: no space left" in caplog.text


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
    logger = WandbLogger(tmp_path, INFO, mode="online", project="lockstep", entity=None)
    with caplog.at_level(logging.WARNING):
        logger.log(1, {"a": 1.0}, {})
        logger.finish({}, 0)
    assert "the run goes on without it" in caplog.text


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


def test_a_process_of_wandbs_that_hangs_is_killed_and_the_run_ends(tmp_path, caplog, monkeypatch):
    logger = start(tmp_path)
    started = threading.Event()
    logger._put(lambda run: started.set())
    assert started.wait(60)
    children = psutil.Process().children()
    (service,) = (child for child in children if child.name().startswith("wandb"))
    service.suspend()
    monkeypatch.setattr("harness.logging.wandb.FINISH_S", 2.0)
    with caplog.at_level(logging.WARNING):
        logger.finish({}, 0)
    logger._thread.join(60)
    assert not logger._thread.is_alive()
    service.wait(60)
    assert "W&B did not finish within 2 s" in caplog.text
