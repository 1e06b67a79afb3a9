"""What a run changes of its process, put back at its end: the next run here must not see it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from collectors.seeds import Streams


@contextmanager
def own_state(*, seed: int, num_threads: int) -> Iterator[None]:
    """Global random streams from `seed` and so many torch threads; what was before, afterwards."""
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
