"""docs/metrics.md: what each metric means.

    python -m harness.metric_reference > docs/metrics.md

`tests/docs/test_metrics.py` compares the names with those that runs log.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.metrics import PHASES, RECENT_EPISODES, SHARES
from harness.staleness import BUCKETS
from sync.stats import KEPT

COMMAND = "python -m harness.metric_reference > docs/metrics.md"

EPISODES = {
    "episode/return": "mean return of the episodes that ended, as the environment itself counts "
    f"it, below all wrappers. In the summary: of the last {RECENT_EPISODES} episodes",
    "episode/length": "their mean length in steps of the environment itself",
    "episode/count": "episodes that have ended since the start of the run",
    "episode/wrapped_return": "mean return with the rewards that the learner sees; logged once "
    "wrappers have changed a return",
    "eval/return": "mean return of the evaluation episodes, played with deterministic actions",
    "eval/return_std": "their standard deviation",
    "eval/length": "their mean length",
}
STALENESS = {
    "policy/version": "the newest published version",
    "policy/lag_mean": "lag in versions: between the weights that acted and the newest published "
    "ones, over the frames of the batches",
    "policy/lag_p95": "its 95th percentile",
    "policy/lag_max": "its maximum",
    "policy/lag_updates_mean": "lag in updates: between the weights that acted and the learner's, "
    "when it uses the frame. With a replay buffer, over the frames that are sampled",
    "policy/lag_updates_p95": "its 95th percentile",
    "policy/lag_updates_max": "its maximum",
    "policy/lag_publish_mean": "the part of it that comes from updates that were not published; "
    "0 with `sync.interval=1`",
    "policy/lag_queue_mean": "the rest of it: updates between the version that acted and the "
    "newest published one",
    "policy/lag_train_mean": "on top of it: how far the learner moves within an update, "
    "(n - 1) / 2n updates for n gradient steps",
    "policy/ess": "effective sample size of the importance weights (the learner's policy at the "
    "start of the update over the weights that acted), as a share of the frames. Of algorithms "
    "that report importance weights: PPO and IMPALA",
    "policy/kl": "estimated KL divergence of the two policies",
    "policy/ratio_max": "the largest importance weight",
    **{
        f"policy/{name}/{bucket}": f"{what} with a lag of {shown.rstrip('+')}"
        f"{' or more' if shown.endswith('+') else ''} updates"
        for name, what in {
            "ess": "`policy/ess` of the frames",
            "kl": "`policy/kl` of the frames",
            "ratio_max": "`policy/ratio_max` of the frames",
            "share": "share of the frames",
        }.items()
        for bucket, shown in BUCKETS.items()
    },
    "policy/mixed_batches": "batches whose frames come from more than one version, so far",
    "policy/dropped": "frames that the learner left out because they exceeded `algo.max_lag`, "
    "so far",
}
SYNC = {
    "sync/publish_ms": "mean time that a publish holds the learner up",
    "sync/ack_ms": "mean time from a publish until the worker's acknowledgement",
    "sync/apply_ms": "mean time that a worker takes to apply a version",
    "sync/bytes": "bytes published so far, as they travel",
    "sync/sends": "publishes so far",
    "sync/bytes_saved": "`sync.wire`: bytes that the wire format saved so far",
    "sync/wire_error": "`sync.wire`: root mean square error relative to that of the weights",
    "sync/wire_error_max": "`sync.wire`: the largest absolute error of a number",
    "sync/link_delay_ms": "`sync.link`: mean time from publication to arrival",
    "sync/link_in_flight": "`sync.link`: versions on the links now",
    "sync/link_coalesced": "`sync.link`: versions that a newer one replaced before they were sent",
    "sync/link_retransmitted": "`sync.link`: packets that were sent again",
    "sync/checked_calls": "`sync=hogwild`: policy calls that were checked for torn weights",
    "sync/torn_calls": "`sync=hogwild`: those of them whose weights changed during the call",
    "sync/tear_rate": "`sync=hogwild`: torn calls as a share of the checked ones",
    "sync/verified_calls": "`sync.verify`: policy calls whose weights were compared with what was "
    "published",
}
COLLECTOR = {
    "collector/fps": "frames per second since the last record",
    "collector/wait_ms": "time that the learner waited for batches since the last record",
    "collector/collected": "frames that workers have made",
    "collector/delivered": "frames that the learner has received",
    "collector/dropped": "frames that were discarded, for example with a worker that died",
    "collector/in_flight": "frames that are made and not delivered yet; "
    "`collected == delivered + dropped + in_flight`",
    "collector/preempted": "`collector.preemptive_threshold`: frames that workers had not made yet "
    "when the batch was taken",
    "sim/time_s": "`collector=simulated`: virtual time",
}
TRAINING = {
    "train/gradient_steps": "gradient steps of an update",
    "train/grad_norm": "norm of all gradients before clipping",
    "train/learning_rate": "the learning rate",
    "train/policy_loss": "loss of the policy",
    "train/value_loss": "PPO, IMPALA: loss of the value function",
    "train/entropy": "entropy of the policy",
    "train/explained_variance": "PPO, IMPALA: share of the returns' variance that the value "
    "function explains",
    "train/dropped": "PPO, IMPALA: frames of the batch that exceeded `algo.max_lag`",
    "train/epochs": "PPO: passes over the batch; fewer than `algo.epochs` after `algo.target_kl`",
    "train/approx_kl": "PPO: estimated KL divergence from the policy that the objective compares "
    "with",
    "train/clip_fraction": "PPO: share of the frames whose ratio the objective bounds",
    "train/update_kl": "PPO with `algo.target_kl`: estimated KL divergence from the policy at the "
    "start of the update",
    "train/critic_loss": "SAC: loss of the two critics",
    "train/alpha": "SAC: weight of the entropy",
    "train/loss": "DQN: loss of the action values",
    "train/epsilon": "DQN: probability of a random action",
    "train/q": "SAC, DQN: mean action value",
    "train/replay_frames": "SAC, DQN: frames in the replay buffer",
}
MACHINE = {
    **{
        f"time/{phase}_s": f"seconds that the learner's loop spent in `{phase}` since the last "
        "record. In the summary: of the whole run"
        for phase in PHASES
    },
    "system/cpu_s": "processor time of the trainer",
    "system/memory_mb": "the trainer's peak memory",
    "system/load": "load average of the machine over one minute",
    "system/cuda_memory_mb": "peak GPU memory of the trainer; only where it uses one",
}
SUMMARY = {
    "frames": "environment steps that the learner received",
    "updates": "batches that the learner learned from",
    "wall_s": "seconds in the learner's loop",
    "fps": "frames per second over the whole run",
    **{
        f"sync/{name}_{label}": f"percentile of `sync/{name}` over the newest {KEPT:,} "
        f"{'publishes' if name == 'publish_ms' else 'answers of each worker'}"
        for name in ("publish_ms", "ack_ms", "apply_ms")
        for label in SHARES
    },
    "workers": "statistics of the scheme for each worker",
    "moved": "versions and bytes by the mechanism that moved them",
}
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Returns": EPISODES,
    "Staleness": STALENESS,
    "Synchronisation": SYNC,
    "Frames": COLLECTOR,
    "Training": TRAINING,
    "Time and machine": MACHINE,
    "In summary.json only": SUMMARY,
}
INTRO = f"""# Every metric

Made by `{COMMAND}`.

Each line of `metrics.jsonl` is a record: `step` (frames so far), `time`, and the metrics since the
record before. `summary.json` holds the totals of the run. All loggers receive the same names. A
metric is left out of a record if there is nothing to report.

An *update* is one batch that the learner learns from. [Versions, lag and schedules](staleness.md)
defines lag. With `sync=none` and `sync=hogwild` the policy acts with the learner's own memory, so
its weights may be newer than their version: lag in updates is then an upper bound. Random actions
have no version and are not counted."""


def reference() -> str:
    """The page."""
    parts = [INTRO]
    for title, metrics in GROUPS.items():
        rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in metrics.items())
        parts.append(f"## {title}\n\n| metric | meaning |\n|---|---|\n{rows}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(reference())
