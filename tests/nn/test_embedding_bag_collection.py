"""`EmbeddingBagCollection`: names, forms it can take, ordinary gradients."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.autograd import forward_ad

import tritonemb as te
from tests.helpers import assert_same_bits, configurations, contents, fewer, make_collection, random_steps, train
from tests.strategies import DIMS, TABLE_DTYPES, problems
from tritonemb import ops

pytestmark = pytest.mark.public

AWKWARD_NAMES = [
    "type", "forward", "training", "tables", "weight", "keys", "a b", "0", "ünïcode", "state_dict",
    "step", "skipped", "pending", "learning_rate",
]  # fmt: skip


def small(optimizer=None, dtype: torch.dtype = torch.float32) -> te.nn.EmbeddingBagCollection:
    configs = [te.TableConfig("user", 30, 8, dtype=dtype), te.TableConfig("genre", 5, 3, pooling="mean", dtype=dtype)]
    return make_collection(configs, optimizer)


@pytest.mark.parametrize("optimizer", [None, *configurations()], ids=lambda o: getattr(o, "name", "none"))
def test_state_dict_has_a_name_for_everything(optimizer):
    collection = small(optimizer)
    states = [] if optimizer is None else [(spec.name, spec.per_element) for spec in optimizer.states]
    expected = {"user.weight": (30, 8), "genre.weight": (5, 3)}
    for name, per_element in states:
        expected |= {
            f"user.{name}": (30, 8) if per_element else (30,),
            f"genre.{name}": (5, 3) if per_element else (5,),
        }
    if optimizer is not None:
        expected["step"] = ()
    assert {name: tuple(tensor.shape) for name, tensor in collection.state_dict().items()} == expected
    assert [name for name, _ in collection.named_parameters()] == ["user.weight", "genre.weight"]


def test_state_dict_restores_a_training_run():
    for optimizer in configurations():
        collection, other = small(optimizer), small(optimizer)
        steps = random_steps(collection, 6, batch_size=fewer(16, 4))
        train(collection, steps[:3])
        file = io.BytesIO()
        torch.save(collection.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        train(collection, steps[3:])
        train(other, steps[3:])
        assert_same_bits(contents(other), contents(collection), optimizer.name)


def test_tables_may_have_the_names_of_methods_and_buffers():
    configs = [te.TableConfig(name, 7, 3) for name in AWKWARD_NAMES]
    collection = make_collection(configs, te.optim.Adagrad())
    steps = random_steps(collection, 2)
    train(collection, steps)
    names = {f"{name}.{part}" for name in AWKWARD_NAMES for part in ("weight", "sum")}
    assert collection.state_dict().keys() == names | {"step"}
    renamed = [te.TableConfig(f"t{i}", 7, 3, [name]) for i, name in enumerate(AWKWARD_NAMES)]
    twin = make_collection(renamed, te.optim.Adagrad())
    train(twin, steps)
    expected = contents(twin)
    for index, name in enumerate(AWKWARD_NAMES):
        assert torch.equal(collection.state_dict()[f"{name}.weight"], expected[f"t{index}.weight"])
    assert_same_bits(contents(copy.deepcopy(collection)), contents(collection))


def test_modes_may_be_switched_with_a_table_called_training():
    collection = make_collection([te.TableConfig("training", 7, 3)], te.optim.SGD())
    assert collection.training is True
    assert collection.eval() is collection
    assert collection.training is False
    assert collection.train().training is True


@pytest.mark.more
@pytest.mark.usefixtures("dynamo")
def test_awkward_names_compile():
    configs = [te.TableConfig(name, 7, 3) for name in AWKWARD_NAMES]
    collection, twin = (make_collection(configs, te.optim.SGD()) for _ in range(2))
    steps = random_steps(collection, 2)
    train(torch.compile(collection, fullgraph=True, backend="aot_eager"), steps)
    train(twin, steps)
    assert_same_bits(contents(collection), contents(twin))


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_ordinary_gradients_are_those_of_torchs_modules(pooling):
    pooled = pooling != "none"
    collection = make_collection([te.TableConfig("table", 30, 8, pooling=pooling)], None, pooled)
    twin = nn.EmbeddingBag(30, 8, mode=pooling, include_last_offset=True) if pooled else nn.Embedding(30, 8)
    twin.weight.data.copy_(collection.tables[0].weight.data)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (collection, twin)]
    for batch, grad in random_steps(collection, 5):
        output = collection(batch)
        outputs = output if pooled else output.values(), twin(batch.values(), *([batch.offsets()] if pooled else []))
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.backward(grad)
            optimizer.step()
        # Sums of a few normal values in another order.
        torch.testing.assert_close(collection.tables[0].weight.grad, twin.weight.grad, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(collection.tables[0].weight, twin.weight, rtol=1e-6, atol=1e-6)


def test_ordinary_gradients_add_up():
    collection = small()
    steps = random_steps(collection, 2)
    train(collection, steps)
    both = [table.weight.grad.clone() for table in collection.tables]
    single = []
    for step in steps:
        collection.zero_grad()
        train(collection, [step])
        single.append([table.weight.grad for table in collection.tables])
    for total, parts in zip(both, zip(*single, strict=True), strict=True):
        assert torch.equal(total, parts[0] + parts[1])


def test_weights_may_change_before_a_backward_with_ordinary_gradients():
    """As between two optimizers' steps: a gradient reads no rows, except that of per-sample weights."""
    collection, twin = small(), small()
    twin.load_state_dict(collection.state_dict())
    for batch, grad in random_steps(collection, 2):
        output = collection(batch)
        with torch.no_grad():
            for table in collection.tables:
                table.weight.mul_(2)
        output.backward(grad)
        twin(batch).backward(grad)
    for table, expected in zip(collection.tables, twin.tables, strict=True):
        assert torch.equal(table.weight.grad, expected.weight.grad)
    weights = torch.ones(1, requires_grad=True)
    features = te.KeyedJaggedTensor(["user", "genre"], torch.tensor([3]), weights, lengths=torch.tensor([1, 0]))
    output = collection(features)
    with torch.no_grad():
        collection["user"].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@given(problems(dims=fewer(DIMS, (1, 7, 60)), max_tables=fewer(6, 3)))
def test_the_order_of_keys_does_not_matter(problem):
    configs, batch = problem
    collection = make_collection(configs, None)
    out = collection(batch)
    backwards = list(reversed(range(len(batch.keys()))))
    assert torch.equal(collection(batch.permute(backwards)), out)
    needed = [batch.keys().index(name) for name in collection.feature_names]
    assert torch.equal(collection(batch.permute(needed)), out)
    parts = out.split(collection.embedding_dims, dim=1)
    names = [(config, feature) for config in configs for feature in config.feature_names]
    for (config, feature), part in zip(names, parts, strict=True):
        single = make_collection(
            [te.TableConfig("t", config.num_embeddings, config.embedding_dim, [feature], config.pooling)], None
        )
        single.tables[0].weight.data.copy_(collection._modules[config.name].weight.data)
        assert torch.equal(single(batch), part)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("optimizer", [None, te.optim.Adam(lr=0.1)], ids=["plain", "fused"])
def test_a_copy_is_independent_and_goes_on_alike(optimizer, make_copy):
    collection = small(optimizer)
    steps = random_steps(collection, 4)
    train(collection, steps[:2])
    if optimizer is not None:
        collection.set_learning_rate(0.3)
        assert collection.fused_optimizer.param_groups[0]["lr"] == pytest.approx(0.3)  # stored as float32
    other = make_copy(collection)
    assert_same_bits(contents(other), contents(collection))
    initial = contents(collection)
    train(other, steps[2:])
    assert_same_bits(contents(collection), initial)
    if optimizer is not None:
        train(collection, steps[2:])
        assert_same_bits(contents(other), contents(collection))
        assert float(other.learning_rate) == float(collection.learning_rate)
        other.fused_optimizer.param_groups[0]["lr"] = 0.5
        assert (float(other.learning_rate), float(collection.learning_rate)) == (0.5, pytest.approx(0.3))
    else:
        pairs = zip(other.tables, collection.tables, strict=True)
        assert not any(torch.equal(a.weight.grad, b.weight.grad) for a, b in pairs)


def test_a_module_and_its_table_set_have_the_same_tensors():
    collection = small(te.optim.Adam(lr=0.1))
    for module in (collection, copy.deepcopy(collection).bfloat16(), pickle.loads(pickle.dumps(collection))):
        assert not isinstance(module.table_set, nn.Module)
        assert [id(table) for table in module.table_set.tables] == [id(module.user), id(module.genre)]
        assert all(module.table_set.counters[name] is module.get_buffer(name) for name in ("step", "learning_rate"))


@pytest.mark.parametrize("dtype", TABLE_DTYPES[1:])
@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_casting_to_16_bits_keeps_states(optimizer, dtype):
    collection = small(optimizer)
    train(collection, random_steps(collection, 2))
    initial, rate = contents(collection), collection.learning_rate.clone()
    collection.to(dtype)
    final = contents(collection)
    for name, tensor in initial.items():
        assert torch.equal(final[name], tensor.to(dtype) if name.endswith(".weight") else tensor)
    assert torch.equal(collection.learning_rate, rate)
    twin = small(optimizer, dtype)
    twin.load_state_dict(final)
    steps = random_steps(collection, 2, seed=9)
    train(collection, steps)
    train(twin, steps)
    assert_same_bits(contents(collection), contents(twin))


@pytest.mark.parametrize("optimizer", [None, te.optim.SGD(lr=0.01)])
def test_tables_that_are_cast_to_8_bits_are_read_only(optimizer):
    """Steps smaller than half the distance of two values would be lost."""
    collection = small(optimizer).to(torch.float8_e4m3fn)
    initial, features = contents(collection), te.KeyedJaggedTensor.from_lists({"user": [[1]], "genre": [[2]]})
    with torch.no_grad():
        assert torch.equal(collection(features)[0, :8], collection["user"].weight[1].float())
    with pytest.raises(TypeError, match=r"tables of torch\.float8_e4m3fn cannot be trained"):
        collection(features).sum().backward()
    assert_same_bits(contents(collection), initial)


@pytest.mark.parametrize("optimizer", [None, te.optim.Adam(lr=0.25)], ids=["plain", "fused"])
@pytest.mark.usefixtures("poisoned")
def test_a_meta_collection_becomes_real(optimizer):
    configs = [te.TableConfig("user", 30, 8, init=nn.init.ones_), te.TableConfig("genre", 5, 3)]
    collection = te.nn.EmbeddingBagCollection(configs, optimizer, device="meta")
    assert all(table.weight.is_meta for table in collection.tables)
    collection.to_empty(device="cpu")
    collection.reset_parameters()
    state = contents(collection)
    assert torch.equal(state["user.weight"], torch.ones(30, 8))
    assert state["genre.weight"].abs().max() <= 5**-0.5
    assert all(not tensor.any() for name, tensor in state.items() if not name.endswith(".weight"))
    if optimizer is not None:
        assert float(collection.learning_rate) == 0.25
        assert collection.skipped_rows() == {"user": 0, "genre": 0}
        assert int(collection.pending) == 0
    twin = te.nn.EmbeddingBagCollection(configs, optimizer)
    twin.load_state_dict(state)
    steps = random_steps(twin, 3)
    train(collection, steps)
    train(twin, steps)
    assert_same_bits(contents(collection), contents(twin))


def test_outputs_have_the_tables_dtype_or_the_one_asked_for():
    batch = te.KeyedJaggedTensor.from_lists({"user": [[1]], "genre": [[2]]})
    assert small(dtype=torch.bfloat16)(batch).dtype == torch.bfloat16
    double = small(te.optim.Adagrad()).double()
    assert (double(batch).dtype, double["user"].get_buffer("sum").dtype) == (torch.float64, torch.float32)
    half = te.TableConfig("user", 3, 2, dtype=torch.float16)
    assert te.nn.EmbeddingBagCollection([half, te.TableConfig("genre", 3, 2)])(batch).dtype == torch.float32
    assert te.nn.EmbeddingBagCollection([half], output_dtype=torch.float32)(batch).dtype == torch.float32


def test_no_update_without_gradients():
    collection = small(te.optim.Adagrad(lr=1.0))
    initial = contents(collection)
    (batch, _), *_ = random_steps(collection, 1)
    trained = collection(batch)
    with torch.no_grad():
        assert torch.equal(collection(batch), trained)
    with torch.inference_mode():
        assert torch.equal(collection(batch), trained)
    del trained
    assert_same_bits(contents(collection), initial)
    collection.requires_grad_(False)
    assert not collection(batch).requires_grad


def test_groups_may_be_computed_ahead():
    collection = small(te.optim.Adam(lr=0.1))
    twin = copy.deepcopy(collection)
    for batch, grad in random_steps(collection, 3, weighted=True):
        collection(batch, groups=collection.group(batch)).backward(grad)
        twin(batch).backward(grad)
    assert_same_bits(contents(collection), contents(twin))


def test_groups_of_another_batch_are_refused():
    """Their positions would be read beyond the gradient."""
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", 10, 4)], te.optim.SGD(lr=0.1))
    batches = [te.KeyedJaggedTensor.from_lengths(["t"], torch.arange(n), torch.ones(n).long()) for n in (2, 3)]
    for batch, other in (batches, batches[::-1]):
        with pytest.raises(ValueError, match=f"another batch than this one of {len(batch.values())} ids"):
            collection(batch, groups=collection.group(other))


class Projected(te.nn.EmbeddingBagCollection):
    """As a user may extend it: by a layer and a parameter."""

    def __init__(self):
        super().__init__([te.TableConfig("t", 5, 4)], te.optim.SGD(lr=0.1))
        self.projection, self.scale = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.ones(2))


def test_what_a_subclass_adds_moves_with_it():
    module = Projected().half()
    weights = module.projection.weight, module.scale, module.tables[0].weight
    assert {weight.dtype for weight in weights} == {torch.float16}
    assert module.table_set.counters["learning_rate"].dtype == torch.float32


def test_a_replaced_table_is_looked_up():
    """As `torch.nn.DataParallel` replaces those of its replicas."""
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", 5, 4)])
    replica, table = collection._replicate_for_data_parallel(), copy.deepcopy(collection.tables[0])
    torch.nn.init.ones_(table.weight)
    replica._modules["t"] = table
    batch = te.KeyedJaggedTensor.from_lists({"t": [[3]]})
    assert torch.equal(replica(batch), torch.ones(1, 4))
    assert not torch.equal(collection(batch), torch.ones(1, 4))


def test_an_attribute_of_a_user_may_be_called_like_ours():
    model = torch.nn.Module()
    model.table_set = te.nn.EmbeddingBagCollection([te.TableConfig("t", 5, 4)])
    batch = te.KeyedJaggedTensor.from_lists({"t": [[3]]})
    assert torch.equal(model.table_set(te.nn.prefetch(model, batch)), model.table_set(batch))


def test_a_collection_gives_a_table_by_its_name():
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("a", 3, 2), te.TableConfig("training", 5, 2)])
    assert collection["training"].weight is dict(collection.named_parameters())["training.weight"]
    with pytest.raises(KeyError, match="unknown table 'b'; expected one of a, training"):
        collection["b"]


def test_weights_may_have_no_address():
    """Inside a functional transform; PyTorch says what it does not support there."""
    collection = make_collection([te.TableConfig("a", 5, 4), te.TableConfig("b", 5, 4)], None)
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]], "b": [[0], [4]]})
    weights = {name: weight.detach() for name, weight in collection.named_parameters()}
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda w: torch.func.functional_call(collection, w, (batch,)).sum())(weights)


def test_forward_mode_differentiation_is_an_error_instead_of_a_tangent_of_zero():
    collection = make_collection([te.TableConfig("a", 5, 4)], None)
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]]})
    weights = {"a.weight": collection["a"].weight.detach()}
    with pytest.raises(NotImplementedError, match="do not support forward-mode differentiation"):
        torch.func.jvp(lambda w: torch.func.functional_call(collection, w, (batch,)), (weights,), (weights,))
    vectors = torch.ones(2, 4)
    for grad in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            with pytest.raises(NotImplementedError, match="do not support forward-mode differentiation"):
                ops.interaction(forward_ad.make_dual(vectors, vectors), vectors)
            assert ops.interaction(vectors, vectors).shape == (2, 5)


IN_PLACE = [("device", "ids"), *[(tier, tensor) for tier in ("device", "host") for tensor in ("offsets", "weights")]]


@pytest.mark.parametrize(("placement", "tensor"), [*IN_PLACE, ("disk", "offsets"), ("dynamic", "offsets")])
def test_a_batch_that_changes_before_the_backward_is_an_error(placement, tensor):
    """An update of other rows, or by other gradients, would be silently wrong."""
    size = {"num_embeddings": None, "capacity": 8} if placement == "dynamic" else {"num_embeddings": 5}
    size["placement"] = "device" if placement == "dynamic" else placement
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", embedding_dim=4, **size)], te.optim.SGD(lr=0.1))
    batch = te.KeyedJaggedTensor.from_lists({"t": [[3], [1, 2]]}, {"t": [[1.0], [2.0, 3.0]]})
    pooled, initial = collection(batch), contents(collection)
    {"ids": batch.values(), "offsets": batch.offsets(), "weights": batch.weights()}[tensor].mul_(1)
    with pytest.raises(RuntimeError, match=f"table 't': .*{tensor} were changed in place between a lookup and its"):
        pooled.sum().backward()
    assert_same_bits(contents(collection), initial)
    collection(batch).sum().backward()


@pytest.mark.parametrize("kind", ["pooled", "unpooled", "dynamic", pytest.param("compiled", marks=pytest.mark.more)])
def test_two_lookups_have_gradients_of_their_sample_weights(kind):
    """The backward of one must not read rows that the backward of the other has updated."""
    size = {"num_embeddings": None, "capacity": 8} if kind == "dynamic" else {"num_embeddings": 5}
    pooling, make = ("none", te.nn.EmbeddingCollection) if kind == "unpooled" else ("sum", te.nn.EmbeddingBagCollection)
    collection = make([te.TableConfig("t", embedding_dim=4, pooling=pooling, **size)], te.optim.SGD(lr=1.0))
    ids, offsets, weights = torch.tensor([3, 1, 2]), torch.tensor([0, 1, 3]), torch.ones(2, 3, requires_grad=True)

    def look_up(sample_weights):
        result = collection(te.KeyedJaggedTensor(["t"], ids, sample_weights, offsets=offsets))
        return (result.values() if kind == "unpooled" else result).sum()

    def look_up_twice():
        return look_up(weights[0]) + look_up(weights[1])

    call = torch.compile(look_up_twice, backend="aot_eager", fullgraph=True) if kind == "compiled" else look_up_twice
    loss, table = call(), collection.tables[0]
    initial = table.lookup(ids) if kind == "dynamic" else table.weight.detach()[ids]
    num_passes = collection.table_set.passes_so_far()  # by the address of the rate, which others have had
    loss.backward()
    assert torch.equal(weights.grad, initial.sum(1).expand(2, 3))
    updated = table.lookup(ids) if kind == "dynamic" else table.weight.detach()[ids]
    torch.testing.assert_close(updated, initial - 2)
    assert int(collection.step) == 2
    assert collection.table_set.passes_so_far() == num_passes + 1
    # A later pass has not the rows of its lookup any more.
    losses = look_up(weights[0]), look_up(weights[1])
    losses[0].backward()
    with pytest.raises(RuntimeError, match="table 't': rows of 't' were changed in place between a lookup and its"):
        losses[1].backward()


@pytest.mark.parametrize("order", ["weighted plain", "plain weighted plain", "weighted plain weighted"])
def test_updates_of_plain_lookups_wait_for_the_gradient_of_weights(order):
    """They read rows; once no such lookup is pending, updates run at once, each in its lookup's backward."""
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", 5, 4)], te.optim.SGD(lr=0.5))
    ids, offsets, table = torch.tensor([3, 1, 1]), torch.tensor([0, 1, 3]), collection.tables[0].weight
    weights, initial = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), table.detach().clone()

    def look_up(kind):
        return collection(te.KeyedJaggedTensor(["t"], ids, weights if kind == "weighted" else None, offsets=offsets))

    sum(look_up(kind).sum() for kind in order.split()).backward()
    num_weighted = order.count("weighted")
    assert torch.equal(weights.grad, initial[ids].sum(1) * num_weighted)
    gradients = torch.zeros(5, 1).index_add_(0, ids, num_weighted * weights.detach()[:, None] + order.count("plain"))
    torch.testing.assert_close(table.detach(), initial - 0.5 * gradients)
    # A hook of the first lookup of a pass sees the update of the last.
    first, steps = look_up("plain"), []
    first.register_hook(lambda _: steps.append(int(collection.step)))
    (first.sum() + look_up("plain").sum()).backward()
    assert steps == [len(order.split()) + 1]
    assert int(collection.step) == len(order.split()) + 2


class TwoLookups(torch.nn.Module):
    """Lookups with per-sample weights `w` and others, or without, in one graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.is_collection, self.second_is_weighted = kind == "collection", kind == "two weighted"
        self.bag: torch.nn.Module = torch.nn.EmbeddingBag(5, 4, mode="sum")
        if self.is_collection:
            self.bag = te.nn.EmbeddingBagCollection([te.TableConfig("t", 5, 4)], te.optim.SGD(lr=0.5))

    def look_up(self, ids, offsets, weights):
        if self.is_collection:
            return self.bag(te.KeyedJaggedTensor(["t"], ids, weights, offsets=offsets))
        return self.bag(ids, offsets, per_sample_weights=weights)

    def forward(self, ids, offsets, weights):
        second = self.look_up(ids, offsets, 2 * weights if self.second_is_weighted else None)
        return self.look_up(ids, offsets, weights).sum() + 3 * second.sum()


@pytest.mark.more
@pytest.mark.parametrize("kind", ["weighted and plain", "two weighted", "collection"])
def test_a_graph_reads_rows_for_the_gradient_of_weights_before_they_are_updated(kind):
    torch.manual_seed(0)
    model, weights = TwoLookups(kind), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    ids, (table,) = torch.tensor([3, 1, 1]), model.parameters()
    expected = table.detach()[ids].sum(1) * (7 if kind == "two weighted" else 1)
    if kind != "collection":
        te.fuse(model, te.optim.SGD(lr=0.5))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(ids, torch.tensor([0, 1, 3]), weights).backward()
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("converted", [torch.bfloat16, torch.float16])
@torch.no_grad()  # otherwise each lookup reads the dtypes
def test_a_table_that_is_converted_in_its_memory_is_read_by_its_dtype(converted):
    """A conversion may reuse the memory that an earlier one has freed."""
    module = te.nn.EmbeddingBagCollection([te.TableConfig("table", 8, 8)])
    batch = te.KeyedJaggedTensor(["table"], torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
    rows = module(batch)
    (weight,) = module.parameters()
    memory, weight.data = weight.data, weight.data.view(converted).view(16, 8)[:8]
    weight.data.copy_(rows)
    assert weight.data_ptr() == memory.data_ptr()
    assert torch.equal(module(batch), rows.to(converted))
