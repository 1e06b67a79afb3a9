"""Experiments: config, runner, algorithms, logging, checkpoints, statistics and report.

The harness builds a run from a Hydra config: it collects, updates the policy, publishes its weights
and logs, and leaves a run directory behind. It stands on `collectors` and `sync`, and neither of
them imports it. Start with `execute.py` (a run from beginning to end) and `runner.py` (its loop).
"""
