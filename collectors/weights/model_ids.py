"""Which parts of a policy are synchronised, each under the name of its model id."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
from torch import nn

from sync import NoWeightSyncScheme, WeightSyncScheme
from sync.model.strategy import flatten

POLICY = "policy"


def sends_weights(policy: Any, schemes: Mapping[str, WeightSyncScheme] | None) -> bool:
    """Whether there are weights to send: through given schemes, or of a policy with weights."""
    return isinstance(policy, nn.Module) if schemes is None else bool(schemes)


def check_apart(policy: Any, schemes: Mapping[str, WeightSyncScheme]) -> None:
    """Refuse a tensor that several schemes send."""
    models = {model_id: find_model(policy, model_id) for model_id in schemes}
    owners: dict[int, str] = {}
    for model_id, model in models.items() if len(models) > 1 else ():
        if isinstance(schemes[model_id], NoWeightSyncScheme):
            continue
        for slot in flatten(model).slots:
            owner = owners.setdefault(id(slot.tensor), model_id)
            if owner != model_id:
                raise ValueError(
                    f"weight_sync_schemes: {slot.name!r} of {model_id!r} is also in {owner!r}: "
                    "send each tensor through one scheme"
                )


def copied(policy: Any, shared: Iterable[Any] = ()) -> Any:
    """A copy of the policy for the rollout, by any means that works.

    shared: objects in it that the copy shares.
    """
    by_id = {id(one): one for one in shared}
    try:
        return copy.deepcopy(policy, dict(by_id))
    except Exception:  # noqa: BLE001 - some modules only pickle
        file = io.BytesIO()
        _Pickler(file, by_id).dump(policy)
        file.seek(0)
        return _Unpickler(file, by_id).load()


class _Pickler(cloudpickle.Pickler):
    """Leaves out these objects, by their identities."""

    def __init__(self, file: io.BytesIO, shared: Mapping[int, Any]):
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, one: Any) -> int | None:
        return id(one) if id(one) in self._shared else None


class _Unpickler(pickle.Unpickler):
    """Puts them in again."""

    def __init__(self, file: io.BytesIO, shared: Mapping[int, Any]):
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, identity: int) -> Any:
        return self._shared[identity]


def parameters_of(policy: Any) -> list[Any]:
    """What copies of a policy can share: its parameters."""
    return list(policy.parameters()) if isinstance(policy, nn.Module) else []


def find_model(policy: Any, model_id: str) -> Any:
    """The part of the policy that a model id names: "policy" itself, or an attribute path in it."""
    model = policy
    for part in model_id.split("."):
        if model is policy and part == POLICY:
            continue
        try:
            model = model[int(part)] if part.isdigit() else getattr(model, part)
        except (AttributeError, IndexError, TypeError):
            raise ValueError(
                f"no model {model_id!r} in the policy: {type(model).__name__} has no {part!r}"
            ) from None
    return model
