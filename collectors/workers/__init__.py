"""Worker processes on this machine: starting, supervising and talking to them."""

import sync  # noqa: F401 - before anything here that imports tensordict
