"""A worker in a thread of a node's process."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

from collectors.workers.process_handle import ProcessHandle
from collectors.workers.worker_loop import Setup, serve
from sync.local.waiting import Doorbell


class ThreadHandle(ProcessHandle):
    """The only worker of a node, which needs no process of its own.

    It has the messages and the memory of a worker process. It cannot be ended by force.
    """

    _thread: threading.Thread | None = None

    def _launch(self, setup: Setup) -> None:
        schemes = {model_id: copy.deepcopy(one) for model_id, one in setup.schemes.items()}
        self._ended, self._bell = False, Doorbell()
        self._thread = threading.Thread(
            target=self._run,
            args=(replace(setup, schemes=schemes), self._bell),
            name=f"lockstep-worker-{self.index}",
            daemon=True,
        )
        self._thread.start()

    def _run(self, setup: Setup, bell: Doorbell) -> None:
        try:
            serve(setup)
        finally:
            setup.pipe.close()
            setup.spec.close()
            self._ended = True
            bell.ring()

    def fds(self) -> list[int]:
        return [*super().fds(), self._bell.fd]

    def gone(self) -> str | None:
        return f" while {self.counters.stage}" if self._ended else None

    def must_look(self) -> bool:
        return self._ended

    def stuck(self, timeout: float) -> str:
        return f"hangs: it has been {self.counters.stage} for more than timeout={timeout:g} s"

    def end(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
