"""Every kind of lookup, merged, gives PyTorch's results and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tritonemb as te
from tests.compiler.graphs import assert_same, compile_pair
from tests.helpers import fewer

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("dynamo")]

ROWS = 11


class Several(nn.Module):
    """Calls `use(module, ids, offsets, floats)` for each of its modules."""

    def __init__(self, modules, use):
        super().__init__()
        self.tables = nn.ModuleList(modules)
        self.use = use

    def forward(self, *args):
        return [self.use(module, *args) for module in self.tables]


def check(modules, use, *args, number=None, tolerance=None):
    """Merged into one lookup of `number`, or of all."""
    compiled, *pair = compile_pair(Several(modules, use))
    assert_same(compiled, *pair, args, **({} if tolerance is None else {"tolerance": tolerance}))
    assert [len(members) for members in compiled.fused] == [len(modules) if number is None else number]
    assert not compiled.reasons


def ids(*shape, dtype=torch.int64):
    return torch.randint(0, ROWS, shape, dtype=dtype)


def ragged(batch_size, num_ids):
    """Offsets `[B]`, some of empty bags."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, num_ids + 1, (batch_size - 1,)).sort()[0]])


def call(module, *args):
    return module(*args)


def bags(mode, *dims, **options):
    return [nn.EmbeddingBag(ROWS, dim, mode=mode, **options) for dim in dims]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bags_of_offsets(mode, dtype):
    offsets = ragged(6, 14).to(dtype)
    assert (offsets.diff() == 0).any() or offsets[-1] == 14, "some bag is empty"
    check(bags(mode, 3, 8, 1), call, ids(14, dtype=dtype), offsets)


def ended_bags(**options):
    return bags("sum", 4, include_last_offset=True, **options) + bags("mean", 4, include_last_offset=True, **options)


def padded_bags():
    return bags("sum", 3, padding_idx=0) + bags("mean", 4, padding_idx=-1) + bags("mean", 5, padding_idx=4)


PADDED = torch.tensor([4, 10, 0, 4, 1, 2, 10]), torch.tensor([0, 1, 2, 2, 4])


@pytest.mark.parametrize(
    ("modules", "args"),
    [
        (ended_bags, lambda: (ids(9), torch.tensor([0, 0, 4, 9, 9]))),
        (lambda: bags("mean", 3, 5), lambda: (ids(5, 4),)),
        (lambda: bags("mean", 3, 3), lambda: (ids(0), torch.zeros(4).long())),
        (padded_bags, lambda: (ids(5, 3),)),
        (padded_bags, lambda: PADDED),
        (lambda: ended_bags(padding_idx=1), lambda: (torch.tensor([3, 1, 4, 2]), torch.tensor([0, 2, 2]))),
    ],
    ids=["ended", "one length", "all empty", "padding", "padding of offsets", "padding of the last bag"],
)  # with padding, the last bag has all that is left
def test_bags(modules, args):
    check(modules(), call, *args())


@pytest.mark.parametrize("optimizer", [None, te.optim.Adam(lr=0.1)], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", [nn.EmbeddingBag, te.nn.EmbeddingBag])
def test_ids_behind_the_last_offset_belong_to_no_bag(kind, optimizer):
    """Merged with bags that have other forms; and with no more keys where there are no offsets to end early."""
    sums = [kind(ROWS, 4, mode=mode, include_last_offset=True) for mode in ("sum", "mean")]
    model = Several([*sums, nn.Embedding(ROWS, 3), kind(ROWS, 2, mode="mean")], ended)
    if optimizer is not None:
        te.fuse(model, optimizer)
    compiled, _, twin = compile_pair(model)
    flat, offsets = torch.tensor([1, 2, 1, 5, 6, 7, 8]), torch.tensor([0, 2, 2, 5])
    matrix = ids(3, 2)
    results = []
    for run, end in ((compiled, 7), (twin, 5)):
        outputs = run(flat[:end], offsets, matrix)
        results.append([output.detach() for output in outputs])
        torch.autograd.backward([output.square().sum() for output in outputs])
    states = [[p.detach() if p.grad is None else p.grad for p in item.parameters()] for item in (model, twin)]
    for actual, expected in zip(results[0] + states[0], results[1] + states[1], strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    assert [len(members) for members in compiled.fused] == [4]
    with pytest.raises(ValueError, match="offsets must ascend: feature 'tables"):
        compiled(flat, torch.tensor([0, 2, 2, 9]), matrix)


def ended(module, flat, offsets, matrix):
    if isinstance(module, nn.Embedding):
        return module(matrix[:, 0])
    return module(flat, offsets) if module.include_last_offset else module(matrix)


def test_bags_of_several_forms_and_dtypes_of_ids():
    def use(module, flat, offsets, matrix, wide):
        form = module.embedding_dim
        if form == 3:
            return module(flat, offsets)
        return module(matrix if form == 4 else wide)

    modules = bags("sum", 3, 4, 5)
    check(modules, use, ids(9, dtype=torch.int32), ragged(5, 9).int(), ids(5, 2), ids(5, 3, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_rows_that_are_bags_of_one_id_are_exact(shape):
    modules = [nn.Embedding(ROWS, dim, padding_idx=padding) for dim, padding in ((3, None), (4, 2), (5, -1))]
    check(modules, call, ids(*shape))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2), ()])
def test_rows_of_ids_of_any_shape(shape):
    modules = [nn.Embedding(ROWS, 4, padding_idx=padding) for padding in (None, 2, -1)]
    check(modules, call, ids(*shape))


def test_functions():
    def use(module, matrix, flat, offsets):
        weight = module.weight
        if module.embedding_dim == 3:
            return F.embedding_bag(matrix, weight, mode="sum") + F.embedding_bag(flat, weight, offsets)
        if module.embedding_dim == 4:
            return F.embedding_bag(flat, weight, offsets, mode="mean")
        return F.embedding(flat[:4], weight)

    modules = [nn.EmbeddingBag(ROWS, dim) for dim in (3, 4, 5)]
    check(modules, use, ids(4, 3), ids(9), ragged(4, 9), number=4)


def test_per_sample_weights_have_gradients_and_others_have_ones():
    def use(module, matrix, weights):
        return module(matrix, per_sample_weights=weights) if module.embedding_dim == 3 else module(matrix)

    modules = [nn.EmbeddingBag(ROWS, 3, mode="sum"), nn.EmbeddingBag(ROWS, 4, mode="mean")]
    check(modules, use, ids(5, 3), torch.randn(5, 3))


def test_one_weight_in_two_modules_and_one_module_twice():
    first, second = nn.EmbeddingBag(ROWS, 4, mode="sum"), nn.EmbeddingBag(ROWS, 4, mode="mean")
    second.weight = first.weight
    check([first, second], lambda m, one, two: m(one) - m(two), ids(5, 3), ids(5, 2), number=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_16_bits(dtype):
    # Bags are summed in float32 and rounded once; PyTorch may round at every addition: some units of the last place.
    eps = torch.finfo(dtype).eps
    check(bags("sum", 3, 4, dtype=dtype), call, ids(5, 3), tolerance={"rtol": 4 * eps, "atol": 8 * eps})


def test_a_frozen_table_has_no_gradient():
    modules = bags("sum", 3, 3)
    modules[0].weight.requires_grad_(False)
    check(modules, call, ids(5, 3))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    modules = [nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=True), nn.Embedding(ROWS, 4, sparse=True)]
    compiled, model, _ = compile_pair(Several(modules, lambda m, i: m(i[:, :1]).reshape(5, -1)))
    matrix = ids(5, 3)
    with context():
        result, required = compiled(matrix), model(matrix)
    assert [len(members) for members in compiled.fused] == [2]
    for actual, expected in zip(result, required, strict=True):
        assert torch.equal(actual, expected)


def test_autocast_changes_nothing_in_lookups():
    modules = bags("sum", 4, 4)
    compiled, *pair = compile_pair(Several(modules, lambda m, i, w: m(i, per_sample_weights=w) @ torch.ones(4, 2)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The product is bfloat16 on both sides, of float32 sums in two orders: a unit in its last place.
        assert_same(compiled, *pair, [ids(5, 3), torch.randn(5, 3)], {"rtol": 2e-2, "atol": 2e-2})
    assert len(compiled.fused) == 1


@given(st.data())
@torch.no_grad()
def test_mixtures(data):
    """Drawn lookups: whatever is merged, the outputs and the gradients are PyTorch's."""
    torch._dynamo.reset()
    batch_size = data.draw(st.integers(1, 4))
    num_lookups = data.draw(st.integers(2, fewer(6, 4)))
    kinds = st.sampled_from(["bag", "ended", "matrix", "row", "rows"])
    specs = [
        (data.draw(kinds), data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from(["sum", "mean"])),
         data.draw(st.sampled_from([None, 0, 3])), data.draw(st.booleans()), data.draw(st.booleans()))
        for _ in range(num_lookups)
    ]  # fmt: skip
    modules, args = [], []
    for kind, dim, mode, padding, shared, narrow in specs:
        same = [module for module in modules if module.embedding_dim == dim]
        rows = kind in ("row", "rows")
        weight = same[0].weight if shared and same else None
        if rows:
            module = nn.Embedding(ROWS, dim, padding_idx=padding, _weight=weight)
        else:
            module = nn.EmbeddingBag(
                ROWS, dim, mode=mode, padding_idx=padding, include_last_offset=kind == "ended", _weight=weight
            )
        if weight is not None:
            module.weight = weight
        modules.append(module)
        length = data.draw(st.integers(1, 4))
        shape = {"matrix": (batch_size, length), "row": (batch_size, 1), "rows": (batch_size, length)}
        values = ids(*shape.get(kind, (length,)), dtype=torch.int32 if narrow else torch.int64)
        offsets = ragged(batch_size, length)
        if kind == "ended":
            offsets = torch.cat([offsets, torch.tensor([length])])
        args.append([values, offsets.to(values.dtype)] if kind in ("bag", "ended") else [values])

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(modules)

        def forward(self, *flat):
            flat, outputs = list(flat), []
            for module, owned in zip(self.tables, args, strict=True):
                outputs.append(module(*[flat.pop(0) for _ in owned]))
            return outputs

    with torch.enable_grad():
        assert_same(*compile_pair(Mixture()), [arg for local in args for arg in local])
