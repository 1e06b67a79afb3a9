"""One stored run of each study can be repeated to the bit."""

from __future__ import annotations

import tarfile

import pytest

from harness import reproduce
from harness.errors import ConfigError
from harness.files import read_json
from harness.run.provenance import hardware
from tests.docs.pages import ROOT

ARCHIVES = sorted((ROOT / "docs/findings/runs").glob("*.tar.xz"))


@pytest.mark.slow
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda file: file.name.split(".")[0])
def test_a_stored_run_is_identical_when_it_is_done_again(archive, tmp_path, monkeypatch, capsys):
    with tarfile.open(archive) as stored:
        stored.extractall(tmp_path, filter="data")
    (run,) = {file.parent for file in tmp_path.rglob("config.yaml")}
    monkeypatch.chdir(tmp_path)
    processor = read_json(run / "manifest.json")["hardware"]["processor"]
    if processor != hardware()["processor"]:
        pytest.skip(f"it was made on another kind of processor: {processor}")
    try:
        status = reproduce.main([str(run)])
    except ConfigError as error:  # an extra is missing
        pytest.skip(str(error))
    printed = capsys.readouterr()
    if "pip install" in printed.err:
        pytest.skip(printed.err.strip())
    assert status == reproduce.SAME, printed.out + printed.err
    assert "identical: all metrics but times, and the final weights" in printed.out
