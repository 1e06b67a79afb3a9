"""Weights on their way from the trainer's policy to the rollout's."""
