"""Over Ray, without a cluster: which token a process shows, and places without an actor."""

from __future__ import annotations

import os
import sys

import pytest

from sync.remote import ray_engine
from sync.remote.engine import PeerDied
from sync.remote.ray_engine import use_token_authentication

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without a token, in a process that has not imported Ray."""
    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": str(tmp_path)})
    for name in VARIABLES:
        os.environ.pop(name, None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return tmp_path


def shown():
    return [os.environ.get(name) for name in VARIABLES]


def test_a_cluster_of_its_own_gets_a_random_token():
    assert use_token_authentication()
    mode, token, path = shown()
    assert (mode, len(token), path) == ("token", 64, None)


def test_a_cluster_that_runs_is_shown_the_token_of_the_users_file(home):
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0" * 64)
    assert use_token_authentication(joins=True)
    assert shown() == ["token", None, None]


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
@pytest.mark.parametrize("joins", [True, False])
def test_a_token_of_the_environment_is_shown_to_any_cluster(name, joins):
    os.environ[name] = "given"
    assert use_token_authentication(joins=joins)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert [one for one in shown()[1:] if one] == ["given"]


def test_who_has_no_token_joins_without_one():
    assert not use_token_authentication(joins=True)
    assert shown() == [None, None, None]


@pytest.mark.parametrize("joins", [True, False])
def test_a_mode_that_is_set_is_kept(joins):
    os.environ["RAY_AUTH_MODE"] = "disabled"
    assert not use_token_authentication(joins=joins)
    assert shown() == ["disabled", None, None]


def test_a_place_without_an_actor_cannot_be_called_and_says_so(monkeypatch):
    monkeypatch.setattr(ray_engine, "is_connected", lambda: True)
    engine = ray_engine.RayEngine([None])
    with pytest.raises(PeerDied, match="peer 0 is gone: there is no such actor"):
        engine.call(0, abs, -1).result(0)
