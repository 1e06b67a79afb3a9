"""Where tensors lie in a block, and what cannot be laid out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sync.model.binding import Binding
from sync.model.layout import ALIGNMENT, HEADER_BYTES, Layout, check_same
from sync.model.strategy import WeightStrategy

EVERY_DTYPE = {
    "half": torch.float16,
    "brain": torch.bfloat16,
    "single": torch.float32,
    "double": torch.float64,
    "complex": torch.complex64,
    "wide_complex": torch.complex128,
    "long": torch.int64,
    "byte": torch.uint8,
    "flag": torch.bool,
}


def one_of_each(shape=(3, 5)):
    return {name: torch.ones(shape, dtype=dtype) for name, dtype in EVERY_DTYPE.items()}


def test_leaves_of_all_dtypes_lie_aligned_behind_the_header_and_apart():
    layout = Layout.of(one_of_each())
    places = sorted((leaf.offset, leaf.nbytes) for leaf in layout.leaves)
    assert len(places) == len(EVERY_DTYPE)
    assert places[0][0] == HEADER_BYTES
    assert all(offset % ALIGNMENT == 0 for offset, _ in places)
    ends = [offset + nbytes for offset, nbytes in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert ends[-1] <= layout.nbytes


def test_views_have_the_dtype_and_shape_of_their_leaves_and_share_the_buffer():
    layout = Layout.of(one_of_each())
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for leaf, view in zip(layout.leaves, layout.views(buffer), strict=True):
        assert (view.dtype, view.shape) == (EVERY_DTYPE[leaf.name], (3, 5))
        view.fill_(1)
        assert buffer[leaf.offset : leaf.offset + leaf.nbytes].any()


def test_leaves_of_one_dtype_lie_in_one_stretch_whatever_their_order_in_the_model():
    tensors = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64), "c": torch.ones(3)}
    layout = Layout.of(tensors)
    first, second, _ = layout.leaves
    assert second.offset - first.offset == ALIGNMENT
    assert [leaf.name for leaf in layout.leaves] == ["a", "c", "b"]


def test_dtypes_lie_in_the_same_order_in_every_process():
    tensors = one_of_each()
    orders = [
        [leaf.dtype for leaf in Layout.of(dict(pairs)).leaves]
        for pairs in (tensors.items(), reversed(tensors.items()))
    ]
    assert orders == [sorted(EVERY_DTYPE.values(), key=str)] * 2


def test_scalars_and_empty_tensors_have_their_place():
    layout = Layout.of({"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)})
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert {tuple(view.shape) for view in views} == {(), (0, 3)}


def test_a_model_of_nothing_has_a_block_of_a_header():
    layout = Layout.of({})
    assert layout.nbytes == HEADER_BYTES
    assert layout.leaves == ()


def test_extra_state_gets_room_to_grow():
    assert Layout.of({}).extra_capacity == 0
    assert Layout.of({}, b"x").extra_capacity >= 1000
    assert Layout.of({}, b"x" * 10_000).extra_capacity >= 20_000


def test_which_leaves_are_buffers_makes_no_difference_to_a_block():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3)}
    plain, flagged = Layout.of(tensors), Layout.of(tensors, buffers={"b"})
    assert plain == flagged
    assert [leaf.is_buffer for leaf in flagged.leaves] == [False, True]


@pytest.mark.parametrize(
    ("check_finite", "checked"),
    [(True, ["weight"]), ("all", ["weight", "mask"]), (False, [])],
)
def test_what_is_checked_is_said_for_each_leaf(check_finite, checked):
    tensors = {"weight": torch.zeros(2), "mask": torch.zeros(2), "steps": torch.zeros(2).long()}
    layout = Layout.of(tensors, buffers={"mask", "steps"})
    flags = zip(layout.leaves, layout.checked(check_finite), strict=True)
    assert [leaf.name for leaf, flag in flags if flag] == checked


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), "a nested tensor"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "torch.qint8"),
    ],
    ids=["csr", "nested", "quantised"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # such tensors are not finished or deprecated
def test_models_with_a_tensor_that_is_not_dense_are_refused_by_name(make, kind):
    model = nn.Module()
    model.register_buffer("odd", make())
    with pytest.raises(ValueError, match=rf"'odd' is {kind}; only dense tensors can be sent"):
        Binding(model, WeightStrategy())


def test_a_sparse_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'adjacency' is torch\.sparse_coo"):
        Layout.of({"adjacency": torch.eye(3).to_sparse()})


def signature(**tensors):
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("found", "error", "says"),
    [
        ({"a": torch.ones(2)}, KeyError, "mine lacks 'b'"),
        (
            {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)},
            KeyError,
            "mine has 'c', which is not expected",
        ),
        (
            {"a": torch.ones(2), "b": torch.ones(3, 1)},
            ValueError,
            r"mine: 'b' has shape \[3, 1\], expected \[3\]",
        ),
        (
            {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.float64)},
            ValueError,
            r"mine: 'b' is torch\.float64, expected torch\.float32",
        ),
    ],
    ids=["missing", "surplus", "misshapen", "wrong_dtype"],
)
def test_what_does_not_fit_is_named_with_what_was_expected(found, error, says):
    expected = {"a": torch.ones(2), "b": torch.ones(3)}
    with pytest.raises(error, match=says):
        check_same(signature(**expected), signature(**found), whose="mine")
    with pytest.raises(error, match=says):
        Layout.of(expected).check(found, whose="mine")


def test_of_many_missing_keys_the_first_are_named_and_the_rest_counted():
    expected = {f"k{i}": torch.ones(1) for i in range(9)}
    with pytest.raises(KeyError, match=r"lacks 'k0', 'k1', 'k2', 'k3', 'k4' and 4 more"):
        check_same(signature(**expected), {}, whose="mine")
