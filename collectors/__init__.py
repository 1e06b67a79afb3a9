"""Rollout workers and the batches they hand over.

Not there yet. A collector steps gymnasium environments with a policy, in one process or in several
workers, and stamps every frame with the version of the weights that computed its action. It stands
on `sync`, and does not know `harness`.
"""
