"""Ages by hand, and that one module computes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep_check.ages import age, in_training, is_within, of_age, parts
from tests.test_imports import ROOT, SHIPPED

AGES = "lockstep_check/ages.py"
WEIGHTS = re.compile(r"(\w+_)?versions?|newest|updates|gradient_steps|stamps?|acted")


def test_an_age_is_made_of_parts():
    """Version 3 acts, 5 is the newest at the end of the batch, 9 when it is taken; 11 updates."""
    ages = parts(acted=3, made=5, taken=9, used=11)
    assert ages == (2, 4, 2)
    assert (ages.queue, ages.total) == (6, 8)
    assert ages.total == age(3, 11)


def test_an_update_uses_a_frame_at_every_age_that_it_has_inside():
    for steps in (1, 2, 5, 64):
        assert in_training(steps) == np.mean([age(0, step) for step in range(steps)])


@pytest.mark.parametrize("of", [np.array, torch.tensor])
def test_arrays_have_the_ages_of_their_numbers(of):
    acted = of([3, 9, 7])
    assert age(acted, 11).tolist() == [8, 2, 4]
    assert is_within(acted, 11, 4).tolist() == [False, True, True]
    assert of_age(age(acted, 11), 11).tolist() == acted.tolist()
    assert parts(acted, 9, 10, 11).total.tolist() == [8, 2, 4]


def differences(file: Path) -> Iterator[int]:
    """The lines in which weights are subtracted from weights, or an age from them."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.BinOp(
                op=ast.Sub(), right=ast.Constant() | ast.Attribute(attr="first_version")
            ):
                pass
            case ast.BinOp(left=left, op=ast.Sub()) if is_weights(left):
                yield node.lineno


def is_weights(node: ast.expr) -> bool:
    name = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node))
    return name is not None and WEIGHTS.fullmatch(getattr(node, name)) is not None


def test_nothing_else_subtracts_versions():
    """Numbering versions anew, as a resumed run does, is no age."""
    numbering = {"collectors/weights/publisher.py", "collectors/simulation/virtual_weights.py"}
    numbering |= {"collectors/simulation/simulator.py", "collectors/data/prioritised_replay.py"}
    places = [
        f"{path}:{line}"
        for room in SHIPPED
        for file in sorted((ROOT / room).rglob("*.py"))
        if (path := file.relative_to(ROOT).as_posix()) not in {AGES, *numbering}
        for line in differences(file)
    ]
    assert places == []


def test_a_difference_of_versions_is_noticed(tmp_path):
    file = tmp_path / "a.py"
    for code, noticed in {
        "lag = batch.version - acted": True,
        "old = newest - self.lag": True,
        "new = batch.policy_version - versions": True,
        "before = version - 1": False,
        "left = total - spent": False,
    }.items():
        file.write_text(code)
        assert bool(list(differences(file))) == noticed, code
