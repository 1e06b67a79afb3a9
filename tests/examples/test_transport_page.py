"""The transport in docs/extending.md keeps the promises."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import sys
from pathlib import Path

import pytest

from sync.schemes import SCHEMES
from tests.promises.behaviours import only_the_addressed_change
from tests.promises.probe import CALLS, STOP, VALUE, flood, read, trial, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The scheme of the page."""
    (code,) = re.findall(
        r"```python\n(# my_project/files\.py\n.*?)```", PAGE.read_text(), re.DOTALL
    )
    path = tmp_path / "files_on_the_page.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    yield module.FilesWeightSyncScheme
    del SCHEMES["files"]


@pytest.mark.parametrize(("options", "background"), [({}, True), ({"wire": "int8"}, False)])
def test_no_use_sees_two_versions_or_a_wrong_stamp(files, options, background):
    with trial(files(timeout=30, **options), background=background) as running:
        flood(running, calls=300, versions=50)
        running.scheme.wait_async()
        version = running.scheme.version
        wait_until(lambda: all(running.findings.get(w, VALUE) == version for w in range(3)))
        assert running.findings.violations() == {}


def test_only_the_addressed_workers_change(files):
    with trial(files(timeout=30)) as running:
        only_the_addressed_change(running)


def test_a_worker_that_left_is_replaced(files):
    scheme = files(timeout=30, connect_timeout=60)
    with trial(scheme, workers=1) as running:
        running.findings.stop()
        running.processes[0].join(30)
        calls = running.findings.total(CALLS)
        running.findings.set(0, STOP, 0)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=read, args=(scheme, 0, running.findings, 64), daemon=True)
        process.start()
        running.processes[0] = process
        scheme.connect(worker_idx=0)
        version = running.publish(wait=True)
        wait_until(lambda: running.findings.get(0, VALUE) == version)
        assert running.findings.total(CALLS) > calls
        assert scheme.stats["workers"][0]["restarts"] == 1
