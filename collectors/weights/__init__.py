"""Moving weights from the trainer's policy to the policies of workers."""

import sync  # noqa: F401 - before anything here that imports tensordict
