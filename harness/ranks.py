"""Ranks that a launcher started to collect: all but the first serve, and do no run of their own."""

from __future__ import annotations

import os
import signal

from harness.config import Config
from harness.config.hosts import JoiningConfig
from harness.config.remote import ranks


def collects_for_another(config: Config) -> bool:
    """Whether this process is a host of the run that rank 0 does."""
    remote = config.collector.remote
    launched = isinstance(remote, JoiningConfig) and remote.launcher != "local" and ranks()
    return bool(launched) and os.environ["RANK"] != "0"


def collect_for_another(config: Config) -> None:
    """Be a host until the trainer says stop, or is gone.

    It ends with its trainer, and not by the signals that launchers send to all ranks: the trainer
    needs its hosts to end a run with a checkpoint.
    """
    remote = config.collector.remote
    assert isinstance(remote, JoiningConfig)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if config.collector.name == "rpc":
        from collectors.remote.rpc import serve_rank
    else:
        from collectors.remote.distributed import serve_rank
    serve_rank(
        address=remote.address,
        timeout=remote.start_timeout_s,
        silence_s=config.collector.timeout_s,
    )
