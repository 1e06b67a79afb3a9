"""run.log: what a run logs, which stops without the run where it cannot be written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def run_log(file: Path) -> Iterator[None]:
    """Everything logged from level INFO on, into a run's log; warnings on the terminal, too."""
    handlers: list[logging.Handler]
    handlers = [LogFile(file), TerminalLog()]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers[1].setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handlers[1].setLevel(logging.WARNING)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.addFilter(_is_worth_keeping)
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


class LogFile(logging.FileHandler):
    """A log that stops, and says so once, when it cannot be written: a run does not end for it."""

    def __init__(self, file: Path):
        super().__init__(file, delay=True)
        self._broken = False
        try:
            self.stream = self._open()
        except OSError as error:
            self._break(error)

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        self._break(sys.exc_info()[1])

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._break(error)

    def _break(self, error: object) -> None:
        if not self._broken:
            self._broken = True
            print(f"WARNING: {self.baseFilename} cannot be written: {error}", file=sys.stderr)


class TerminalLog(logging.Handler):
    """A log on the terminal, above the dashboard where that is shown: it takes over stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:  # noqa: BLE001 - as every handler
            self.handleError(record)


def _is_worth_keeping(record: logging.LogRecord) -> bool:
    """W&B tells its own log what it does; only its warnings are the run's."""
    return not record.name.startswith("wandb") or record.levelno >= logging.WARNING
