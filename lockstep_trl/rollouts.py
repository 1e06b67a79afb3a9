"""The parts of a training with a lag, joined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from collectors.schedule.recording import Header, RecordedSchedule, ScheduleFile
from harness.files import MOST_BYTES_YAML, parse_yaml, read_text
from lockstep_trl import on_cpu
from lockstep_trl.run import RunRecord
from lockstep_trl.sampler import Reward, Sampler, Writing
from lockstep_trl.supported import check_trl
from lockstep_trl.transfer import Transfer
from lockstep_trl.worker import Worker
from sync import Lag, Tear

SCHEDULE, STATE = "schedule.jsonl", "lockstep"  # files of a run, and of a checkpoint
_NAMES = {
    "model": "the first weights",
    "num_steps": "max_completion_length",
    "num_envs": "answers in a batch:",
    "seed": "seed",
}


def _recorded_look_ahead(config: Path, otherwise: bool) -> bool:
    """What a recorded run had, if its config says it."""
    recorded = parse_yaml(read_text(config, MOST_BYTES_YAML)) if config.is_file() else {}
    collector = recorded.get("collector") if isinstance(recorded, dict) else None
    found = collector.get("look_ahead") if isinstance(collector, dict) else None
    return found if isinstance(found, bool) else otherwise


class LockstepRollouts:
    """A rollout worker and a weight transfer for TRL's `AsyncGRPOTrainer`.

        rollouts = LockstepRollouts(model, prompts, reward, lag=4, run_dir="outputs/trl/lag=4")
        trainer = AsyncGRPOTrainer(
            model=model, args=args, train_dataset=prompts, reward_funcs=reward,
            rollout_worker=rollouts.worker, weight_transfer=rollouts.transfer,
        )
        rollouts.attach(trainer)
        trainer.train()

    model: the name or folder that the trainer gets.
    prompts: rows with a column `prompt`, answered in their order, over and over.
    rewards: one function, or several whose values are added; called as TRL calls them.
    lag: how many weight syncs the weights that write an answer are old when it is trained on: a
        number or a `Lag`. With `free`, on top of the lag that arises.
    free: a thread writes answers as fast as it can, and the schedule is recorded.
    replay: a run directory, or a file of a schedule: the same versions as in that run.
    tear, wire: as in `sync`.
    look_ahead: whether the trainer asks for a batch before the last one is used, as accelerate
        does, which adds one update to the lag. By default with `free`; in a replay, as recorded.
    size: how many prompts are answered at once: one batch of the schedule.
    queue_batches: with `free`, how many such batches may wait.
    apply_at: with `free`, take new weights before each `answer`, or before each `token`.
    eval_prompts, eval_every: what is evaluated with the newest weights, at first, after so many
        updates, and at the end.
    run_dir, options, trace: what is recorded where; `options` are added to config.yaml.
    """

    def __init__(
        self,
        model: str | Path,
        prompts: Any,
        rewards: Reward | Sequence[Reward],
        *,
        lag: Lag | int = 0,
        free: bool = False,
        replay: str | Path | None = None,
        tear: Tear | None = None,
        wire: str = "float32",
        look_ahead: bool | None = None,
        size: int = 1,
        queue_batches: int = 4,
        apply_at: Literal["answer", "token"] = "answer",
        eval_prompts: Any = None,
        eval_every: int = 0,
        run_dir: str | Path | None = None,
        options: dict[str, Any] | None = None,
        trace: bool = False,
    ):
        check_trl()
        on_cpu.install()
        self.lag = Lag.of(lag)
        if replay is not None and (free or self.lag is not None):
            raise ValueError(
                "replay: the recorded run has its own versions; leave lag and free out"
            )
        exact = not free and replay is None
        look_ahead = not exact if look_ahead is None else look_ahead
        self._replay = None
        if replay is not None:
            path = Path(replay)
            self._replay = RecordedSchedule(path / SCHEDULE if path.is_dir() else path)
            look_ahead = _recorded_look_ahead(
                self._replay.path.with_name("config.yaml"), look_ahead
            )
        self.transfer = Transfer(self.lag, tear, wire, keep_all=replay is not None)
        loaded = AutoModelForCausalLM.from_pretrained(model)
        sampler = Sampler(loaded, AutoTokenizer.from_pretrained(model), prompts, rewards)
        self.worker: Any = Worker(
            self.transfer,
            sampler,
            size=size,
            free=free,
            replay=self._replay,
            queue_batches=queue_batches,
            apply_at=apply_at,
        )
        self._size = size
        mechanism: dict[str, Any] = {
            "sync": {"lag": lag if isinstance(lag, int) else str(lag), "wire": wire},
            "collector": {
                "name": "exact" if exact else "free" if free else "replay",
                "replay": None if replay is None else str(replay),
                "look_ahead": look_ahead,
            },
        }
        if tear is not None:
            mechanism["sync"]["tear"] = str(tear)
        name = Path(model).name.strip(".")
        base = {"algo": {"name": "grpo"}, "env": {"id": "trl"}, "model": {"name": name}}
        self.record = RunRecord(
            run_dir,
            {**base, **mechanism, **(options or {})},
            sampler=sampler,
            eval_prompts=eval_prompts,
            eval_every=eval_every,
            trace=trace,
            look_ahead=look_ahead,
        )
        self._sampler = sampler
        self._exact, self._resumable = exact, exact and not look_ahead

    def attach(self, trainer: Any) -> None:
        """Join the trainer that got `worker` and `transfer`; before `trainer.train()`."""
        if (
            trainer.rollout_worker is not self.worker
            or trainer.weight_transfer is not self.transfer
        ):
            raise ValueError(
                "attach: make the trainer with rollout_worker=rollouts.worker and "
                "weight_transfer=rollouts.transfer"
            )
        args = trainer.args
        for name, values in (
            *(("top_p", (1.0,)), ("top_k", (0, None)), ("min_p", (None,))),
            ("repetition_penalty", (1.0,)),
        ):
            if getattr(args, name) not in values:
                raise ValueError(
                    f"{name}={getattr(args, name)}: this worker has {name}={values[0]}"
                )
        self._check_lag(args)
        self._check_batches(args)
        self._trainer = trainer
        self._sampler.model.to(args.device, trainer.model.dtype)
        worker, transfer, record = self.worker, self.transfer, self.record
        worker.writing = Writing(
            args.num_generations, args.max_completion_length, args.temperature, args.seed
        )
        worker.record, worker.ready, transfer.begin = record, self._ready, self._begin
        transfer.keeps_recent = self._resumable and args.save_strategy != "no"
        record.saving = self._save
        record.attach(trainer)

    def _check_batches(self, args: Any) -> None:
        if args.token_budget is None:
            raise ValueError(
                "token_budget is not set, and TRL would ask a vLLM server for it: "
                "set token_budget=-1"
            )
        if not self._exact:
            return
        if args.token_budget > 0:
            raise ValueError(
                f"token_budget={args.token_budget}: a sample that does not fit waits for the next "
                "update, older than the lag; set token_budget=-1"
            )
        used = args.per_device_train_batch_size * args.gradient_accumulation_steps
        written = self._size * args.num_generations
        if used % written:
            raise ValueError(
                f"size={self._size}, num_generations={args.num_generations}: {written} answers are "
                f"written at once, and an update uses {used}; the rest would be older than the lag"
            )

    def _check_lag(self, args: Any) -> None:
        versions = args.max_steps // args.weight_sync_steps
        if self.lag is not None and args.max_steps > 0 and self.lag.smallest >= versions:
            raise ValueError(
                f"lag={self.lag.smallest}: the run publishes {versions} versions, so all answers "
                "would be those of the first weights"
            )
        if self.lag is not None and self.lag.largest > args.max_staleness:
            raise ValueError(
                f"max_staleness={args.max_staleness}: TRL would drop what is older, and the lag is "
                f"up to {self.lag.largest}; set max_staleness={self.lag.largest} or more"
            )

    # -- called in the course of a training

    def _begin(self) -> None:
        """Before the first version is sent."""
        if self._trainer.state.global_step:
            self._restore()
        self.record.open()
        if self.record.writes_trace:
            self.transfer.trace = self._trace_publish

    def _trace_publish(self, event: str, **what: Any) -> None:
        step = self._trainer.state.global_step
        self.record.trace(event, update=step, step=step, **what)

    def _ready(self) -> None:
        """The first version is published: say what the schedule is of, or check it."""
        writing, model = self.worker.writing, self.transfer.model
        rows = self._size * writing.answers
        header = Header(1, writing.most_tokens, rows, writing.seed, model=model)
        if self._replay is not None:
            for name in ("model", "num_steps", "num_envs", "seed"):
                ours, theirs = getattr(header, name), getattr(self._replay.header, name)
                if ours != theirs:
                    raise ValueError(
                        f"{self._replay.path}: the recorded run had {_NAMES[name]} {theirs}, and "
                        f"this one has {ours}: only the same model and arguments can be replayed"
                    )
        elif self.record.run_dir is not None and not self._trainer.state.global_step:
            self.worker.schedule = ScheduleFile(self.record.run_dir.schedule, header)

    def _save(self, folder: Path) -> None:
        """Add to a checkpoint what the schedule needs to go on."""
        left = self.record.in_flight + self.worker.qsize()
        state = {"next": self.worker.next, "in_flight": left, **self.record.state()}
        (folder / f"{STATE}.json").write_text(json.dumps(state))
        weights = {
            f"{version}/{name}": tensor
            for version, tensors in self.transfer.recent
            for name, tensor in tensors.items()
        }
        save_file(weights, folder / f"{STATE}.safetensors")

    def _restore(self) -> None:
        """Go on with the schedule where a checkpoint was saved, or refuse."""
        args, step = self._trainer.args, self._trainer.state.global_step
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        if not self._resumable:
            raise ValueError("resume_from_checkpoint: only a run with an exact lag can go on")
        if not (folder / f"{STATE}.json").exists():
            raise ValueError(f"resume_from_checkpoint: {folder} has no {STATE}.json")
        state = json.loads((folder / f"{STATE}.json").read_text())
        if state["in_flight"] or step % args.weight_sync_steps:
            raise ValueError(
                f"resume_from_checkpoint: at step {step} answers were in flight, or weights not "
                "sent yet; save where a batch ends, at a multiple of weight_sync_steps"
            )
        versions: dict[int, dict[str, Any]] = {}
        for key, tensor in load_file(folder / f"{STATE}.safetensors").items():
            version, _, name = key.partition("/")
            versions.setdefault(int(version), {})[name] = tensor
        recent = sorted(versions.items())
        self.transfer.restore(recent)
        self.worker.next, self.worker.offset = state["next"], 1 - recent[-1][0]
        self.record.versions_before = recent[-1][0]
        self.record.load_state(state)
