"""Ranks that a launcher started: all but the first are hosts, which collect for rank 0."""

from __future__ import annotations

import os
import signal

from harness.options.collectors import JoiningCollectorConfig
from harness.options.run import Config


def collects_for_another(config: Config) -> bool:
    """Whether this process is a host of the run that rank 0 does."""
    collector = config.collector
    joins = isinstance(collector, JoiningCollectorConfig) and collector.joins_ranks
    return joins and os.environ["RANK"] != "0"


def collect_for_another(config: Config) -> None:
    """Run a host until the trainer stops it or is gone.

    It ignores the signals that launchers send to all ranks, because the trainer needs its hosts to
    end the run with a checkpoint.
    """
    assert isinstance(config.collector, JoiningCollectorConfig)
    remote = config.collector.remote
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
