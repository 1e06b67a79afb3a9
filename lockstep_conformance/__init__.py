"""Checks of what a weight-sync library promises, for any library: see README.md."""
