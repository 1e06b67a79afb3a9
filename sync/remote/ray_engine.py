"""Calls over Ray: peers are actors, and any function runs in any actor.

    trainer                                    actor i
    -------                                    -------
    RayEngine([actor, ...])
    call(i, f, x)      --  task  ------->      a thread runs f(x)
    share(block)       --  one copy into the object store of this node
    call(i, f, shared) -- a reference -->      f(block): its node fetches the block once, and all
                                               actors of the node map the same memory

A small block is copied into each task instead, which takes about half as long.

The actors and the cluster are their owner's; the engine ends neither. An actor serves several calls
at a time if it was made with `max_concurrency` of 2 or more, or with concurrency groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from torch import Tensor

from sync.remote.engine import Engine, PeerDied
from sync.remote.pickled_calls import CallOutcome

_IN_TASK_BYTES = 96 << 10  # Ray puts an argument of more than 100 KiB into the store, each time

_NO_ACTOR = "there is no such actor"
LEFT = "this process is not connected to a Ray cluster any more"


def is_connected() -> bool:
    """Whether this process is in a cluster; if not, any call of Ray would start one."""
    import ray

    return bool(ray.is_initialized())


class RayEngine(Engine):
    """Over actor handles; `replace` puts another actor into a dead one's place.

    actors: None where there is none yet.
    """

    mechanism = "ray object store"
    hint = (
        "; an actor that is busy takes weights only if it was made with max_concurrency of 2 or "
        "more, or with a concurrency group for them"
    )

    def __init__(self, actors: Sequence[Any]):
        self._actors = list(actors)
        self._gone: dict[int, str] = {}

    @property
    def num_peers(self) -> int:  # type: ignore[override]
        return len(self._actors)

    def replace(self, peer: int, actor: Any) -> None:
        """From now on `actor` is peer number `peer`, which may also be one more than there were."""
        self._actors[peer : peer + 1] = [actor]
        self._gone.pop(peer, None)

    def share(self, block: Tensor) -> Any:
        if block.numel() <= _IN_TASK_BYTES:
            return block.numpy()
        if not is_connected():
            raise PeerDied(LEFT)
        import ray

        return ray.put(block.numpy())

    def call(self, peer: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        actor, answer = self._actors[peer], Future[Any]()
        why = _NO_ACTOR if actor is None else "" if is_connected() else LEFT
        if why:
            answer.set_exception(PeerDied(f"{self.describe(peer)} is gone: {why}"))
            return answer
        try:
            done = actor.__ray_call__.remote(_run, function, *args).future()
        except Exception as error:  # noqa: BLE001 - Ray is down, or the handle is another cluster's
            answer.set_exception(PeerDied(f"{self.describe(peer)} cannot be called: {error}"))
            return answer

        def hear(done: Future[Any]) -> None:
            error = done.exception()
            with contextlib.suppress(InvalidStateError):
                if error is None:
                    done.result().tell(answer, self.describe(peer))
                elif _is_death(error):
                    if self._actors[peer] is actor:
                        self._gone[peer] = _first_line(error)
                    text = f"{self.describe(peer)} is gone: {_first_line(error)}"
                    answer.set_exception(PeerDied(text))
                else:
                    answer.set_exception(error)

        done.add_done_callback(hear)
        return answer

    def gone(self, peer: int) -> str | None:
        if self._actors[peer] is None:
            return _NO_ACTOR
        return self._gone.get(peer) or (None if is_connected() else LEFT)

    def describe(self, peer: int) -> str:
        actor = self._actors[peer]
        return f"peer {peer}" + (f" (Ray actor {actor._actor_id.hex()[:12]})" if actor else "")

    def close(self) -> None:
        """Nothing to end: actors and cluster are their owner's."""


def _run(actor: Any, function: Callable[..., Any], *args: Any) -> CallOutcome:
    outcome = CallOutcome.of(function, args)
    if outcome.fine and isinstance(outcome.value, Future):
        return CallOutcome.of(outcome.value.result, ())
    return outcome


def _is_death(error: BaseException) -> bool:
    from ray import exceptions

    if isinstance(error, exceptions.RaySystemError):
        return error.traceback_str is None  # else an answer came that cannot be read here
    return isinstance(
        error,
        exceptions.RayActorError  # dead, or not to be reached for now
        | exceptions.ObjectLostError
        | exceptions.OwnerDiedError,
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1]) or type(error).__name__


def use_token_authentication(*, joins: bool = False) -> bool:
    """Have clusters that this process starts demand a token; call it before anything imports Ray.

    Ray reads the environment when it is imported. A variable that is set already is kept. If Ray is
    already imported, its own default applies: since 2.60 that is a token too, kept in the user's
    home directory. Returns whether the environment now asks for tokens.

    joins: the process joins a cluster that runs: it shows the token that the user has, if any.
    """
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
        has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ))
        if not joins or has_token or (Path.home() / ".ray" / "auth_token").exists():
            os.environ["RAY_AUTH_MODE"] = "token"
        if not joins and not has_token:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return os.environ.get("RAY_AUTH_MODE") == "token"
