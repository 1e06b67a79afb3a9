"""`env.vectorisation=envpool`: what is refused, and runs where EnvPool is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import run
from harness.files import read_json
from tests.harness.small import SMALL
from tests.harness.test_run import same_weights, without_times

pytestmark = pytest.mark.usefixtures("here")

POOL = (*SMALL, "env.vectorisation=envpool", "total_frames=1024")
installed = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="envpool is not installed"
)


def test_the_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run.main([*POOL, "hydra.run.dir=run"]) == 2
    assert "env.vectorisation=envpool needs envpool; install it with" in capsys.readouterr().err


@installed
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["env=acrobot", "env.id=lockstep/Tokens-v0"], "EnvPool does not have it"),
        (["+env.kwargs.sutton_barto_reward=true"], "EnvPool's environments take other arguments"),
        (["env.wrappers=[atari]"], "'atari' cannot wrap a vector of EnvPool"),
    ],
)
def test_what_envpool_cannot_do_is_refused_before_the_start(given, said, capsys):
    assert run.main([*POOL, *given, "hydra.run.dir=run"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


@installed
@pytest.mark.parametrize("collector", ["single", "multi_sync", "simulated"])
def test_a_run_has_the_same_bits_again_and_another_seed_has_others(collector):
    directories = []
    for number, seed in enumerate((3, 3, 4)):
        into = Path(f"run_{number}")
        given = (*POOL, f"collector={collector}", f"seed={seed}", f"hydra.run.dir={into}")
        assert run.main(given) == 0
        directories.append(into)
    first, again, other = directories
    assert without_times(first) == without_times(again)
    assert same_weights(first, again)
    assert not same_weights(first, other)
    assert read_json(first / "summary.json")["eval/return"] > 0


@installed
def test_a_limit_of_steps_ends_episodes():
    assert run.main([*POOL, "env.max_episode_steps=9", "hydra.run.dir=run"]) == 0
    assert read_json(Path("run/summary.json"))["episode/return"] <= 9
