"""Waiting for workers: for all at a time, no longer than was said, and not for the dead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from sync.errors import WorkerError
from sync.memory import SLICE_S, awake_s, wait_for
from sync.snapshot import NEVER

if TYPE_CHECKING:
    from sync.link import LinkEnd
    from sync.transport import Transport

LONGEST_S = 1e9  # every wait is bounded, and clocks do not count much further


def await_workers(
    transports: Iterable[Transport],
    done: Callable[[Transport], bool],
    timeout_s: float,
    bystanders: Collection[Transport] = (),
    link: LinkEnd | None = None,
) -> dict[int, WorkerError]:
    """Wait until every worker is `done`, has failed, has died or is overdue; return the failures.

    One poll watches all answers and all deaths; nothing waits longer than `timeout_s`. Bystanders
    are not waited for, but what they say meanwhile is collected, so that they are fed. What is due
    on a slow link meanwhile is moved on.
    """
    deadline = awake_s() + timeout_s
    transports = list(transports)
    failures: dict[int, WorkerError] = {}
    for transport in transports:
        transport.collect()
    pending = transports = [t for t in transports if t.failure is not None or not done(t)]
    for transport in transports:
        transport.expect(max(0, transport.addressed))
    try:
        while True:
            still = []
            for transport in pending:
                transport.collect()
            if link is not None:
                link.pump()
            for transport in pending:
                if transport.failure is None and not done(transport):
                    transport.judge()
                    if transport.failure is None:
                        still.append(transport)
                if transport.failure is not None:
                    failures[transport.worker_idx] = transport.failure
                    transport.expect(NEVER)  # the others need not wait for it before they ring
            if not still:
                return failures
            remaining = deadline - awake_s()
            if remaining <= 0:
                return failures | {t.worker_idx: t.overdue(timeout_s) for t in still}
            if still != pending:  # look once more: another may have finished meanwhile
                pending = still
                continue
            fds = {fd for t in still for fd in t.wait_fds()}
            if link is not None:
                fds.add(link.bell.fd)
            fds.update(*(t.news_fds() for t in bystanders))
            ready = wait_for(fds, min(remaining, SLICE_S))
            bells = {t.answer_bell for t in still if t.answer_bell is not None}
            for bell in bells if link is None else bells | {link.bell}:
                bell.silence()  # before anything is collected: a later ring must be heard
            for transport in still:
                if transport.watch is not None:
                    transport.watch.notice(ready)  # before another can take its number
            for transport in bystanders:
                transport.collect()
    finally:
        for transport in transports:
            transport.expect(NEVER)
