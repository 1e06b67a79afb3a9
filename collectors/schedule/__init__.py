"""Schedules: in which order batches come and which version acts at which step, recorded."""

import sync  # noqa: F401 - before anything here that imports tensordict
