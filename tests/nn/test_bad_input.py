"""What is wrong with a batch, a table or a gradient has a name, and nothing was changed."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, contents, fewer, make_collection, output_of, random_steps, train
from tests.nn.tiers import not_interpreted, seeded
from tritonemb.nn.collections import TableCollection
from tritonemb.ops.registry import REFERENCE, use_kernels
from tritonemb.optim import OPTIMIZERS

pytestmark = pytest.mark.public
NAMES = fewer(list(OPTIMIZERS), ["row_wise_adagrad", "adam"])
BATCH = fewer(400, 20)  # enough that CPU kernels share the work among threads
TABLES = [te.TableConfig("user", 10, 4, features=["u", "shared"]), te.TableConfig("genre", 5, 2, features=["shared"])]


PLACEMENTS = ["device", *(pytest.param(placement, marks=not_interpreted) for placement in ("host", "disk"))]


def make(
    optimizer: te.optim.Optimizer | None = None, pooled: bool = True, placement: str = "device", **options
) -> TableCollection:
    tables = TABLES if pooled else [te.TableConfig(name, 5, 4, pooling="none") for name in ("u", "shared")]
    return seeded(tables, optimizer or te.optim.Adam(lr=0.1), pooled, (placement,), **options)


def batch_of(u, shared, dtype=torch.int64) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor.from_lists({"u": u, "shared": shared}, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [5, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_id_out_of_range_is_reported_in_full(placement, pooled, value, dtype):
    collection, twin = make(None, pooled, placement), make(None, pooled)
    initial = contents(collection)
    batch = batch_of([[1], [2, 3]], [[0, 4], [1, value]], dtype)
    table = {True: "user" if not 0 <= value < 10 else "genre", False: "shared"}[pooled]
    last = {"user": 9, "genre": 4, "shared": 4}[table]
    for use in (output_of, te.nn.prefetch, type(collection).group) if placement != "device" else (output_of,):
        with pytest.raises(ValueError, match="out of range") as caught:
            use(collection, batch)
        message = str(caught.value)
        for part in (
            f"table '{table}'", f"id {value} ", "feature 'shared'", "sample 1", "position 6 of values", f"0 to {last}",
        ):  # fmt: skip
            assert part in message, message
    assert_same_bits(contents(collection), initial)
    assert all(cache_statistic.lookups == 0 for cache_statistic in collection.cache_statistics().values())
    steps = random_steps(twin, 3, batch_size=4)
    train(collection, steps)
    train(twin, steps)
    assert_same_bits(contents(collection), contents(twin))


def test_ids_beyond_32_bits_are_out_of_range():
    """Their lower 32 bits would be valid."""
    for value in (2**32, 2**32 + 1, -(2**32), 2**62):
        with pytest.raises(ValueError, match=re.escape(f"id {value} of feature 'u', sample 0 (position 0 of values)")):
            make()(batch_of([[value]], [[0]]))


def test_the_first_bad_id_is_reported_on_any_number_of_threads():
    table = te.TableConfig("table", 100, 16)
    collection = make_collection([table], None)
    size = fewer(40_000, 400)
    values = torch.zeros(size, dtype=torch.int64)
    values[[size // 2 + 1, size // 2 + 5, size - 1]] = 100
    batch = te.KeyedJaggedTensor(["table"], values, lengths=torch.full((size // 2,), 2))
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        with pytest.raises(ValueError, match=rf"sample {size // 4} \(position {size // 2 + 1} of values\)"):
            collection(batch)


OPTIMIZERS_AND_PLACEMENTS = [(None, "device"), *((OPTIMIZERS[name](lr=0.1), "device") for name in NAMES)]
OPTIMIZERS_AND_PLACEMENTS += [
    pytest.param(te.optim.Adam(lr=0.1), placement, marks=not_interpreted) for placement in ("host", "disk")
]


@pytest.mark.parametrize(("optimizer", "placement"), OPTIMIZERS_AND_PLACEMENTS)
@pytest.mark.parametrize("pooled", [True, False])
def test_ignored_ids_read_as_zero_and_update_nothing(pooled, optimizer, placement):
    tables = [te.TableConfig(name, 5, 4, pooling="sum" if pooled else "none") for name in ("u", "shared")]
    collection = seeded(tables, optimizer, pooled, (placement,), bounds_check="ignore")
    twin = seeded(tables, optimizer, pooled)
    for ids in (([[1, 5], [-1]], [[2**40], [3]]), ([[-1], []], [[], [70]])):
        bad = batch_of(*ids)
        good = batch_of(*([[id for id in bag if 0 <= id < 5] for bag in bags] for bags in ids))
        valid = slice(None) if pooled else (bad.values() >= 0) & (bad.values() < 5)
        out, expected = output_of(collection, bad), output_of(twin, good)
        assert torch.equal(out[valid], expected)
        assert pooled or not out[~valid].any()
        grad = torch.randn(out.shape)
        out.backward(grad)
        expected.backward(grad[valid])
    assert_same_bits(contents(collection), contents(twin))
    if optimizer is None:
        for table, other in zip(collection.tables, twin.tables, strict=True):
            assert torch.equal(table.weight.grad, other.weight.grad)


def test_an_ignored_id_counts_in_the_length_of_its_bag():
    collection = make_collection([te.TableConfig("t", 5, 4, pooling="mean")], None, bounds_check="ignore")
    out = collection(te.KeyedJaggedTensor.from_lists({"t": [[2, 7]]}))
    assert torch.equal(out[0], collection.tables[0].weight[2] / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool, None])
def test_ids_of_a_wrong_dtype_or_shape(dtype):
    values = torch.ones(2, 1, dtype=torch.int64) if dtype is None else torch.ones(2, dtype=dtype)
    error, message = TypeError, f"ids must be int32 or int64, got {dtype}"
    if dtype is None:
        error, message = ValueError, r"ids must be 1-D, got shape \(2, 1\)"
    batch = te.KeyedJaggedTensor(["u", "shared"], values, lengths=torch.tensor([1, 1]))
    dynamic = [te.TableConfig(name, None, 4, pooling="none", capacity=8) for name in ("u", "shared")]
    collections = make_collection(TABLES, None), make(), te.nn.EmbeddingCollection(dynamic, te.optim.SGD(lr=0.1))
    for use in (*collections, make().group, *map(te.HybridParallel, map(copy.deepcopy, collections[1:]))):
        with pytest.raises(error, match=message):
            use(batch)


def test_a_batch_that_is_none():
    with pytest.raises(ValueError, match=r"lacks the features \['shared'\].*\['u', 'other'\]"):
        make()(te.KeyedJaggedTensor.from_lists({"u": [[1]], "other": [[1]]}))
    with pytest.raises(TypeError, match=r"expected a KeyedJaggedTensor, got dict, which has no offsets\(\)"):
        make()({"u": torch.tensor([1])})
    with pytest.raises(TypeError, match="expected a KeyedJaggedTensor, got Tensor"):
        make()(torch.tensor([1]))


def test_tables_that_do_not_go_together():
    table, (bags, rows) = te.TableConfig("t", 3, 2), (te.nn.EmbeddingBagCollection, te.nn.EmbeddingCollection)
    none, mean = (te.TableConfig("t", 3, 2, pooling=pooling) for pooling in ("none", "mean"))
    served, other_dim = te.TableConfig("u", 3, 2, placement="server"), te.TableConfig("s", 3, 3)
    unknown, single = r"optimizer must be one of tritonemb\.optim", "tables must be a list of TableConfig, got"
    for kinds, tables, options, error, message in (
        ((bags, rows), [], {}, ValueError, "at least one table"),
        ((bags, rows), [table, served], {}, ValueError, r"\['t'\] are not on embedding servers, but others .* are"),
        ((bags, rows), [table], {"optimizer": "adam"}, TypeError, unknown),
        ((bags, rows), [table], {"optimizer": te.optim.Adam}, TypeError, unknown),
        ((bags, rows), [table], {"bounds_check": "warn"}, ValueError, "bounds_check must be one of"),
        ((bags, rows), [table], {"output_dtype": "float32"}, TypeError, r"output_dtype must be a torch\.dtype, got"),
        ((bags, rows), [table], {"output_dtype": []}, TypeError, r"output_dtype must be a torch\.dtype, got"),
        ((bags, rows), ["t"], {}, TypeError, "tables must be TableConfig, got 't'"),
        ((bags, rows), table, {}, TypeError, f"{single} TableConfig"),
        ((bags, rows), None, {}, TypeError, f"{single} None"),
        ([bags], [table, te.TableConfig("t", 5, 2, ["other"])], {}, ValueError, "duplicate table 't'"),
        ([bags], [none], {}, ValueError, "'t' has pooling 'none'; use EmbeddingCollection"),
        ([rows], [mean], {}, ValueError, "'t' has pooling 'mean'; use EmbeddingBagCollection"),
        ([rows], [table, other_dim], {}, ValueError, r"need one embedding_dim, got \{'t': 2, 's': 3\}"),
        ([rows], [table, te.TableConfig("s", 3, 2, ["t"])], {}, ValueError, "feature 't' is in tables 't' and 's'"),
    ):
        for kind in kinds:
            with pytest.raises(error, match=message):
                kind(tables, **options)


@pytest.mark.parametrize("bad", fewer([float("nan"), float("inf"), -float("inf")], [-float("inf")]))
@pytest.mark.parametrize("num_threads", fewer([1, 4], [1]))
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_is_raised_before_anything_changes(name, num_threads, bad):
    torch.set_num_threads(num_threads)
    tables = [te.TableConfig("first", 400, 33), te.TableConfig("second", 300, 7)]
    collection = make_collection(tables, OPTIMIZERS[name](lr=0.1, on_nonfinite="raise"))
    (batch, grad), good = random_steps(collection, 2, batch_size=BATCH)
    initial = contents(collection)
    sample = 17
    grad[sample, 35] = bad
    rows = batch.to_lists()["second"][sample]
    assert rows
    with pytest.raises(ValueError, match="no table was changed") as caught:
        train(collection, [(batch, grad)])
    result = re.search(r"table '(\w+)': the gradient of row (\d+)", str(caught.value))
    assert result
    assert result[1] == "second"
    assert int(result[2]) in rows
    assert_same_bits(contents(collection), initial)
    train(collection, [good])
    assert int(collection.step) == 1


@pytest.mark.parametrize("num_threads", fewer([1, 4], [1]))
@pytest.mark.parametrize("name", NAMES)
def test_rows_whose_gradient_is_not_finite_are_skipped_and_counted(name, num_threads):
    torch.set_num_threads(num_threads)
    tables = [te.TableConfig("first", 400, 33), te.TableConfig("second", 300, 7)]
    collection = make_collection(tables, OPTIMIZERS[name](lr=0.1, on_nonfinite="skip"))
    (batch, grad), *_ = random_steps(collection, 1, batch_size=BATCH)
    assert collection.skipped_rows() == {"first": 0, "second": 0}
    grad[5, 0], grad[6, 2], grad[7, 36] = float("nan"), float("inf"), -float("inf")
    lists = batch.to_lists()
    skipped = {"first": {*lists["first"][5], *lists["first"][6]}, "second": set(lists["second"][7])}
    assert all(skipped.values())
    initial = contents(collection)
    train(collection, [(batch, grad)])
    assert collection.skipped_rows() == {name: len(rows) for name, rows in skipped.items()}
    final = contents(collection)
    for table, rows in skipped.items():
        for key in initial:
            if key.startswith(table):
                assert torch.equal(final[key][list(rows)], initial[key][list(rows)])
        touched = list({row for ids in lists[table] for row in ids} - rows)
        assert not (final[f"{table}.weight"][touched] == initial[f"{table}.weight"][touched]).all(1).any()
        assert final[f"{table}.weight"].isfinite().all()
    train(collection, [(batch, grad)])
    assert collection.skipped_rows() == {name: 2 * len(rows) for name, rows in skipped.items()}


WARNING = r"table 'user': rows whose gradient is NaN or infinite are not updated; skipped_rows\(\) counts them"


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_by_default_rows_are_skipped_with_a_warning(placement, bad):
    collection = make(te.optim.SGD(lr=0.1), placement=placement)
    initial = contents(collection)
    gradient = torch.ones(2, 10)
    gradient[1, :4] = bad  # of sample 1's bag of feature "u"
    with pytest.warns(RuntimeWarning, match=WARNING):
        collection(batch_of([[1], [4]], [[2], [3]])).backward(gradient)
    final = contents(collection)
    changed = (final["user.weight"] != initial["user.weight"]).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 3]
    assert collection.skipped_rows() == {"user": 1, "genre": 0}


@pytest.mark.parametrize("custom", [False, True])
def test_reference_kernels_warn_of_skipped_rows_too(custom):
    def step(rows, states, gradients, lr, number):
        return rows - lr * gradients, states

    optimizer = te.optim.Custom(step=step, lr=0.1) if custom else te.optim.SGD(lr=0.1)
    with use_kernels(REFERENCE):
        collection = make(optimizer)
        with pytest.warns(RuntimeWarning, match=WARNING):
            collection(batch_of([[1]], [[2]])).backward(torch.full((1, 10), torch.nan))
    assert collection.skipped_rows() == {"user": 2, "genre": 1}


def test_gradients_that_are_not_finite_are_written_where_they_are_ignored():
    collection = make(te.optim.SGD(lr=0.1, on_nonfinite="ignore"))
    collection(batch_of([[1]], [[2]])).backward(torch.full((1, 10), float("nan")))
    assert contents(collection)["genre.weight"].isnan().any(1).tolist() == [False, False, True, False, False]
    assert contents(collection)["user.weight"].isnan().any(1).nonzero().flatten().tolist() == [1, 2]


def test_clipping_comes_before_the_check_but_does_not_hide_nan():
    optimizer = te.optim.SGD(lr=1.0, on_nonfinite="raise", max_gradient=0.5)
    collection = make_collection([te.TableConfig("t", 3, 2)], optimizer)
    initial = contents(collection)["t.weight"]
    batch = te.KeyedJaggedTensor.from_lists({"t": [[0]]})
    collection(batch).backward(torch.tensor([[float("inf"), -float("inf")]]))
    torch.testing.assert_close(contents(collection)["t.weight"][0], initial[0] - torch.tensor([0.5, -0.5]))
    with pytest.raises(ValueError, match="table 't'"):
        collection(batch).backward(torch.tensor([[float("nan"), 0.0]]))


@pytest.mark.usefixtures("dynamo")
def test_compiled_modules_report_the_same():
    collection = make(te.optim.Adam(lr=0.1, on_nonfinite="raise"))
    initial = contents(collection)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"table 'genre': id 7 of feature 'shared', sample 0 \(position 1 of values\)"):
        compiled(batch_of([[1]], [[7]]))
    out = compiled(batch_of([[1]], [[2]]))
    with pytest.raises(ValueError, match="table 'user': the gradient of row 1"):
        out.backward(torch.full((1, 10), float("nan")))
    assert_same_bits(contents(collection), initial)


@pytest.mark.parametrize("optimizer", [None, te.optim.SGD()], ids=["dense", "fused"])
def test_a_batch_on_another_device_is_refused(optimizer):
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("table", 5, 4)], optimizer=optimizer, device="meta")
    with pytest.raises(ValueError, match=r"table 'table' is on meta but the batch is on cpu; move one"):
        collection(te.KeyedJaggedTensor.from_lists({"table": [[1]]}))
