"""The loop at the heart of every collector: act, step, write, with new weights between two calls.

for each step:  is there a message? new weights?
                policy(observation row t)              -> outputs into row t
                environments.step(actions)             -> reward, ends into row t,
                                                          observation into row t + 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor

from collectors.rollout.environment import Environments
from collectors.rollout.frame_block import FrameBlock, FrameLayout
from collectors.rollout.policy import ACTION, IS_INIT, NEXT, PolicyCaller, exploring, shown
from collectors.rollout.seeds import Seeds, Streams
from collectors.rollout.spaces import Key, is_reserved, key_of, name_of, sample
from collectors.weights.receiver import WeightReceiver
from collectors.workers.shared_counters import (
    ACTING,
    COMPILING,
    FRAMES,
    REPLAYING,
    RESETTING,
    STAGE,
    STEPPING,
    STEPS,
    VERSION,
    SharedCounters,
)

RANDOM_VERSION = -1


class Rollout:
    """One worker's environments and policy, and where they are in their episodes.

    acting: None for random actions.
    weights: brings new versions of the policy. With apply_at="step" it is asked before every step,
        with "episode" where an episode starts; before a batch, the caller takes what there is.
    take_at_start: takes new weights where an episode starts, if not as at a step.
    state_on_update: "zero" clears the policy's state wherever it gets new weights.
    poll_control: called before every step; False ends the block early.
    """

    def __init__(
        self,
        environments: Environments,
        acting: PolicyCaller | None,
        weights: WeightReceiver,
        seeds: Seeds,
        *,
        exploration: InteractionType = InteractionType.RANDOM,
        apply_at: str = "step",
        take_at_start: Callable[[], None] | None = None,
        state_on_update: str = "keep",
        next_observation: str = "all",
        random_frames: int = 0,
        set_truncated: bool = False,
        counters: SharedCounters | None = None,
        poll_control: Callable[[Rollout], bool] | None = None,
    ):
        self.environments = environments
        self.acting = acting
        self.weights = weights
        if acting is not None:
            acting.call = weights.watched(acting.call)
        self.exploration = exploration
        self.apply_at = apply_at
        self.take_at_start = take_at_start or weights.take
        self.only_finals = next_observation == "final"
        self.zeroes_state = state_on_update == "zero"
        self.random_frames = random_frames
        self.set_truncated = set_truncated
        self.counters = (counters or SharedCounters()).values
        self.poll_control = poll_control
        self.layout: FrameLayout | None = None
        self.frames: FrameBlock | None = None  # the block under way
        self.t = 0
        self.state: dict[Key, Tensor] = {}
        self._first: dict[Key, Tensor] | None = None
        self._used_version = 0  # of the weights that the policy was called with last
        self._begun = False
        self._lost = False  # a block was left in the middle: nobody knows where the episodes are
        check_apply_at(apply_at, environments)
        if self.zeroes_state and not (acting and acting.state_keys):
            raise ValueError(
                "state_on_update='zero' is for a policy that carries state, which this one does "
                "not: it puts out no ('next', key) for a key that it takes"
            )
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
        """Draw from these streams from now on, and start new episodes with them."""
        self.seeds = seeds
        self.actions = seeds.actions()
        seeds.seed_policy()
        if self._begun:
            self.restart(seeds=seeds.environments(self.environments.num_envs))

    def restart(
        self, which: np.ndarray[Any, Any] | None = None, seeds: Sequence[int] | None = None
    ) -> None:
        """Start new episodes now; those under way end as truncated."""
        if which is not None and not which.any():
            return
        if self.frames is not None:
            self.environments.cut(self.frames, self.t, seeds, which)
        else:
            self.environments.reset(seeds, which)
        self._clear_state(which)

    def plan(self, num_steps: int) -> FrameLayout:
        """What a block of so many steps holds. The first call asks the policy, for its outputs."""
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
                only_finals=self.only_finals,
            )
        return self.layout

    def _begin_episodes(self) -> None:
        if not self._begun:
            self.counters[STAGE] = RESETTING
            self.environments.reset(self.seeds.environments(self.environments.num_envs))
            self._begun = True
        if self._lost:
            self.restart()
            self._lost = False

    def _first_outputs(self) -> dict[Key, Tensor]:
        """The policy's outputs for the first step: their shapes are known only now."""
        if self.acting is None:
            return {}
        self.counters[STAGE] = COMPILING if self.acting.compiles else ACTING
        if self._first is None:
            streams = Streams()
            self._use(self.weights.version)
            rows = [torch.from_numpy(array) for array in self.environments.current]
            with torch.no_grad(), exploring(self.exploration):
                if self.acting.state_keys and not self.state:
                    self.state = self._initial_state(rows)
                given = {key: value.clone() for key, value in self.state.items()}
                self._first = self.acting(self._inputs(rows, 0))
                self.state = given  # the policy may have written into what it was given
            _check_unchanged(rows)
            self._check(self._first)
            if self.random_frames > 0:  # asked for shapes only: what it drew is not used
                streams.resume()
        return {**self.state, **self._first}

    def _initial_state(self, rows: Sequence[Tensor]) -> dict[Key, Tensor]:
        """Zeros of the shapes that the policy puts out when it is given None for its state."""
        assert self.acting is not None
        streams = Streams()
        state = self.acting.state_keys
        self.state = dict.fromkeys(state)  # type: ignore[assignment]
        try:
            outputs = self.acting(self._inputs(rows, 0))
        except Exception as error:
            self.state = {}
            error.add_note(
                f"to learn the shape of {shown(state)}, the policy was called once without: that "
                "was None, or not in the TensorDict; have it start with zeros then"
            )
            raise
        streams.resume()
        return {key: torch.zeros_like(outputs[(NEXT, *key)]) for key in state}

    def _check(self, outputs: dict[Key, Tensor]) -> None:
        count, leaf = self.environments.num_envs, self.environments.action
        taken = [leaf.key for leaf in self.environments.observations]
        if clashing := [key for key in outputs if is_reserved(key, taken)]:
            raise ValueError(
                f"the policy's output {'/'.join(clashing[0])!r} has the name of something that "
                "batches hold already; rename it"
            )
        for key, value in outputs.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (count,):
                shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the policy's output {'/'.join(key)!r} is {shown}; the first dimension must "
                    f"be the {count} environments"
                )
        action = outputs[ACTION]
        if action.shape[1:] != leaf.shape and action.shape[1:].numel() != int(np.prod(leaf.shape)):
            raise ValueError(
                f"the policy's actions are {list(action.shape)}; "
                f"the action space says {[count, *leaf.shape]}"
            )
        if action.is_floating_point() and leaf.dtype.kind != "f":
            kind = str(action.dtype).removeprefix("torch.")
            raise ValueError(f"the policy's actions are {kind}; the action space says {leaf.dtype}")

    def collect(self, frames: FrameBlock) -> int:
        """Fill the block; how many rows were, fewer only if `poll_control` said to stop."""
        self._begin_episodes()
        environments, counters = self.environments, self.counters
        frames.begin()
        environments.begin(frames)
        self.frames, self.t = frames, 0
        with torch.no_grad(), exploring(self.exploration):
            try:
                if not (environments.halting and environments.halted.all()):
                    self._run(frames, frames.layout.num_steps)
                _check_unchanged(frames.observation_rows[0])
            except BaseException:
                self.lose()
                raise
            finally:
                self.frames = None
        steps = frames.num_steps = self.t
        environments.end(frames, steps)
        if self.set_truncated and steps:
            self._truncate(frames, steps - 1)
        counters[STEPS] += 1
        return steps

    def lose(self) -> None:
        """What was collected last is handed to nobody: start new episodes."""
        self._lost = True

    def _run(self, frames: FrameBlock, num_steps: int) -> None:
        """The hot loop."""
        environments, weights, counters, poll_control = (
            self.environments,
            self.weights,
            self.counters,
            self.poll_control,
        )
        write, step = self._writer(frames), environments.step
        versions, starts, halting = frames.version, frames.is_init, environments.halting
        at_step, at_episode = self.apply_at == "step", self.apply_at == "episode"
        made, used = counters[FRAMES], self._used_version
        counters[VERSION] = weights.version
        for t in range(num_steps):
            self.t = t
            if poll_control is not None and not poll_control(self):
                return
            if at_step and weights.has_news():
                weights.take()
            elif at_episode and starts[t, 0]:
                self.take_at_start()
            version = weights.version
            if version != used:
                self._use(version)
                used = counters[VERSION] = version
            counters[STAGE] = ACTING
            if self.random_frames > 0 or self.acting is None:
                action = self._random_actions(frames, t)
                versions[t] = RANDOM_VERSION
            else:
                action = write(t)
                versions[t] = version
            counters[STAGE] = STEPPING
            count = step(frames, t, action)
            if environments.started and self.state:
                self._clear_state(frames.is_init[t + 1])
            if self.random_frames > 0:
                self.random_frames -= count
            made += count
            counters[FRAMES] = made
            counters[STEPS] += 1
            if halting and environments.halted.all():
                self.t = t + 1
                return
        self.t = num_steps

    def _use(self, version: int) -> None:
        """Note which weights the policy is called with from here on."""
        if version != self._used_version:
            self._used_version = version
            self._first = None  # what the policy said for this row, it said with older weights
            if self.zeroes_state:
                self._clear_state(None)

    def _random_actions(self, frames: FrameBlock, t: int) -> np.ndarray[Any, Any]:
        environments = self.environments
        action = sample(
            environments.action_space, environments.action, self.actions, environments.num_envs
        )
        frames.action[t] = torch.from_numpy(action)
        for output in frames.outputs:
            output[t].zero_()
        return action

    def _writer(self, frames: FrameBlock) -> Callable[[int], np.ndarray[Any, Any]]:
        """A function that acts at row t: call the policy, write its outputs, give the actions."""
        acting = self.acting
        if acting is None:
            return lambda t: self._random_actions(frames, t)
        if self.random_frames > 0:
            self._first = None  # nobody acts by it
        rows, actions = frames.observation_rows, frames.action.numpy()
        shape, kind = actions.shape[1:], actions.dtype.kind
        plain = (
            not acting.state_keys
            and acting.in_keys == [leaf.key for leaf in self.environments.observations]
            and acting.device is None
        )
        state_keys = acting.state_keys
        fields: list[tuple[Key, Any]] = [
            (field.key, output.numpy() if _numpy_knows(output) else output)
            for field, output in zip(frames.layout.outputs, frames.outputs, strict=True)
        ]
        carried = [(key, target) for key, target in fields if key in state_keys]
        targets = [(key, target) for key, target in fields if key not in state_keys]
        expected = dict.fromkeys([ACTION, *(key for key, _ in targets)]).keys()

        def act(t: int, action: Tensor) -> np.ndarray[Any, Any]:
            array = _array(action)
            if array.shape != shape or array.dtype.kind != kind:
                self._check({ACTION: action})
                array = array.reshape(shape)
            actions[t] = array
            return actions[t].copy()  # the policy's own memory is no environment's to write into

        def write(t: int, outputs: dict[Key, Tensor] | None = None) -> np.ndarray[Any, Any]:
            for key, target in carried:  # before the policy can write into it
                _put(key, target, t, self.state[key])
            if outputs is None:
                if self._first is not None and t == 0:
                    outputs, self._first = self._first, None
                else:
                    outputs = acting(rows[t] if plain else self._inputs(rows[t], t))
            if outputs.keys() != expected:
                raise ValueError(
                    f"the policy put out {shown(outputs)}, and {shown(expected)} when it was first "
                    "called: batches hold the same at every step"
                )
            for key, target in targets:
                _put(key, target, t, outputs[key])
            for key in state_keys:
                self.state[key] = outputs[(NEXT, *key)]
            return act(t, outputs[ACTION])

        tensors = any(type(target) is Tensor for _, target in targets)
        return self._tuple_writer(rows, targets, act, write) if plain and not tensors else write

    def _tuple_writer(
        self,
        rows: Sequence[tuple[Tensor, ...]],
        targets: Sequence[tuple[Key, Any]],
        act: Callable[[int, Tensor], np.ndarray[Any, Any]],
        write: Callable[..., np.ndarray[Any, Any]],
    ) -> Callable[[int], np.ndarray[Any, Any]]:
        """The same without a dictionary, for a policy that puts out a tuple of what it named."""
        assert self.acting is not None
        acting, out_keys = self.acting, self.acting.out_keys
        if out_keys is None or len(set(out_keys)) != len(out_keys):
            return write
        count, call = len(out_keys), acting.call
        places = [(key, out_keys.index(key), target) for key, target in targets]
        acts = out_keys.index(ACTION)

        def write_tuple(t: int) -> np.ndarray[Any, Any]:
            if t == 0 and self._first is not None:
                return write(t)
            result = call(*rows[t])
            if type(result) is not tuple or len(result) != count:
                return write(t, acting.read(result))
            for key, place, target in places:
                _put(key, target, t, result[place])
            return act(t, result[acts])

        return write_tuple

    def _inputs(self, rows: Sequence[Tensor], t: int) -> list[Tensor]:
        """The policy's inputs in its own order: observations, state, whether an episode starts."""
        assert self.acting is not None
        known: dict[Key, Tensor] = {
            leaf.key: row for leaf, row in zip(self.environments.observations, rows, strict=True)
        }
        known.update(self.state)
        if IS_INIT in self.acting.in_keys:
            starts = self.environments.fresh if self.frames is None else self.frames.is_init[t]
            known[IS_INIT] = torch.from_numpy(starts)
        return [known[key] for key in self.acting.in_keys]

    def _clear_state(self, which: np.ndarray[Any, Any] | None) -> None:
        """Have these environments' state start anew."""
        if self._first is not None:
            self._first = None
        for key, value in self.state.items():
            if which is None:
                self.state[key] = torch.zeros_like(value)
            else:
                mask = torch.from_numpy(which).to(value.device)
                mask = mask.reshape(-1, *[1] * (value.ndim - 1))
                self.state[key] = value.masked_fill(mask, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is: its streams, its environments, what its policy carries."""
        return {
            "seeds": asdict(self.seeds),
            "begun": self._begun,
            "random_frames": self.random_frames,
            "used_version": self._used_version,
            "actions": self.actions.bit_generator.state,
            "environments": self.environments.state_dict() if self._begun else {},
            "state": {name_of(key): value.clone() for key, value in self.state.items()},
        }

    def load_state_dict(self, state: dict[str, Any], *, goes_on: bool = True) -> bool:
        """Go on from there; False if the environments had to start new episodes instead.

        Without `goes_on`, and in the midst of a block, they start new ones in any case; with
        apply_at="episode" too, as the weights that they began with are gone.
        """
        self.seeds = Seeds(**state["seeds"])
        self.random_frames = int(state["random_frames"])
        self._used_version = int(state["used_version"])
        self.actions.bit_generator.state = state["actions"]
        goes_on = goes_on and (self.apply_at != "episode" or not state["begun"])
        if self.frames is not None or not goes_on:
            self.restart()
            return False
        self._begun, self._first, self._lost = bool(state["begun"]), None, False
        self.counters[STAGE] = REPLAYING
        exact = not self._begun or self.environments.load_state_dict(state["environments"])
        saved = {key_of(name): value.clone() for name, value in state["state"].items()}
        self.state = saved or self.state
        if not exact or not saved:
            self._clear_state(None)
        return exact

    def _truncate(self, frames: FrameBlock, t: int) -> None:
        """Mark the block's last frames as truncated, for those who bootstrap there."""
        open_ended = ~(frames.terminated[t] | frames.truncated[t])
        frames.keep_finals(t, open_ended)
        frames.truncated[t] |= open_ended


def check_apply_at(apply_at: str, environments: Environments) -> None:
    """Refuse to apply weights where episodes start if several start at different steps."""
    if apply_at == "episode" and environments.num_envs > 1:
        raise ValueError(
            f"apply_at='episode' needs one environment a worker, and this one has "
            f"{environments.num_envs} ({environments}): their episodes start at different steps, "
            "and a policy has one version at a time; give each worker one environment, or take "
            "apply_at='step' or 'batch'"
        )


def _check_unchanged(observations: Sequence[Tensor]) -> None:
    """Refuse a policy that writes into observations: torch counts that for all rows together."""
    counted = [one for one in observations if not one.is_inference()]
    if any(one._version for one in counted):
        raise ValueError(
            "the policy wrote into an observation that it was given, which the batch would then "
            "hold: have it work on a copy"
        )


def _array(value: Tensor) -> np.ndarray[Any, Any]:
    known = value if _numpy_knows(value) else value.float()
    array: np.ndarray[Any, Any] = known.numpy() if known.is_cpu else known.cpu().numpy()
    return array


def _put(key: Key, target: Any, t: int, value: Tensor) -> None:
    """Write a row of a block's field: an array, or a tensor of a type that numpy does not know."""
    if value.shape != target.shape[1:]:
        raise ValueError(
            f"the policy's output {'/'.join(key)!r} is {list(value.shape)}, and was "
            f"{list(target.shape[1:])} when it was first called: batches hold one shape"
        )
    if type(target) is Tensor:
        target[t].copy_(value)
    else:
        target[t] = _array(value)


def _numpy_knows(tensor: Tensor) -> bool:
    return tensor.dtype != torch.bfloat16
