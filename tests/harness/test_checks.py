from __future__ import annotations

import pytest

from harness.checks import above, at_least, between, one_of


@pytest.mark.parametrize(
    ("check", "complaint"),
    [
        (lambda: one_of("a", "tow", ["one", "two"]), "a is 'tow', expected one of one, two; did"),
        (lambda: one_of("a", "xyz", ["one", "two"]), "a is 'xyz', expected one of one, two$"),
        (lambda: one_of("a", "n", map(str, range(50))), "a is 'n'; no known name is near it$"),
        (lambda: at_least("a", 1, 2), "a is 1, expected 2 or more"),
        (lambda: above("a", 0, 0), "a is 0, expected more than 0"),
        (lambda: between("a", 3, 0, 1), "a is 3, expected 0 to 1"),
        (lambda: at_least("a", float("nan"), 0), "a is nan"),
        (lambda: above("a", float("nan"), 0), "a is nan"),
        (lambda: between("a", float("nan"), 0, 1), "a is nan"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(check, complaint):
    with pytest.raises(ValueError, match=complaint):
        check()


def test_right_values_pass():
    one_of("a", "two", ["one", "two"])
    at_least("a", 2, 2)
    above("a", 0.1, 0)
    between("a", 1, 0, 1)
