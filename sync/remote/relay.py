"""Large blocks go from peer to peer, so that the trainer sends a version to two of many.

    trainer                   peer 0                       peer 2
    -------                   ------                       ------
    the block    -------->    keeps it, applies it
    "peer 0 has it"  ----------------------------->        take_and_deliver
                              give           <--------     asks peer 0
                              the block      -------->     keeps it, applies it
                 <---------------------------------        its answer, as always

Only blocks take that way: calls, answers and their times are between the trainer and each worker,
as without it. Who cannot get the block there says so, and the trainer sends it after all; so a
peer that hands nothing on costs others time and no version.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch import Tensor

from sync.remote.engine import Route
from sync.remote.inbox import MISSING, Answer, close_inbox, deliver
from sync.remote.wire import Later

CHILDREN = 2  # whom one hands a block to
LEAST_WORKERS = 5  # with fewer, two from the trainer and two from one of them win no time
LEAST_BYTES = 2**18  # below, a handover costs more than it saves


def pays(num_workers: int, nbytes: int) -> bool:
    """Whether so large a block reaches so many sooner from each other than from the trainer."""
    return num_workers >= LEAST_WORKERS and nbytes >= LEAST_BYTES


def parent(worker: int) -> int | None:
    """Who hands a block to this worker; None: the trainer does."""
    return worker // CHILDREN - 1 if worker >= CHILDREN else None


def has_children(worker: int, num_workers: int) -> bool:
    """Whether it hands blocks to others."""
    return CHILDREN * (worker + 1) < num_workers


class Errand(NamedTuple):
    """Which block of which scheme, for which worker."""

    key: str
    version: int
    worker: int
    keep: bool  # for others, who will ask
    patience_s: float  # for a worker that has not come yet


def keep_and_deliver(block: Tensor, errand: Errand) -> Answer | Later:
    """Give a worker of this process a block, and others the chance to ask for it."""
    if errand.keep:
        with _changed:
            # A copy: the worker may write to what it is given.
            _kept[errand.key, errand.worker] = errand.version, block.clone()
            _changed.notify_all()
    return deliver(block, errand.key, errand.worker, errand.patience_s)


def take_and_deliver(route: Route, giver: int, wait_s: float, errand: Errand) -> Answer | Later:
    """Ask another peer for the block, waiting so long at most, and give it to a worker here."""
    try:
        asked = route.call(give, errand.key, giver, errand.version, wait_s)
        block: Tensor | None = asked.result(wait_s)
    except Exception:  # noqa: BLE001 - it may be dead, or out of reach: then the trainer is asked
        block = None
    if block is None:
        return Answer(MISSING)
    return keep_and_deliver(block, errand)


def give(key: str, giver: int, version: int, wait_s: float) -> Tensor | None:
    """The block of this version, once it has come; None if it does not, or is not kept any more."""
    place = key, giver
    with _changed:
        _changed.wait_for(lambda: place in _kept and _kept[place][0] >= version, wait_s)
        found, block = _kept.get(place, (None, None))
        return block if found == version else None


def close(key: str, worker: int) -> None:
    """The trainer says that nothing more will come."""
    forget(key, worker)
    close_inbox(key, worker)


def forget(key: str, worker: int) -> None:
    """Nobody will ask for this worker's blocks any more."""
    with _changed:
        _kept.pop((key, worker), None)


_changed = threading.Condition()
_kept: dict[tuple[str, int], tuple[int, Tensor]] = {}
