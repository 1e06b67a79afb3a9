"""The options of collectors, and their checks; importing `check_types` loads no torch."""
