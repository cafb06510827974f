"""`te.nn.EmbeddingBag` beside `torch.nn.EmbeddingBag`: whatever PyTorch's documentation says must hold for ours."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tritonemb as te
from tests.nn.twins import BAG, IDS, TOLERANCE, assert_same_error, compare, few_examples, random_bags, random_ids, twins

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
    options = max_norm, norm_type, by_frequency and not sparse, mode, sparse, None, last, padding
    pair = twins(BAG, rows, dim, *options, dtype=dtype)
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
    fused = te.nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx, dtype=dtype)
    exact = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    exact.load_state_dict(fused.state_dict())
    ids, offsets = random_bags(SIZES, ROWS, torch.int64, False)
    weights = torch.randn(ids.shape).to(dtype).requires_grad_() if mode == "sum" else None
    wide = None if weights is None else weights.detach().double().requires_grad_()
    output, expected = fused(ids, offsets, weights), exact(ids, offsets, wide)
    assert output.dtype == dtype
    tolerance = {"rtol": 0.51 * torch.finfo(dtype).eps * (2 if mode == "mean" else 1), "atol": 1e-4}
    torch.testing.assert_close(output.double(), expected, **tolerance)
    gradient = torch.randn(output.shape).to(dtype)
    output.backward(gradient)
    expected.backward(gradient.double())
    torch.testing.assert_close(fused.weight.grad.double(), exact.weight.grad, rtol=torch.finfo(dtype).eps, atol=1e-2)
    if weights is not None:
        torch.testing.assert_close(weights.grad.double(), wide.grad, **tolerance)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_derivatives_of_any_order(mode, padding_idx):
    module = te.nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding_idx, dtype=torch.float64)
    ids, offsets = random_bags([2, 0, 3], 5, torch.int64, False)
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True) if mode == "sum" else None

    def look_up(weight, *args):
        return torch.func.functional_call(module, {"weight": weight}, (ids, offsets, *args))

    inputs = [module.weight.detach().clone().requires_grad_(), *([] if weights is None else [weights])]
    assert torch.autograd.gradcheck(look_up, inputs)
    assert torch.autograd.gradgradcheck(look_up, inputs)


@pytest.mark.parametrize("options", [{"mode": "max"}, {"sparse": True}], ids=str)
def test_pytorchs_own_refusal_to_differentiate_again_stays(options):
    module = te.nn.EmbeddingBag(5, 3, **options)
    (gradient,) = torch.autograd.grad(module(torch.tensor([[1, 2]])).pow(2).sum(), module.weight, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.to_dense().sum(), module.weight)


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
    initial = fused.weight.detach().clone()
    fused(ids, torch.tensor(offsets)).sum().backward()
    assert (fused.weight != initial).any(1).nonzero().flatten().tolist() == [2, 4, 5]


@pytest.mark.usefixtures("dynamo")
def test_compiled_too_the_last_bag_has_all_that_is_left_and_a_bad_id_is_found():
    bag = te.nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True, padding_idx=1)
    ids, offsets = torch.tensor([2, 1, 4, 5]), torch.tensor([0, 3, 3])
    expected = torch.stack([bag.weight[[2, 4]].mean(0), bag.weight[5]])
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, offsets), expected)
    with pytest.raises(RuntimeError, match=r"input\[1\] is 11"):
        compiled(torch.tensor([2, 11, 4, 5]), offsets)


def test_with_padding_a_last_offset_that_is_too_large_is_named():
    bag = te.nn.EmbeddingBag(ROWS, DIM, include_last_offset=True, padding_idx=1)
    with pytest.raises(RuntimeError, match="offsets end at 5 but there are 4 values"):
        bag(torch.tensor([2, 1, 4, 5]), torch.tensor([0, 3, 5]))


ID = torch.tensor([1])


@pytest.mark.parametrize("args", [([1],), (None,), (ID.to_sparse(),), (ID, [0]), (ID[None], None, [[1.0]])])
def test_what_is_no_dense_tensor_is_named(args):
    with pytest.raises(TypeError, match=r"expected dense tensors, got .*; see torch\.tensor, to_dense"):
        te.nn.EmbeddingBag(ROWS, DIM)(*args)


# The last two, of which one is no id, are in no bag.
SHORT = torch.tensor([1, 2, 1, 4, ROWS + 3]), torch.tensor([0, 2, 3])
SERVED = [{"mode": "sum"}, {"mode": "mean"}, {"mode": "max"}, {"mode": "mean", "sparse": True}]
SERVED += [{"mode": "mean", "scale_grad_by_freq": True}, {"mode": "sum", "max_norm": 0.5}]


def looked_up(module, call, ids, offsets, *weights):
    """The result, and all that a backward pass changes."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    output = call(ids, offsets, *weights)
    output.square().sum().backward()
    gradient = module.weight if module.weight.grad is None else module.weight.grad.to_dense()
    return {"output": output, "gradient": gradient.detach(), **({"weights": weights[0].grad[:3]} if weights else {})}


@pytest.fixture(params=["small", "large"])
def size_of_calls(request):
    if request.param == "small":
        request.getfixturevalue("small_calls")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", SERVED, ids=str)
@pytest.mark.usefixtures("size_of_calls")
def test_ids_behind_the_last_offset_belong_to_no_bag(options, dtype):
    """Whoever serves the call; and with a fused optimizer, or per-sample weights, too."""
    ids, offsets = SHORT
    fused = dtype != torch.float64 and options in SERVED[:2]
    for optimizer in [None, te.optim.Adam(lr=0.1)] if fused else [None]:
        module = te.nn.EmbeddingBag(ROWS, DIM, include_last_offset=True, dtype=dtype, optimizer=optimizer, **options)
        twin = copy.deepcopy(module)
        weights = [torch.randn(5, dtype=dtype)] if options == {"mode": "sum"} else []
        result = looked_up(module, module, ids, offsets, *weights)
        short = [ids[:3], offsets, *(weight[:3] for weight in weights)]
        torch.testing.assert_close(result, looked_up(twin, twin, *short))
        with torch.no_grad():
            torch.testing.assert_close(module(ids, offsets, *weights), twin(*short))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("dynamo")
@pytest.mark.few(1)
def test_compiled_too_ids_behind_the_last_offset_belong_to_no_bag(mode):
    """Nobody reads offsets there: one more bag has these ids."""
    for optimizer in [None, te.optim.Adam(lr=0.1)] if mode != "max" else [None]:
        module = te.nn.EmbeddingBag(ROWS, DIM, include_last_offset=True, mode=mode, optimizer=optimizer)
        twin = copy.deepcopy(module)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for ids, offsets in (SHORT, (SHORT[0], SHORT[1] * 0), (SHORT[0][:4], torch.tensor([0, 3, 4]))):
            actual, required = looked_up(module, compiled, ids, offsets), looked_up(twin, twin, ids, offsets)
            for name, expected in required.items():
                torch.testing.assert_close(actual[name], expected, **TOLERANCE)
            module.weight.grad = twin.weight.grad = None


def test_dynamic_tables_get_no_ids_from_behind_the_last_offset():
    module = te.nn.EmbeddingBag(None, DIM, mode="mean", include_last_offset=True, capacity=9, optimizer=te.optim.SGD())
    ids, offsets = SHORT
    output = module(ids, offsets)
    assert module.table.ids().tolist() == [1, 2]
    assert torch.equal(output, module(ids[:3], offsets))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("options", [*SERVED, {"mode": "sum", "padding_idx": 1}], ids=str)
@pytest.mark.usefixtures("size_of_calls")
def test_offsets_that_descend_are_a_value_error(options, ended):
    for dtype in (torch.float32, torch.float64):
        module = te.nn.EmbeddingBag(ROWS, DIM, include_last_offset=ended, dtype=dtype, **options)
        with pytest.raises(ValueError, match=r"offsets must ascend: .*, sample 1 goes from 3 to 2 \(of 4 values\)"):
            module(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 2, 4]))


def test_a_weight_of_another_shape_is_looked_up():
    pair = twins(BAG, ROWS, DIM, padding_idx=1)
    for module in pair:
        module.weight = nn.Parameter(torch.arange(80.0).view(20, 4))
    compare(*pair, torch.tensor([[1, 19], [2, 0]]))


def test_exported():
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1])
    for options, strict in (({}, True), ({"padding_idx": 1}, False)):
        module = te.nn.EmbeddingBag(ROWS, DIM, **options)
        program = torch.export.export(module, (ids, offsets), strict=strict)
        torch.testing.assert_close(program.module()(ids, offsets), module(ids, offsets))


def test_nested_input():
    parts = [torch.tensor([1, 2, 2]), torch.tensor([4])]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    weights = torch.nested.nested_tensor_from_jagged(torch.rand(4), nested.offsets())
    for mode in ("sum", "mean"):
        reference, fused = twins(BAG, ROWS, DIM, mode=mode)
        compare(reference, fused, nested)
    reference, fused = twins(BAG, ROWS, DIM, mode="sum")
    torch.testing.assert_close(fused(nested, None, weights), reference(nested, None, weights), **TOLERANCE)


def test_weights_get_their_gradient_before_the_update():
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
        torch.testing.assert_close(pair[1].weight.grad.to_dense(), pair[0].weight.grad.to_dense(), **TOLERANCE)

    @pytest.mark.parametrize("padding_idx", [None, 1])
    def test_a_bad_id_is_reported_and_reads_as_zero(self, padding_idx):
        module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=padding_idx, device="cuda")
        output = module(torch.tensor([[ROWS, 2]], device="cuda"))
        assert torch.equal(output[0], module.weight[2])
        with pytest.raises(ValueError, match=f"id {ROWS} "):
            te.check_errors()
