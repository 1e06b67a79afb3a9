"""Worker processes on this machine: starting, supervising and talking to them."""
