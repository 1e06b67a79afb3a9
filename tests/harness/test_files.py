"""What files hold, taken apart: nested values by dotted names, and numbers of processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.files import flatten, is_alive, one_line

NESTED = {"a": {"b": 1, "c": [2, {"d": 3}]}, "e": {}, 5: None}


def test_mappings_are_flattened_and_lists_are_left_whole():
    found = dict(flatten(NESTED, lists=False))
    assert found == {"a.b": 1, "a.c": [2, {"d": 3}], "e": {}, "5": None}


def test_lists_are_flattened_where_they_are_asked_for():
    found = dict(flatten(NESTED, lists=True))
    assert found == {"a.b": 1, "a.c.0": 2, "a.c.1.d": 3, "e": {}, "5": None}


def test_a_process_is_alive_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(child.pid)
    child.communicate(b"\n")
    assert not is_alive(child.pid)
    assert is_alive(os.getpid())


@pytest.mark.parametrize("pid", [None, True, 0, -1, 1 << 31, 10**30, "1", 1.0, [1]])
def test_what_is_no_number_of_a_process_is_not_alive(pid):
    assert not is_alive(pid)


def test_a_line_is_cut_to_the_length_asked_for():
    assert one_line("a\n b\x07", 10) == "a b�"
    assert one_line("x" * 20, 10) == "x" * 9 + "…"
    assert one_line("x" * 5000, float("inf")) == "x" * 5000
