"""The learning algorithms, each in one file to be read from top to bottom.

An algorithm holds `policy`, the module that is sent to workers, and improves it: PPO by
`update(batch, version)` with what a collector delivers, SAC and DQN by `update(samples)` with what
a replay buffer draws. Both return metrics by name and have `state_dict` and `load_state_dict`.
"""

import sync  # noqa: F401 - before anything here that imports tensordict
