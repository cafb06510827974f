"""What `te.nn.EmbeddingBag` and `te.nn.Embedding` have in common, beside the modules of PyTorch."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritonemb as te
from tests.helpers import assert_same_bits, fewer
from tests.nn.twins import BAG, ROW, TOLERANCE, assert_same_error, compare, dense, random_bags, random_ids, twins
from tritonemb.optim import OPTIMIZERS

pytestmark = pytest.mark.public
ROWS, DIM = 11, 6
SIZES = [3, 0, 7, 1, 4]
IDS = torch.tensor([[1, 2], [3, 1]])
forms = pytest.mark.parametrize(
    ("kinds", "mode"), [(BAG, {"mode": "sum"}), (BAG, {"mode": "mean"}), (ROW, {})], ids=["sum", "mean", "row"]
)


@pytest.fixture(params=[BAG, ROW], ids=["bag", "row"])
def kinds(request):
    """A module of PyTorch and ours."""
    return request.param


def summing(kinds: tuple[type, type]) -> dict[str, str]:
    """The option with which the output depends on the weights as that of rows does."""
    return {"mode": "sum"} if kinds is BAG else {}


def test_sparse_gradients_are_pytorchs(kinds):
    module = kinds[1](ROWS, DIM, sparse=True, padding_idx=1, **summing(kinds))
    ids = torch.tensor([[5, 1, 5], [0, 9, 5]])
    output = module(ids)
    assert type(output.grad_fn).__name__ == f"{kinds[0].__name__}Backward0"
    (gradient,) = torch.autograd.grad(output.sum(), module.weight)
    gradient = gradient.coalesce()
    assert gradient.indices().tolist() == [[0, 5, 9]]
    assert torch.equal(gradient.values(), torch.tensor([[1.0], [3.0], [1.0]]).expand(-1, DIM))
    module(torch.tensor([[1, 1]])).sum().backward()
    assert module.weight.grad._nnz() == 0
    module(ids).sum().backward()
    module(ids).sum().backward()
    torch.testing.assert_close(module.weight.grad.to_dense(), 2 * gradient.to_dense())


@pytest.mark.parametrize(
    ("kinds", "rows", "layouts"),
    [(BAG, 50, [False]), (BAG, 50, [True]), (ROW, 90, [False, True]), (ROW, 5, [False])],
    ids=["bag", "sparse bag", "row", "few rows"],
)
def test_the_same_call_has_the_same_bits(kinds, rows, layouts):
    """By any number of threads. PyTorch sums sparse gradients in order, as we do those of a row with 32 uses."""
    bags = random_bags(fewer([300, 0, 500, 40], [30, 0, 50]), rows, torch.int64, False)
    args = bags if kinds is BAG else (torch.randperm(fewer(900, 90)) % rows,)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for sparse in layouts:
            _, module = twins(kinds, rows, 33, sparse=sparse)
            output = module(*args)
            output.backward(torch.sin(torch.arange(output.numel()).view_as(output)))
            results.append({"output": output.detach(), "gradient": dense(module.weight.grad)})
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize(
    "options",
    [
        {"num_embeddings": -1}, {"num_embeddings": 2.5}, {"embedding_dim": "a"}, {"padding_idx": 11},
        {"padding_idx": -12}, {"_weight": torch.zeros(2, 2)}, {"dtype": torch.int64},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_raise_what_pytorch_raises(kinds, options):
    arguments = {"num_embeddings": ROWS, "embedding_dim": DIM} | options
    assert_same_error(*(lambda kind=kind: kind(**arguments) for kind in kinds))
    assert_same_error(*(lambda kind=kind: kind.from_pretrained(torch.zeros(3)) for kind in kinds))


def test_signatures_are_pytorchs_and_an_optimizer(kinds):
    for name in ("__init__", "from_pretrained", "forward"):
        reference, fused = (list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in kinds)
        extra = {"__init__": ["optimizer", "dynamic"], "from_pretrained": ["optimizer"], "forward": []}[name]
        assert [p.name for p in fused] == [p.name for p in reference] + extra
        assert [(p.default, p.kind) for p in fused[: len(reference)]] == [(p.default, p.kind) for p in reference]


def test_attributes_and_text_are_pytorchs(kinds):
    options = [{}, {"max_norm": 2.0, "norm_type": 1.0, "scale_grad_by_freq": True}, {"padding_idx": -1, "sparse": True}]
    options += [{"mode": "sum"}, {"include_last_offset": True}] if kinds is BAG else []
    for option in options:
        reference, fused = twins(kinds, ROWS, DIM, **option)
        assert isinstance(fused, kinds[0])
        assert repr(fused) == repr(reference)
        assert {"num_embeddings", "padding_idx", "sparse", *summing(kinds)} <= {*reference.__constants__}
        for name in (*reference.__constants__, "training"):
            assert getattr(fused, name) == getattr(reference, name)
    assert "SGD" in repr(kinds[1](3, 2, optimizer=te.optim.SGD()))


def test_a_new_module_has_the_weights_of_pytorchs(kinds):
    for options in ({}, {"padding_idx": 3}, {"dtype": torch.bfloat16}, {"_freeze": True} if kinds is ROW else {}):
        weights = []
        for kind in kinds:
            torch.manual_seed(7)
            weights.append(kind(ROWS, DIM, **options).weight)
        assert torch.equal(*weights)
        assert weights[0].requires_grad == weights[1].requires_grad


def test_state_dicts_go_both_ways(kinds):
    reference, fused = (kind(ROWS, DIM) for kind in kinds)
    assert list(fused.state_dict()) == ["weight"]
    reference.load_state_dict(fused.state_dict())
    assert torch.equal(reference.weight, fused.weight)
    fused.load_state_dict(kinds[0](ROWS, DIM).state_dict())
    assert not torch.equal(reference.weight, fused.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        fused.load_state_dict(kinds[0](ROWS, DIM + 1).state_dict())


def test_from_pretrained(kinds):
    weight, ids = torch.randn(ROWS, DIM), torch.tensor([[1, 2]])
    for freeze in (True, False):
        module = kinds[1].from_pretrained(weight, freeze, padding_idx=2, **summing(kinds))
        assert module.weight.data_ptr() == weight.data_ptr()
        assert module.weight.requires_grad is not freeze
        assert torch.equal(module(ids), weight[[1]] if kinds is BAG else weight[ids])
        assert module(ids).requires_grad is not freeze
    transposed = torch.randn(DIM, ROWS).t()
    compare(*(kind.from_pretrained(transposed, freeze=False) for kind in kinds), ids)


@pytest.mark.parametrize("optimizer", [None, te.optim.Adagrad(lr=0.1)], ids=["plain", "fused"])
def test_copies_pickles_and_casts(kinds, optimizer):
    module = kinds[1](ROWS, DIM, padding_idx=0, optimizer=optimizer)
    module(IDS).sum().backward()
    assert (module.fused_optimizer is None) == (optimizer is None)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert_same_bits(dict(other.state_dict()), dict(module.state_dict()))
        assert torch.equal(other(IDS), module(IDS))
        other(IDS).sum().backward()
    half = module.to(torch.bfloat16)
    assert half.weight.dtype == half(IDS).dtype == torch.bfloat16
    if optimizer is not None:
        assert half.sum.dtype == half.learning_rate.dtype == torch.float32
        half(IDS).sum().backward()


def test_meta_modules(kinds):
    for options in ({}, {"padding_idx": 1}, {"sparse": True}, *([{"mode": "max"}] if kinds is BAG else [])):
        module = kinds[1](ROWS, DIM, device="meta", **options)
        assert module.weight.is_meta
        output = module(IDS.to("meta"))
        assert output.shape == ((2, DIM) if kinds is BAG else (2, 2, DIM))
        assert output.is_meta
    module = kinds[1](ROWS, DIM, device="meta", optimizer=te.optim.Adam(lr=0.5))
    module.to_empty(device="cpu").reset_parameters()
    assert (module.learning_rate, module.step) == (0.5, 0)
    assert not module.exp_avg.any()
    module(IDS).sum().backward()
    assert module.step == 1


def test_without_gradients_and_with_autocast(kinds):
    reference, fused = twins(kinds, ROWS, DIM, padding_idx=1)
    ids = random_ids(4, 3, rows=ROWS)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            output = fused(ids)
            torch.testing.assert_close(output, reference(ids), **TOLERANCE)
            assert output.dtype == torch.float32
            assert output.requires_grad == isinstance(mode, torch.autocast)
            if output.requires_grad:
                compare(reference, fused, ids)


def test_functional_transforms(kinds):
    ids, results = random_ids(3, 4, rows=ROWS), []
    for module in twins(kinds, ROWS, DIM, padding_idx=1, **summing(kinds)):
        weight, scales = module.weight.detach(), torch.ones(3, 4)

        def loss(weight, ids, scales=None, module=module):
            options = {} if scales is None else {"per_sample_weights": scales}
            return torch.func.functional_call(module, {"weight": weight}, (ids,), options).pow(2).sum()

        by_sample = torch.func.vmap(lambda w, row, loss=loss: torch.func.grad(loss)(w, row[None]), in_dims=(None, 0))
        result = [torch.func.grad(loss)(weight, ids), by_sample(weight, ids)]
        if kinds is BAG:
            result += torch.func.grad(loss, argnums=(0, 2))(weight, ids, scales)
        else:
            result += torch.func.jvp(lambda w, loss=loss: loss(w, ids), (weight,), (torch.ones_like(weight),))
            result.append(torch.func.grad(lambda w, loss=loss: torch.func.grad(loss)(w, ids).pow(2).sum())(weight))
        results.append(result)
    for reference, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, reference, **TOLERANCE)


@pytest.mark.usefixtures("dynamo")
class TestCompiled:
    """One case of each kind by Inductor."""

    @pytest.mark.parametrize(
        ("kinds", "options", "backend"),
        [
            (BAG, {"mode": "sum"}, "inductor"), (BAG, {"padding_idx": 1}, "aot_eager"),
            (BAG, {"mode": "max"}, "aot_eager"), (BAG, {"sparse": True}, "aot_eager"),
            (BAG, {"max_norm": 1.0}, "aot_eager"), (ROW, {"padding_idx": 1}, "inductor"),
            (ROW, {"sparse": True}, "aot_eager"), (ROW, {"max_norm": 1.0}, "aot_eager"),
        ],
        ids=["bag", "padding", "max", "sparse", "max norm", "row", "sparse rows", "max norm of rows"],
    )  # fmt: skip
    @pytest.mark.few(5)
    def test_equals_eager_with_any_sizes(self, kinds, options, backend):
        _, module = twins(kinds, ROWS, DIM, **options)
        twin = copy.deepcopy(module)
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
        for seed, shape in enumerate(((3, 4), (5, 2), (7, 7))):
            args = (random_ids(*shape, rows=ROWS, seed=seed),)
            if kinds is BAG:
                args = random_bags([*shape, 0, 2 + seed], ROWS, torch.int64, False, seed)
            scales = torch.rand(args[0].shape)
            results = []
            for lookup, holder in ((compiled, module), (twin, twin)):
                holder.zero_grad()
                weights = scales.clone().requires_grad_()
                output = lookup(*args, **({"per_sample_weights": weights} if options.get("mode") == "sum" else {}))
                output.pow(2).sum().backward()
                results.append((output, dense(holder.weight.grad), weights.grad))
            torch.testing.assert_close(*results, **TOLERANCE)

    @pytest.mark.few(1)
    def test_fused_updates_equal_eager_ones(self, kinds):
        module = kinds[1](ROWS, DIM, padding_idx=1, optimizer=te.optim.Adam(lr=0.1))
        twin = copy.deepcopy(module)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, fullgraph=True, backend=counter)
        for index in range(4):
            ids = random_ids(4 + index, 3 + index, rows=ROWS, seed=index)
            for lookup, holder in ((compiled, module), (twin, twin)):
                holder.set_learning_rate(0.1 / (1 + index))
                lookup(ids).pow(2).sum().backward()
        torch.testing.assert_close(module.state_dict(), twin.state_dict(), **TOLERANCE)
        assert counter.frame_count <= 3


class TestFused:
    @forms
    @pytest.mark.parametrize("name", fewer(list(OPTIMIZERS), ["adam", "row_wise_adagrad"]))
    def test_updates_are_those_of_a_collection(self, kinds, mode, name):
        optimizer, pooled = OPTIMIZERS[name](lr=0.1), kinds is BAG
        module = kinds[1](ROWS, DIM, optimizer=optimizer, **mode)
        config = te.TableConfig("weight", ROWS, DIM, ["input"], pooling=mode.get("mode", "none"))
        collection = (te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection)([config], optimizer)
        with torch.no_grad():
            collection.tables[0].weight.copy_(module.weight)
        for seed in range(3):
            ids, offsets = random_bags(SIZES, ROWS, torch.int64, True, seed)
            batch = te.KeyedJaggedTensor(["input"], ids, offsets=offsets)
            if pooled:
                outputs = module(ids, offsets[:-1]), collection(batch)
            else:
                outputs = module(ids.view(3, 5)).flatten(0, 1), collection(batch).values()
            assert torch.equal(*outputs)
            for output in outputs:
                output.backward(torch.cos(torch.arange(output.numel()).view_as(output)))
        assert module.weight.grad is None
        expected = {key.removeprefix("weight."): value for key, value in collection.state_dict().items()}
        assert_same_bits(dict(module.state_dict()), expected)

    @forms
    def test_padding_is_not_updated(self, kinds, mode):
        optimizer = te.optim.Adam(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled")
        module = kinds[1](ROWS, DIM, padding_idx=2, optimizer=optimizer, **mode)
        with torch.no_grad():
            module.weight[2] = 5.0
        twin = kinds[0](ROWS, DIM, padding_idx=2, **mode)
        twin.load_state_dict({"weight": module.weight})
        initial = module.weight.detach().clone()
        ids = torch.tensor([[2, 1, 2], [2, 2, 2], [4, 1, 2]])
        torch.testing.assert_close(module(ids), twin(ids))
        module(ids).sum().backward()
        assert (module.weight != initial).any(1).nonzero().flatten().tolist() == [1, 4]
        assert not module.exp_avg[2].any()

    def test_pretrained_and_frozen(self, kinds):
        weight, ids = torch.randn(ROWS, DIM), torch.tensor([[1]])
        frozen = kinds[1].from_pretrained(weight.clone(), optimizer=te.optim.SGD(lr=1.0))
        assert not frozen(ids).requires_grad
        free = kinds[1].from_pretrained(weight.clone(), freeze=False, optimizer=te.optim.SGD(lr=1.0))
        free(ids).sum().backward()
        torch.testing.assert_close(free.weight[1], weight[1] - 1)

    def test_what_cannot_be_fused_is_refused(self, kinds):
        kind, ids = kinds[1], torch.tensor([[1]])
        with pytest.raises(TypeError, match=r"tritonemb\.optim"):
            kind(3, 2, optimizer=torch.optim.SGD)
        max_mode = [{"mode": "max"}] if kinds is BAG else []
        for options in ({"scale_grad_by_freq": True}, {"dtype": torch.float64}, *max_mode):
            with pytest.raises(ValueError, match=r"fused|optimizer|scale_grad_by_freq"):
                kind(3, 2, optimizer=te.optim.SGD(), **options)
        module = kind(3, 2, optimizer=te.optim.SGD())
        with pytest.raises(RuntimeError, match="fused optimizer"):
            torch.func.grad(lambda w: torch.func.functional_call(module, {"weight": w}, (ids,)).sum())(
                module.weight.detach()
            )
        with pytest.raises((RuntimeError, IndexError), match=r"input\[0\] is 3"):
            module(torch.tensor([[3]]))
        module.weight = nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(RuntimeError, match="contiguous weight of its original shape"):
            module(ids)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bag = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=1)


@pytest.mark.parametrize("size_of_calls", ["small", "large"])
@pytest.mark.parametrize("optimizer", [None, te.optim.SGD()], ids=["plain", "fused"])
@pytest.mark.parametrize(
    ("name", "batch", "sample", "error"),
    [
        ("rows", [[[1, 2], [50, 3]]], 1, IndexError),
        ("rows", [[1, 2, 50]], 2, IndexError),
        ("rows", [50], 0, IndexError),
        ("bag", [[[1, 2], [50, 3]]], 1, RuntimeError),
        ("bag", [[1, 2, 50, 3], [0, 0, 1]], 2, RuntimeError),
    ],
)
def test_an_id_out_of_range_names_module_and_sample(name, batch, sample, error, optimizer, size_of_calls, request):
    if size_of_calls == "small":
        request.getfixturevalue("small_calls")
    model = nn.ModuleDict({"emb": Inner()})
    te.fuse(model, optimizer)
    batch = [torch.tensor(part) for part in batch]
    place = batch[0].flatten().tolist().index(50)
    text = rf"^table 'emb\.{name}', sample {sample}: input\[{place}\] is 50, .*; valid ids are 0 to {ROWS - 1}$"
    with pytest.raises(error, match=text):
        getattr(model["emb"], name)(*batch)


@pytest.mark.parametrize("options", [{}, {"optimizer": te.optim.SGD()}, {"dtype": torch.float64}], ids=str)
def test_a_batch_of_lists_that_are_all_empty_is_refused_in_words(options):
    module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum", **options)
    with pytest.raises(RuntimeError, match=r"input of shape \[3, 0\] has no ids, .* pass ids \[0\], and offsets"):
        module(torch.zeros(3, 0, dtype=torch.int64))
    assert not module(torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)).any()
    dynamic = te.nn.EmbeddingBag(None, DIM, mode="sum", capacity=9, optimizer=te.optim.SGD())
    with pytest.raises(ValueError, match="with L > 0"):
        dynamic(torch.zeros(3, 0, dtype=torch.int64))
