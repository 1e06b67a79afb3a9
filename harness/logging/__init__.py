"""Loggers: metrics.jsonl always, W&B and TensorBoard as the config says."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.schema import LoggerConfig
from harness.logging.base import Histogram, Logger, Metrics, RunInfo
from harness.logging.jsonl import JsonlLogger
from harness.logging.tensorboard import TensorBoardLogger
from harness.logging.wandb import WandbLogger
from harness.run_dir import RunDir

__all__ = ["Histogram", "Logger", "Loggers", "Metrics", "RunInfo", "make_loggers"]

log = logging.getLogger(__name__)


class Loggers(Logger):
    """Several loggers as one; one that fails is left out from then on, with a warning."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)

    def log(
        self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram] | None = None
    ) -> None:
        for logger in list(self._loggers):
            try:
                logger.log(step, metrics, histograms or {})
            except Exception as error:
                log.info("a logger failed", exc_info=True)
                log.error("%s failed, it logs no more: %s", type(logger).__name__, error)
                self._loggers.remove(logger)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        for logger in self._loggers:
            try:
                logger.finish(summary, exit_code)
            except Exception as error:
                log.info("a logger failed", exc_info=True)
                log.error("%s did not finish: %s", type(logger).__name__, error)
        self._loggers = []


def make_loggers(config: LoggerConfig, run_dir: RunDir, info: RunInfo) -> Loggers:
    """The loggers that a run has."""
    loggers: list[Logger] = [JsonlLogger(run_dir.metrics)]
    if config.tensorboard:
        loggers.append(TensorBoardLogger(run_dir.path / "tensorboard"))
    if config.wandb != "disabled":
        loggers.append(
            WandbLogger(
                run_dir.path,
                info,
                mode=config.wandb,
                project=config.project,
                entity=config.entity,
            )
        )
    return Loggers(loggers)
