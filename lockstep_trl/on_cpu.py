"""What TRL's trainer needs on a machine without CUDA: two functions of it, replaced.

| in TRL 1.16 | what it does | here |
|---|---|---|
| `packing._flash_attn` | fetches an attention kernel for GPUs from the hub | plain torch |
| `async_grpo_trainer.get_peak_flops_per_device` | asks `torch.cuda` for a device's name | None |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class TorchAttention:
    """Attention over segments of several lengths, with the signature of the kernel."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Each query attends to the keys up to its own place; the last of both are aligned."""
        if not causal or window_size != (-1, -1):
            raise NotImplementedError("on a CPU there is causal attention without a window only")
        outputs = []
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for i in range(len(starts_q) - 1):
            queries = q[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
            keys, values = (
                one[starts_k[i] : starts_k[i + 1]].transpose(0, 1).contiguous() for one in (k, v)
            )
            if groups := queries.shape[0] // keys.shape[0]:
                keys, values = (one.repeat_interleave(groups, 0) for one in (keys, values))
            rows, columns = queries.shape[1], keys.shape[1]
            mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
            attended = scaled_dot_product_attention(
                queries, keys, values, mask.tril(columns - rows), scale=softmax_scale
            )
            outputs.append(attended.transpose(0, 1))
        return torch.cat(outputs)


def install() -> None:
    """Replace both, unless there is a CUDA device. Call it before a trainer is made."""
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = _no_peak


def _no_peak(*arguments: Any) -> None:
    """A CPU's peak is not known, so TRL logs no utilisation."""
