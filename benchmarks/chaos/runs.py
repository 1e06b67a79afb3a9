"""The runs that chaos happens to: small, of every kind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

TROUBLE = "benchmarks.chaos.environments:Trouble-v0"
SMALL = {
    "env.num_envs": "4",
    "env.max_episode_steps": "30",
    "model.hidden_sizes": "[16]",
    "evaluation.num_episodes": "2",
    "collector.timeout_s": "30",
    "sync.timeout_s": "20",
    "logger": "jsonl",
}
PPO = {
    "algo": "ppo",
    "total_frames": "2048",
    "collector.frames_per_batch": "128",
    "algo.minibatch_size": "64",
    "algo.epochs": "1",
    "evaluation.every_frames": "768",
    "checkpoint.every_frames": "256",
}
SAC = {
    "algo": "sac",
    "env": "pendulum",
    "total_frames": "512",
    "collector.frames_per_batch": "32",
    "algo.learning_starts": "64",
    "algo.batch_size": "16",
    "algo.buffer_size": "1000",
    "algo.updates_per_frame": "0.25",
    "evaluation.every_frames": "192",
    "checkpoint.every_frames": "64",
}


@dataclass
class Run:
    """What one run is told."""

    options: dict[str, str] = field(default_factory=dict)
    troubled: dict[str, str] | None = None

    def __str__(self) -> str:
        given = ("algo", "sync", "collector", "collector.on_worker_failure")
        extra = ("collector.free_running", "env.vectorisation", "logger")
        found = [self.options[name] for name in given if name in self.options]
        found += [
            f"{name.split('.')[-1]}={self.options[name]}" for name in extra if name in self.options
        ]
        return " ".join(found)

    @property
    def restarts(self) -> bool:
        return self.options.get("collector.on_worker_failure") == "restart"

    @property
    def total_frames(self) -> int:
        return int(self.options["total_frames"])

    def trouble(self, where: str, what: str, at: int) -> None:
        """Put it into an environment that goes wrong."""
        self.troubled = {"where": where, "what": what, "at": str(at)}

    def resumed(self) -> list[str]:
        """What has to be said again when it goes on: that its environment's code may run."""
        return [f"env.id={TROUBLE}"] if self.troubled is not None else []

    def overrides(self, directory: Path, once: Path) -> list[str]:
        """The command line."""
        options = dict(self.options)
        if self.troubled is not None:
            options.pop("env", None)
            options["env.id"] = TROUBLE
            kwargs = {**self.troubled, "continuous": str(options["algo"] == "sac").lower()}
            kwargs["once"] = str(once)
            options["env.kwargs"] = (
                "{" + ",".join(f"{name}:{_quoted(value)}" for name, value in kwargs.items()) + "}"
            )
        groups = [f"{name}={value}" for name, value in options.items() if "." not in name]
        single = [f"{name}={value}" for name, value in options.items() if "." in name]
        return [*groups, *single, f"hydra.run.dir={directory}"]


def draw(rng: random.Random, *, workers: bool = False, ppo: bool = False) -> Run:
    """A run of any kind; with workers, or of PPO, if that is wanted."""
    sac = not ppo and rng.random() < 0.4
    collector = rng.choice(["multi_sync", "multi_async", "multi_async"])
    if not workers and rng.random() < 0.3:
        collector = "single"
    single = collector == "single"
    sync = rng.choice(["shared_mem", "multiprocess", "none" if single else "hogwild"])
    options = {**SMALL, **(SAC if sac else PPO), "collector": collector, "sync": sync}
    options["seed"] = str(rng.randrange(1000))
    if not single and rng.random() < 0.4:
        options["collector.on_worker_failure"] = "restart"
    if sac and not single and rng.random() < 0.3:
        options["collector.free_running"] = "true"
    if rng.random() < 0.15:
        options["env.vectorisation"] = "async"
        options["env.num_envs"] = "2"
    if rng.random() < 0.1:
        options["sync.blocking"] = "true"
    if rng.random() < 0.1:
        options["logger"] = rng.choice(["tensorboard", "wandb"])
    return Run(options)


def draw_remote(rng: random.Random, engine: str) -> Run:
    """A run of PPO whose workers are on two hosts, started by the run on this machine."""
    options = {**SMALL, **PPO, "collector": engine, "sync": engine}
    options["seed"] = str(rng.randrange(1000))
    if rng.random() < 0.5 and engine != "rpc":  # which cannot replace a host
        options["collector.on_worker_failure"] = "restart"
    if rng.random() < 0.3:
        options["collector.remote.asynchronous"] = "true"
    return Run(options)


def _quoted(value: str) -> str:
    return value if value in ("true", "false") or value.isdigit() else f"'{value}'"
