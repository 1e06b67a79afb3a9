"""The trainer's TCPStore, where its peers meet it."""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_LOOK_S = 0.01


def open_store(host: str, port: int, timeout: float) -> Any:
    """A store that listens at `host` alone; torch's own default is every interface.

    port: 0 takes a free one; `store.port` tells which.
    """
    try:
        listener = socket.create_server((socket.gethostbyname(host), port), backlog=128)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "the port is taken" if taken else str(error.strerror or error).lower()
        raise ConnectionError(f"no store can be opened at {host}:{port}: {why}") from None
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store owns the socket from here on, and closes it
    limit = timedelta(seconds=timeout)
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:  # this process is too busy to answer itself, say
        why = str(error).splitlines()[0]
        raise ConnectionError(f"no store can be opened at {host}:{port}: {why}") from None


def find_store(host: str, port: int, timeout: float, peer: int) -> Any:
    """The trainer's store, as peer number `peer` sees it, within `timeout`."""
    deadline, why = time.monotonic() + timeout, "there was no time"
    while (left := deadline - time.monotonic()) > 0:
        # torch would retry too, and print a page of warnings each time it fails.
        try:
            socket.create_connection((host, port), timeout=left).close()
            break
        except OSError as error:
            why = str(error.strerror or error).lower()
        time.sleep(_LOOK_S)
    else:
        raise ConnectionError(
            f"peer {peer}: no trainer answered at {host}:{port} within {timeout:g} s ({why}); is "
            "that its address, and did it open its engine?"
        )
    left = max(1.0, deadline - time.monotonic())
    opened: Future[Any] = Future()

    def open_it() -> None:
        try:
            limit = timedelta(seconds=left)
            opened.set_result(TCPStore(host, port, is_master=False, timeout=limit))
        except RuntimeError as error:
            opened.set_exception(error)

    # torch waits for the first answer without a limit, whatever its timeout.
    threading.Thread(target=open_it, name="lockstep-store", daemon=True).start()
    try:
        return opened.result(left)
    except (RuntimeError, TimeoutError) as error:
        said = str(error).splitlines()
        why = f" ({said[0]})" if said else ""
        raise ConnectionError(
            f"peer {peer}: the process that listens at {host}:{port} did not answer as a trainer "
            f"does within {timeout:g} s{why}; is that its address and port?"
        ) from None
