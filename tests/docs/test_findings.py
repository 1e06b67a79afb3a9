"""One stored run of each study repeats to the bit, and the records of all runs make a report."""

from __future__ import annotations

import lzma
import tarfile

import pytest

from harness import report, reproduce
from harness.errors import ConfigError
from harness.files import parse_yaml, read_json
from harness.run.provenance import hardware
from tests.docs.pages import ROOT

ARCHIVES = sorted((ROOT / "docs/findings/runs").glob("*.tar.xz"))
RECORDS = sorted((ROOT / "docs/findings/records").glob("*.tar.xz"))


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
    config = parse_yaml((run / "config.yaml").read_text())
    trusted = ["--import-env", *(f"--plugin={name}" for name in config["plugins"])]
    try:
        status = reproduce.main([str(run), *trusted])
    except ConfigError as error:  # an extra is missing
        pytest.skip(str(error))
    printed = capsys.readouterr()
    if "pip install" in printed.err:
        pytest.skip(printed.err.strip())
    assert status == reproduce.SAME, printed.out + printed.err
    assert "identical: all metrics but times, and the final weights" in printed.out


@pytest.mark.parametrize(
    "archive",
    [*ARCHIVES, *RECORDS],
    ids=lambda file: file.parent.name + "/" + file.name.split(".")[0],
)
def test_an_archive_ends_where_its_content_does(archive):
    reader = lzma.LZMADecompressor()  # tar and xz refuse what tarfile does not read
    reader.decompress(archive.read_bytes())
    assert reader.eof
    assert reader.unused_data == b""


@pytest.mark.parametrize("archive", RECORDS, ids=lambda file: file.name.split(".")[0])
def test_the_records_of_all_runs_make_a_report(archive, tmp_path, capsys):
    with tarfile.open(archive) as stored:
        stored.extractall(tmp_path, filter="data")
    (sweep,) = tmp_path.iterdir()
    runs = len(list(sweep.rglob("config.yaml")))
    assert report.main([str(sweep), "--out", str(tmp_path / "report")]) == 0
    assert f"{runs} runs, {runs} done, 0 with damaged files" in capsys.readouterr().out
