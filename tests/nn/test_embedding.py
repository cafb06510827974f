"""`te.nn.Embedding` beside `torch.nn.Embedding`: whatever PyTorch's documentation says must hold for ours."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tritonemb as te
from tests.helpers import assert_same_bits, fewer
from tests.nn.twins import IDS, ROW, TOLERANCE, assert_same_error, compare, dense, few_examples, random_ids, twins
from tritonemb.optim import OPTIMIZERS

pytestmark = pytest.mark.public
ROWS, DIM = 11, 6


@settings(max_examples=few_examples)
@given(
    rows=st.sampled_from([1, 2, 50]),
    dim=st.sampled_from([1, 3, 16, 67]),
    shape=st.lists(st.sampled_from([0, 1, 2, 5]), max_size=4),
    padding=st.sampled_from([None, 0, -1]),
    sparse=st.booleans(),
    max_norm=st.sampled_from([None, 0.5]),
    norm_type=st.sampled_from([1.0, 2.0, 3.5, float("inf")]),
    by_frequency=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    id_dtype=st.sampled_from(IDS),
    seed=st.integers(0, 1000),
)
def test_any_options(rows, dim, shape, padding, sparse, max_norm, norm_type, by_frequency, dtype, id_dtype, seed):
    sparse = sparse and not (padding is not None and not shape)  # PyTorch's own sparse gradient fails for it
    pair = twins(
        ROW, rows, dim, padding, max_norm, norm_type, by_frequency and not sparse, sparse, dtype=dtype
    )  # fmt: skip
    ids = random_ids(*shape, rows=rows, dtype=id_dtype, seed=seed)
    output = compare(*pair, ids)
    assert output.shape == (*shape, dim)
    assert torch.equal(output, pair[0](ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_summed_in_more(dtype):
    """128 gradients of one row: the exact sum, rounded once."""
    module = te.nn.Embedding(3, DIM, dtype=dtype)
    output = module(torch.ones(128, dtype=torch.int32))
    assert torch.equal(output, module.weight[1].expand(128, DIM))
    gradient = torch.randn(128, DIM).to(dtype)
    output.backward(gradient)
    expected = gradient.double().sum(0)
    torch.testing.assert_close(module.weight.grad[1].double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_derivatives_of_any_order(padding_idx):
    module = te.nn.Embedding(5, 3, padding_idx=padding_idx, dtype=torch.float64)
    ids = torch.tensor([[1, 2], [1, 4]])

    def look_up(weight):
        return torch.func.functional_call(module, {"weight": weight}, (ids,))

    if padding_idx is None:  # with padding the gradient is not the function's own
        assert torch.autograd.gradcheck(look_up, module.weight.detach().clone().requires_grad_())
        assert torch.autograd.gradgradcheck(look_up, module.weight.detach().clone().requires_grad_())
    results = []
    for twin in twins(ROW, 5, 3, padding_idx=padding_idx, dtype=torch.float64):
        (gradient,) = torch.autograd.grad(twin(ids).pow(3).sum(), twin.weight, create_graph=True)
        results.append(torch.autograd.grad(gradient.pow(2).sum(), twin.weight)[0])
    torch.testing.assert_close(*results)


def test_padding_is_looked_up_but_not_trained():
    module = te.nn.Embedding(4, 2, padding_idx=-1)
    assert module.padding_idx == 3
    assert torch.equal(module.weight[3], torch.zeros(2))
    with torch.no_grad():
        module.weight[3] = 7.0
    output = module(torch.tensor([3, 1, 3]))
    assert output[0].tolist() == [7.0, 7.0]
    output.sum().backward()
    assert module.weight.grad[:, 0].tolist() == [0, 1, 0, 0]


def test_sparse_gradients_are_pytorchs():
    module = te.nn.Embedding(ROWS, DIM, sparse=True, padding_idx=1)
    ids = torch.tensor([[5, 1, 5], [0, 9, 5]])
    output = module(ids)
    assert type(output.grad_fn).__name__ == "EmbeddingBackward0"
    (gradient,) = torch.autograd.grad(output.sum(), module.weight)
    gradient = gradient.coalesce()
    assert gradient.indices().tolist() == [[0, 5, 9]]
    assert gradient.values()[:, 0].tolist() == [1, 3, 1]


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_pytorchs_sparse_optimizers_train_it(kind):
    pair = twins(ROW, ROWS, DIM, sparse=True)
    optimizers = [kind(module.parameters(), lr=0.1) for module in pair]
    for seed in range(4):
        ids = random_ids(5, 4, rows=ROWS, seed=seed)
        for module, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            module(ids).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(pair[1].weight, pair[0].weight, **TOLERANCE)


@pytest.mark.parametrize("rows", [90, 5])
def test_the_same_call_has_the_same_bits(rows):
    """So has a sparse one, which PyTorch sums in order, as we do where a row is used 32 times at most."""
    ids, gradients = torch.randperm(fewer(900, 90)) % rows, []
    for threads in fewer((1, 2, 3), (1,)):
        torch.set_num_threads(threads)
        for sparse in (False, True) if rows == 90 else (False,):
            _, module = twins(ROW, rows, 33, sparse=sparse)
            output = module(ids)
            output.backward(torch.sin(torch.arange(output.numel()).view_as(output)))
            gradients.append({"gradient": dense(module.weight.grad)})
    for other in gradients[1:]:
        assert_same_bits(other, gradients[0])


def test_max_norm_scales_the_table_in_place():
    theirs, ours = twins(ROW, ROWS, DIM, max_norm=1.0, padding_idx=2)
    before = ours.weight.detach().clone()
    compare(theirs, ours, torch.tensor([[1, 2], [2, 5]]))
    assert (ours.weight[[1, 2, 5]].norm(dim=1) <= 1 + 1e-5).all()
    assert torch.equal(ours.weight[6:], before[6:])


@pytest.mark.parametrize("ids", [[11], [-1], [0.5], [True]], ids=["too large", "negative", "floating point", "boolean"])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_bad_calls_raise_what_pytorch_raises(ids, padding_idx):
    pair = twins(ROW, ROWS, DIM, padding_idx=padding_idx)
    assert_same_error(*(lambda module=module: module(torch.tensor(ids)) for module in pair))
    assert_same_error(*(lambda module=module: module(ids) for module in pair))


def test_sparse_ids_raise_what_pytorch_raises():
    ids = torch.tensor([1, 2]).to_sparse()
    assert_same_error(*(lambda kind=kind: kind(5, 4)(ids) for kind in (nn.Embedding, te.nn.Embedding)))


def test_an_id_out_of_range_is_named():
    with pytest.raises(IndexError, match=r"input\[3\] is 11, .* 0 to 10"):
        te.nn.Embedding(ROWS, DIM)(torch.tensor([[1, 2], [3, 11]]))


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
    assert_same_error(*(lambda kind=kind: kind(**made) for kind in ROW))
    assert_same_error(*(lambda kind=kind: kind.from_pretrained(torch.zeros(3)) for kind in ROW))


def test_empty_tables():
    for shape, ids in (((0, 3), torch.zeros(0, dtype=torch.int64)), ((3, 0), torch.tensor([1]))):
        pair = [kind(*shape) for kind in ROW]
        assert pair[0](ids).shape == pair[1](ids).shape


def test_signatures_are_pytorchs_and_an_optimizer():
    for name in ("__init__", "from_pretrained", "forward"):
        theirs, ours = (list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in ROW)
        extra = {"__init__": ["optimizer", "dynamic"], "from_pretrained": ["optimizer"], "forward": []}[name]
        assert [p.name for p in ours] == [p.name for p in theirs] + extra
        assert [(p.default, p.kind) for p in ours[: len(theirs)]] == [(p.default, p.kind) for p in theirs]


def test_attributes_and_text_are_pytorchs():
    for options in ({}, {"max_norm": 2.0, "norm_type": 1.0, "scale_grad_by_freq": True}, {"padding_idx": -1},
                    {"sparse": True}):  # fmt: skip
        theirs, ours = twins(ROW, ROWS, DIM, **options)
        assert isinstance(ours, nn.Embedding)
        assert repr(ours) == repr(theirs)
        for name in ("num_embeddings", "embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
                     "padding_idx", "training"):  # fmt: skip
            assert getattr(ours, name) == getattr(theirs, name)


def test_a_new_module_has_the_weights_of_pytorchs():
    for options in ({}, {"padding_idx": 3}, {"_freeze": True}):
        weights = []
        for kind in ROW:
            torch.manual_seed(7)
            weights.append(kind(ROWS, DIM, **options).weight)
        assert torch.equal(*weights)
        assert weights[0].requires_grad == weights[1].requires_grad


def test_state_dicts_go_both_ways():
    theirs, ours = (kind(ROWS, DIM) for kind in ROW)
    assert list(ours.state_dict()) == ["weight"]
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, ours.weight)
    ours.load_state_dict(nn.Embedding(ROWS, DIM).state_dict())


def test_from_pretrained():
    weight = torch.randn(ROWS, DIM)
    for freeze in (True, False):
        module = te.nn.Embedding.from_pretrained(weight, freeze, padding_idx=2)
        assert module.weight.data_ptr() == weight.data_ptr()
        assert module.weight.requires_grad is not freeze
        assert torch.equal(module(torch.tensor([2, 1])), weight[[2, 1]])
    transposed = torch.randn(DIM, ROWS).t()
    compare(*(kind.from_pretrained(transposed, freeze=False) for kind in ROW), torch.tensor([1, 3]))


def test_copies_pickles_and_devices():
    ids = torch.tensor([[1, 2], [3, 1]])
    for optimizer in (None, te.optim.Adagrad(lr=0.1)):
        module = te.nn.Embedding(ROWS, DIM, padding_idx=0, optimizer=optimizer)
        module(ids).sum().backward()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
            assert_same_bits(dict(other.state_dict()), dict(module.state_dict()))
            other(ids).sum().backward()
    meta = te.nn.Embedding(ROWS, DIM, device="meta", padding_idx=1)
    assert meta(ids.to("meta")).shape == (2, 2, DIM)
    assert module.half()(ids).dtype == torch.float16
    assert module.sum.dtype == torch.float32


def test_without_gradients_and_with_autocast():
    theirs, ours = twins(ROW, ROWS, DIM, padding_idx=1)
    ids = random_ids(4, 3, rows=ROWS)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            output = ours(ids)
            assert torch.equal(output, theirs(ids))
            assert output.dtype == torch.float32


def test_functional_transforms():
    ids = random_ids(3, 4, rows=ROWS)
    results = []
    for module in twins(ROW, ROWS, DIM, padding_idx=1):
        weight = module.weight.detach()

        def loss(weight, ids=ids, module=module):
            return torch.func.functional_call(module, {"weight": weight}, (ids,)).pow(2).sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, ids)
        tangent = torch.func.jvp(loss, (weight,), (torch.ones_like(weight),))[1]
        curvature = torch.func.grad(lambda w, loss=loss: torch.func.grad(loss)(w).pow(2).sum())(weight)
        results.append((torch.func.grad(loss)(weight), each, tangent, curvature))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_nested_input():
    nested = torch.nested.nested_tensor([torch.tensor([1, 2, 2]), torch.tensor([4])], layout=torch.jagged)
    theirs, ours = twins(ROW, ROWS, DIM)
    assert torch.equal(ours(nested).values(), theirs(nested).values())


@pytest.mark.usefixtures("dynamo")
class TestCompiled:
    @pytest.mark.parametrize("options", [{"padding_idx": 1}, {"sparse": True}, {"max_norm": 1.0}], ids=str)
    def test_equals_eager_with_any_sizes(self, options):
        _, module = twins(ROW, ROWS, DIM, **options)
        twin = copy.deepcopy(module)
        compiled = torch.compile(module, fullgraph=True, dynamic=True)
        for index, shape in enumerate(((3, 4), (5, 2), (7, 7))):
            ids = random_ids(*shape, rows=ROWS, seed=index)
            outputs = []
            for lookup, holder in ((compiled, module), (twin, twin)):
                holder.zero_grad()
                outputs.append(lookup(ids))
                outputs[-1].pow(2).sum().backward()
            torch.testing.assert_close(*outputs, **TOLERANCE)
            torch.testing.assert_close(dense(module.weight.grad), dense(twin.weight.grad), **TOLERANCE)

    def test_fused_updates_equal_eager_ones(self):
        module = te.nn.Embedding(ROWS, DIM, padding_idx=1, optimizer=te.optim.Adam(lr=0.1))
        twin = copy.deepcopy(module)
        compiled = torch.compile(module, fullgraph=True)
        for index in range(3):
            ids = random_ids(4 + index, 3 + index, rows=ROWS, seed=index)
            for lookup in (compiled, twin):
                lookup(ids).pow(2).sum().backward()
        torch.testing.assert_close(module.state_dict(), twin.state_dict(), **TOLERANCE)


class TestFused:
    @pytest.mark.parametrize("name", fewer(list(OPTIMIZERS), ["adam", "row_wise_adagrad"]))
    def test_updates_are_those_of_a_collection(self, name):
        optimizer = OPTIMIZERS[name](lr=0.1)
        module = te.nn.Embedding(ROWS, DIM, optimizer=optimizer)
        collection = te.nn.EmbeddingCollection(
            [te.TableConfig("weight", ROWS, DIM, ["input"], pooling="none")], optimizer=optimizer
        )
        with torch.no_grad():
            collection.tables[0].weight.copy_(module.weight)
        for seed in range(3):
            ids = random_ids(12, rows=ROWS, seed=seed)
            batch = te.KeyedJaggedTensor(["input"], ids, offsets=torch.tensor([0, 5, 12]))
            outputs = module(ids.view(3, 4)).view(12, DIM), collection(batch).values()
            assert torch.equal(*outputs)
            for output in outputs:
                output.backward(torch.cos(torch.arange(output.numel()).view_as(output)))
        assert module.weight.grad is None
        expected = {key.removeprefix("weight."): value for key, value in collection.state_dict().items()}
        assert_same_bits(dict(module.state_dict()), expected)

    def test_padding_is_looked_up_but_not_updated(self):
        module = te.nn.Embedding(ROWS, DIM, padding_idx=2, optimizer=te.optim.Adam(lr=0.1))
        with torch.no_grad():
            module.weight[2] = 5.0
        before = module.weight.detach().clone()
        output = module(torch.tensor([2, 1, 4]))
        assert torch.equal(output, before[[2, 1, 4]])
        output.sum().backward()
        assert (module.weight != before).any(1).nonzero().flatten().tolist() == [1, 4]

    def test_errors(self):
        module = te.nn.Embedding(3, 2, optimizer=te.optim.SGD())
        with pytest.raises(IndexError, match=r"input\[0\] is 3"):
            module(torch.tensor([3]))
        with pytest.raises(ValueError, match="scale_grad_by_freq"):
            te.nn.Embedding(3, 2, scale_grad_by_freq=True, optimizer=te.optim.SGD())
