"""The limit of update.py: update_limit.cpp, compiled with g++ and called by ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("update_limit.cpp")
COMPILER = ("g++", "-O3", "-march=native", "-ffast-math", "-fPIC", "-c")
# A library that is linked with -ffast-math sets tiny numbers to zero in the whole process.
LINKER = ("g++", "-shared")


class Limit:
    """Parameters of both networks as one vector, and gradient steps on minibatches of 256."""

    def __init__(self, weights: Tensor, learning_rate: float):
        with TemporaryDirectory() as folder:
            compiled, library = Path(folder, "update_limit.o"), Path(folder, "update_limit.so")
            subprocess.run([*COMPILER, SOURCE, "-o", compiled], check=True)
            subprocess.run([*LINKER, compiled, "-o", library, "-lmvec", "-lm"], check=True)
            self.library = ctypes.CDLL(str(library))
        if len(weights) != self.library.size():
            raise ValueError(f"{len(weights)} weights: expected {self.library.size()}")
        self.learning_rate = ctypes.c_float(learning_rate)
        self.weights = weights.clone()
        self.mean, self.square, self.gradient = (torch.zeros_like(weights) for _ in range(3))
        self.state = [_address(x) for x in (self.weights, self.mean, self.square, self.gradient)]
        self.steps = 0

    def step(self, *columns: Tensor) -> None:
        """Learn from contiguous inputs, actions, log-probabilities, advantages, targets, values."""
        self.steps += 1
        self.library.gradient_step(
            *self.state,
            ctypes.c_int64(self.steps),
            self.learning_rate,
            *(_address(column) for column in columns),
        )


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
