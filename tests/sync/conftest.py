"""Systems that lack some of what this one has."""

from __future__ import annotations

import os
import sys

import pytest

KERNEL = ("memfd_create", "pidfd_open")
SYSTEMS = {"all": (), **{f"no_{name}": (name,) for name in KERNEL}, "none": KERNEL}


@pytest.fixture(params=SYSTEMS)
def system(request, monkeypatch):
    """A system that lacks some of what this one has; so does a forked worker."""
    missing = SYSTEMS[request.param]
    for name in missing:
        monkeypatch.delattr(os, name)
    if "pidfd_open" in missing:
        for name, module in list(sys.modules.items()):
            if name.startswith("sync.") and hasattr(module, "PIDFDS"):
                monkeypatch.setattr(module, "PIDFDS", False)
    return request.param
