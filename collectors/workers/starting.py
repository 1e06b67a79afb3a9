"""Starts the workers of a `WorkerPool`, connects them to schemes, and replaces failed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from collectors.workers.handle import CannotReplace, WorkerHandle, failures_of
from sync import NoWeightSyncScheme
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, combine
from sync.local.waiting import awake_s


def start_all(pool: Any, handles: Sequence[WorkerHandle]) -> None:
    """Start these workers, and wait until each has its environments and version 0."""
    for handle in handles:
        with pool.news:
            pool.raise_if_closed()
            handle.failure, handle.moved_at = None, awake_s()
            handle.start(_spec(handle))
    await_all(pool, handles, lambda handle: handle.hello is not None)
    for handle in handles:
        _number_environments(pool, handle)
    connect(pool, handles)
    with pool.news:
        for handle in handles:
            handle.last_progress, handle.moved_at = None, awake_s()


def _spec(handle: WorkerHandle) -> Any:
    """What the worker is told: of the random frames, those that its predecessors left."""
    spec = handle.spec
    left = max(0, spec.options["random_frames"] - handle.earlier)
    return dataclasses.replace(spec, options={**spec.options, "random_frames": left})


def connect(pool: Any, handles: Sequence[WorkerHandle]) -> None:
    """Meet the workers' receivers; the worker's own error comes before the scheme's."""
    schemes = [
        scheme
        for scheme in pool.publisher.schemes.values()
        if not isinstance(scheme, NoWeightSyncScheme)
    ]
    try:
        for scheme in schemes:
            for handle in handles:
                scheme.describe_worker(handle.index, handle.described)
            if len(handles) == scheme.num_workers:
                scheme.connect()
                continue
            for handle in handles:
                scheme.connect(worker_idx=handle.index)
    except WorkerError:
        pool.wait(lambda: bool(failures_of(handles)), 0.5)
        if failures := failures_of(handles):
            raise combine(failures) from None
        raise
    await_all(pool, handles, lambda handle: handle.met)


def await_all(
    pool: Any, handles: Sequence[WorkerHandle], done: Callable[[WorkerHandle], bool]
) -> None:
    """Wait until `done` for all; raise for those that failed or did not get there."""
    timeout = pool.options.start_timeout
    pool.wait(lambda: all(done(h) or h.failure is not None for h in handles), timeout)
    pool.raise_if_closed()
    for handle in handles:
        if handle.failure is None and not done(handle):
            activity = handle.activity()
            text = f"{handle} was not ready within start_timeout={timeout:g} s: it {activity}"
            handle.failure = WorkerTimeout(handle.index, text)
    if failures := failures_of(handles):
        raise combine(failures)


def replace(pool: Any, handle: WorkerHandle) -> None:
    """Start a replacement for a failed worker. It may fail as well."""
    pool.raise_if_closed()
    try:
        with pool.ending:
            handle.make_way()
            pool.receive_the_rest(handle)
    except CannotReplace as error:
        assert handle.failure is not None
        handle.failure.add_note(str(error))
        raise handle.failure from None
    except Exception as error:  # noqa: BLE001 - whatever an engine raises: it costs a restart
        text = f"{handle} could not be replaced: {type(error).__name__}: {error}"
        with pool.news:
            pool.start_generation(handle)
            handle.failure = WorkerDied(handle.index, text)
        return
    with pool.news:  # threads that wait for an answer ask the new generation again
        pool.start_generation(handle)
    try:
        start_all(pool, [handle])
    except WorkerError as error:
        handle.failure = handle.failure or error


def _number_environments(pool: Any, handle: WorkerHandle) -> None:
    """Number the worker's environments after those of the workers before it."""
    assert handle.hello is not None
    count = handle.hello.num_envs
    if handle.first_env >= 0 and count != handle.num_envs:
        text = f"{handle} has {count} environments; the worker that it replaces had "
        raise WorkerRaised(handle.index, f"{text}{handle.num_envs}")
    handle.num_envs = count
    handle.first_env = sum(h.num_envs for h in pool.handles if h.index < handle.index)
