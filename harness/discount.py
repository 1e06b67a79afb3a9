"""Discounted sums along rows of frames, for advantages and for running returns."""

from __future__ import annotations

from torch import Tensor


def discounted(inputs: Tensor, decay: Tensor) -> Tensor:
    """Solve x[t] = inputs[t] + decay[t] * x[t + 1] along the last dimension.

    By doubling: log2(T) passes over whole tensors in place of T small ones.
    """
    total = inputs.clone()
    reach = decay.to(inputs.dtype, copy=True)
    reach[..., -1] = 0
    step = 1
    while step < inputs.shape[-1]:
        total[..., :-step] += reach[..., :-step] * total[..., step:]
        reach[..., :-step] = reach[..., :-step] * reach[..., step:]
        step *= 2
    return total
