"""Tests of the benchmarks: of what they count, not of what is fast."""
