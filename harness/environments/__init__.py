"""Environments as a config describes them, and evaluation in them."""
