"""Whatever is typed or composed: it is accepted, or refused in one line before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import run
from harness.config.compose import CONF
from harness.config.explain import known_options
from harness.config.help import groups
from harness.config.plan import plan_run, to_config
from harness.errors import ConfigError
from harness.files import LONGEST_LINE, DamagedError, parse_yaml, to_yaml
from harness.run.build import make_learner
from tests.security.support import command

# Derandomised and few: CI sees the same ones each time. For more: FUZZ=10000 make test ARGS=...
EXAMPLES = int(os.environ.get("FUZZ", "0"))
FEW = settings(
    max_examples=EXAMPLES or 20,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=EXAMPLES or 100)

ROOT = Path(run.__file__).parent
OPTIONS = sorted(known_options())
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from([2**63, -(2**63), 10**400, 1e308, float("inf"), float("nan")]),
)
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=12))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
PIECES = [*"}[]{},='\"\\:~+@$", "${", "..", "!!"]
TYPED = st.one_of(
    PLAIN.map(str),
    st.lists(st.sampled_from([*PIECES, "oc.env:HOME", "seed", "1", "a"]), max_size=8).map("".join),
    st.sampled_from([name for names in groups().values() for name in names]),
)


def complaint(about: Callable[[], object]) -> str:
    """What is wrong, if anything is; whatever else is raised is a failure."""
    try:
        about()
    except (ConfigError, DamagedError) as error:
        return str(error)
    return ""


def is_one_line(said: str) -> bool:
    return said.isprintable() and len(said) <= LONGEST_LINE


def overrides() -> st.SearchStrategy[list[str]]:
    keys = st.one_of(st.sampled_from([*OPTIONS, *groups()]), st.text(max_size=10))
    marks = st.sampled_from(["", "", "", "+", "++", "~"])
    one = st.builds(lambda mark, key, value: f"{mark}{key}={value}", marks, keys, TYPED)
    return st.lists(st.one_of(one, st.text(max_size=20)), min_size=1, max_size=2)


@FEW
@given(overrides())
def test_any_command_line_is_accepted_or_refused_in_one_line(arguments):
    given_here = [text for text in arguments if not text.startswith("resume=")]
    assert is_one_line(complaint(lambda: plan_run(given_here)))


@pytest.fixture(scope="module")
def sound() -> dict[str, Any]:
    return plan_run([]).options


@MANY
@given(path=st.sampled_from(OPTIONS), value=VALUES)
def test_any_value_of_any_option_is_accepted_or_refused_in_one_line(sound, path, value):
    options = parse_yaml(to_yaml(sound))
    group = options
    *above, last = path.split(".")
    for name in above:
        group = group.setdefault(name, {})
    group[last] = value
    assert is_one_line(complaint(lambda: to_config(options)))


@MANY
@given(VALUES)
def test_what_is_stored_is_read_as_it_was(value):
    try:
        text = to_yaml(value)
        text.encode()
    except (ValueError, UnicodeEncodeError):
        return  # too long a number, or half a character
    try:
        assert same(parse_yaml(text), value)
    except DamagedError:
        assert has_more_digits_than_are_read(value)


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


def has_more_digits_than_are_read(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(has_more_digits_than_are_read, value))
    return isinstance(value, int) and abs(value) >= 10**399


MARKUP = st.lists(st.sampled_from([*PIECES, "\n", "- ", "a: ", "&x ", "*x", "!!int "])).map("".join)


@MANY
@given(st.one_of(st.text(), MARKUP))
def test_any_text_is_plain_yaml_or_damaged(text):
    assert is_one_line(complaint(lambda: parse_yaml(text)))


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_as_a_stored_config_are_refused_in_one_line(tmp_path_factory, content):
    directory = tmp_path_factory.mktemp("run")
    (directory / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as found:
        plan_run([f"resume={directory}"])
    assert str(found.value).isprintable()


# -- what was found by hand, or by longer fuzzing


REFUSED = [
    # what the parsers of overrides choke on
    "name=" + "[" * 3000 + "]" * 3000,
    "x=" + "{a:" * 500 + "1" + "}" * 500,
    "seed=" + "9" * 5000,
    "a" * 100_000 + "=1",
    *("name=\x00", "name=\udcff", "\ud800", "algo=null", "collector=3", "algo=true"),
    # numbers that nothing can take
    *("seed=9223372036854775808", "total_frames=1e300", "num_threads=1000000"),
    *("env.num_envs=10000000000", "collector.timeout_s=inf", "sync.timeout_s=1e300"),
    *("algo.learning_rate=inf", "algo.entropy_weight=nan", "collector.num_workers=1e6"),
    *("model.hidden_sizes=[1e30]", "print_every_s=nan"),
    # environments and wrappers
    *("env.id=.foo:Bar-v0", "env.id=:", "env.id=a:b:c", "env.wrappers=[{resize:3}]"),
    *("env.wrappers=[{resize:[1]}]", "env.wrappers=[{1:2}]", "env.wrappers=[[a]]"),
    # directories
    *("hydra.run.dir=", "hydra.run.dir=null", "hydra.run.dir=/", "hydra.run=null"),
    *("resume=", "resume=/dev/null", "resume=/etc/passwd", "resume=\x00"),
]


@pytest.mark.parametrize("override", REFUSED, ids=lambda override: ascii(override)[:40])
def test_it_is_refused_in_one_line(override):
    said = complaint(lambda: plan_run([override]))
    assert said
    assert is_one_line(said)


def test_a_network_that_no_memory_holds_is_refused_in_one_line():
    plan = plan_run(["model.hidden_sizes=[1e12]"])
    with pytest.raises(ConfigError, match="model=mlp cannot be made"):
        make_learner(plan.config)


def test_an_environment_that_cannot_be_closed_is_refused_in_one_line(monkeypatch):
    def fail(env):
        raise OSError("the lid is stuck")

    monkeypatch.setattr("gymnasium.envs.classic_control.CartPoleEnv.close", fail)
    with pytest.raises(
        ConfigError, match=r"env\.id=CartPole-v1 cannot be closed: the lid is stuck"
    ):
        make_learner(plan_run([]).config)


@pytest.mark.parametrize("directory", ["x" * 300, "/proc/nowhere/run", "/dev/null/run"])
def test_a_directory_that_cannot_be_made_is_refused_in_one_line(capsys, directory):
    said = command(capsys, "collector=single", "sync=none", f"hydra.run.dir={directory}")
    assert said.status == 2
    assert "cannot be written" in said.line


def test_a_package_that_fails_when_it_is_imported_is_a_mistake_in_the_config(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for number, text in enumerate(["1/0", "raise SystemExit(3)", "def"]):
        (tmp_path / f"broken{number}.py").write_text(text)
        said = complaint(lambda n=number: plan_run([f"env.id=broken{n}:A-v0"]))
        assert "cannot be imported" in said


# -- configs name no code, and stored ones read no secrets


def test_an_options_target_is_no_option():
    for key in ("_target_", "env._target_", "model._target_", "algo._target_"):
        said = complaint(lambda key=key: plan_run([f"+{key}=os.system"]))
        assert "there is no such option" in said


def test_the_environment_is_read_by_a_users_own_config_and_not_by_a_stored_one(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("SECRET", "s3cret")
    plan = plan_run(["name=${oc.env:SECRET}"])
    assert plan.config.name == "s3cret"
    for text in ("${oc.env:SECRET}", "\\${oc.env:SECRET}", "x${oc.env:NONE,${oc.env:SECRET}}"):
        (tmp_path / "config.yaml").write_text(to_yaml({**plan.options, "name": text}))
        assert plan_run([f"resume={tmp_path}"]).config.name == text
    files = [file.read_text() for file in CONF.rglob("*.yaml")]
    assert not any("oc.env" in text or "_target_: os" in text for text in files)


# -- and so it is for the command itself


def test_the_command_says_one_line_and_starts_no_process(tmp_path):
    """Counted by a hook in the interpreter: what the command forks or executes is a failure."""
    hook = (
        "import sys\n"
        "starts = ('os.fork', 'os.forkpty', 'os.posix_spawn', 'os.exec', 'subprocess.Popen', "
        "'os.system')\n"
        "def seen(event, arguments):\n"
        "    if event in starts:\n"
        "        sys.stderr.write(f'started: {event} {arguments}\\n')\n"
        "sys.addaudithook(seen)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hook)
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "--multirun", "seed=1,x"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lockstep: ")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == [
        "sitecustomize.py"
    ]
