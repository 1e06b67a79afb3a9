"""A worker process on this machine: messages in a pipe, counters and frames in shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from torch import Tensor

from collectors.data.batch import TrajectoryNumbers
from collectors.rollout.frame_block import FrameBlock, FrameLayout, map_blocks
from collectors.rollout.shared_counters import (
    CUT,
    FRAMES,
    IDLE,
    MESSAGES,
    REPLAYING,
    STAGE,
    STARTING,
    STEPS,
    VERSION,
    SharedCounters,
)
from collectors.workers.handle import WorkerHandle
from collectors.workers.messages import Blocks, Event, Failed, Filled
from collectors.workers.pipe import Pipe, PipeClosed
from collectors.workers.process_lifetime import (
    KILL_AFTER_S,
    default_start_method,
    end_process,
    sigint_blocked,
)
from collectors.workers.worker_loop import WorkerSetup, main
from collectors.workers.worker_spec import WorkerSpec
from sync import WeightSyncScheme
from sync.local.memory import SharedFd, anonymous_file
from sync.local.waiting import Watch

# A worker that has imported the script sends what it raises.
_NOT_IMPORTED = (
    ". It could not import the script (see its output): create the collector below "
    "`if __name__ == '__main__':`, because workers import the script"
)


class WeightSource(Protocol):
    """Where workers get their weights: the schemes by model, and the version that is their 0."""

    base: int
    schemes: dict[str, WeightSyncScheme]


class ProcessHandle(WorkerHandle):
    """One worker process.

    weights: what it receives. ctx: starts the process.
    timeout: how long a message may wait to be read.
    resume_timeout: how long the worker may replay episodes, beside that.
    """

    spec: WorkerSpec

    def __init__(
        self,
        index: int,
        spec: WorkerSpec,
        trajectories: TrajectoryNumbers,
        weights: WeightSource,
        *,
        ctx: Any,
        timeout: float,
        resume_timeout: float,
    ):
        super().__init__(index, spec, trajectories, str(spec.policy_device or "cpu"))
        self._weights = weights
        self._ctx = ctx
        self._timeout, self._resume_timeout = timeout, resume_timeout
        self.process: Any = None
        self.counters = SharedCounters()
        self._pipe: Pipe | None = None
        self._watch: Watch | None = None
        self._memory: SharedFd | None = None  # of the blocks
        self._blocks: list[FrameBlock] = []
        self._free: list[int] = []
        self._block_of: dict[int, int] = {}  # by the serials of batches that have not come

    def start(self, spec: WorkerSpec) -> None:
        self.close()
        near, far = Pipe.pair()
        self.counters.memory.close()  # it stays mapped for whoever still has it
        self._pipe, self.counters = near, SharedCounters()
        self._memory = SharedFd(anonymous_file())
        self._num_blocks = spec.num_blocks
        self._blocks, self._free = [], list(range(spec.num_blocks))
        self._block_of = {}
        self._made_before = 0  # frames of the batches that have come
        setup = WorkerSetup(
            worker_idx=self.index,
            trainer_pid=os.getpid(),
            pipe=far,
            counters=self.counters,
            spec=spec.pack(),
            blocks=self._memory,
            schemes=self._weights.schemes,
            start_method=default_start_method(),
            version_base=self._weights.base,
        )
        self._launch(setup)

    def _launch(self, setup: WorkerSetup) -> None:
        """Start the process."""
        name = f"lockstep-worker-{self.index}"
        with sigint_blocked():
            process = self._ctx.Process(target=main, args=(setup,), name=name, daemon=False)
            try:
                process.start()
            except (EOFError, ConnectionError, ChildProcessError) as error:
                raise RuntimeError(
                    f"worker {self.index} could not be started: the fork server, which starts "
                    f"workers, has died, or belongs to the process that this one was forked from "
                    f"({type(error).__name__}: {error}); start_method='spawn' does not need it"
                ) from error
            try:
                self._watch = Watch(process.pid)
            except OSError:  # no descriptor is left, and it must not outlive this call
                process.kill()
                process.join(KILL_AFTER_S)
                raise
            self.process = process
        setup.pipe.close()
        setup.spec.close()

    # -- messages

    def order(self, serial: int, versions: Mapping[str, int]) -> None:
        number = self._block_of[serial] = self._free.pop(0)
        self._send("collect", number, serial, versions)

    def frames(self, filled: Filled) -> FrameBlock:
        return self._blocks[filled.block]

    def release(self, block: int) -> None:
        self._free.append(block)

    def cut(self, serial: int) -> None:
        self.counters.values[CUT] = serial

    def ask(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        self._send("call", number, method, args)

    def _send(self, *message: Any, timeout: float | None = None) -> None:
        if self._pipe is None:
            raise PipeClosed("the worker has ended")
        self._pipe.send(message, timeout=self._timeout if timeout is None else timeout)
        self.counters.values[MESSAGES] += 1

    def receive(self) -> list[Event]:
        if self._pipe is None:
            return []
        received = (self._event(message) for message in self._pipe.receive())
        return [event for event in received if event is not None]

    def _event(self, message: Event | Blocks) -> Event | None:
        """The event that the pool has to know, if there is one."""
        if isinstance(message, Blocks):
            return self._map(message.layout)
        if isinstance(message, Filled):
            if not self._blocks:  # they could not be mapped, which was a failure
                return None
            del self._block_of[message.serial]
            self._made_before += message.num_frames
        return message

    def _map(self, layout: FrameLayout) -> Failed | None:
        assert self._memory is not None
        try:
            self._blocks = map_blocks(self._memory.fd, layout, self._num_blocks)
        except OSError as error:
            return Failed(f"cannot return its frames: their memory cannot be mapped: {error}")
        self._memory.close()
        return None

    def fds(self) -> list[int]:
        pipe, watch = self._pipe, self._watch
        fds = [pipe.fileno()] if pipe is not None and not pipe.ended else []
        return [*fds, *watch.fds()] if watch is not None else fds

    # -- watching

    def gone(self) -> str | None:
        if self._watch is None or not self._watch.look():
            return None
        self.process.join(1.0)
        code = self.process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            has_name = -code in set(signal.Signals)
            how = f"by {signal.Signals(-code).name if has_name else f'signal {-code}'}"
        starting = self.counters.values[STAGE] == STARTING
        hint = _NOT_IMPORTED if code == 1 and starting else ""
        return f" {how} (pid {self.process.pid}) while {self.counters.stage}{hint}"

    def must_look(self) -> bool:
        return self._watch is not None and self._watch.gone

    def progress(self) -> Hashable:
        values = self.counters.values
        return values[FRAMES], values[STEPS], values[STAGE]

    def is_busy(self) -> bool:
        return bool(self.counters.values[STAGE] != IDLE)

    def activity(self) -> str:
        return f"is {self.counters.stage}"

    def patience(self, timeout: float) -> float:
        replaying = self.counters.values[STAGE] == REPLAYING
        return timeout + self._resume_timeout if replaying else timeout

    def stuck(self, timeout: float) -> str:
        return (
            f"hangs: it has been {self.counters.stage} for more than timeout={timeout:g} s "
            f"(pid {self.process.pid})"
        )

    def stamps_so_far(self, serial: int) -> Tensor | None:
        if not self._blocks or serial not in self._block_of:
            return None
        values, block = self.counters.values, self._blocks[self._block_of[serial]]
        done = (values[FRAMES] - self._made_before) // block.layout.num_envs
        stamps = block.stamps(done + 1).clone()
        if stamps[0, max(0, done - 1)] >= 0 or stamps[0, -1] >= 0:  # else its actions are random
            stamps[:, done:] = values[VERSION]
        return stamps

    def reported_counts(self) -> dict[str, Any]:
        values = self.counters.values
        return {
            "collected": values[FRAMES],
            "pid": None if self.process is None else self.process.pid,
            "stage": self.counters.stage,
            "version": values[VERSION],
        }

    def start_generation(self) -> None:
        super().start_generation()
        self.counters.values[FRAMES] = 0  # they are counted now, also if no successor can start

    # -- ending

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not been ended."""
        return self.process is not None

    def tell_to_stop(self, timeout: float, close_env: bool) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, OSError, ValueError):
            self._send("stop", close_env, timeout=0.1)

    def end(self, timeout: float) -> None:
        if self.process is not None and self._watch is not None:
            end_process(self.process, self._watch, timeout)
            self._watch.close()
            self.process = self._watch = None

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._memory is not None:
            self._memory.close()
