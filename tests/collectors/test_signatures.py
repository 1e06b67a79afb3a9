"""mypy, editors and `help()` know every option of every collector, with its type and default."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest
from mypy import api

import collectors
from collectors import MultiCollector
from collectors.options.collector_options import CollectorOptions

LOCAL = ("Collector", "MultiSyncCollector", "MultiAsyncCollector", "MultiCollector")
REMOTE = {
    "DistributedCollector": ("num_collectors", "launcher", "port"),
    "RPCCollector": ("num_workers_per_collector", "launcher", "host"),
    "RayCollector": ("ray_init_config", "remote_configs"),
}


@pytest.mark.parametrize("name", [*LOCAL, *REMOTE])
def test_help_shows_every_option(name):
    collector = getattr(collectors, name)
    shown = inspect.signature(collector).parameters
    assert list(shown)[:2] == ["create_env_fn", "policy"]
    assert {*CollectorOptions.__dataclass_fields__, *REMOTE.get(name, ())} <= set(shown)
    assert shown["copy"].default is True
    text = pydoc.plain(pydoc.render_doc(collector))
    assert re.search(r"frames_per_batch: '?Count \| Sequence\[Count\]'? = 200", text)


def test_a_call_without_what_is_needed_says_so():
    with pytest.raises(TypeError, match="sync"):
        MultiCollector(lambda: None)
    with pytest.raises(TypeError, match="create_env_fn"):
        collectors.Collector()
    with pytest.raises(TypeError, match="no argument 'lancher'; did you mean 'launcher'"):
        collectors.RPCCollector(lambda: None, lancher="local")


RIGHT = "(make, policy=None, frames_per_batch=[30], timeout=5.0, apply_at='batch', device='cpu')"
WRONG = {
    "(make, frames_per_bach=30)": 'Unexpected keyword argument "frames_per_bach"',
    "(make, frames_per_batch='30')": 'Argument "frames_per_batch" .* incompatible type "str"',
    "(make, apply_at='never')": 'Argument "apply_at" .* incompatible type',
    "(policy=None)": "Missing .*argument",
}
CONFIG = """
[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*,tensordict.*,numpy.*,gymnasium.*,ray.*]
follow_imports = skip
"""


def test_mypy_refuses_wrong_names_and_types(tmp_path):
    calls, lines = [], ["import collectors", "def make() -> None: ..."]
    for name in [*LOCAL, *REMOTE]:
        extra = ", sync=True)" if name == "MultiCollector" else ")"
        calls += [(f"collectors.{name}{call[:-1]}{extra}", text) for call, text in WRONG.items()]
        lines.append(f"collectors.{name}{RIGHT[:-1]}{extra}")
    for name in REMOTE:
        calls.append((f"collectors.{name}(make, num_collectors='2')", '"num_collectors" .* "str"'))
    start = len(lines) + 1
    (tmp_path / "calls.py").write_text("\n".join([*lines, *(call for call, _ in calls)]))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    out, _, _ = api.run([*options, "--hide-error-context", str(tmp_path / "calls.py")])
    told = {int(line): text for line, text in re.findall(r"calls\.py:(\d+): error: (.*)", out)}
    assert set(told) == set(range(start, start + len(calls))), out
    for line, (call, expected) in enumerate(calls, start):
        assert re.search(expected, told[line]), call
