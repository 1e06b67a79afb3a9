"""Workers on other machines. Start with `base.py`, then `remote_handle.py` and `host.py`."""

import sync  # noqa: F401 - before anything here that imports tensordict
