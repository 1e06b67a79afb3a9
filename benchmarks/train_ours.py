"""Lockstep's own runs, as a contestant of the training benchmark: what `run.py` does.

The time is the run's own: from the moment all parts stand to the end of the last update, with its
metrics written to metrics.jsonl after every batch. It leaves out the start of the workers and the
evaluation, as it does for the others the making of environments and networks. What workers have
collected ahead when it starts is about what nobody has taken from them when it ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.train_case import SAC, Episodes, Trained, Training, ppo_settings, serve

SAC_BATCH_FRAMES = 16  # collected in turn with as many updates
RECORD_EVERY_FRAMES = {"ppo": 1, "pong": 1, "sac": 100}
IMAGES = ("env=atari", "env.kwargs.repeat_action_probability=0", "model=cnn")


def overrides(training: Training, options: dict[str, Any]) -> list[str]:
    """The command line of the run."""
    collector = options["collector"]
    return [
        f"algo={'sac' if training.algo == 'sac' else 'ppo'}",
        f"collector={collector}",
        f"sync={'none' if collector == 'single' else 'shared_mem'}",
        *(IMAGES if training.algo == "pong" else ("model=mlp",)),
        f"algo.compile={options.get('compile', False)}",
        "logger=jsonl",
        f"total_frames={training.frames}",
        f"seed={training.seed}",
        "num_threads=1",
        f"log_every_frames={RECORD_EVERY_FRAMES[training.algo]}",
        "evaluation.at_end=false",
        "checkpoint.at_end=false",
        *([] if collector == "single" else [f"collector.num_workers={options['num_workers']}"]),
        *(of_sac(training.frames) if training.algo == "sac" else of_ppo(training.algo, options)),
    ]


def of_ppo(algo: str, options: dict[str, Any]) -> list[str]:
    """Each batch is of as many environments and steps, however many workers make it."""
    ppo = ppo_settings(algo)
    own = [] if algo == "pong" else [f"env.id={ppo.env}", "model.activation=tanh"]
    makers = options["num_workers"] if options["collector"] == "multi_sync" else 1
    return [
        *own,
        f"env.num_envs={ppo.num_envs // makers}",
        f"collector.frames_per_batch={ppo.batch_frames}",
        f"model.hidden_sizes={list(ppo.hidden_sizes)}",
        f"algo.learning_rate={ppo.learning_rate}",
        "algo.anneal_learning_rate=true",
        f"algo.epochs={ppo.epochs}",
        f"algo.minibatch_size={ppo.minibatch_size}",
        f"algo.gamma={ppo.gamma}",
        f"algo.gae_lambda={ppo.gae_lambda}",
        f"algo.clip={ppo.clip}",
        "algo.clip_value=true",
        "algo.normalise_advantages=true",
        f"algo.entropy_weight={ppo.entropy_weight}",
        f"algo.value_weight={ppo.value_weight}",
        f"algo.max_grad_norm={ppo.max_grad_norm}",
    ]


def of_sac(frames: int) -> list[str]:
    return [
        f"env.id={SAC.env}",
        "env.num_envs=1",
        f"collector.frames_per_batch={SAC_BATCH_FRAMES}",
        f"model.hidden_sizes={list(SAC.hidden_sizes)}",
        "model.activation=relu",
        f"algo.learning_rate={SAC.policy_learning_rate}",
        f"algo.critic_learning_rate={SAC.critic_learning_rate}",
        f"algo.gamma={SAC.gamma}",
        f"algo.tau={SAC.tau}",
        f"algo.batch_size={SAC.batch_size}",
        f"algo.buffer_size={max(frames, SAC.batch_size)}",
        f"algo.learning_starts={SAC.learning_starts}",
        "algo.updates_per_frame=1",
        f"algo.policy_delay={SAC.policy_delay}",
        "algo.alpha=1",
        "algo.auto_alpha=true",
    ]


def read_episodes(lines: Iterable[str]) -> list[Episodes]:
    """What metrics.jsonl says of episodes; each record has the mean of those since the last."""
    episodes, counted = [], 0
    for line in lines:
        record = json.loads(line)
        if "episode/return" not in record:
            continue
        fresh, counted = int(record["episode/count"]) - counted, int(record["episode/count"])
        episodes.append(Episodes(int(record["step"]), float(record["episode/return"]), fresh))
    return episodes


def train(training: Training, options: dict[str, Any]) -> Trained:
    """Do the run in this process, as run.py would, and read what it left."""
    from harness.config.plan import plan_run
    from harness.run.run_lifetime import execute

    directory = Path(training.scratch) / "run"
    outcome = execute(replace(plan_run(overrides(training, options)), directory=directory))
    if outcome.state == "interrupted":
        sys.exit(outcome.exit_status)
    if outcome.state != "done":
        raise RuntimeError(json.loads((directory / "status.json").read_text())["error"])
    with (directory / "metrics.jsonl").open() as records:
        episodes = read_episodes(records)
    return Trained(outcome.summary["frames"], outcome.summary["wall_s"], episodes)


if __name__ == "__main__":
    serve(train)
