"""Sweeps: all jobs are checked before the first one starts, watched, and counted at the end."""
