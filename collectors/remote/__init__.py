"""Workers on other machines: `remote_collector.py` first, then `remote_handle.py` and `host.py`."""

import sync  # noqa: F401 - before anything here that imports tensordict
