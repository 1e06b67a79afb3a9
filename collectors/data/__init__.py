"""Batches of frames: assembling them, splitting them into trajectories, and keeping them."""

import sync  # noqa: F401 - before anything here that imports tensordict
