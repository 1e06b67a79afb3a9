"""What a run of TRL's trainer leaves behind: a run directory that Lockstep's commands read.

    loader of the trainer   which answers each batch holds, and the weights that train on it
    callbacks               a record at each log of TRL, evaluations, the summary

Ages are counted where a batch is used. `policy/lag_*` counts versions, that is weight syncs, and
`policy/lag_updates_*` optimiser steps; `trl/staleness_mean` is TRL's own figure.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.utils import send_to_device
from transformers import TrainerCallback

from collectors.rollout.seeds import untouched_streams
from harness.logging import JsonlLogger
from harness.logging.events import TraceFile
from harness.measures.episodes import RECENT_EPISODES
from harness.measures.lags import Lags, lag_figures
from harness.measures.meters import split
from harness.measures.staleness import Staleness
from harness.run.provenance import manifest
from harness.run_directory import RunDir
from harness.saved_state import Stateful
from lockstep_check.ages import age
from lockstep_trl.sampler import SampledAnswer, Sampler, Writing
from lockstep_trl.worker import AnswerWorker, Stamped

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
EVALUATION = 1 << 40  # the batch number of evaluations, which no training reaches


class Loader:
    """The trainer's loader of batches, which says when the trainer gets each.

    look_ahead: iterate as accelerate does, which asks for a batch before the last one is used.
    """

    def __init__(self, loader: Any, record: RunRecord, *, look_ahead: bool):
        self._loader, self._record, self._look_ahead = loader, record, look_ahead
        self._collated: deque[list[SampledAnswer]] = deque()
        collate = loader.base_dataloader.collate_fn

        def noted(examples: list[Any]) -> Any:
            samples = [sample for row in examples[0] for sample in row.samples]
            self._collated.append([sample["metrics"].answer for sample in samples])
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
            self._record.used(self._collated.popleft())
            yield batch


class Watched:
    """The queue of another worker, such as TRL's own: its samples get their answers' records."""

    def __init__(self, rollouts: Any, record: RunRecord):
        self._rollouts, self._record, self._count = rollouts, record, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts, name)

    def get(self, *arguments: Any, **options: Any) -> Any:
        sample = self._rollouts.get(*arguments, **options)
        written = sample.completion_mask.astype(bool)
        answer = SampledAnswer(
            sample.input_ids[~written].tolist(),
            sample.input_ids[written].tolist(),
            sample.old_log_probs[written].tolist(),
            sample.metrics.get("reward", float("nan")),
            number=self._count,
            group=sample.group_id,
            versions=[(0, sample.model_version - 1)],
        )
        sample.metrics, self._count = Stamped(answer, **sample.metrics), self._count + 1
        self._record.acted(answer)
        self._record.taken(sample)
        return sample


class RunRecord(Stateful, TrainerCallback):
    """Follows one training, and writes its run directory if there is one.

    options: of config.yaml, beside the trainer's arguments.
    sampler, eval_prompts: for evaluations, at first, after every `eval_every`, and at the end.
    """

    STATE = ("counts", "lags", "staleness")

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
        self.look_ahead, self.writes_trace = look_ahead, trace and directory is not None
        self.versions_before = 0  # of the run that this one continues
        self.counts = dict.fromkeys(("taken", "dropped", "used", "answers"), 0)  # tokens; answers
        self.lags, self.staleness = Lags(), Staleness()  # of the tokens trained on
        self.scores: dict[str, float] = {}  # of the last evaluation
        self.saving: Callable[[Path], None] | None = None  # called with the folder of a checkpoint
        self._directory, self._options = directory, dict(options or {})
        self._eval_prompts = eval_prompts
        self._eval_every = 0 if eval_prompts is None else eval_every
        self._sampler = copy.copy(sampler) if eval_prompts is not None else None
        self._follows = False  # another worker, such as TRL's own
        self._fresh: list[SampledAnswer] = []  # used since the last record
        self._recent: deque[float] = deque(maxlen=RECENT_EPISODES)  # their rewards
        self._evaluated = -1
        self._metrics: JsonlLogger | None = None
        self._trace: TraceFile | None = None

    # -- joining a trainer

    def attach(self, trainer: Any) -> None:
        """Follow this trainer; before `trainer.train()`."""
        if trainer.accelerator.num_processes > 1:
            raise ValueError("lockstep_trl follows a trainer of one process, and this one has more")
        self.trainer = trainer
        self._follows = not isinstance(trainer.rollout_worker, AnswerWorker)
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

    # -- the life of versions and samples

    def published(self, version: int, checksum: str | None = None) -> None:
        """The trainer has sent this version."""
        step = self.trainer.state.global_step
        self.staleness.note(version, step, step)
        what = {"version": version, "update": step, "step": step, "checksum": checksum}
        self.trace("publish", worker=None, **what)

    def acted(self, answer: SampledAnswer, newest: int | None = None) -> None:
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
        length = len(answer.tokens)
        self.counts["taken"] += length
        stamp = sample.model_version - 1 + self.versions_before
        self.trace("take", sample=answer.number, version=stamp, length=length)
        answer.staleness = age(sample.model_version, self.trainer.model_version)
        if answer.staleness > args.max_staleness:
            reason = "stale"
        elif 0 < (args.token_budget or 0) < len(sample.input_ids):
            reason = "oversize"
        else:
            return
        self.counts["dropped"] += length
        self.trace("drop", sample=answer.number, reason=reason)

    def used(self, answers: list[SampledAnswer]) -> None:
        """The trainer gets these, to train on them with the weights as they are now."""
        update = self.trainer.state.global_step
        spans = np.array([span for answer in answers for span in answer.spans()])
        stamps = torch.from_numpy(np.repeat(spans[:, 0], spans[:, 2] - spans[:, 1]))
        self.lags.add_stamps(stamps, self.newest)
        self.staleness.add(stamps, update, gradient_steps=1, steps=update)
        self.counts["used"] += len(stamps)
        self.counts["answers"] += len(answers)
        self._fresh += answers
        for answer in answers:
            self.trace(
                "train",
                sample=answer.number,
                update=update + 1,
                step=update,
                epoch=0,
                age=answer.staleness,
                logprob=sum(answer.log_probs),
            )
        if self._trace is not None:
            self._trace.flush()

    def trace(self, event: str, **what: Any) -> None:
        """A line of the trace; there is one worker."""
        if self._trace is not None:
            line = {"worker": 0, **what, "time": round(time.time(), 6)}
            self._trace.write(event, **{k: v for k, v in line.items() if v is not None})

    # -- callbacks of the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open()
        if self._follows:
            self.published(self.newest)
        if self._eval_every and not state.global_step:
            self.evaluate()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._follows and state.global_step % args.weight_sync_steps == 0:
            self.published(self.newest)
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
        figures |= split({**self.lags.read(), **self.staleness.read()})[0]
        if self._fresh:
            rewards = [answer.reward for answer in self._fresh]
            figures["episode/return"] = float(np.nanmean(rewards))
            figures["episode/length"] = float(np.mean([len(one.tokens) for one in self._fresh]))
            self._recent.extend(rewards)
            self._fresh = []
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
        rewards = [answer.reward for answer in greedy]
        self.scores = {
            "eval/return": float(np.nanmean(rewards)),
            "eval/return_std": float(np.nanstd(rewards)),
            "eval/return_sampled": float(np.nanmean([answer.reward for answer in sampled])),
            "eval/length": float(np.mean([len(answer.tokens) for answer in greedy])),
        }
        self._write(self.scores)
        return self.scores

    # -- files

    def open(self) -> None:
        """Make the run directory, or go on in it; a second call does nothing."""
        if self._directory is None or self.run_dir is not None:
            return
        args, step, path = self.trainer.args, self.trainer.state.global_step, Path(self._directory)
        config = yaml.safe_dump(self._config(args), sort_keys=False)
        about = manifest(seed=args.seed, overrides=[])
        about["packages"] |= {name: metadata.version(name) for name in PACKAGES}
        if step and (path / "config.yaml").exists():
            self.run_dir = RunDir.reopen(path, config=config)
            self.run_dir.cut_metrics(self.counts["used"], self.counts["used"])
        elif RunDir(path).is_done():
            raise ValueError(f"run_dir={path} holds a finished run; name another directory")
        else:
            self.run_dir = RunDir.open(path, config=config, manifest=about)
        self._metrics = JsonlLogger(self.run_dir.metrics)
        if self.writes_trace:
            self._trace = TraceFile(self.run_dir.path)
            program = f"trl {metadata.version('trl')}"
            self._trace.begin(update=step, program=program, unit="tokens")

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

    def _write(self, metrics: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.log(self.counts["used"], metrics, {})

    def _end(self, error: BaseException | None) -> None:
        if self.run_dir is None or self._metrics is None:
            return
        steps = self.trainer.state.global_step
        summary: dict[str, Any] = {
            "frames": self.counts["used"],
            "updates": steps,
            "gradient_steps": steps,
            **self._frames(),
            **self.scores,
            **(lag_figures(self.lags.all) if self.lags.all else {}),
            **self.staleness.summary(),
        }
        if self._recent:
            summary["episode/return"] = float(np.nanmean(self._recent))
        state = "done" if error is None else "failed"
        if isinstance(error, KeyboardInterrupt):
            state = "interrupted"
        if self._trace is not None:
            self._trace.close()
        self._metrics.finish(summary, 0)
        self._metrics = self._trace = None
        self.run_dir.end(state, summary=summary, error=error)
