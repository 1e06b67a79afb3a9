"""What limits the speed of a run: learner, environments, weight synchronisation or logging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LESS_LOG = "record and save less often (log_every_frames, checkpoint)"
CHEAPER_UPDATES = "make updates cheaper (larger minibatches, fewer epochs, device=cuda)"
RARER_VERSIONS = "publish less often (sync.interval), or apply once a batch (sync.apply_at=batch)"
MORE_FRAMES = {
    "single": "collect with several workers (collector=multi_async)",
    "multi_sync": "add workers, or let them act during updates (collector=multi_async)",
    "simulated": "simulate less: this process computes the frames of all virtual workers",
}
MORE_WORKERS = "add workers or environments (collector.num_workers, env.num_envs)"
RUN_AHEAD = "let workers, which wait as well, run ahead (collector.batches_ahead, sync.max_lag)"


class Bottleneck(NamedTuple):
    """The word for it, the figure behind it, and what would make the run faster."""

    name: str
    reason: str
    advice: str


def verdict(
    phases: Mapping[str, float], workers: Mapping[str, float], collector: str = ""
) -> Bottleneck | None:
    """From the shares of the learner's time, and of the workers' time if that is known.

    phases: collect, train, sync and log. workers: acting, waiting and applying. None if nothing was
    measured.
    """
    if not any(phases.values()):
        return None
    largest = max(phases, key=lambda name: phases[name])
    share = f"{phases[largest]:.0%}"
    waiting, applying = workers.get("waiting", 0.0), workers.get("applying", 0.0)
    if largest == "log":
        reason = f"logging and evaluation take {share} of the learner's time"
        return Bottleneck("log-bound", reason, LESS_LOG)
    if largest == "train":
        reason = f"updates take {share} of the learner's time"
        if waiting > 0:
            reason += f", and workers wait {waiting:.0%} of theirs"
        return Bottleneck("learner-bound", reason, CHEAPER_UPDATES)
    if largest == "sync":
        reason = f"publishing takes {share} of the learner's time"
        return Bottleneck("sync-bound", reason, RARER_VERSIONS)
    if applying > max(workers.get("acting", 0.0), waiting):
        reason = f"workers spend {applying:.0%} of their time on new weights"
        return Bottleneck("sync-bound", reason, RARER_VERSIONS)
    advice = MORE_FRAMES.get(collector, RUN_AHEAD if waiting > 0.5 else MORE_WORKERS)
    return Bottleneck(
        "environment-bound", f"the learner waits {share} of its time for frames", advice
    )
