"""The parts of a training with a lag, joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import AutoModelForCausalLM, AutoTokenizer

from collectors.schedule.recording import Header, RecordedSchedule, ScheduleFile
from harness.files import MOST_BYTES_YAML, flatten, parse_yaml, read_text
from harness.run.checkpoints import Checkpoints
from harness.run_directory import SCHEDULE
from lockstep_check.ages import of_age
from lockstep_trl import on_cpu
from lockstep_trl.run import RunRecord
from lockstep_trl.sampler import Reward, Sampler, Writing
from lockstep_trl.supported import check_trl
from lockstep_trl.transfer import Transfer
from lockstep_trl.worker import AnswerWorker
from sync import Lag, Tear

STATE = "lockstep"  # a folder in a checkpoint of TRL
PLAIN = {"top_p": (1.0,), "top_k": (0, None), "min_p": (None,), "repetition_penalty": (1.0,)}
_NAMES = {
    "model": "the first weights",
    "num_steps": "max_completion_length",
    "num_envs": "answers in a batch:",
    "seed": "seed",
}


def _recorded_look_ahead(config: Path, otherwise: bool) -> bool:
    """What a recorded run had, if its config says it."""
    recorded = parse_yaml(read_text(config, MOST_BYTES_YAML)) if config.is_file() else {}
    look_ahead = dict(flatten(recorded, lists=False)).get("collector.look_ahead")
    return look_ahead if isinstance(look_ahead, bool) else otherwise


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
        self.lag, self._replay = Lag.of(lag), None
        look_ahead = (free or replay is not None) if look_ahead is None else look_ahead
        name = "free" if free else "exact"
        if replay is not None:
            if free or self.lag is not None:
                raise ValueError(
                    "replay: the recorded run has its own versions; leave lag and free out"
                )
            path, name = Path(replay), "replay"
            self._replay = RecordedSchedule(path / SCHEDULE if path.is_dir() else path)
            look_ahead = _recorded_look_ahead(
                self._replay.path.with_name("config.yaml"), look_ahead
            )
        self._exact, self._size = name == "exact", size
        self.transfer = Transfer(self.lag, tear, wire, keep_all=replay is not None)
        self._sampler = Sampler(
            AutoModelForCausalLM.from_pretrained(model),
            AutoTokenizer.from_pretrained(model),
            prompts,
            rewards,
        )
        self.worker: Any = AnswerWorker(
            self.transfer,
            self._sampler,
            size=size,
            free=free,
            replay=self._replay,
            queue_batches=queue_batches,
            apply_at=apply_at,
        )
        config = {
            "algo": {"name": "grpo"},
            "env": {"id": "trl"},
            "model": {"name": Path(model).name.strip(".")},
            "sync": {"lag": lag if isinstance(lag, int) else str(lag), "wire": wire}
            | ({} if tear is None else {"tear": str(tear)}),
            "collector": {
                "name": name,
                "replay": None if replay is None else str(replay),
                "look_ahead": look_ahead,
            },
        }
        self.record = RunRecord(
            run_dir,
            config | (options or {}),
            sampler=self._sampler,
            eval_prompts=eval_prompts,
            eval_every=eval_every,
            trace=trace,
            look_ahead=look_ahead,
        )

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
        for name, values in PLAIN.items():
            if getattr(args, name) not in values:
                raise ValueError(
                    f"{name}={getattr(args, name)}: this worker has {name}={values[0]}"
                )
        self._check_lag(args)
        self._check_batches(args)
        self._trainer = trainer
        self._sampler.model.to(args.device, trainer.model.dtype)
        self.worker.writing = Writing(
            args.num_generations, args.max_completion_length, args.temperature, args.seed
        )
        self.worker.record, self.worker.ready = self.record, self._ready
        self.transfer.begin = self._begin
        if self._exact and not self.record.look_ahead and args.save_strategy != "no":
            self.transfer.recent = deque(maxlen=1 + self.transfer.scheme.history)
            self.record.saving = self._save
        self.record.attach(trainer)

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
        self.transfer.record = self.record

    def _ready(self) -> None:
        """The first version is published: say what the schedule is of, or check it."""
        writing, model = self.worker.writing, self.transfer.model
        rows = self._size * writing.answers
        header = Header(1, writing.most_tokens, rows, writing.seed, model=model)
        if self._replay is not None:
            for name, label in _NAMES.items():
                ours, theirs = getattr(header, name), getattr(self._replay.header, name)
                if ours != theirs:
                    raise ValueError(
                        f"{self._replay.path}: the recorded run had {label} {theirs}, and "
                        f"this one has {ours}: only the same model and arguments can be replayed"
                    )
        elif self.record.run_dir is not None and not self._trainer.state.global_step:
            self.worker.schedule = ScheduleFile(self.record.run_dir.schedule, header)

    def _save(self, folder: Path) -> None:
        """Add to a checkpoint what the schedule needs to go on."""
        state = {
            "next": self.worker.next,
            "in_flight": self.record.in_flight + self.worker.qsize(),
            "newest": self.transfer.newest,
            "recent": list(self.transfer.recent),
            "record": self.record.state_dict(),
        }
        Checkpoints(folder / STATE).save(self._trainer.state.global_step, state)

    def _restore(self) -> None:
        """Go on with the schedule where a checkpoint was saved, or refuse."""
        args, step = self._trainer.args, self._trainer.state.global_step
        if self.record.saving is None:
            raise ValueError("resume_from_checkpoint: only a run with an exact lag can go on")
        _, state = Checkpoints(Path(args.output_dir) / f"checkpoint-{step}" / STATE).load()
        if state["in_flight"] or step % args.weight_sync_steps:
            raise ValueError(
                f"resume_from_checkpoint: at step {step} answers were in flight, or weights not "
                "sent yet; save where a batch ends, at a multiple of weight_sync_steps"
            )
        newest, recent = state["newest"], state["recent"]
        self.record.load_state_dict(state["record"])
        self.record.versions_before = newest
        self.worker.next, self.worker.offset = state["next"], 1 - newest
        self.transfer.scheme.first_version = of_age(len(recent) - 1, newest)  # the oldest kept
        for weights in recent[:-1]:  # TRL sends the last
            self.transfer.send_weights(weights.items())
