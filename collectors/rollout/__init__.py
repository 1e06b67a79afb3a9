"""Making frames: the loop, the policy, and environments of every kind."""
