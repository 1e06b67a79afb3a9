"""The two functions of TRL that are replaced on a CPU are still needed, and still called so."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: `make trl` makes an environment for it")

from trl.experimental.async_grpo import async_grpo_trainer, packing

from lockstep_trl.on_cpu import TorchAttention, install

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without CUDA")


def test_trl_needs_both_and_calls_them_by_these_names():
    from trl.trainer import utils

    original = importlib.util.find_spec("trl.experimental.async_grpo.packing").loader
    source = original.get_source("trl.experimental.async_grpo.packing")
    assert "def _flash_attn():" in source
    assert "_flash_attn().flash_attn_varlen_func(" in source
    assert "kernels-community/flash-attn3" in source
    assert "get_peak_flops_per_device(self.accelerator, dtype)" in inspect.getsource(
        async_grpo_trainer
    )
    accelerator = type("Accelerator", (), {"device": torch.device("cpu")})()
    with pytest.raises((AssertionError, RuntimeError)):  # torch has no CUDA
        utils.get_peak_flops_per_device(accelerator, "float32")


def test_the_attention_is_that_of_each_segment_alone():
    install()
    torch.manual_seed(0)
    heads, shared, size = 4, 2, 8
    queries, keys = [3, 1, 5], [7, 4, 5]
    q = torch.randn(sum(queries), heads, size)
    k, v = (torch.randn(sum(keys), shared, size) for _ in range(2))
    starts_q = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    starts_k = torch.tensor([0, *torch.tensor(keys).cumsum(0)], dtype=torch.int32)
    kernel = packing._flash_attn()
    assert kernel is TorchAttention
    out = kernel.flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, 5, 7, softmax_scale=0.3, causal=True, window_size=(-1, -1)
    )
    first_q = first_k = 0
    for rows, columns in zip(queries, keys, strict=True):
        for head in range(heads):
            for row in range(rows):
                seen = first_k + columns - rows + row + 1
                scores = k[first_k:seen, head // 2] @ q[first_q + row, head] * 0.3
                expected = scores.softmax(0) @ v[first_k:seen, head // 2]
                torch.testing.assert_close(out[first_q + row, head], expected)
        first_q, first_k = first_q + rows, first_k + columns


def test_what_the_attention_here_lacks_is_said():
    empty = torch.zeros(1, 1, 1)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="without a window"):
        TorchAttention.flash_attn_varlen_func(
            empty, empty, empty, starts, starts, 1, 1, window_size=(3, 0)
        )
