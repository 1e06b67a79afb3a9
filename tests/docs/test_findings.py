"""One stored run of each study repeats to the bit, and the records of all runs make a report."""

from __future__ import annotations

import lzma
import os
import re
import subprocess
import sys
import tarfile

import pytest

from harness import report, reproduce
from harness.files import parse_yaml, read_json
from harness.run.provenance import hardware
from tests.docs.pages import ROOT

ARCHIVES = sorted((ROOT / "docs/findings/runs").glob("*.tar.xz"))
RECORDS = sorted((ROOT / "docs/findings/records").glob("*.tar.xz"))
# Made before manifests named instructions: these on an EPYC without AVX-512, the others with it.
WITHOUT_AVX512 = ("clip_lag", "dropping")
NUMPY_WITHOUT_AVX512 = {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda file: file.name.split(".")[0])
def test_a_stored_run_is_identical_when_it_is_done_again(archive, tmp_path):
    with tarfile.open(archive) as stored:
        stored.extractall(tmp_path, filter="data")
    (run,) = {file.parent for file in tmp_path.rglob("config.yaml")}
    made_on, here = read_json(run / "manifest.json")["hardware"], hardware()
    without = archive.name.split(".")[0] in WITHOUT_AVX512
    if made_on["processor"] != here["processor"]:
        pytest.skip(f"it was made on another kind of processor: {made_on['processor']}")
    if made_on.get("instructions", here["instructions"]) != here["instructions"]:
        pytest.skip(f"it was made with other instructions: {made_on['instructions']}")
    if "X86_V4" not in here["instructions"] and not without:
        pytest.skip(f"it was made with AVX-512: {here['instructions']} here")
    config = parse_yaml((run / "config.yaml").read_text())
    trusted = ["--import-env", *(f"--plugin={name}" for name in config["plugins"])]
    ended = subprocess.run(
        [sys.executable, "-m", "harness.reproduce", run, *trusted],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        | (NUMPY_WITHOUT_AVX512 if without else {}),
        capture_output=True,
        text=True,
        timeout=800,
    )
    if ended.returncode == reproduce.USAGE_ERROR and "pip install" in ended.stderr:  # an extra
        pytest.skip(ended.stderr.strip().splitlines()[-1])
    assert ended.returncode == reproduce.SAME, ended.stdout + ended.stderr
    compared = re.search("identical: all metrics (.*), and the final weights", ended.stdout)
    assert compared is not None
    assert compared[1] in ("but times", "that both runs have, but times")


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
