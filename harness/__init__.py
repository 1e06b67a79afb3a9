"""Experiments: config, runner, algorithms, logging, checkpoints, statistics and report.

The harness builds a run from a Hydra config. The run collects, updates the policy, publishes its
weights, logs, and writes a run directory. The harness imports `collectors` and `sync`, which do not
import it. Start with `execution.py` (a run from start to end) and `runner.py` (its loop).
"""
