"""Collectors on several machines. Start with `base.py`, then `node_handle.py` and `node.py`."""
