"""How PPO cuts rows of frames [E, T] into minibatches: by frames, sequences, or whole trajectories.

    parts = layout.arrange(rows, present, states)
    for places in layout.split(parts, torch.randperm(count), size):
        part = layout.take(parts, places)      # one minibatch, which the networks read
        frames = layout.frames(part)           # its frames, one after another, without padding

Feed-forward networks read frames. Recurrent ones read rows, from the state that each begins with.
Whole trajectories, for objectives that need them, are numbered from zero in each minibatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Part = dict[str, Tensor]


class BatchLayout:
    """Minibatches of frames, each by itself. Other layouts derive from it."""

    def arrange(self, rows: Part, present: Tensor, states: Tensor | None) -> Part:
        """What minibatches are drawn from: of rows [E, T], the frames that are present.

        states: of a recurrent policy after each frame. rows["state"] is the one before each row.
        """
        return {key: x[present] for key, x in rows.items()}

    def split(self, parts: Part, order: Tensor, size: int) -> Iterable[Tensor]:
        """Cut an order of all parts into minibatches of nearly equal size, about `size` frames."""
        return order.tensor_split(max(1, round(len(order) / size)))

    def take(self, parts: Part, places: Tensor) -> Part:
        """The minibatch of these parts."""
        return {key: x[places] for key, x in parts.items()}

    def frames(self, part: Part) -> Part:
        """The frames of a minibatch."""
        return part


class Sequences(BatchLayout):
    """Minibatches of sequences [S, length] for a recurrent policy; "mask" says what is present."""

    def __init__(self, length: int):
        self.length = length

    def arrange(self, rows: Part, present: Tensor, states: Tensor | None) -> Part:
        length = min(self.length, present.shape[1])
        first, rows = numbered_frames(rows)
        return with_states(sequences(rows, present, length), first, states)

    def split(self, parts: Part, order: Tensor, size: int) -> Iterable[Tensor]:
        return super().split(parts, order, max(1, size // parts["mask"].shape[1]))

    def frames(self, part: Part) -> Part:
        return without_padding(part)


class WholeTrajectories(BatchLayout):
    """Minibatches of whole trajectories, each as far as it lies in the batch, frame after frame."""

    def arrange(self, rows: Part, present: Tensor, states: Tensor | None) -> Part:
        return trajectories(rows, present)

    def split(self, parts: Part, order: Tensor, size: int) -> Iterable[Tensor]:
        return split_evenly(order, parts["mask"].sum(1), size)

    def take(self, parts: Part, places: Tensor) -> Part:
        return without_padding(renumbered(super().take(parts, places)))


class RecurrentTrajectories(WholeTrajectories):
    """The same for a recurrent policy: trajectories [N, L], and the state before each."""

    def arrange(self, rows: Part, present: Tensor, states: Tensor | None) -> Part:
        first, rows = numbered_frames(rows)
        return with_states(trajectories(rows, present), first, states)

    def take(self, parts: Part, places: Tensor) -> Part:
        return renumbered(BatchLayout.take(self, parts, places))

    def frames(self, part: Part) -> Part:
        return without_padding(part)


def layout(*, recurrent: bool, whole_trajectories: bool, length: int) -> BatchLayout:
    """The layout for a policy and an objective. length: of the sequences of a recurrent policy."""
    if whole_trajectories:
        return RecurrentTrajectories() if recurrent else WholeTrajectories()
    return Sequences(length) if recurrent else BatchLayout()


def trajectories(rows: Part, usable: Tensor) -> Part:
    """Cut rows [E, T] into trajectories [N, L] of the longest's length, as far as they lie in them.

    Those without a usable frame are left out; "mask" says which frames of the others to learn from.
    """
    ids = rows["trajectory"]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    number = begins.flatten().cumsum(0) - 1
    first = begins.flatten().nonzero().squeeze(1)
    place = torch.arange(len(number), device=ids.device) - first[number]
    shape = (len(first), int(place.max()) + 1)
    cut = {}
    for key, value in {**rows, "mask": usable}.items():
        cut[key] = value.new_zeros((*shape, *value.shape[2:]))
        cut[key][number, place] = value.flatten(0, 1)
    chosen = cut["mask"].any(1)
    return {key: value[chosen] for key, value in cut.items()}


def sequences(rows: Part, usable: Tensor, length: int) -> Part:
    """Cut rows [E, T] into sequences [S, length].

    Those without a usable frame are left out; "mask" says which frames of the others to learn from.
    """
    padding = -usable.shape[1] % length
    cut = {}
    for key, value in {**rows, "mask": usable}.items():
        padded = torch.cat([value, value[:, -1:].expand(-1, padding, *value.shape[2:])], dim=1)
        cut[key] = padded.unflatten(1, (-1, length)).flatten(0, 1)
    if padding:
        cut["mask"].unflatten(0, (len(usable), -1))[:, -1, -padding:] = False
    chosen = cut["mask"].any(1)
    return {key: value[chosen] for key, value in cut.items()}


def numbered_frames(rows: Part) -> tuple[Tensor, Part]:
    """The state before each row, and the rest of the rows, with the "place" of each frame."""
    starts = rows["starts"]
    place = torch.arange(starts.numel(), device=starts.device).view(starts.shape)
    return rows["state"], {key: x for key, x in rows.items() if key != "state"} | {"place": place}


def with_states(parts: Part, first: Tensor, states: Tensor | None) -> Part:
    """Parts of rows, each with the state before it: the learner's, and not that of the worker."""
    if states is None:
        raise ValueError("a recurrent policy has a state after each frame")
    parts["state"] = states_before(parts.pop("place")[:, 0], first, states)
    return parts


def states_before(places: Tensor, first: Tensor, states: Tensor) -> Tensor:
    """The state before each of these frames, numbered through rows [E, T].

    first: before each row; states: after each frame.
    """
    row, step = places // states.shape[1], places % states.shape[1]
    begins_row = (step == 0).view(-1, *[1] * (first.dim() - 1))
    return torch.where(begins_row, first[row], states[row, step - 1])


def split_evenly(order: Tensor, lengths: Tensor, size: int) -> Iterator[Tensor]:
    """Cut an order of trajectories into parts with nearly the same number of frames."""
    ends = lengths[order].cumsum(0)
    count = max(1, round(int(ends[-1]) / size))
    middles = ends - 0.5 * lengths[order]
    which = (middles * count / ends[-1]).long()
    return (order[which == number] for number in range(count) if (which == number).any())


def renumbered(part: Part) -> Part:
    """Trajectories, numbered from zero in each frame."""
    numbers = torch.arange(len(part["mask"]), device=part["mask"].device)
    return part | {"trajectory": numbers[:, None].expand_as(part["mask"])}


def without_padding(part: Part) -> Part:
    """The frames of sequences or trajectories, one after another, without the padding."""
    mask = part["mask"]
    return {key: x[mask] for key, x in part.items() if key not in ("state", "mask")}
