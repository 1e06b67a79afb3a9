"""Measurements, each a command; what they compare with runs in an environment of its own."""
