"""Where tensors lie in a block, and one version in it: what is written is what is read."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sync.model import copying
from sync.model.binding import Binding
from sync.model.block import (
    ALIGNMENT,
    HEADER_BYTES,
    NEVER,
    Layout,
    Snapshot,
    check_same,
    private_snapshot,
)
from sync.model.copying import PIECE, STRETCH
from sync.model.strategy import WeightStrategy
from tests.sync.support import bits

NAN, INF = float("nan"), float("inf")
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


def test_of_many_missing_keys_the_first_are_named_and_the_rest_counted():
    expected = {f"k{i}": torch.ones(1) for i in range(9)}
    with pytest.raises(KeyError, match=r"lacks 'k0', 'k1', 'k2', 'k3', 'k4' and 4 more"):
        check_same(signature(**expected), {}, whose="mine")


# -- one version


def packed(tensors, *, check_finite: bool = True, version: int = 0) -> Snapshot:
    binding = Binding(tensors, WeightStrategy())
    written = private_snapshot(binding.layout)
    binding.pack(written, version, check_finite)
    return written


def loaded(tensors, **how):
    """`tensors` after a trip through a block."""
    arrived = {name: torch.zeros_like(t) for name, t in tensors.items()}
    Binding(arrived, WeightStrategy()).load(packed(tensors, **how))
    return arrived


def test_a_block_holds_no_version_while_it_is_packed(monkeypatch):
    binding = Binding({"a": torch.ones(3)}, WeightStrategy())
    written = private_snapshot(binding.layout)
    binding.pack(written, 0)
    versions = []

    def copied(*_, check):
        versions.append(written.version)
        return True

    monkeypatch.setattr("sync.model.binding.copy_leaf", copied)
    binding.pack(written, 1)
    assert versions == [NEVER]
    assert written.version == 1


def test_extra_state_beyond_its_room_is_refused_and_leaves_no_version():
    layout = Layout.of({"a": torch.ones(3)}, b"x")
    written = private_snapshot(layout)
    written.begin()
    written.stamp(0, b"y" * layout.extra_capacity)
    assert (written.version, written.extra) == (0, b"y" * layout.extra_capacity)
    written.begin()
    with pytest.raises(ValueError, match=r"extra state takes \d+ bytes.*nothing was sent"):
        written.stamp(1, b"y" * (layout.extra_capacity + 1))
    assert written.version == NEVER


def test_a_block_can_become_another_to_the_byte():
    source = leaves(PIECE)
    written = packed(source, version=7)
    twin = private_snapshot(written.layout)
    twin.become(written)
    assert torch.equal(twin.buffer, written.buffer)
    assert twin.version == 7


def test_a_block_holds_no_version_while_it_becomes_another(monkeypatch):
    old, new = packed({"a": torch.zeros(3)}, version=1), packed({"a": torch.ones(3)}, version=2)
    versions = []
    monkeypatch.setattr(
        "sync.model.block.copy_leaves", lambda *copied: versions.append(old.version)
    )
    old.become(new)
    assert (versions, old.version) == ([NEVER], 2)


FLOATS = {name: d for name, d in EVERY_DTYPE.items() if d.is_floating_point or d.is_complex}


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_one_bad_value_is_refused_with_the_name_of_its_leaf(dtype, bad):
    source = {"fine": torch.ones(5, dtype=dtype), "spoiled": torch.ones(5, dtype=dtype)}
    source["spoiled"][3] = bad
    with pytest.raises(ValueError, match=r"'spoiled' holds 1 NaN or infinite value"):
        packed(source)
    sent = loaded(source, check_finite=False)
    assert bits(sent) == bits(source)


@pytest.mark.parametrize("at", [0, STRETCH - 1, STRETCH, 2 * STRETCH + PIECE, -1])
@pytest.mark.parametrize("step", [1, 2], ids=["in_one_piece", "strided"])
def test_one_bad_value_is_refused_wherever_it_is_in_a_large_tensor(step, at):
    tensor = torch.ones(step * (2 * STRETCH + 2 * PIECE))[::step]
    tensor[at] = NAN
    with pytest.raises(ValueError, match=r"'a' holds 1 NaN or infinite value"):
        packed({"a": tensor})
    tensor[at] = 7.0
    assert bits(loaded({"a": tensor})) == bits({"a": tensor})


LARGEST = {
    "half": torch.full((40,), 65504.0, dtype=torch.float16),
    "brain": torch.full((40,), 3.3e38, dtype=torch.bfloat16),
    "single": torch.full((40,), 3.4e38),
    "double": torch.full((40,), 1.7e308, dtype=torch.float64),
    "complex": torch.full((40,), 3.4e38 + 3.4e38j, dtype=torch.complex64),
    "wide_complex": torch.full((40,), 1.7e308 - 1.7e308j, dtype=torch.complex128),
    "of_both_signs": torch.tensor([3.4e38, 3.4e38, -3.4e38, -3.4e38] * 40),
    "many": torch.full((3 * PIECE,), 3.4e38),
}


@pytest.mark.parametrize("values", LARGEST.values(), ids=LARGEST)
def test_finite_values_are_accepted_though_their_sum_overflows(values):
    assert bits(loaded({"a": values})) == bits({"a": values})


def test_one_finite_complex_number_is_accepted_though_its_magnitude_overflows():
    values = torch.tensor([1.5e308 + 1.5e308j], dtype=torch.complex128)
    assert bits(loaded({"a": values})) == bits({"a": values})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_complex_numbers_travel_like_others():
    values = torch.view_as_complex(torch.arange(8, dtype=torch.float16).reshape(4, 2))
    assert bits(loaded({"a": values})) == bits({"a": values})


def leaves(elements: int) -> dict[str, Tensor]:
    """Leaves of many kinds, of about so many elements each."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    rows = max(1, elements // 64)
    return {
        "plain": random(rows, 64),
        "transposed": random(64, rows).t(),
        "every_other": random(2 * rows, 64)[::2],
        "expanded": random(1, 64).expand(rows, 64),
        "half": random(elements).half(),
        "odd": random(elements + 7),
        "complex": torch.complex(random(elements), random(elements)).conj(),
        "double": random(elements).double(),
        "long": torch.arange(elements),
        "flag": random(elements) > 0,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }


def test_a_large_model_crosses_in_pieces_bit_for_bit():
    source = leaves(3 * PIECE)
    assert bits(loaded(source)) == bits(source)


@pytest.mark.parametrize("where", [0, PIECE - 1, PIECE, 3 * PIECE + 4])
def test_a_spoiled_number_is_seen_in_whatever_piece_it_is(where):
    source = {"a": torch.ones(3 * PIECE + 5)}
    source["a"][where] = NAN
    with pytest.raises(ValueError, match="'a' holds 1 NaN"):
        packed(source)
    packed(source, check_finite=False)


def test_a_large_model_is_packed_anew_after_its_values_changed_in_place():
    source = {"a": torch.ones(3 * PIECE), "b": torch.ones(512, 513).t()}
    binding = Binding(source, WeightStrategy())
    written = private_snapshot(binding.layout)
    binding.pack(written, 0)
    for tensor in source.values():
        tensor.mul_(3)
    binding.pack(written, 1)
    assert all((view == 3).all() for view in written.views)


# Trees of tensors, of random shape and depth and with random bytes in them.

names = st.text("abcxyz_0123456789", min_size=1, max_size=4)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from(list(EVERY_DTYPE.values()))


@st.composite
def random_tensors(draw) -> Tensor:
    dtype, shape = draw(dtypes), draw(shapes)
    size = functools.reduce(int.__mul__, shape, 1) * torch.empty((), dtype=dtype).element_size()
    data = draw(st.binary(min_size=size, max_size=size))
    raw = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[:size].clone()
    if dtype == torch.bool:
        raw %= 2
    tensor = raw.view(dtype).reshape(shape)
    return tensor.mT.contiguous().mT if draw(st.booleans()) and tensor.dim() > 1 else tensor


trees = st.recursive(
    st.dictionaries(names, random_tensors(), max_size=4),
    lambda below: st.dictionaries(names, below | random_tensors(), max_size=4),
    max_leaves=12,
)


def zeros(tree):
    if isinstance(tree, Tensor):
        return torch.zeros_like(tree)
    return {name: zeros(below) for name, below in tree.items()}


@settings(max_examples=150, deadline=None)
@given(tree=trees, version=st.integers(0, 1 << 40), as_dict=st.booleans(), piecewise=st.booleans())
def test_any_tree_of_tensors_travels_bit_for_bit(tree, version, as_dict, piecewise):
    strategy = WeightStrategy("state_dict" if as_dict else "tensordict")
    with pytest.MonkeyPatch.context() as patch:
        if piecewise:
            patch.setattr(copying, "PIECE", 5)
        source = Binding(tree, strategy)
        written = private_snapshot(source.layout)
        source.pack(written, version)
        arrived = zeros(tree)
        Binding(arrived, strategy, source.layout).load(written)
    assert written.version == version
    assert bits(arrived) == bits(tree)
    assert bits(strategy.extract_weights(arrived)) == bits(tree)
