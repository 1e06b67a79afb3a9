"""Virtual workers in virtual time: their costs, their network, and the collector that runs them."""

import sync  # noqa: F401 - before anything here that imports tensordict
