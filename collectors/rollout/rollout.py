"""The loop of every collector: act, step, write.

for each step:  handle messages, take new weights
                policy(observation row t)    -> outputs into row t
                environments.step(actions)   -> reward, ends into row t, observation into row t + 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor

from collectors.options.rollout_options import RolloutOptions, interaction_type
from collectors.rollout.environment import Environments, Restored
from collectors.rollout.frame_block import FrameBlock, FrameLayout
from collectors.rollout.policy import (
    ACTION,
    IS_INIT,
    PolicyCaller,
    exploring,
    shown,
)
from collectors.rollout.recurrent_state import RecurrentState
from collectors.rollout.saved_attributes import SavedAttributes
from collectors.rollout.seeds import Seeds, Streams
from collectors.rollout.shared_counters import (
    ACTING,
    COMPILING,
    FRAMES,
    HANDING_OVER,
    NUM_COUNTERS,
    REPLAYING,
    RESETTING,
    STAGE,
    STEPPING,
    STEPS,
    VERSION,
    SharedCounters,
)
from collectors.rollout.spaces import Key, is_reserved
from collectors.weights.rollout_weights import RolloutWeights

RANDOM_VERSION = -1
Array = np.ndarray[Any, Any]


class Rollout:
    """One worker's environments and policy, and the state of their episodes.

    acting: None for random actions.
    weights: receives new versions of the policy. With apply_at="step" it is checked before every
        step, with "episode" at the start of an episode. Before a batch, the caller applies new
        weights.
    random_frames: so many frames at first have random actions.
    take_at_start: applies new weights at the start of an episode; by default `weights.take`.
    counters: where to count frames and steps; by default a list.
    poll_control: called before every step; False ends the block early.
    """

    def __init__(
        self,
        environments: Environments,
        acting: PolicyCaller | None,
        weights: RolloutWeights,
        seeds: Seeds,
        options: RolloutOptions = RolloutOptions(),  # noqa: B008 - immutable
        *,
        random_frames: int = 0,
        take_at_start: Callable[[], None] | None = None,
        counters: SharedCounters | None = None,
        poll_control: Callable[[], bool] | None = None,
    ):
        self.environments = environments
        self.acting = acting
        keys = [] if acting is None else acting.state_keys
        num_envs, on_update = environments.num_envs, options.state_on_update
        self.state = RecurrentState(keys, num_envs, on_update, self._call)
        self.attributes = SavedAttributes(None if acting is None else acting.policy)
        self.weights = weights
        if acting is not None:
            acting.call = weights.watched(acting.call)
        self.options = options
        self.exploration = interaction_type(options.exploration_type)
        self.apply_at = options.apply_at
        self.take_at_start = take_at_start or weights.take
        self.random_frames = random_frames
        self.counters = [0] * NUM_COUNTERS if counters is None else counters.values
        self.poll_control = poll_control
        self.layout: FrameLayout | None = None
        self.frames: FrameBlock | None = None  # the current block
        self.t = 0  # its current row
        # The policy's outputs for the next row, and the random streams before it was called.
        self._first: tuple[dict[Key, Tensor], Streams] | None = None
        self._observed = [leaf.key for leaf in environments.observations]
        self._outputs: Collection[Key] = ()  # what the policy returned at its first call
        self._used_version = 0  # of the weights in the policy's last call
        self._begun = False
        self._lost = False  # an error left the episodes in an unknown state
        self.reseed(seeds)

    @property
    def may_take(self) -> bool:
        """Whether weights may change before the next step."""
        if self.apply_at == "episode":
            frames = self.frames
            starts = self.environments.fresh if frames is None else frames.is_init[self.t]
            return self._lost or bool(starts.all())
        return self.apply_at == "step" or self.frames is None

    def reseed(self, seeds: Seeds) -> None:
        """Seed all random streams, and start new episodes."""
        self.seeds = seeds
        self._discard_first()
        self.random_actions = batch_space(
            self.environments.action_space, self.environments.num_envs
        )
        self.random_actions.seed(seeds.actions())
        seeds.seed_streams()
        if self._begun:
            self.restart(seeds=seeds.environments(self.environments.num_envs))

    def restart(self, which: Array | None = None, seeds: Sequence[int] | None = None) -> None:
        """Start new episodes now; current ones end as truncated."""
        if which is not None and not which.any():
            return
        self._discard_first()
        if self.frames is not None:
            self.environments.cut(self.frames, self.t, seeds, which)
        else:
            self.environments.reset(seeds, which)
        self.state.clear(which)

    def lose(self) -> None:
        """After an error, discard the last block; the next one starts new episodes."""
        self._lost = True

    def _begin_episodes(self) -> None:
        if self._lost or not self._begun:
            self.counters[STAGE] = RESETTING
            count = self.environments.num_envs
            self.restart(seeds=None if self._begun else self.seeds.environments(count))
            self._begun, self._lost = True, False

    def plan(self, num_steps: int) -> FrameLayout:
        """The layout of a block. The first call asks the policy for its outputs."""
        if self.layout is None or self.layout.num_steps != num_steps:
            self._begin_episodes()
            outputs, infos = self._first_outputs(), self.environments.infos
            self.layout = FrameLayout.of(
                self.environments.num_envs,
                num_steps,
                self.environments.observations,
                self.environments.action,
                {key: value for key, value in outputs.items() if key != ACTION},
                infos=None if infos is None else infos.absent,
            )
        return self.layout

    def _first_outputs(self) -> dict[Key, Tensor]:
        """The policy's state and its outputs for the first step, which show their shapes."""
        if self.acting is None:
            return {}
        self.counters[STAGE] = COMPILING if self.options.compile_policy else ACTING
        rows = [torch.from_numpy(array) for array in self.environments.current]
        starts = self.environments.fresh
        with torch.no_grad(), exploring(self.exploration):
            self._use(self.weights.version)
            streams = Streams()
            self.state.begin(rows, starts)
            state = {key: value.clone() for key, value in self.state.values.items()}
            outputs = self._call(rows, state, starts)
        _check_unchanged(rows)
        self._check(outputs)
        self._outputs = outputs.keys()
        if self.random_frames > 0:  # random actions come first
            streams.resume()
        else:
            self._first = outputs, streams
        return {**self.state.values, **outputs}

    def _discard_first(self) -> None:
        """Forget the call of the policy that showed its outputs, and take back its draws."""
        if self._first is not None:
            self._first[1].resume()
            self._first = None

    def _check(self, outputs: dict[Key, Tensor]) -> None:
        count = self.environments.num_envs
        for key, value in outputs.items():
            if is_reserved(key, self._observed):
                raise ValueError(
                    f"the policy's output {'/'.join(key)!r} has the name of another entry of "
                    "batches; rename it"
                )
            if not isinstance(value, Tensor) or value.shape[:1] != (count,):
                what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the policy's output {'/'.join(key)!r} is {what}; the first dimension must "
                    f"be the {count} environments"
                )
        self._check_action(outputs[ACTION])

    def _check_action(self, action: Tensor) -> None:
        leaf = self.environments.action
        if action.shape[1:] != leaf.shape and action.shape[1:].numel() != math.prod(leaf.shape):
            raise ValueError(
                f"the policy's actions are {list(action.shape)}; "
                f"the action space requires {[self.environments.num_envs, *leaf.shape]}"
            )
        if action.is_floating_point() and leaf.dtype.kind != "f":
            kind = str(action.dtype).removeprefix("torch.")
            raise ValueError(f"the policy's actions are {kind}, but the space has {leaf.dtype}")

    def collect(self, frames: FrameBlock) -> int:
        """Fill the block; returns the number of rows, fewer only if `poll_control` ended it."""
        self._begin_episodes()
        environments = self.environments
        if self.options.reset_at_each_iter and not environments.fresh.all():
            self.restart()
        frames.begin()
        environments.begin(frames)
        self.frames, self.t = frames, 0
        with torch.no_grad(), exploring(self.exploration):
            try:
                self._run(frames)
                self.counters[STAGE] = HANDING_OVER
                self.attributes.check_buffers()
                _check_unchanged(frames.observation_rows[0])
                _check_numbers(frames, self.t, environments, self.seeds)
            except BaseException:
                self.lose()
                raise
            finally:
                self.frames = None
        steps = self.t
        environments.end(frames, steps)
        if self.state.history is not None:
            self.state.history.trim()
        if self.options.set_truncated and steps:
            self._truncate(frames, steps - 1)
        self.counters[STEPS] += 1
        return steps

    def _run(self, frames: FrameBlock) -> None:
        """The hot loop."""
        environments, weights, counters = self.environments, self.weights, self.counters
        counters[VERSION] = weights.version
        self.attributes.mark_buffers()
        while self.t < frames.layout.num_steps:
            t = self.t
            if environments.halting and environments.halted.all():
                return
            if self.poll_control is not None and not self.poll_control():
                return
            if self.apply_at == "step" and weights.has_news():
                weights.take()
            elif self.apply_at == "episode" and frames.is_init[t, 0]:
                self.take_at_start()
            self._use(weights.version)
            counters[STAGE] = ACTING
            if self.acting is None or self.random_frames > 0:
                self._act_randomly(frames, t)
            else:
                self._act(frames, t)
            counters[STAGE] = STEPPING
            count = environments.step(frames, t)
            if self.state.values and frames.is_init[t + 1].any():
                self.state.clear(frames.is_init[t + 1])
            self.random_frames = max(0, self.random_frames - count)
            counters[FRAMES] += count
            counters[STEPS] += 1
            self.t = t + 1

    def _use(self, version: int) -> None:
        """Note the version that the policy is called with from here on."""
        if version != self._used_version:
            self._used_version = self.counters[VERSION] = version
            self.attributes.mark_buffers()
            self._discard_first()  # computed with older weights
            self.state.update()

    def _act_randomly(self, frames: FrameBlock, t: int) -> None:
        frames.actions[t] = self.random_actions.sample()
        for output in frames.outputs:
            output[t].zero_()
        frames.version[t] = RANDOM_VERSION

    def _act(self, frames: FrameBlock, t: int) -> None:
        """Call the policy for row `t`, and write its outputs into the block."""
        targets = frames.output_rows[t]
        rows, starts = frames.observation_rows[t], frames.is_init[t]
        for key, value in self.state.values.items():  # now: the policy may write into its state
            _write(key, targets[key], value)
        if self._first is not None:
            outputs, _ = self._first
            self._first = None
        else:
            outputs = self._call(rows, self.state.values, starts)
        if outputs.keys() != self._outputs:
            raise ValueError(
                f"the policy returned {shown(outputs)}, but {shown(self._outputs)} at its first "
                "call: it must return the same keys at every step"
            )
        action, target = outputs[ACTION], targets[ACTION]
        if action.shape != target.shape or action.dtype != target.dtype:
            self._check_action(action)
            outputs[ACTION] = action.reshape(target.shape)
        for key, value in outputs.items():
            _write(key, targets[key], value)
        self.state.follow(outputs, rows, starts)
        frames.version[t] = self._used_version

    def _call(
        self, rows: Sequence[Tensor], state: Mapping[Key, Any], starts: Array
    ) -> dict[Key, Tensor]:
        """The policy's outputs; its inputs in its own order are among these."""
        assert self.acting is not None
        if self.acting.in_keys == self._observed:
            return self.acting(rows)
        inputs = {**dict(zip(self._observed, rows, strict=True)), **state}
        if IS_INIT in self.acting.in_keys:
            inputs[IS_INIT] = torch.from_numpy(starts)
        return self.acting([inputs[key] for key in self.acting.in_keys])

    def attribute(self, name: str) -> Any:
        """An attribute of the environments."""
        return self.environments.attribute(name)

    def state_dict(self) -> dict[str, Any]:
        """The random streams, the environments' episodes and the policy's state."""
        return {
            "seeds": asdict(self.seeds),
            "begun": self._begun,
            "random_frames": self.random_frames,
            "used_version": self._used_version,
            "actions": self.random_actions.np_random.bit_generator.state,
            "environments": self.environments.state_dict() if self._begun else {},
            "policy": self.attributes.state_dict(),
            **self.state.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], *, goes_on: bool = True, has_weights: bool = False
    ) -> Restored:
        """Continue from a saved state.

        The environments start new episodes without `goes_on` and in the middle of a block. They
        also do with apply_at="episode", unless `has_weights`: the weights of the current episodes
        are still here.
        """
        self._first = None
        self.seeds = Seeds(**state["seeds"])
        self.random_frames = int(state["random_frames"])
        self._used_version = int(state["used_version"])
        self.random_actions.np_random.bit_generator.state = state["actions"]
        # Run directories of earlier versions have no "policy", and no "attributes" of members.
        lost = self.attributes.load_state_dict(state["policy"]) if "policy" in state else []
        needs_weights = self.apply_at == "episode" and state["begun"]
        goes_on = goes_on and (has_weights or not needs_weights)
        if self.frames is not None or not goes_on:
            self.restart()
            return Restored(False, lost)
        self._begun, self._lost = bool(state["begun"]), False
        self.counters[STAGE] = REPLAYING
        restored = Restored(True, [])
        if self._begun:
            restored = self.environments.load_state_dict(state["environments"])
        self.state.load_state_dict(state, under_way=restored.under_way)
        return Restored(restored.under_way, [*lost, *restored.lost])

    def _truncate(self, frames: FrameBlock, t: int) -> None:
        """Mark the block's last frames as truncated."""
        open_ended = ~(frames.terminated[t] | frames.truncated[t])
        frames.keep_finals(t, open_ended)
        frames.truncated[t] |= open_ended


def _check_numbers(
    frames: FrameBlock, steps: int, environments: Environments, seeds: Seeds
) -> None:
    """Raise if the policy or an environment returned NaN, or a number beyond its type's range."""
    ended = frames.terminated[:steps] | frames.truncated[:steps]
    places = frames.final_places(ended)
    live = frames.live[:steps]
    suspects: list[tuple[str, Any, Any, int]] = [("reward", frames.reward[:steps], live, 0)]
    if frames.action.is_floating_point():  # first: where an environment acts by NaN, it gives NaN
        suspects.insert(0, ("action", frames.action[:steps].numpy(), live, 0))
    for i, leaf in enumerate(environments.observations):
        if leaf.dtype.kind == "f":
            rows, finals = frames.observation_arrays[i], frames.final_arrays[i][places]
            name = "/".join(leaf.key)
            suspects.append((name, rows[: steps + 1], None, 1))
            if not np.isfinite(finals.sum(dtype=np.float64)):
                shown = np.zeros_like(rows[:steps])
                shown[ended] = finals
                suspects.append((name, shown, ended, 0))
    for name, values, counts, ahead in suspects:
        if np.isfinite(values.sum(dtype=np.float64)):  # one pass, and nearly always the only one
            continue
        bad = ~np.isfinite(values).reshape(*values.shape[:2], -1).all(-1)
        if counts is not None:
            bad &= counts
        if bad.any():
            t, env = (int(i) for i in np.argwhere(bad)[0])
            step = max(0, t - ahead)
            what = "NaN" if np.isnan(values[t, env]).any() else f"infinite in {values.dtype}"
            seed = seeds.environments(environments.num_envs)[env]
            raise ValueError(
                f"{name!r} is {what} in environment {env}, at step {step} of this batch "
                f"(worker {seeds.worker}, {environments}, seed {seed})"
            )


def _check_unchanged(observations: Sequence[Tensor]) -> None:
    """Refuse a policy that writes to observations, which are part of batches."""
    if any(one._version for one in observations if not one.is_inference()):
        raise ValueError("the policy wrote to an observation; it should work on a copy")


def _write(key: Key, target: Tensor, value: Tensor) -> None:
    if value.shape != target.shape:
        raise ValueError(
            f"the policy's output {'/'.join(key)!r} has the shape {list(value.shape)}, but "
            f"{list(target.shape)} at the first call: it must be the same at every step"
        )
    target.copy_(value)
