"""Tables that are parts of others: what the whole table's update gives there, parts give by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.helpers import Step, fewer, make_collection, random_steps, train
from tests.strategies import optimizers, seeds
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.layout import COLUMN_ORIGIN, ROW_IDS, ROW_ORIGIN, SEED, BatchGradient, FusedTables, Layout, make_layout
from tritonemb.nn.collections import TableCollection
from tritonemb.ops.registry import kernel, use_kernels
from tritonemb.optim import OPTIMIZERS

Run = tuple[int, int]  # the first, and how many
DTYPES = (torch.bfloat16, torch.float16)
ELEMENT_WISE = ("sgd", "adagrad", "adam", "ftrl")
NUM_STEPS = fewer(3, 1)
IMPLEMENTATIONS = [pytest.param("cpu"), pytest.param("reference"), pytest.param("triton", marks=pytest.mark.triton)]


@st.composite
def runs(draw: st.DrawFn, size: int, step: int) -> list[Run]:
    """All of `size`, in two to four runs that begin at multiples of `step`; in one if it is no more than `step`."""
    most = (size - 1) // step
    places = draw(st.lists(st.integers(1, most), min_size=1, max_size=3, unique=True)) if most else []
    bounds = [0, *sorted(place * step for place in places), size]
    return [(begin, end - begin) for begin, end in itertools.pairwise(bounds)]


def place_of(part: te.TableConfig) -> tuple[slice, slice]:
    """The rows and columns of the whole table that a part of it holds."""
    row, column = part.row_origin, part.column_origin
    return slice(row, row + part.num_embeddings), slice(column, column + part.embedding_dim)


def cut_step(step: Step, parts: Sequence[te.TableConfig]) -> Step:
    """What a batch for a whole table, and the gradient of its output, are to parts: a key for each."""
    batch, grad = step
    ((_, samples),) = batch.to_lists().items()
    lists = {}
    for part in parts:
        rows, _ = place_of(part)
        lists[part.name] = [[row - rows.start for row in ids if rows.start <= row < rows.stop] for ids in samples]
    return te.KeyedJaggedTensor.from_lists(lists), torch.cat([grad[:, place_of(part)[1]] for part in parts], dim=1)


def cut(whole: TableCollection, rows: Sequence[Run], columns: Sequence[Run]) -> TableCollection:
    """The tables of one that has a single table, cut along `rows` and `columns`; with its weights."""
    (config,), (table,) = whole.configs, whole.tables
    parts = []
    for index, (local, its) in enumerate(itertools.product(rows, columns)):
        parts.append(config.shard(f"part{index}", local, its, [f"part{index}"]))
    collection = make_collection(parts, whole.optimizer)
    with torch.no_grad():
        for part, owned in zip(parts, collection.tables, strict=True):
            owned.weight.copy_(table.weight[place_of(part)])
    return collection


def check_parts_have_the_wholes_bits(device, implementation, config, optimizer, rows, columns, seed=0):
    whole = make_collection([config], optimizer)
    parts = cut(whole, rows, columns)
    steps = random_steps(whole, NUM_STEPS, batch_size=fewer(30, 9), seed=seed)
    cut_steps = [cut_step(step, parts.configs) for step in steps]
    initial = whole.tables[0].weight.detach().clone()
    device = device if implementation == "triton" else torch.device("cpu")
    with use_kernels(implementation):
        for collection, given_steps in ((whole, steps), (parts, cut_steps)):
            collection.to(device)
            train(collection, [(batch.to(device), grad.to(device)) for batch, grad in given_steps])
    te.check_errors()
    assert not torch.equal(whole.tables[0].weight.cpu(), initial)
    for part, local in zip(parts.configs, parts.tables, strict=True):
        where = place_of(part)
        expected = {"weight": whole.tables[0].weight, **dict(whole.tables[0].named_buffers())}
        actual = {"weight": local.weight, **dict(local.named_buffers())}
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            value = tensor.detach()[where[: tensor.dim()]].contiguous()
            same = torch.equal(actual[name].detach().view(torch.uint8), value.view(torch.uint8))
            assert same, f"{name} of {where}: {(actual[name] != value).sum()} of {value.numel()} elements differ"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENT_WISE)
@settings(max_examples=fewer(8, 2))
@given(data=st.data(), seed=seeds)
def test_rectangles_are_updated_as_the_whole_table(device, name, dtype, implementation, data, seed):
    config = te.TableConfig("whole", 23, data.draw(st.sampled_from((7, 20, 24, 60))), dtype=dtype)
    rows, columns = data.draw(runs(23, 1)), data.draw(runs(config.embedding_dim, 8))
    optimizer = data.draw(optimizers(name, max_norm=None, cow_clip=None))
    check_parts_have_the_wholes_bits(device, implementation, config, optimizer, rows, columns, seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - set(ELEMENT_WISE)))
@settings(max_examples=fewer(5, 1))
@given(data=st.data(), seed=seeds)
def test_runs_of_rows_are_updated_as_the_whole_table(device, name, dtype, implementation, data, seed):
    """By optimizers that look at whole rows."""
    config = te.TableConfig("whole", 23, data.draw(st.sampled_from((7, 24, 60))), dtype=dtype)
    rows, optimizer = data.draw(runs(23, 1)), data.draw(optimizers(name))
    check_parts_have_the_wholes_bits(
        device, implementation, config, optimizer, rows, [(0, config.embedding_dim)], seed
    )  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_cut_at_once(device, implementation):
    """Parts of one row, and of as few columns as there may be."""
    config = te.TableConfig("whole", 6, 20, dtype=torch.bfloat16)
    rows, columns = [(row, 1) for row in range(6)], [(0, 8), (8, 8), (16, 4)]
    check_parts_have_the_wholes_bits(device, implementation, config, te.optim.SGD(lr=0.1), rows, columns)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_and_column_far_from_the_origin(device, implementation, dtype):
    """Where the row's number has more than 32 bits; the whole table is but a name."""
    device = device if implementation == "triton" else torch.device("cpu")
    whole = te.TableConfig("whole", 2**35, 2**24, dtype=dtype)
    shard_bounds = (2**33 + 2**31 + 3, 5), (2**23 + 8, 16)
    result = {}
    for serving in (implementation, "reference"):
        table = make_collection([whole.shard("part", *shard_bounds, ["part"])], te.optim.SGD(lr=0.1))
        steps = random_steps(table, NUM_STEPS)
        where = device if serving == implementation else torch.device("cpu")
        table.to(where)
        with use_kernels(serving):
            train(table, [(batch.to(where), grad.to(where)) for batch, grad in steps])
        result[serving] = table.tables[0].weight.detach().cpu()
    assert torch.equal(result[implementation], result["reference"])
    (part,) = table.configs
    layout = make_layout([part], ["part"], True)
    numbers = layout.tables[0, [SEED, ROW_ORIGIN, COLUMN_ORIGIN]].tolist()
    assert numbers == [whole.seed, 2**33 + 2**31 + 3, 2**23 + 8]


def update(implementation, weights, states, optimizer, values, grad, layout):
    """One update by bags of one id; what is wrong is raised."""
    offsets = torch.arange(values.numel() + 1, device=values.device)
    groups = tuple(group.to(values.device) for group in row_groups_reference(values, offsets, layout))
    step, skipped = (torch.zeros(size, dtype=torch.int64, device=values.device) for size in ((), len(weights)))
    rate = torch.tensor(optimizer.lr, device=values.device)
    with use_kernels(implementation):
        kernel("row_update_", values.device, tuple(weight.dtype for weight in weights))(
            FusedTables(weights, states, step, skipped, rate, optimizer.name, optimizer.hyperparameters),
            BatchGradient(grad, offsets, None, groups, layout),
        )
        te.check_errors()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("columns", [(0, 8), (8, 8)], ids=["another row", "another column"])
def test_equal_rows_in_other_places_round_differently(device, implementation, columns):
    device = device if implementation == "triton" else torch.device("cpu")
    whole = te.TableConfig("whole", 80, 16, dtype=torch.bfloat16)
    rows = (40, 40) if columns[0] == 0 else (0, 40)
    configs = [whole.shard("a", (0, 40), (0, 8), ["a"]), whole.shard("b", rows, columns, ["b"])]
    weights = [torch.ones(40, 8, dtype=torch.bfloat16, device=device) for _ in configs]
    layout = make_layout(configs, ["a", "b"], True, device)
    values = torch.arange(40, device=device).repeat(2)
    grad = torch.full((40, 16), 2.0**-10, device=device)  # a quarter of the gap below 1
    update(implementation, weights, [], te.optim.SGD(lr=1.0), values, grad, layout)
    down = [weight < 1 for weight in weights]
    # Each goes down with probability 1/4: 320 draws have a mean of 80 and a standard deviation of 8; five of those.
    assert all(abs(int(mask.sum()) - 80) <= 40 for mask in down)
    assert not torch.equal(*down)


def held(whole: te.TableConfig, rows: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """A layout of a table that holds these rows of another, as a cache does; and the tensor that names them."""
    local = te.TableConfig(whole.name, rows.numel(), whole.embedding_dim, dtype=whole.dtype)
    layout = make_layout([local], [whole.name], True, rows.device)
    layout.tables[0, ROW_IDS] = rows.data_ptr()
    return rows, layout


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_rows_held_elsewhere_are_updated_as_in_the_table(device, name, dtype, implementation):
    device = device if implementation == "triton" else torch.device("cpu")
    whole, spec = te.TableConfig("whole", 60, 24, dtype=dtype), OPTIMIZERS[name](lr=0.1)
    generator = torch.Generator().manual_seed(0)
    ids, layout = held(whole, torch.randperm(60, generator=generator)[:17].to(device))
    slots = torch.randint(17, (40,), generator=generator).to(device)
    grad = torch.randn(40, 24, generator=generator).to(device)
    drawn = torch.randn(60, 24, generator=generator).to(device, dtype)
    results = []
    for values, where in ((ids[slots], make_layout([whole], ["whole"], True, device)), (slots, layout)):
        weight = (drawn if values is not slots else drawn[ids]).clone()
        states = [torch.zeros(weight.shape[: 1 + state.per_element], device=device) for state in spec.states]
        update(implementation, [weight], states, spec, values, grad, where)
        results.append([weight, *states] if values is slots else [tensor[ids] for tensor in (weight, *states)])
    assert not torch.equal(results[1][0], drawn[ids])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bad_gradient_of_a_row_held_elsewhere_names_the_row(device, implementation):
    device = device if implementation == "triton" else torch.device("cpu")
    whole, spec = te.TableConfig("whole", 60, 8), te.optim.SGD(lr=0.1, on_nonfinite="raise")
    _, layout = held(whole, torch.tensor([7, 41, 3], device=device))
    weight, values = torch.ones(3, 8, device=device), torch.tensor([0, 1], device=device)
    grad = torch.tensor([[1.0], [float("nan")]], device=device).expand(2, 8).contiguous()
    with pytest.raises(ValueError, match="table 'whole': the gradient of row 41 is NaN"):
        update(implementation, [weight], [], spec, values, grad, layout)
    assert torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bit_tables_are_cut_between_those_that_round_together(dtype):
    whole = te.TableConfig("whole", 10, 64, dtype=dtype)
    make_layout([whole.shard("part", (3, 2), (56, 8), ["part"])], ["part"], True)
    part = whole.shard("part", (3, 2), (20, 8), ["part"])
    with pytest.raises(ValueError, match=r"'part' begins at column 20 .* begin at multiples of 8 columns"):
        make_layout([part], ["part"], True)
    with pytest.raises(ValueError, match=r"'part' begins at column 20"):
        te.nn.EmbeddingBagCollection([part], te.optim.SGD())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_tables_that_are_not_rounded_at_random_are_cut_anywhere(dtype):
    part = te.TableConfig("whole", 10, 64, dtype=dtype).shard("part", (0, 10), (3, 5), ["part"])
    layout = make_layout([part], ["part"], True)
    assert layout.tables[0, COLUMN_ORIGIN] == 3
