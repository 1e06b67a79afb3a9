"""Schedules: whose batch comes next and which version acts at which step, recorded or simulated."""

import sync  # noqa: F401 - before anything here that imports tensordict
