"""The options that reach the loop that makes frames, in whichever process that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tensordict.nn import InteractionType

from collectors.option_checks import SECONDS, NeedsPolicy, at_least, option


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How one worker steps its environments and calls its policy."""

    # Episodes and exploration
    max_frames_per_traj: int | None = option(None, at_least(1))
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    exploration_type: str | InteractionType = option("random", NeedsPolicy())
    set_truncated: bool = False
    resume_episodes: bool = True  # load_state_dict replays unfinished episodes
    resume_timeout: float = option(
        300.0, SECONDS
    )  # of a worker, to replay them; after it, new ones start
    info_keys: Sequence[str] | Mapping[str, Any] = ()  # a mapping gives values for missing entries
    # The policy's calls
    trust_policy: bool = option(False, NeedsPolicy())
    compile_policy: bool | Mapping[str, Any] = option(False, NeedsPolicy())
    cudagraph_policy: bool = option(False, NeedsPolicy())
    # When new weights are applied; "episode": only between two episodes
    apply_at: Literal["step", "batch", "episode"] = option("step", NeedsPolicy())
    # The policy's recurrent state
    state_on_update: Literal["keep", "zero", "recompute"] = option("keep", NeedsPolicy())
