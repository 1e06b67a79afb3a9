"""Branches: go back to a moment of a run, and continue from there with an option changed.

command.py      lockstep branch: flags, progress, the table
moments.py      the states of the parent at the asked updates
options.py      which options a branch may change, and the config of a branch
jobs.py         runs in processes of their own, several at a time
"""
