"""Every op passes PyTorch's own checks: schema, fakes, autograd registration, tracing with dynamic shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tritonemb as te
from tests.helpers import breadth, make_collection
from tests.ops.row_caches import make_cache, serve
from tests.strategies import random_batch, rows_of
from tritonemb.comm import gradient_exchange, output_exchange
from tritonemb.comm.gradient_exchange import GraphDataParallel
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import EXACT, PooledExchange
from tritonemb.kernels.packing import make_packing
from tritonemb.kernels.quantized_bag import quantize_rows
from tritonemb.layout import make_layout
from tritonemb.ops import POLICIES, row_groups
from tritonemb.ops.row_update import NOT_ACCUMULATING, Accumulator
from tritonemb.optim import OPTIMIZERS
from tritonemb.types import CODECS

pytestmark = pytest.mark.public
OPS = torch.ops.tritonemb


class Problem:
    """Three tables, one key that feeds two of them, and the arguments that ops share."""

    def __init__(self, pooled: bool = True, weighted: bool = False, batch_size: int = 5, id_dtype=torch.int64) -> None:
        if pooled:
            self.configs = [
                te.TableConfig("a", 10, 3, features=["x", "y"]),
                te.TableConfig("b", 7, 5, features=["y"], pooling="mean"),
                te.TableConfig("c", 4, 1, features=["z"]),
            ]
        else:
            self.configs = [te.TableConfig(name, 7, 5, pooling="none") for name in "xyz"]
        rows = rows_of(self.configs)
        self.batch = random_batch(rows, ["z", "x", "y"], batch_size, 3, weighted, id_dtype, id_dtype)
        self.layout = make_layout(self.configs, self.batch.keys(), pooled)
        self.values, self.offsets = self.batch.values(), self.batch.offsets()
        self.sample_weights = self.batch.weights_or_none()
        self.groups = row_groups(self.values, self.offsets, self.layout)
        self.num_rows = batch_size if pooled else self.values.numel()

    def weights(self, requires_grad: bool = False) -> list[Tensor]:
        return [torch.randn(c.num_embeddings, c.embedding_dim).requires_grad_(requires_grad) for c in self.configs]

    def grad(self) -> Tensor:
        return torch.randn(self.num_rows, self.layout.width)

    def states(self, optimizer: str) -> list[Tensor]:
        return [
            torch.zeros(c.num_embeddings, c.embedding_dim) if state.per_element else torch.zeros(c.num_embeddings)
            for state in OPTIMIZERS[optimizer].states
            for c in self.configs
        ]

    def counters(self, by_table: bool = False) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Steps, skipped, learning rate."""
        zeros = torch.zeros(len(self.configs), dtype=torch.int64)
        if by_table:
            return [zero.clone() for zero in zeros], [zero.clone() for zero in zeros.split(1)], torch.tensor(0.1)
        return [zeros[0].clone()], [zeros], torch.tensor(0.1)


def one_table(pooled: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, offsets and per-sample weights of three bags, or of six values."""
    ids = torch.tensor([1, 9, 1, 0, 4, 9])
    return ids, torch.tensor([0, 3, 3, 6] if pooled else [0, 6]), torch.rand(6) if pooled else None


FORMS = {
    "pooled": (True, False, 5, torch.int64), "weighted": (True, True, 5, torch.int32),
    "unpooled": (False, True, 5, torch.int64), "no samples": (True, True, 0, torch.int64),
}  # fmt: skip


@pytest.fixture(params=breadth(FORMS, ["weighted"]))
def problem(request) -> Problem:
    return Problem(*FORMS[request.param])


def with_gradient(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.clone().requires_grad_()


def row_updates() -> list[pytest.param]:
    """Each optimizer and each form of a batch, with a step of all tables or one each."""
    cases = [("weighted", "adam", True), *((form, "sgd", False) for form in FORMS)]
    cases += [("pooled", name, index % 2 == 0) for index, name in enumerate(OPTIMIZERS)]
    return [pytest.param(*case, marks=pytest.mark.more if index else ()) for index, case in enumerate(cases)]


POOLED = pytest.mark.parametrize("pooled", breadth([True, False], [True]))
BATCH_SIZES = pytest.mark.parametrize("batch_size", breadth([5, 0], [5]))
DTYPES = pytest.mark.parametrize("dtype", breadth([torch.float32, torch.bfloat16], [torch.float32]))
PACKED = pytest.mark.parametrize("packed", breadth([*((codec, 5) for codec in CODECS), ("int8", 0)], [("int8", 5)]))


@pytest.mark.usefixtures("dynamo")
class TestOpcheck:
    def test_row_groups(self, problem):
        torch.library.opcheck(OPS.row_groups.default, (problem.values, problem.offsets, *problem.layout))

    def test_embedding_bag(self, problem):
        sample_weights = with_gradient(problem.sample_weights)
        trained_ids = problem.values.masked_fill(problem.values == 1, -1)
        for dtype, trained in ((torch.float32, None), (torch.bfloat16, trained_ids)):
            args = (problem.weights(True), problem.values, problem.offsets, sample_weights, trained, True, dtype)
            torch.library.opcheck(OPS.embedding_bag.default, (*args, *problem.layout))

    def test_quantized_bag(self, problem):
        bits = (8, 4, 2)
        tables = [quantize_rows(weight, count, False) for weight, count in zip(problem.weights(), bits, strict=True)]
        args = (tables, bits, problem.values, problem.offsets, problem.sample_weights, True, torch.bfloat16)
        torch.library.opcheck(OPS.quantized_bag.default, (*args, *problem.layout))

    def test_row_gradients(self, problem):
        args = (problem.grad(), problem.weights(), problem.offsets, problem.sample_weights)
        torch.library.opcheck(OPS.row_gradients.default, (*args, *problem.groups, *problem.layout))

    def test_sample_weight_gradient(self, problem):
        sample_weights = torch.ones(problem.values.numel())
        args = (problem.grad(), problem.weights(), problem.values, problem.offsets, sample_weights)
        torch.library.opcheck(OPS.sample_weight_gradient.default, (*args, *problem.layout))

    @POOLED
    def test_bag(self, pooled):
        ids, offsets, weights = one_table(pooled)
        for dtype, trained in ((torch.float32, None), (torch.bfloat16, ids.masked_fill(ids == 9, -1))):
            form = (pooled, pooled and weights is None, True, 10, torch.float32, torch.float32, dtype)
            factors = (torch.randn(10, 3, requires_grad=True), weights, None)
            torch.library.opcheck(OPS.bag.default, (2, *factors, ids, trained, offsets, *form))
        grad, form = torch.randn(3 if pooled else 6, 3), (pooled, False, True, 10, *[torch.float32] * 3)
        for by, factors in ((0, (None, weights, grad)), (1, (torch.randn(10, 3), None, grad))):  # its derivatives
            torch.library.opcheck(OPS.bag.default, (by, *factors, ids, None, offsets, *form))

    @POOLED
    def test_bag_fused(self, pooled):
        ids, offsets, weights = one_table(pooled)
        step, skipped, rate = torch.zeros((), dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.tensor(0.1)
        optimizer = te.optim.RowWiseAdagrad(lr=0.1)
        update = ([torch.zeros(10)], [step], [skipped], rate, optimizer.name, list(optimizer.hyperparameters), "a")
        trained = ids.masked_fill(ids == 9, -1) if pooled else None
        bags = (ids, weights, trained, offsets, pooled, pooled and weights is None, True)
        args = ([torch.randn(10, 3, requires_grad=True)], *update, *bags, torch.float32)
        torch.library.opcheck(OPS.bag_fused.default, args)

    @pytest.mark.parametrize("optimizer", breadth(OPTIMIZERS, ["adam"]))
    def test_bag_update_(self, optimizer):
        ids, offsets, weights = one_table(True)
        spec = OPTIMIZERS[optimizer](lr=0.1)
        states = [torch.zeros(10, 3) if state.per_element else torch.zeros(10) for state in spec.states]
        counters = [torch.zeros((), dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)], torch.tensor(0.1)
        table = ([torch.randn(10, 3)], states, *counters, optimizer, list(spec.hyperparameters))
        batch = ("a", ids, weights, offsets, True, False, True, torch.randn(3, 3))
        torch.library.opcheck(OPS.bag_update_.default, (*table, *batch))

    def test_drop_padding(self):
        ids, offsets, _ = one_table(True)
        torch.library.opcheck(OPS.drop_padding.default, (ids, offsets, 9, 10))

    def test_divide_sums(self):
        counts = torch.tensor([[1], [2], [3]])
        torch.library.opcheck(OPS.divide_sums.default, (torch.randn(3, 4, requires_grad=True), counts, 0.3))

    def test_close_bags(self):
        for dtype in (torch.int32, torch.int64):
            torch.library.opcheck(OPS.close_bags.default, (torch.arange(5).to(dtype), torch.tensor([0, 1, 3])))

    @pytest.mark.parametrize(("form", "optimizer", "by_table"), row_updates())
    def test_row_update_(self, form, optimizer, by_table):
        problem = Problem(*FORMS[form])
        args = (
            problem.weights(), problem.states(optimizer), *problem.counters(by_table), optimizer,
            list(OPTIMIZERS[optimizer](lr=0.1).hyperparameters), problem.grad(), problem.offsets,
            problem.sample_weights,
        )  # fmt: skip
        torch.library.opcheck(OPS.row_update_.default, (*args, *problem.groups, *problem.layout))

    def test_embedding_bag_fused(self, problem):
        pending = torch.zeros((), dtype=torch.int64)
        optimizer, sample_weights = te.optim.RowWiseAdagrad(lr=0.1), with_gradient(problem.sample_weights)
        args = (
            problem.weights(True), problem.states(optimizer.name), *problem.counters(), optimizer.name,
            list(optimizer.hyperparameters), problem.values, problem.offsets, sample_weights, pending,
            False, NOT_ACCUMULATING, True, torch.float32,
        )  # fmt: skip
        torch.library.opcheck(OPS.embedding_bag_fused.default, (*args, *problem.groups, *problem.layout))

    def test_shared_update(self, problem):
        """Outside of a backward pass it is done at once."""
        inputs = []
        accumulator, tables = Accumulator(), SimpleNamespace(update_shared=lambda *batch: inputs.append(batch))
        accumulator.tables = lambda: tables
        grad = problem.grad()
        args = (accumulator.handle, grad, problem.values, problem.offsets, problem.sample_weights)
        torch.library.opcheck(OPS.shared_update.default, (*args, *problem.groups, *problem.layout))
        assert inputs
        assert all(torch.equal(batch[0], grad) for batch in inputs)

    @pytest.mark.parametrize(("trained", "weighted"), [(False, False), (True, False), (True, True), (False, True)])
    def test_pinned_lookup(self, trained, weighted):
        accumulator, tables, inputs = Accumulator(), SimpleNamespace(), []
        accumulator.tables = lambda: tables
        tables.read_pinned = lambda number, *_: torch.full((2, 3), float(number))

        def update(number, grad, sample_weights):
            inputs.append(number)
            return None if sample_weights is None else torch.full_like(sample_weights, float(grad.sum()))

        tables.update_pinned = update
        weight, weights = torch.ones(5, 3, requires_grad=trained), torch.ones(4, requires_grad=True)
        tensors = weight, weights if weighted else None, torch.tensor(7)
        torch.library.opcheck(OPS.pinned_lookup.default, (*tensors, accumulator.handle, trained, 2, 3, torch.float32))
        assert bool(inputs) == (trained or weighted)
        assert all(number == 7 for number in inputs)

    def test_pinned_update(self):
        accumulator, inputs = Accumulator(), []
        tables = SimpleNamespace(update_pinned=lambda *update: inputs.append(update))
        accumulator.tables = lambda: tables
        args = torch.ones(2, 3), None, torch.tensor(7), accumulator.handle
        torch.library.opcheck(OPS.pinned_update.default, args)
        assert all(number == 7 and torch.equal(grad, torch.ones(2, 3)) for number, grad, _ in inputs)
        assert inputs

    def test_start_exchange(self):
        """Of an exchange's two ops, each the other's backward, which opcheck would call with gradients of its own."""
        self.check_exchange(OPS.start_exchange.default)

    def test_finish_exchange(self, monkeypatch):
        class Arrived:
            def pop(self, address):
                return lambda: torch.ones(4, 5)

        monkeypatch.setattr(output_exchange, "_started", Arrived())
        self.check_exchange(OPS.finish_exchange.default)

    def check_exchange(self, op):
        exchange = PooledExchange(RankGroup(), [[(2, 3), (0, 2)]], 5, EXACT)
        for back in (False, True):
            for final in (None, torch.zeros(1)):
                values = torch.randn(4, 5)
                inputs = [values] if op is OPS.start_exchange.default else values
                args = inputs, final, exchange.handle, back, [4], []
                torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))

    def test_broadcast_buffers(self, monkeypatch):
        monkeypatch.setattr(gradient_exchange.dist, "broadcast", lambda buffer, *_: buffer.fill_(3.0))
        of_graphs, buffers = GraphDataParallel(RankGroup(), torch.nn.Linear(2, 3)), [torch.zeros(2), torch.zeros(())]
        torch.library.opcheck(OPS.broadcast_buffers.default, (buffers, of_graphs.handle))
        OPS.broadcast_buffers(buffers, of_graphs.handle)
        assert all(bool((buffer == 3.0).all()) for buffer in buffers)

    def test_accumulate_(self, problem):
        accumulator = Accumulator()
        accumulator.is_open = True
        pending = torch.zeros((), dtype=torch.int64)
        args = (pending, accumulator.handle, problem.grad(), problem.values, problem.offsets, problem.sample_weights)
        torch.library.opcheck(OPS.accumulate_.default, args)
        assert accumulator.pop_all()

    @BATCH_SIZES
    @DTYPES
    def test_interaction(self, batch_size, dtype):
        args = [torch.randn(batch_size, width).to(dtype).requires_grad_() for width in (4, 12)]
        torch.library.opcheck(OPS.interaction.default, args)

    @BATCH_SIZES
    def test_interaction_gradient(self, batch_size):
        args = [torch.randn(batch_size, width) for width in (10, 4, 12)]
        torch.library.opcheck(OPS.interaction_gradient.default, args)

    @BATCH_SIZES
    @DTYPES
    def test_cross(self, batch_size, dtype):
        inputs, product, crossed = (torch.randn(batch_size, 4).to(dtype).requires_grad_() for _ in range(3))
        args = (inputs, product, torch.randn(4, requires_grad=True), crossed)
        torch.library.opcheck(OPS.cross.default, args)

    @BATCH_SIZES
    def test_cross_gradient(self, batch_size):
        grad, inputs, product = (torch.randn(batch_size, 4) for _ in range(3))
        torch.library.opcheck(OPS.cross_gradient.default, (grad, inputs, product, torch.randn(4)))

    @PACKED
    def test_quantize_pack(self, packed):
        codec, num_rows = packed
        packing, saturated = make_packing([[(2, 3)], [(0, 2)]], 5, codec), torch.zeros((), dtype=torch.int64)
        for scale, rows in ((None, None), (torch.tensor(8.0), torch.randperm(num_rows))):
            args = (torch.randn(num_rows, 5), *packing, saturated, scale, rows)
            torch.library.opcheck(OPS.quantize_pack.default, args)

    @PACKED
    def test_quantize_unpack(self, packed):
        codec, num_rows = packed
        packing, saturated = make_packing([[(2, 3)], [(0, 2)]], 5, codec), torch.zeros((), dtype=torch.int64)
        message = torch.zeros(num_rows * packing.row_bytes, dtype=torch.uint8)
        for scale, rows in ((None, None), (torch.tensor(8.0), torch.zeros(7, dtype=torch.int32))):
            args = (message, *packing, torch.bfloat16, saturated, scale, rows)
            torch.library.opcheck(OPS.quantize_unpack.default, args)

    def test_jagged_permute(self, problem):
        args = (problem.values, problem.offsets, torch.tensor([2, 0]), problem.sample_weights, 3)
        for num_values in (problem.values.numel(), 0):
            torch.library.opcheck(OPS.jagged_permute.default, (*args, num_values))

    def test_block_bucketize(self, problem):
        args = (problem.values, problem.offsets, torch.tensor([3, 1, 2]), problem.sample_weights, 4)
        torch.library.opcheck(OPS.block_bucketize.default, args)

    @pytest.mark.parametrize("policy", breadth(POLICIES, ["lru"]))
    def test_row_cache_look_up_(self, policy):
        cache = make_cache(policy)
        serve(cache)
        torch.library.opcheck(OPS.row_cache_look_up_.default, (*cache.directory, *cache[1:]))

    @pytest.mark.parametrize("policy", breadth(POLICIES, ["lru"]))
    def test_row_cache_allocate_(self, policy):
        cache = make_cache(policy)
        args = (*cache.directory, cache.rows, torch.full_like(cache.rows, -1), *cache[2:])
        torch.library.opcheck(OPS.row_cache_allocate_.default, args)

    def test_row_cache_translate(self):
        starts, order = torch.tensor([0, 2, 3, 3], dtype=torch.int32), torch.tensor([0, 2, 1], dtype=torch.int32)
        args = (torch.tensor([7, 9, 2**40]), starts, order, torch.tensor(2))
        torch.library.opcheck(OPS.row_cache_translate.default, args)

    def test_move_rows_(self):
        to, sources = [torch.zeros(4, 3), torch.zeros(4)], [torch.randn(5, 3), torch.randn(5)]
        moves = torch.tensor([0, 3, -1]), torch.tensor([4, 4, 2])
        for of_table in ((None, []), (torch.tensor([0, 1, 3]), [1, 0])):
            torch.library.opcheck(OPS.move_rows_.default, (to, sources, *moves, *of_table))


def test_exchanges_are_ordered_by_tensors_of_one_device():
    """They are gradients of each other, wherever what is sent is."""
    exchange = PooledExchange(RankGroup(), [[(0, 5)]], 5, EXACT)
    with FakeTensorMode():
        values, final = torch.empty(4, 5, device="cuda"), torch.empty(1)
        started, sent = OPS.start_exchange([values], final, exchange.handle, False, [4], [])
        arrived, received = OPS.finish_exchange(started, final, exchange.handle, False, [4], [])
    assert (started.device.type, arrived.device.type) == ("cuda", "cuda")
    assert (sent.device.type, received.device.type) == ("cpu", "cpu")


def test_every_op_is_checked():
    """A new op of this library needs a test of its own name here."""
    collection = make_collection([te.TableConfig("table", 3, 2)], te.optim.SGD())
    collection(te.KeyedJaggedTensor.from_lists({"table": [[1]]})).sum().backward()
    defined = {
        schema.name.removeprefix("tritonemb::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("tritonemb::")
    }
    checked = {name.removeprefix("test_") for name in vars(TestOpcheck) if name.startswith("test_")}
    assert defined
    assert defined == checked
