"""A small causal transformer over texts: vectors of whole numbers, with zeros at the end.

Its state is a key-value cache. While it acts, it computes only new positions and adds their keys
and values to the cache. Cached ones stay those of the weights that computed them, also after an
update. A learner computes all positions with its own weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gymnasium.spaces import Box, Space
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from collectors.options.check_types import Count
from harness.models.encoders import RecurrentEncoder
from harness.options.run import ModelConfig
from harness.registry import models


class Block(nn.Module):
    """Attention to earlier positions, and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        projected: Tensor = self.project(self.attention_norm(x))
        return projected.chunk(3, -1)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """The positions of `x`, which see those of `k` and `v` that `visible` says."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.attention_out(attended.transpose(-3, -2).flatten(-2))
        return x + self.down(gelu(self.up(self.hidden_norm(x))))


@dataclass
class TransformerConfig(ModelConfig):
    """A small causal transformer with a key-value cache, for texts. Not for SAC."""

    recurrent: ClassVar[bool] = True

    name: str = "transformer"
    hidden_sizes: list[Count] = field(default_factory=lambda: [256, 256])  # one block for each
    width: Count = 64  # of a position
    heads: Count = 4  # of attention
    sequence_length: Count = 16  # frames of one piece of a row that is learned from at once


@models.register("transformer", options=TransformerConfig)
class TransformerEncoder(RecurrentEncoder):
    """One block for each of `hidden_sizes`. The features are those of a text's last position."""

    reads_images = True  # it takes observations as they are

    def __init__(self, config: TransformerConfig, space: Space):
        super().__init__()
        if not isinstance(space, Box) or space.dtype.kind not in "iu" or len(space.shape) != 1:
            raise ValueError(
                "model=transformer reads texts, vectors of whole numbers, and the observations "
                f"are {space}; use env=tokens, or another model"
            )
        if config.width % config.heads:
            raise ValueError(
                f"model.width={config.width} model.heads={config.heads}: the width is a multiple "
                "of the heads"
            )
        self.num_features = self.width = config.width
        (self.length,) = space.shape
        self.token = nn.Embedding(int(space.high.max()) + 1, config.width)
        self.position = nn.Embedding(self.length, config.width)
        self.blocks: Any = nn.ModuleList(
            Block(config.width, config.heads, hidden) for hidden in config.hidden_sizes
        )
        self.norm = nn.LayerNorm(config.width)

    def initial_state(self, *batch: int) -> Tensor:
        """An empty cache: how many positions it has, then keys and values of each block."""
        return torch.zeros(
            *batch,
            1 + len(self.blocks) * 2 * self.length * self.width,
            device=self.norm.weight.device,
        )

    def forward(self, text: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Read texts [N, L] on from what is cached; the features, and the cache after it."""
        if not len(text):
            return self.norm.weight.new_zeros(0, self.width), state
        text = text.long()
        lengths, cached = (text > 0).sum(-1), state[:, 0].long()
        cache = state[:, 1:].unflatten(1, (len(self.blocks), 2, self.length, self.width)).clone()
        first, end = int(torch.minimum(cached, lengths - 1).min()), int(lengths.max())
        places = torch.arange(first, end, device=text.device)
        is_new = (places >= cached[:, None])[..., None]
        visible = torch.arange(end, device=text.device) <= places[:, None]
        x = self.token(text[:, first:end]) + self.position(places)
        for number, block in enumerate(self.blocks):
            q, *new = block.queries_keys_values(x)
            for half, value in enumerate(new):
                kept = cache[:, number, half, first:end]
                cache[:, number, half, first:end] = torch.where(is_new, value, kept)
            keys, values = cache[:, number, :, :end].unbind(1)
            x = block(x, q, keys, values, visible)
        features = self.norm(x)[torch.arange(len(text), device=text.device), lengths - 1 - first]
        return features, torch.cat([lengths[:, None].float(), cache.flatten(1)], 1)

    def unroll(self, text: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The features of texts [N, L, length], each computed anew; caches are not needed.

        The texts of an episode begin alike, so its longest one is read for all.
        """
        begins = starts.clone()
        begins[:, 0] = True
        episode = begins.flatten().cumsum(0) - 1
        frames = text.long().flatten(0, 1)
        longest = frames.new_zeros(int(episode[-1]) + 1, self.length)
        longest.scatter_reduce_(0, episode[:, None].expand_as(frames), frames, "amax")
        last = ((frames > 0).sum(-1) - 1).clamp(min=0)
        features = self.read(longest)[episode, last].unflatten(0, starts.shape)
        return features, state.new_zeros(()).expand(*starts.shape, state.shape[-1])

    def read(self, text: Tensor) -> Tensor:
        """The features of every position of texts [N, length]."""
        places = torch.arange(self.length, device=text.device)
        visible = places <= places[:, None]
        x = self.token(text) + self.position(places)
        for block in self.blocks:
            x = block(x, *block.queries_keys_values(x), visible)
        return self.norm(x)
