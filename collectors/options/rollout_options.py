"""The options that reach the loop that makes frames, in whichever process that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import sync  # noqa: F401 - before tensordict

# isort: split
from tensordict.nn import InteractionType

from collectors.options.check_types import Count, Seconds

InfoKeys = Annotated[
    Sequence[str] | Mapping[str, Any],
    "names of entries of info, or a dict of them with a value for missing ones",
]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How the policy is called."""

    exploration_type: str | InteractionType = "random"
    trust_policy: bool = False
    compile_policy: bool | Mapping[str, Any] = False
    cudagraph_policy: bool = False
    # When new weights are applied; "episode": only between two episodes
    apply_at: Literal["step", "batch", "episode"] = "step"
    # The policy's recurrent state, when there are new weights
    state_on_update: Literal["keep", "zero", "recompute"] = "keep"


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(PolicyOptions):
    """How one worker steps its environments and calls its policy."""

    max_frames_per_traj: Count | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    resume_episodes: bool = True  # load_state_dict replays unfinished episodes
    # Of a worker, to replay them; after it, new ones start
    resume_timeout: Seconds = 300.0
    info_keys: InfoKeys = ()


def interaction_type(name: str | InteractionType) -> InteractionType:
    """The tensordict constant for an exploration type."""
    if isinstance(name, InteractionType):
        return name
    try:
        return InteractionType.from_str(str(name).lower())
    except (ValueError, NotImplementedError, KeyError):
        raise ValueError(
            f"exploration_type={name!r}: it is one of random, mode, mean, deterministic"
        ) from None
