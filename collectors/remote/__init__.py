"""Collectors on several machines. Start with `base.py`, then `node_handle.py` and `node.py`."""

import sync  # noqa: F401 - before anything here that imports tensordict
