"""What hydra finds of ours: launchers for parallel sweeps, and a sweeper that searches.

hydra looks for plugins in the namespace package `hydra_plugins`, which has no `__init__.py`.
"""
