from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import Literal

import pytest

from collectors.options.check_types import NonNegative, Positive, Share
from harness.errors import ConfigError, nearest, suggest
from harness.options.base import build, paths


@dataclass
class Inner:
    width: int = 1
    sizes: list[int] = field(default_factory=list)


@dataclass
class Outer:
    rate: float
    mode: Literal["fast", "slow"] = "slow"
    limit: int | None = None
    place: str | list[str] = "cpu"
    inner: Inner = field(default_factory=Inner)
    extra: dict[str, int] = field(default_factory=dict)


def test_plain_data_becomes_dataclasses():
    built = build(Outer, {"rate": 1, "inner": {"width": 2.0, "sizes": [1, 2]}, "extra": {"a": 1}})
    assert built == Outer(1.0, inner=Inner(2, [1, 2]), extra={"a": 1})
    assert isinstance(built.rate, float)
    assert isinstance(built.inner.width, int)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "rate is not set: it needs a number"),
        ({"rate": "x"}, "rate=x: expected a number"),
        ({"rate": True}, "rate=true: expected a number"),
        ({"rate": None}, "rate=null: expected a number"),
        ({"rate": 1, "mode": "fas"}, "mode=fas: expected one of fast, slow; did you mean fast?"),
        ({"rate": 1, "mode": 1}, "mode=1: expected one of fast, slow"),
        ({"rate": 1, "limit": 1.5}, "limit=1.5: expected a whole number or null"),
        ({"rate": 1, "limit": False}, "limit=false: expected a whole number or null"),
        ({"rate": 1, "place": [1]}, "place=[1]: expected text or a list, each text"),
        ({"rate": 1, "inner": 3}, "inner=3: expected a group of options"),
        (
            {"rate": 1, "inner": {"with": 1}},
            "inner.with=1: there is no such option; did you mean inner.width?",
        ),
        (
            {"rate": 1, "inner": {"sizes": ["a"]}},
            "inner.sizes=['a']: expected a list, each a whole number",
        ),
        (
            {"rate": 1, "extra": {"a": "b"}},
            "extra={'a': 'b'}: expected a mapping, each value a whole number",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(data, expected):
    with pytest.raises(ConfigError) as found:
        build(Outer, data)
    assert str(found.value) == expected


@dataclass
class Bounded:
    share: Share = 0.5
    rate: Positive = 1.0
    limit: NonNegative = 0.0
    either: float | int | str = ""


def test_bounds_are_kept_and_nan_is_in_no_range():
    for data in ({"share": 0}, {"share": 1}, {"rate": 1e-9}, {"limit": 0}):
        build(Bounded, data)
    for data in ({"share": -1e-9}, {"share": 1.1}, {"rate": 0}, {"limit": -1e-9}, {"limit": nan}):
        with pytest.raises(ConfigError, match="expected a number"):
            build(Bounded, data)


@pytest.mark.parametrize("value", [1, 1.0, "1"])
def test_a_value_keeps_its_type_where_several_fit(value):
    assert type(build(Bounded, {"either": value}).either) is type(value)


def test_every_option_has_a_dotted_path():
    assert {"inner.width", "extra"} <= set(paths(Outer))


def test_the_nearest_name_is_found_by_spelling_and_by_initials():
    known = ["learning_rate", "gamma", "frames_per_batch"]
    assert nearest("Gama", known) == "gamma"
    assert nearest("lr", known) == "learning_rate"
    assert nearest("xyzzy", known) is None
    assert suggest("xyzzy", known) == "known: frames_per_batch, gamma, learning_rate"


def test_a_message_is_always_one_line():
    assert str(ConfigError("a\n  b")) == "a b"
