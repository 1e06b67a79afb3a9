"""Sets the random streams and thread count of one run, and restores them after it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from collectors.rollout.seeds import Streams


@contextmanager
def own_state(*, seed: int, num_threads: int) -> Iterator[None]:
    """Seed the global random streams and set torch's thread count; restore both afterwards."""
    streams, threads = Streams(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        streams.resume()
