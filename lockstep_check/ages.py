"""How old weights are."""


def age(acted: int, current: int) -> int:
    """From the weights that acted to those that are current, in the unit of both."""
    return current - acted
