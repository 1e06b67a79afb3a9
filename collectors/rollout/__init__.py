"""Making frames: the loop, the policy, and environments of every kind."""

import sync  # noqa: F401 - before anything here that imports tensordict
