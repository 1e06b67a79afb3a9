"""A report handed to W&B, offline and for real."""

from __future__ import annotations

import json

import wandb

from harness.files import read_json, write_json
from harness.report import main
from tests.harness.logging import wandb_file
from tests.harness.report.synthetic import make_sweep


def test_a_report_is_a_run_in_the_sweeps_group_with_figures_and_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    make_sweep(tmp_path / "mine", schemes={"a": 50, "b": 70})
    for file in (tmp_path / "mine").glob("*/manifest.json"):
        write_json(file, read_json(file) | {"sweep": "mine"})
    out = tmp_path / "report"
    assert main([str(tmp_path / "mine"), "--out", str(out), "--wandb", "offline"]) == 0
    assert wandb.run is None
    records = wandb_file.read(out)
    (named,) = (r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (named.run_group, named.job_type, named.project) == ("mine", "report", "lockstep")
    (files,) = out.glob("wandb/offline-run-*/files")
    figures = {file.stem for file in (out / "figures").glob("*.png")}
    uploaded = {file.name.split("_")[0] for file in (files / "media/images/figures").iterdir()}
    assert uploaded == figures
    assert (files / "report.html").read_bytes() == (out / "report.html").read_bytes()
    summaries = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json)}
        for record in records
        for item in record.summary.update
    ]
    scores = {key: value for summary in summaries for key, value in summary.items()}
    assert {"a/eval/return", "b/eval/return"} <= set(scores)
    assert scores["b/eval/return"] > scores["a/eval/return"]
