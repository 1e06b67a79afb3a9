"""Collectors on several machines. Start with `base.py`, then `node_channel.py` and `node.py`."""
