"""Whole runs on a hostile day: random faults at observed moments, and what must hold afterwards."""
