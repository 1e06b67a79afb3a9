"""Batches of frames: assembling them, splitting them into trajectories, and keeping them."""
