"""Lockstep's Hydra plugins: a launcher for parallel sweeps on one machine, and Optuna's sweeper.

Hydra looks for plugins in the namespace package `hydra_plugins`, which has no `__init__.py`.
"""
