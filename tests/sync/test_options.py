"""Options that make no sense are refused with the value and what was expected."""

from __future__ import annotations

import pytest

from sync import (
    PRESETS,
    HogwildWeightSyncScheme,
    Lag,
    Link,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    Tear,
)

NO_WEIGHTS = [HogwildWeightSyncScheme, NoWeightSyncScheme]  # travel under these

REFUSED = {
    SharedMemWeightSyncScheme: [
        ({"timeout": -1}, "timeout=-1: expected"),
        ({"timeout": float("nan")}, "timeout=nan: expected"),
        ({"timeout": float("inf")}, "timeout=inf: expected"),
        ({"timeout": True}, "timeout=True: expected"),
        ({"connect_timeout": None}, "connect_timeout=None: expected"),
        ({"sync": "no"}, "sync='no': expected"),
        ({"strategy": None}, "strategy=None: expected"),
        ({"link": 5}, "link=5: expected"),
        ({"link": "moon"}, "link='moon': expected one of lan, datacenter, wan"),
        ({"lag": -1}, "k=-1: expected a number of versions, 0 or more"),
        ({"lag": "four"}, "lag='four': expected a number of versions, or a Lag"),
        ({"lag": True}, "lag=True: expected a number of versions, or a Lag"),
        ({"wire": "bfloat61"}, r"wire='bfloat61'.*did you mean 'bfloat16'"),
        ({"verify": "always"}, "verify='always': expected one of off, sampled, every"),
        *[
            ({"zero_copy": True, "wire": wire}, f"zero_copy=True with wire='{wire}'")
            for wire in ("bfloat16", "float16", "int8")
        ],
    ],
    HogwildWeightSyncScheme: [
        ({"check_every": every}, "check_every=.*: expected a number of uses, 1 or more")
        for every in (0, -3, 1.5, True)
    ],
    Link: [
        ({"latency_ms": -1}, "latency_ms=-1: expected 0 or more"),
        ({"jitter_ms": float("nan")}, "jitter_ms=nan: expected 0 or more"),
        ({"bandwidth_mbps": 0}, "bandwidth_mbps=0: expected more than 0"),
        ({"loss": 1.0}, "loss=1.0: expected a share"),
    ],
    Tear: [
        ({"share": 1.1}, "share=1.1: expected a share, 0 to 1"),
        ({"share": 0.5, "span": 0}, "span=0: expected a number of versions, 1 or more"),
        ({"unit": "layer"}, "unit='layer': expected tensor or element"),
    ],
    Lag: [
        ({"kind": "normal"}, "kind='normal': expected one of constant, uniform"),
        ({"per": "batch"}, "per='batch': expected version or worker"),
        ({"kind": "uniform", "k": 2}, "k=2: kind=uniform has no such option; it has low, high"),
        ({"kind": "uniform", "low": 3, "high": 1}, "high=1: expected at least low=3"),
        ({"kind": "cycle"}, r"values=\[\]: expected at least one lag"),
        ({"kind": "cycle", "values": 3}, "values=3: expected a list of lags"),
        ({"kind": "geometric", "mean": "two"}, "mean=two: expected 0 or more"),
        ({"kind": "cycle", "values": [1, -2]}, r"values\[1\]=-2: expected a number of versions"),
        ({"kind": "geometric", "mean": -1.0}, "mean=-1.0: expected 0 or more"),
        ({"kind": "two_point", "high": 1, "share": 1.5}, "share=1.5: expected a probability"),
    ],
}


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [(make, *row) for make, rows in REFUSED.items() for row in rows],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:60],
)
def test_what_makes_no_sense_is_refused_with_what_was_expected(make, options, says):
    with pytest.raises(ValueError, match=says):
        make(**options)


@pytest.mark.parametrize("scheme", NO_WEIGHTS)
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"wire": "int8"}, "wire='int8'.*moves no weights"),
        ({"round_buffers": True}, "round_buffers=True.*moves no weights"),
        ({"link": "wan"}, "link='wan'.*moves no weights"),
        ({"lag": 2}, "lag=2.*moves no weights"),
        ({"tear": Tear(share=0.5)}, "tear=Tear.*moves no weights"),
        ({"verify": "every"}, "verify='every': .* publishes no weights"),
    ],
    ids=str,
)
def test_schemes_that_publish_no_weights_refuse_what_would_happen_to_them(scheme, option, says):
    with pytest.raises(ValueError, match=says):
        scheme(**option)
    scheme(wire="float32", link=Link(), lag=0, tear=Tear(share=0.0), verify="off").shutdown()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_known_by_name(name):
    assert SharedMemWeightSyncScheme(link=name).link == PRESETS[name]
