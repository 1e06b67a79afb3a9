"""What a run of TRL's trainer leaves behind: a run directory that Lockstep's commands read.

    loader of the trainer   which answers each batch holds, and the weights that train on it
    callbacks               a record at each log of TRL, evaluations, the summary

Ages are counted where a batch is used. `policy/lag_*` counts versions, that is weight syncs, and
`policy/lag_updates_*` optimiser steps; `trl/staleness_mean` is TRL's own figure.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate.utils import send_to_device
from transformers import TrainerCallback

from collectors.rollout.seeds import untouched_streams
from harness.measures.metrics import lag_figures
from harness.run.directory import RunDir
from harness.run.provenance import manifest
from lockstep_check.ages import age
from lockstep_check.events import FILE, FORMAT
from lockstep_trl.sampler import Sampler, Writing
from lockstep_trl.worker import Answer, Stamped, Worker

NAMES = {  # what TRL logs, and Lockstep's names
    "loss": "train/policy_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "train/entropy",
    "clip_ratio/region_mean": "train/clip_fraction",
    "kl": "policy/kl",
    "sample/staleness_mean": "trl/staleness_mean",
    "sample/staleness_max": "trl/staleness_max",
    "sample/dropped_stale_total": "trl/dropped_stale_total",
}
# The trainer's arguments that change what is learned.
ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_steps", "num_generations", "max_completion_length"),
    *("temperature", "epsilon", "epsilon_high", "max_staleness", "weight_sync_steps"),
    "token_budget",
)
PACKAGES = ("trl", "transformers", "accelerate", "datasets")
_BY_WORKER = ("applied", "act", "enqueue", "take", "train", "drop")
EVALUATION = 1 << 40  # the batch number of evaluations, which no training reaches


class Loader:
    """The trainer's loader of batches, which says when the trainer gets each.

    look_ahead: iterate as accelerate does, which asks for a batch before the last one is used.
    """

    def __init__(self, loader: Any, record: RunRecord, *, look_ahead: bool):
        self._loader, self._record, self._look_ahead = loader, record, look_ahead
        collate = loader.base_dataloader.collate_fn

        def noted(examples: list[Any]) -> Any:
            record.collated(examples[0])
            return collate(examples)

        loader.base_dataloader.collate_fn = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._loader)
        if not self._look_ahead:
            device = self._record.trainer.accelerator.device
            batches = (send_to_device(one, device) for one in self._loader.base_dataloader)
        for batch in batches:
            self._record.used()
            yield batch


class Watched:
    """The queue of another worker, such as TRL's own: its samples get their answers' records."""

    def __init__(self, rollouts: Any, record: RunRecord):
        self._rollouts, self._record, self._count = rollouts, record, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts, name)

    def get(self, *arguments: Any, **options: Any) -> Any:
        sample = self._rollouts.get(*arguments, **options)
        chances = sample.old_log_probs[sample.completion_mask.astype(bool)].tolist()
        metrics = Stamped(sample.metrics)
        metrics.answer = Answer(
            self._count,
            sample.group_id,
            [(0, sample.model_version - 1)],
            chances,
            sample.metrics.get("reward", float("nan")),
        )
        sample.metrics, self._count = metrics, self._count + 1
        self._record.acted(metrics.answer)
        self._record.taken(sample)
        return sample


class RunRecord(TrainerCallback):
    """Follows one training, and writes its run directory if there is one.

    options: of config.yaml, beside the trainer's arguments.
    sampler, eval_prompts: for evaluations, at first, after every `eval_every`, and at the end.
    """

    def __init__(
        self,
        directory: str | Path | None,
        options: Mapping[str, Any] | None = None,
        *,
        sampler: Sampler | None = None,
        eval_prompts: Any = None,
        eval_every: int = 0,
        trace: bool = False,
        look_ahead: bool = True,
    ):
        self.trainer: Any = None
        self.run_dir: RunDir | None = None
        self.look_ahead = look_ahead
        self.versions_before = 0  # of the run that this one continues
        # Of the tokens trained on: ages in versions and in optimiser steps, and TRL's figures.
        self.ages, self.ages_updates = Counter[int](), Counter[int]()
        self.counts = Counter[str]()  # tokens taken, dropped, used; answers used
        self._directory = None if directory is None else Path(directory)
        self._options = dict(options or {})
        self._eval_every = 0 if eval_prompts is None else eval_every
        self._sampler = copy.copy(sampler) if eval_prompts is not None else None
        self._eval_prompts, self.writes_trace = eval_prompts, trace
        self._ended = self._follows = False  # follows another worker, such as TRL's own
        self._logged: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        self.saving: Callable[[Path], None] | None = None  # called with the folder of a checkpoint
        self._collated: deque[list[Answer]] = deque()
        self._returns: list[float] = []
        self._recent: deque[float] = deque(maxlen=100)
        self.scores: dict[str, float] = {}  # of the last evaluation
        self._evaluated = -1

    # -- joining a trainer

    def attach(self, trainer: Any) -> None:
        """Follow this trainer; before `trainer.train()`."""
        if trainer.accelerator.num_processes > 1:
            raise ValueError("lockstep_trl follows a trainer of one process, and this one has more")
        self.trainer = trainer
        self._follows = not isinstance(trainer.rollout_worker, Worker)
        if self._follows:
            trainer.rollout_queue = Watched(trainer.rollout_queue, self)
        if self._sampler is not None:
            self._sampler.model = copy.deepcopy(self._sampler.model)
        loader, stop = trainer.get_train_dataloader, trainer.rollout_worker.stop
        trainer.get_train_dataloader = lambda: Loader(loader(), self, look_ahead=self.look_ahead)

        def stopped() -> None:  # after the last update, and after an error
            try:
                stop()
            finally:
                self._end(sys.exc_info()[1])

        trainer.rollout_worker.stop = stopped
        trainer.add_callback(self)

    @property
    def in_flight(self) -> int:
        """Tokens that were taken and are neither dropped nor used."""
        return self.counts["taken"] - self.counts["dropped"] - self.counts["used"]

    @property
    def newest(self) -> int:
        """The version published last; TRL counts from 1."""
        return int(self.trainer.model_version) - 1 + self.versions_before

    # -- the life of a sample

    def acted(self, answer: Answer, newest: int | None = None) -> None:
        """A worker wrote this answer, and it waits in the queue."""
        for version, start, end in answer.spans():
            self.trace(
                "act",
                sample=answer.number,
                version=version,
                length=end - start,
                cache=answer.versions[0][1],
                logprob=sum(answer.log_probs[start:end]),
            )
        self.trace("enqueue", sample=answer.number, newest=newest)

    def taken(self, sample: Any) -> None:
        """The trainer takes a sample from the queue; what is too old or too long, TRL drops."""
        answer, args = sample.metrics.answer, self.trainer.args
        self.counts["taken"] += answer.length
        stamp = sample.model_version - 1 + self.versions_before
        self.trace("take", sample=answer.number, version=stamp, length=answer.length)
        answer.staleness = age(sample.model_version, self.trainer.model_version)
        if answer.staleness > args.max_staleness:
            reason = "stale"
        elif 0 < (args.token_budget or 0) < len(sample.input_ids):
            reason = "oversize"
        else:
            return
        self.counts["dropped"] += answer.length
        self.trace("drop", sample=answer.number, reason=reason)

    def collated(self, rows: list[Any]) -> None:
        """A batch is put together."""
        samples = [sample for row in rows for sample in row.samples]
        self._collated.append([sample["metrics"].answer for sample in samples])

    def used(self) -> None:
        """The trainer gets the next batch, to train on it with the weights as they are now."""
        update = self.trainer.state.global_step
        for answer in self._collated.popleft():
            self.counts["used"] += answer.length
            self.counts["answers"] += 1
            self._returns.append(answer.reward)
            for version, start, end in answer.spans():
                lag, between = age(version, self.newest), self.trainer.args.weight_sync_steps
                self.ages[lag] += end - start
                self.ages_updates[lag * between + update % between] += end - start
            self.trace(
                "train",
                sample=answer.number,
                update=update + 1,
                step=update,
                epoch=0,
                age=answer.staleness,
                logprob=sum(answer.log_probs),
            )

    # -- callbacks of the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open()
        if self._follows:
            self._note_version()
        if self._eval_every and not state.global_step:
            self.evaluate()

    def _note_version(self) -> None:
        """Another worker's version was published."""
        step = self.trainer.state.global_step
        self.trace("publish", version=self.newest, update=step, step=step)

    def open(self) -> None:
        """Make the run directory, or go on in it; a second call does nothing."""
        if self._directory is None or self.run_dir is not None:
            return
        args, step = self.trainer.args, self.trainer.state.global_step
        config = yaml.safe_dump(self._config(args), sort_keys=False)
        about = manifest(seed=args.seed, overrides=[])
        about["packages"] |= {name: metadata.version(name) for name in PACKAGES}
        if step and (self._directory / "config.yaml").exists():
            self.run_dir = RunDir.reopen(self._directory, config=config)
            self.run_dir.cut_metrics(self.counts["used"], self.counts["used"])
            self.trace("resume", update=step)
        else:
            self.run_dir = RunDir.open(self._directory, config=config, manifest=about)
            self._directory = self.run_dir.path
            self.trace(
                "trace", format=FORMAT, program=f"trl {metadata.version('trl')}", unit="tokens"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._follows and state.global_step % args.weight_sync_steps == 0:
            self._note_version()
        if self._eval_every and state.global_step % self._eval_every == 0:
            self.evaluate()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saving is not None:
            self.saving(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        figures = {ours: logs[theirs] for theirs, ours in NAMES.items() if theirs in logs}
        ages, updates = self.ages - self._logged[0], self.ages_updates - self._logged[1]
        if ages:
            figures |= _figures(ages, updates)
        self._logged = (self.ages.copy(), self.ages_updates.copy())
        if self._returns:
            figures["episode/return"] = float(np.nanmean(self._returns))
            figures["episode/length"] = ages.total() / len(self._returns)
            self._recent.extend(self._returns)
            self._returns = []
        self._write({**figures, **self._frames()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._sampler is not None and self._evaluated != state.global_step:
            self.evaluate()
        self._end(None)

    # -- evaluation

    def evaluate(self) -> dict[str, float]:
        """Fresh answers of the newest weights to prompts that training does not see."""
        if self._sampler is None:
            raise ValueError("no evaluation: there are no eval_prompts")
        args, model = self.trainer.args, self._sampler.model
        writing = Writing(1, args.max_completion_length, args.temperature, args.seed)
        sent = dict(self.trainer.accelerator.unwrap_model(self.trainer.model).named_parameters())
        with untouched_streams():
            for name, parameter in model.named_parameters():
                parameter.data.copy_(sent[name].detach())
            greedy, sampled = (
                self._sampler.answer(list(self._eval_prompts), writing, EVALUATION, greedy=one)
                for one in (True, False)
            )
        self._evaluated = self.trainer.state.global_step
        self.scores = {
            "eval/return": float(np.nanmean(greedy.rewards)),
            "eval/return_std": float(np.nanstd(greedy.rewards)),
            "eval/return_sampled": float(np.nanmean(sampled.rewards)),
            "eval/length": float(np.mean([len(one) for one in greedy.tokens])),
        }
        self._write(self.scores)
        return self.scores

    # -- files

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs to know."""
        return {"counts": self.counts, "ages": self.ages, "ages_updates": self.ages_updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        for name in ("ages", "ages_updates"):
            setattr(self, name, Counter({int(age): n for age, n in state[name].items()}))
        self._logged = (self.ages.copy(), self.ages_updates.copy())

    def trace(self, event: str, **what: Any) -> None:
        """A line of the trace, in the format of `lockstep_check`."""
        if not self.writes_trace or self._directory is None:
            return
        if event in _BY_WORKER:
            what = {"worker": 0, **what}
        line = {"event": event, **what, "time": round(time.time(), 6)}
        with (self._directory / FILE).open("a") as file:
            file.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")

    def _frames(self) -> dict[str, float]:
        return {
            "episode/count": self.counts["answers"],
            "policy/version": self.newest,
            "collector/collected": self.counts["taken"],
            "collector/delivered": self.counts["used"],
            "collector/dropped": self.counts["dropped"],
            "collector/in_flight": self.in_flight,
        }

    def _config(self, args: Any) -> dict[str, Any]:
        chosen = {name: getattr(args, name, None) for name in ARGUMENTS}
        chosen = {name: getattr(value, "value", value) for name, value in chosen.items()}  # enums
        plain = {
            key: value for key, value in chosen.items() if isinstance(value, int | float | str)
        }
        return {"seed": args.seed, "framework": "TRL", **self._options, "trl": plain}

    def _write(self, metrics: Mapping[str, Any]) -> None:
        if self.run_dir is not None:
            known = {key: value for key, value in metrics.items() if value is not None}
            line = {"step": self.counts["used"], "time": round(time.time(), 3), **known}
            with self.run_dir.metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _end(self, error: BaseException | None) -> None:
        if self._ended or self.run_dir is None:
            return
        self._ended = True
        summary: dict[str, Any] = {
            "frames": self.counts["used"],
            "updates": self.trainer.state.global_step,
            "gradient_steps": self.trainer.state.global_step,
            **self._frames(),
            **self.scores,
        }
        if self.ages:
            summary |= _figures(self.ages, self.ages_updates)
        if self._recent:
            summary["episode/return"] = float(np.nanmean(self._recent))
        state = "done" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt):
            state = "interrupted"
        self.run_dir.end(state, summary=summary, error=error)


def _figures(ages: Counter[int], updates: Counter[int]) -> dict[str, float]:
    """Ages in versions and in updates, each of which is one gradient step."""
    names = ("policy/lag_updates", "policy/lag_steps")
    return lag_figures(ages) | lag_figures(updates, names[0]) | lag_figures(updates, names[1])
