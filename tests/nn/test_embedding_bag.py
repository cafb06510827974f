"""`te.nn.EmbeddingBag` beside `torch.nn.EmbeddingBag`: whatever PyTorch's documentation says must hold for ours."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritonemb as te
from tests.helpers import assert_same_bits, fewer
from tests.nn.twins import (
    BAG,
    IDS,
    TOLERANCE,
    assert_same_error,
    compare,
    dense,
    few_examples,
    random_bags,
    random_ids,
    twins,
)
from tritonemb.optim import OPTIMIZERS

pytestmark = pytest.mark.public
ROWS, DIM = 11, 6
SIZES = [3, 0, 7, 1, 4]
MODES = ["sum", "mean", "max"]


@pytest.mark.parametrize("form", ["2-D", "offsets", "last offset"])
@pytest.mark.parametrize("padding_idx", [None, 0, -2])
@pytest.mark.parametrize(
    ("mode", "sparse", "weighted"),
    [("sum", False, False), ("sum", True, False), ("sum", False, True), ("sum", True, True), ("mean", False, False),
     ("mean", True, False), ("max", False, False)],
)  # fmt: skip
def test_results_and_gradients_are_pytorchs(form, padding_idx, mode, sparse, weighted):
    options = {"mode": mode, "padding_idx": padding_idx, "sparse": sparse, "include_last_offset": form == "last offset"}
    pair = twins(BAG, ROWS, DIM, **options)
    for seed, dtype in enumerate(IDS):
        if form == "2-D":
            args = (random_ids(5, 4, rows=ROWS, dtype=dtype, seed=seed),)
        else:
            args = random_bags(SIZES, ROWS, dtype, form == "last offset", seed)
        weights = torch.randn(args[0].shape) if weighted else None
        compare(*pair, *args, weights=weights)


@settings(max_examples=few_examples)
@given(
    mode=st.sampled_from(MODES),
    rows=st.sampled_from([1, 2, 50]),
    dim=st.sampled_from([1, 3, 16, 67]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 9]), max_size=9),
    last=st.booleans(),
    padding=st.sampled_from([None, 0, -1]),
    sparse=st.booleans(),
    weighted=st.booleans(),
    max_norm=st.sampled_from([None, 0.5]),
    norm_type=st.sampled_from([1.0, 2.0, 3.5, float("inf")]),
    by_frequency=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    id_dtypes=st.tuples(st.sampled_from(IDS), st.sampled_from(IDS)),
    seed=st.integers(0, 1000),
)
def test_any_options(
    mode, rows, dim, sizes, last, padding, sparse, weighted, max_norm, norm_type, by_frequency, dtype, id_dtypes, seed
):
    sparse, by_frequency = sparse and mode != "max", by_frequency and mode != "max"
    pair = twins(
        BAG, rows, dim, max_norm, norm_type, by_frequency and not sparse, mode, sparse, None, last, padding, dtype=dtype
    )
    ids, offsets = random_bags(sizes, rows, id_dtypes[0], last, seed)
    weights = torch.randn(ids.shape, dtype=dtype) if weighted and mode == "sum" else None
    if not sizes or not ids.numel():  # PyTorch's gradients of nothing: not for every option
        assert torch.equal(pair[1](ids, offsets.to(id_dtypes[1]), weights), torch.zeros(len(sizes), dim, dtype=dtype))
        return
    compare(*pair, ids, offsets.to(id_dtypes[1]), weights=weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_16_bit_rows_are_summed_in_more(dtype, mode, padding_idx):
    """Output and gradients are the exact ones, rounded once: to half a unit in the last place, and float32's errors."""
    ours = te.nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx, dtype=dtype)
    exact = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    exact.load_state_dict(ours.state_dict())
    ids, offsets = random_bags(SIZES, ROWS, torch.int64, False)
    weights = torch.randn(ids.shape).to(dtype).requires_grad_() if mode == "sum" else None
    wide = None if weights is None else weights.detach().double().requires_grad_()
    output, expected = ours(ids, offsets, weights), exact(ids, offsets, wide)
    assert output.dtype == dtype
    tolerance = {"rtol": 0.51 * torch.finfo(dtype).eps * (2 if mode == "mean" else 1), "atol": 1e-4}
    torch.testing.assert_close(output.double(), expected, **tolerance)
    gradient = torch.randn(output.shape).to(dtype)
    output.backward(gradient)
    expected.backward(gradient.double())
    torch.testing.assert_close(ours.weight.grad.double(), exact.weight.grad, rtol=torch.finfo(dtype).eps, atol=1e-2)
    if weights is not None:
        torch.testing.assert_close(weights.grad.double(), wide.grad, **tolerance)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_derivatives_of_any_order(mode, padding_idx):
    module = te.nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    ids, offsets = random_bags([2, 0, 3], 5, torch.int64, False)
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True) if mode == "sum" else None

    def look_up(weight, *given):
        return torch.func.functional_call(module, {"weight": weight}, (ids, offsets, *given))

    inputs = [module.weight.detach().clone().requires_grad_(), *([] if weights is None else [weights])]
    assert torch.autograd.gradcheck(look_up, inputs)
    assert torch.autograd.gradgradcheck(look_up, inputs)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"sparse": True}], ids=str)
def test_pytorchs_own_refusal_to_differentiate_again_stays(options):
    module = te.nn.EmbeddingBag(5, 3, **options)
    (gradient,) = torch.autograd.grad(module(torch.tensor([[1, 2]])).pow(2).sum(), module.weight, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.to_dense().sum(), module.weight)


def test_sparse_gradients_are_pytorchs():
    module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, padding_idx=1)
    ids = torch.tensor([[5, 1, 5], [0, 9, 5]])
    output = module(ids)
    assert type(output.grad_fn).__name__ == "EmbeddingBagBackward0"
    (gradient,) = torch.autograd.grad(output.sum(), module.weight)
    gradient = gradient.coalesce()
    assert gradient.indices().tolist() == [[0, 5, 9]]
    assert torch.equal(gradient.values(), torch.tensor([[1.0], [3.0], [1.0]]).expand(-1, DIM))
    module(torch.tensor([[1, 1]])).sum().backward()
    assert module.weight.grad._nnz() == 0
    module(ids).sum().backward()
    module(ids).sum().backward()
    torch.testing.assert_close(module.weight.grad.to_dense(), 2 * gradient.to_dense())


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_pytorchs_sparse_optimizers_train_it(kind):
    pair = twins(BAG, ROWS, DIM, mode="sum", sparse=True)
    optimizers = [kind(module.parameters(), lr=0.1) for module in pair]
    for seed in range(4):
        ids = random_ids(5, 4, rows=ROWS, seed=seed)
        for module, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            module(ids).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(pair[1].weight, pair[0].weight, **TOLERANCE)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_same_call_has_the_same_bits(sparse):
    """Whatever the number of threads."""
    ids, offsets = random_bags(fewer([300, 0, 500, 40], [30, 0, 50]), 50, torch.int64, False)
    gradients = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        _, module = twins(BAG, 50, 33, sparse=sparse)
        output = module(ids, offsets)
        output.backward(torch.sin(torch.arange(output.numel()).view_as(output)))
        gradients.append({"output": output.detach(), "gradient": dense(module.weight.grad)})
    for other in gradients[1:]:
        assert_same_bits(other, gradients[0])


def test_padding_has_no_part():
    """Not even if its row is NaN; a bag of padding alone is zero; its row gets no gradient."""
    for mode in MODES:
        module = te.nn.EmbeddingBag(4, 2, mode=mode, padding_idx=-1)
        assert module.padding_idx == 3
        assert torch.equal(module.weight[3], torch.zeros(2))
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[1.0, 2], [3, 4], [5, 6], [float("nan")] * 2]))
        output = module(torch.tensor([[0, 3, 1], [3, 3, 3]]))
        expected = {"sum": [4.0, 6], "mean": [2.0, 3], "max": [3.0, 4]}[mode]
        assert output.tolist() == [expected, [0, 0]]
        output.sum().backward()
        assert torch.equal(module.weight.grad[2:], torch.zeros(2, 2))


def test_max_norm_scales_the_table_in_place():
    for mode in MODES:
        theirs, ours = twins(BAG, ROWS, DIM, max_norm=1.0, mode=mode)
        before = ours.weight.detach().clone()
        ids = torch.tensor([[1, 2], [2, 5]])
        compare(theirs, ours, ids)
        used = [1, 2, 5]
        assert (ours.weight[used].norm(dim=1) <= 1 + 1e-5).all()
        others = [row for row in range(ROWS) if row not in used]
        assert torch.equal(ours.weight[others], before[others])


def test_max_norm_after_a_use_of_the_table_is_found_out():
    for kind in BAG:
        module = kind(ROWS, DIM, max_norm=0.1)
        used = module.weight.pow(2).sum()
        module(torch.tensor([[1, 2]]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            used.backward()


BAD_CALLS = {
    "id too large": ([0, 11], [0]),
    "negative id": ([0, -1], [0]),
    "first offset not 0": ([0, 1, 2], [1]),
    "offset behind the ids": ([0, 1, 2], [0, 4]),
    "no offsets": ([0, 1], None),
    "2-D offsets": ([0, 1], [[0]]),
    "2-D input with offsets": ([[0, 1]], [0]),
    "3-D input": ([[[0]]], None),
    "0-D input": (1, None),
    "bags without ids": ([[], []], None),
    "float ids": ([0.0, 1.0], [0]),
    "float offsets": ([0, 1], [0.0]),
}


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise_what_pytorch_raises(case, mode, padding_idx):
    ids, offsets = BAD_CALLS[case]
    ids = torch.tensor(ids) if ids != [[], []] else torch.zeros(2, 0, dtype=torch.int64)
    offsets = None if offsets is None else torch.tensor(offsets)
    for dtype in (torch.float32, torch.float64):
        pair = twins(BAG, ROWS, DIM, mode=mode, padding_idx=padding_idx, dtype=dtype)
        assert_same_error(*(lambda module=module: module(ids, offsets) for module in pair))
    with torch.no_grad():
        assert_same_error(*(lambda module=module: module(ids, offsets) for module in pair))


@pytest.mark.parametrize("mode", MODES)
def test_bad_weights_raise_what_pytorch_raises(mode):
    pair = twins(BAG, ROWS, DIM, mode=mode)
    for weights in (torch.ones(1), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), torch.ones(2)):
        if mode == "sum" and weights.shape == (2,) and weights.dtype == torch.float32:
            continue
        args = torch.tensor([1, 2]), torch.tensor([0]), weights
        assert_same_error(*(functools.partial(module, *args) for module in pair))


@pytest.mark.parametrize(
    "options",
    [
        {"num_embeddings": -1}, {"num_embeddings": 2.5}, {"embedding_dim": "a"}, {"padding_idx": 11},
        {"padding_idx": -12}, {"_weight": torch.zeros(2, 2)}, {"dtype": torch.int64},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_raise_what_pytorch_raises(options):
    made = {"num_embeddings": ROWS, "embedding_dim": DIM} | options
    assert_same_error(*(lambda kind=kind: kind(**made) for kind in BAG))
    assert_same_error(*(lambda kind=kind: kind.from_pretrained(torch.zeros(3)) for kind in BAG))


@pytest.mark.parametrize(
    "options", [{"mode": "x"}, {"mode": "max", "sparse": True}, {"mode": "max", "scale_grad_by_freq": True}], ids=str
)
def test_options_that_only_a_call_refuses(options):
    pair = [kind(ROWS, DIM, **options) for kind in BAG]
    assert_same_error(*(lambda module=module: module(torch.tensor([[1]])) for module in pair))


def test_the_last_offset_must_be_there():
    pair = [kind(ROWS, DIM, include_last_offset=True) for kind in BAG]
    empty = torch.zeros(0, dtype=torch.int64)
    assert_same_error(*(lambda module=module: module(empty, empty) for module in pair))
    assert_same_error(*(lambda module=module: module(torch.tensor([1]), torch.tensor([0, 5])) for module in pair))
    assert pair[1](empty, torch.tensor([0])).shape == (0, DIM)


def test_with_padding_no_bag_has_what_is_left():
    module = te.nn.EmbeddingBag(ROWS, DIM, include_last_offset=True, padding_idx=1)
    assert module(torch.tensor([2, 1, 4, 5]), torch.tensor([0])).shape == (0, DIM)


@pytest.mark.parametrize("offsets", [[0, 3, 3], [0, 2, 3], [0, 3, 2], [0, 0, 0]])
@pytest.mark.parametrize(("mode", "sparse"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_with_padding_the_last_bag_has_all_that_is_left(mode, sparse, offsets):
    """PyTorch's own test asserts so, whatever the last offset is."""
    pair = twins(BAG, ROWS, DIM, mode=mode, sparse=sparse, include_last_offset=True, padding_idx=1)
    ids, weights = torch.tensor([2, 1, 4, 5]), torch.rand(4) if mode == "sum" else None
    compare(*pair, ids, torch.tensor(offsets), weights=weights)
    fused = te.nn.EmbeddingBag(
        ROWS, DIM, mode=mode if mode != "max" else "sum", include_last_offset=True, padding_idx=1,
        optimizer=te.optim.SGD(lr=1.0),
    )  # fmt: skip
    before = fused.weight.detach().clone()
    fused(ids, torch.tensor(offsets)).sum().backward()
    assert (fused.weight != before).any(1).nonzero().flatten().tolist() == [2, 4, 5]


@pytest.mark.usefixtures("dynamo")
def test_compiled_too_the_last_bag_has_all_that_is_left():
    bag = te.nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True, padding_idx=1)
    ids, offsets = torch.tensor([2, 1, 4, 5]), torch.tensor([0, 3, 3])
    expected = torch.stack([bag.weight[[2, 4]].mean(0), bag.weight[5]])
    torch.testing.assert_close(torch.compile(bag, fullgraph=True, backend="aot_eager")(ids, offsets), expected)


def test_with_padding_a_last_offset_that_is_too_large_is_named():
    bag = te.nn.EmbeddingBag(ROWS, DIM, include_last_offset=True, padding_idx=1)
    with pytest.raises(RuntimeError, match="offsets end at 5 but there are 4 values"):
        bag(torch.tensor([2, 1, 4, 5]), torch.tensor([0, 3, 5]))


ID = torch.tensor([1])


@pytest.mark.parametrize("args", [([1],), (None,), (ID.to_sparse(),), (ID, [0]), (ID[None], None, [[1.0]])])
def test_what_is_no_dense_tensor_is_named(args):
    with pytest.raises(TypeError, match=r"expected dense tensors, got .*; see torch\.tensor, to_dense"):
        te.nn.EmbeddingBag(ROWS, DIM)(*args)


def test_ids_behind_the_last_offset_belong_to_no_bag():
    module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)
    output = module(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
    assert torch.equal(output, module.weight[1:3])
    output.sum().backward()
    assert module.weight.grad[:, 0].nonzero().flatten().tolist() == [1, 2]


def test_signatures_are_pytorchs_and_an_optimizer():
    for name in ("__init__", "from_pretrained", "forward"):
        theirs, ours = (list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in BAG)
        extra = {"__init__": ["optimizer", "dynamic"], "from_pretrained": ["optimizer"], "forward": []}[name]
        assert [p.name for p in ours] == [p.name for p in theirs] + extra
        assert [(p.default, p.kind) for p in ours[: len(theirs)]] == [(p.default, p.kind) for p in theirs]


def test_attributes_and_text_are_pytorchs():
    for options in ({}, {"max_norm": 2.0, "norm_type": 1.0, "scale_grad_by_freq": True}, {"mode": "sum"},
                    {"padding_idx": -1, "sparse": True, "include_last_offset": True}):  # fmt: skip
        theirs, ours = twins(BAG, ROWS, DIM, **options)
        assert isinstance(ours, nn.EmbeddingBag)
        assert repr(ours) == repr(theirs)
        for name in ("num_embeddings", "embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
                     "include_last_offset", "padding_idx", "training"):  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, name)
    assert "SGD" in repr(te.nn.EmbeddingBag(3, 2, optimizer=te.optim.SGD()))


def test_a_new_module_has_the_weights_of_pytorchs():
    for options in ({}, {"padding_idx": 3}, {"dtype": torch.bfloat16}):
        weights = []
        for kind in BAG:
            torch.manual_seed(7)
            weights.append(kind(ROWS, DIM, **options).weight)
        assert torch.equal(*weights)


def test_state_dicts_go_both_ways():
    theirs, ours = (kind(ROWS, DIM) for kind in BAG)
    assert list(ours.state_dict()) == ["weight"]
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, ours.weight)
    ours.load_state_dict(nn.EmbeddingBag(ROWS, DIM).state_dict())
    assert not torch.equal(theirs.weight, ours.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_state_dict(nn.EmbeddingBag(ROWS, DIM + 1).state_dict())


def test_from_pretrained():
    weight = torch.randn(ROWS, DIM)
    ids = torch.tensor([[1, 2]])
    for freeze in (True, False):
        module = te.nn.EmbeddingBag.from_pretrained(weight, freeze, mode="sum", padding_idx=2)
        assert module.weight.data_ptr() == weight.data_ptr()
        assert module.weight.requires_grad is not freeze
        assert torch.equal(module(ids)[0], weight[1])
        assert module(ids).requires_grad is not freeze
    transposed = torch.randn(DIM, ROWS).t()
    pair = [kind.from_pretrained(transposed, freeze=False) for kind in BAG]
    compare(*pair, ids)


def test_copies_pickles_and_casts():
    ids = torch.tensor([[1, 2], [3, 1]])
    for optimizer in (None, te.optim.Adagrad(lr=0.1)):
        module = te.nn.EmbeddingBag(ROWS, DIM, padding_idx=0, optimizer=optimizer)
        module(ids).sum().backward()
        if optimizer is not None:
            assert module.fused_optimizer is not None
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
            assert_same_bits(dict(other.state_dict()), dict(module.state_dict()))
            assert torch.equal(other(ids), module(ids))
            other(ids).sum().backward()
    half = module.to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16
    assert half.sum.dtype == half.learning_rate.dtype == torch.float32
    half(ids).sum().backward()


def test_meta_modules():
    ids = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    for options in ({}, {"padding_idx": 1}, {"mode": "max"}, {"sparse": True}):
        module = te.nn.EmbeddingBag(ROWS, DIM, device="meta", **options)
        assert module.weight.is_meta
        assert module(ids).shape == (3, DIM)
        assert module(ids).is_meta
    module = te.nn.EmbeddingBag(ROWS, DIM, device="meta", optimizer=te.optim.Adam(lr=0.5))
    module.to_empty(device="cpu").reset_parameters()
    assert (module.learning_rate, module.step) == (0.5, 0)
    assert not module.exp_avg.any()
    module(torch.tensor([[1, 2]])).sum().backward()
    assert module.step == 1


def test_without_gradients():
    theirs, ours = twins(BAG, ROWS, DIM, padding_idx=1)
    ids = random_ids(4, 3, rows=ROWS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = ours(ids)
            torch.testing.assert_close(output, theirs(ids), **TOLERANCE)
            assert not output.requires_grad


def test_autocast_leaves_it_alone():
    theirs, ours = twins(BAG, ROWS, DIM)
    ids = random_ids(4, 3, rows=ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(ids).dtype == theirs(ids).dtype == torch.float32
        compare(theirs, ours, ids)


def test_a_weight_of_another_shape_is_looked_up():
    pair = twins(BAG, ROWS, DIM, padding_idx=1)
    for module in pair:
        module.weight = nn.Parameter(torch.arange(80.0).view(20, 4))
    compare(*pair, torch.tensor([[1, 19], [2, 0]]))


def test_exported():
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1])
    for options in ({}, {"padding_idx": 1}):
        module = te.nn.EmbeddingBag(ROWS, DIM, **options)
        for strict in (True, False):
            program = torch.export.export(module, (ids, offsets), strict=strict)
            torch.testing.assert_close(program.module()(ids, offsets), module(ids, offsets))


def test_nested_input():
    parts = [torch.tensor([1, 2, 2]), torch.tensor([4])]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    weights = torch.nested.nested_tensor_from_jagged(torch.rand(4), nested.offsets())
    for mode in ("sum", "mean"):
        theirs, ours = twins(BAG, ROWS, DIM, mode=mode)
        compare(theirs, ours, nested)
    theirs, ours = twins(BAG, ROWS, DIM, mode="sum")
    torch.testing.assert_close(ours(nested, None, weights), theirs(nested, None, weights), **TOLERANCE)


def test_functional_transforms():
    ids = random_ids(3, 4, rows=ROWS)
    results = []
    for module in twins(BAG, ROWS, DIM, mode="sum", padding_idx=1):
        parameters = {"weight": module.weight.detach()}

        def loss(parameters, weights, ids=ids, module=module):
            return torch.func.functional_call(module, parameters, (ids,), {"per_sample_weights": weights}).pow(2).sum()

        both = torch.func.grad(loss, argnums=(0, 1))(parameters, torch.ones(3, 4))
        each = torch.func.vmap(
            torch.func.grad(lambda p, row, loss=loss: loss(p, torch.ones(1, 4), row[None])), in_dims=(None, 0)
        )(parameters, ids)
        results.append((both[0]["weight"], both[1], each["weight"]))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.usefixtures("dynamo")
class TestCompiled:
    @pytest.mark.parametrize(
        "options", [{"mode": "sum"}, {"padding_idx": 1}, {"mode": "max"}, {"sparse": True}, {"max_norm": 1.0}], ids=str
    )
    def test_equals_eager_with_any_sizes(self, options):
        _, module = twins(BAG, ROWS, DIM, **options)
        twin = copy.deepcopy(module)
        compiled = torch.compile(module, fullgraph=True, dynamic=True)
        for index, sizes in enumerate(([3, 0, 2], [5, 1, 4, 2, 2], [6, 6])):
            ids, offsets = random_bags(sizes, ROWS, torch.int64, False, index)
            weights = [torch.rand(ids.shape).requires_grad_() for _ in range(2)]
            outputs = []
            for lookup, holder, weight in zip((compiled, twin), (module, twin), weights, strict=True):
                weight.data.copy_(weights[0])
                holder.zero_grad()
                given = {"per_sample_weights": weight} if options.get("mode") == "sum" else {}
                outputs.append(lookup(ids, offsets, **given))
                outputs[-1].pow(2).sum().backward()
            torch.testing.assert_close(*outputs, **TOLERANCE)
            torch.testing.assert_close(dense(module.weight.grad), dense(twin.weight.grad), **TOLERANCE)
            if options.get("mode") == "sum":
                torch.testing.assert_close(weights[0].grad, weights[1].grad, **TOLERANCE)

    @pytest.mark.more
    def test_fused_updates_equal_eager_ones(self):
        module = te.nn.EmbeddingBag(ROWS, DIM, padding_idx=1, optimizer=te.optim.Adam(lr=0.1))
        twin = copy.deepcopy(module)
        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(module, fullgraph=True, backend=counter)
        for index in range(4):
            ids = random_ids(4 + index, 3 + index, rows=ROWS, seed=index)
            for lookup, holder in ((compiled, module), (twin, twin)):
                holder.set_learning_rate(0.1 / (1 + index))
                lookup(ids).pow(2).sum().backward()
        torch.testing.assert_close(module.state_dict(), twin.state_dict(), **TOLERANCE)
        assert counter.frame_count <= 3

    def test_a_bad_id_is_found(self):
        compiled = torch.compile(te.nn.EmbeddingBag(ROWS, DIM), fullgraph=True)
        with pytest.raises(RuntimeError, match=r"input\[1\] is 11"):
            compiled(torch.tensor([[0, 11]]))


class TestFused:
    @pytest.mark.parametrize("name", fewer(list(OPTIMIZERS), ["adam", "row_wise_adagrad"]))
    @pytest.mark.parametrize("mode", ["sum", "mean"])
    def test_updates_are_those_of_a_collection(self, name, mode):
        optimizer = OPTIMIZERS[name](lr=0.1)
        module = te.nn.EmbeddingBag(ROWS, DIM, mode=mode, optimizer=optimizer)
        collection = te.nn.EmbeddingBagCollection(
            [te.TableConfig("weight", ROWS, DIM, ["input"], pooling=mode)], optimizer=optimizer
        )
        with torch.no_grad():
            collection.tables[0].weight.copy_(module.weight)
        for seed in range(3):
            ids, offsets = random_bags(SIZES, ROWS, torch.int64, True, seed)
            batch = te.KeyedJaggedTensor(["input"], ids, offsets=offsets)
            outputs = module(ids, offsets[:-1]), collection(batch)
            assert torch.equal(*outputs)
            for output in outputs:
                output.backward(torch.cos(torch.arange(output.numel()).view_as(output)))
        assert module.weight.grad is None
        expected = {key.removeprefix("weight."): value for key, value in collection.state_dict().items()}
        assert_same_bits(dict(module.state_dict()), expected)

    @pytest.mark.parametrize("mode", ["sum", "mean"])
    def test_padding_is_not_updated(self, mode):
        optimizer = te.optim.Adam(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled")
        module = te.nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=2, optimizer=optimizer)
        twin = te.nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=2)
        twin.load_state_dict({"weight": module.weight})
        with torch.no_grad():
            module.weight[2] = 5.0
        before = module.weight.detach().clone()
        ids = torch.tensor([[2, 1, 2], [2, 2, 2], [4, 1, 2]])
        torch.testing.assert_close(module(ids), twin(ids))
        module(ids).sum().backward()
        changed = (module.weight != before).any(1)
        assert changed.nonzero().flatten().tolist() == [1, 4]
        assert not module.exp_avg[2].any()

    def test_state_dict_restores_a_run(self):
        modules = [te.nn.EmbeddingBag(ROWS, DIM, optimizer=te.optim.Adam(lr=0.1)) for _ in range(2)]
        ids = torch.tensor([[1, 2], [3, 1]])
        assert set(modules[0].state_dict()) == {"weight", "exp_avg", "exp_avg_sq", "step"}
        modules[0](ids).sum().backward()
        modules[1].load_state_dict(modules[0].state_dict())
        for module in modules:
            module(ids).sum().backward()
        assert_same_bits(dict(modules[0].state_dict()), dict(modules[1].state_dict()))

    def test_optimizer_view_and_schedules(self):
        module = te.nn.EmbeddingBag(ROWS, DIM, optimizer=te.optim.SGD(lr=1.0))
        view = module.fused_optimizer
        schedule = torch.optim.lr_scheduler.StepLR(view, step_size=1, gamma=0.5)
        schedule.step()
        assert module.learning_rate == 0.5
        module.set_learning_rate(0.25)
        assert view.param_groups[0]["lr"] == 0.25
        before = module.weight.detach().clone()
        module(torch.tensor([[3]])).sum().backward()
        torch.testing.assert_close(before[3] - module.weight[3], torch.full((DIM,), 0.25))
        other = te.nn.EmbeddingBag(ROWS, DIM, optimizer=te.optim.SGD(lr=1.0))
        other.fused_optimizer.load_state_dict(view.state_dict())
        assert other.learning_rate == 0.25
        assert te.nn.EmbeddingBag(3, 2).fused_optimizer is None
        with pytest.raises(ValueError, match="no fused optimizer"):
            te.nn.EmbeddingBag(3, 2).set_learning_rate(0.1)
        with pytest.raises(ValueError, match="learning rate"):
            module.set_learning_rate(-1.0)

    def test_what_cannot_be_fused_is_refused(self):
        with pytest.raises(TypeError, match=r"tritonemb\.optim"):
            te.nn.EmbeddingBag(3, 2, optimizer=torch.optim.SGD)
        for options in ({"mode": "max"}, {"scale_grad_by_freq": True}, {"dtype": torch.float64}):
            with pytest.raises(ValueError, match=r"fused|optimizer"):
                te.nn.EmbeddingBag(3, 2, optimizer=te.optim.SGD(), **options)
        module = te.nn.EmbeddingBag(3, 2, optimizer=te.optim.SGD())
        with pytest.raises(RuntimeError, match="fused optimizer"):
            torch.func.grad(lambda w: torch.func.functional_call(module, {"weight": w}, (torch.tensor([[1]]),)).sum())(
                module.weight.detach()
            )
        with pytest.raises(RuntimeError, match="input"):
            module(torch.tensor([[3]]))

    def test_a_weight_of_another_shape_is_not_updated(self):
        module = te.nn.EmbeddingBag(ROWS, DIM, optimizer=te.optim.Adam())
        module.weight = nn.Parameter(torch.zeros(ROWS - 1, DIM))
        with pytest.raises(RuntimeError, match="shape it was made for"):
            module(torch.tensor([[1]]))

    def test_weights_get_their_gradient_before_the_update(self):
        module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum", optimizer=te.optim.SGD(lr=1.0))
        twin = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        twin.load_state_dict(module.state_dict(), strict=False)
        weights = [torch.rand(2, 3, requires_grad=True) for _ in range(2)]
        weights[1].data.copy_(weights[0])
        ids = random_ids(2, 3, rows=ROWS)
        for lookup, weight in zip((module, twin), weights, strict=True):
            lookup(ids, per_sample_weights=weight).sum().backward()
        torch.testing.assert_close(weights[0].grad, weights[1].grad, **TOLERANCE)
        torch.testing.assert_close(module.weight, twin.weight - twin.weight.grad, **TOLERANCE)

    def test_pretrained_and_frozen(self):
        weight = torch.randn(ROWS, DIM)
        frozen = te.nn.EmbeddingBag.from_pretrained(weight.clone(), optimizer=te.optim.SGD(lr=1.0))
        assert not frozen(torch.tensor([[1]])).requires_grad
        free = te.nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, optimizer=te.optim.SGD(lr=1.0))
        free(torch.tensor([[1]])).sum().backward()
        torch.testing.assert_close(free.weight[1], weight[1] - 1)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("options", [{}, {"mode": "sum", "padding_idx": 1}, {"padding_idx": 1}, {"mode": "max"}])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_results_and_gradients_are_pytorchs(self, options, sparse):
        if sparse and options.get("mode") == "max":
            pytest.skip("not offered")
        pair = twins(BAG, ROWS, DIM, sparse=sparse, device="cuda", **options)
        ids, offsets = (tensor.cuda() for tensor in random_bags(SIZES, ROWS, torch.int64, False))
        weights = torch.randn(ids.shape, device="cuda") if options.get("mode") == "sum" else None
        outputs = []
        for module in pair:
            outputs.append(module(ids, offsets, weights))
            outputs[-1].pow(2).sum().backward()
        torch.testing.assert_close(*outputs, **TOLERANCE)
        torch.testing.assert_close(dense(pair[1].weight.grad), dense(pair[0].weight.grad), **TOLERANCE)

    @pytest.mark.parametrize("padding_idx", [None, 1])
    def test_a_bad_id_is_reported_and_reads_as_zero(self, padding_idx):
        module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=padding_idx, device="cuda")
        output = module(torch.tensor([[ROWS, 2]], device="cuda"))
        assert torch.equal(output[0], module.weight[2])
        with pytest.raises(ValueError, match=f"id {ROWS} "):
            te.check_errors()
