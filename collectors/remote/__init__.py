"""Collectors on several machines. Start with `collector.py`, then `seats.py` and `host.py`."""
