"""What each part of `sync` does. What all of it promises together is in `tests/promises`."""
