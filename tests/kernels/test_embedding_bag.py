"""Lookups: what the CPU kernel does beside sums (those: `tests/ops`), and Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.strategies import DIMS, TABLE_DTYPES, problems, random_batch, random_weights, seeds
from tritonemb import ops
from tritonemb.kernels import embedding_bag as triton
from tritonemb.kernels.cpu.embedding_bag import embedding_bag, sample_weight_gradient
from tritonemb.kernels.embedding_bag import embedding_bag_reference, sample_weight_gradient_reference
from tritonemb.kernels.triton_utils import TablesOfDtype
from tritonemb.layout import make_layout

any_pooling = pytest.mark.parametrize("pooled", [True, False])


def draw_problem(data, pooled, **options):
    return data.draw(problems(**{"dtypes": TABLE_DTYPES, "pooled": pooled, **options}))


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
def test_single_rows_are_copied_exactly(dtype):
    configs = [te.TableConfig("table", 1000, 257, dtype=dtype)]
    batch = te.KeyedJaggedTensor(["table"], torch.randperm(1000), lengths=torch.ones(1000, dtype=torch.int32))
    weights = random_weights(configs)
    for pooled in (True, False):
        layout = make_layout(configs, ["table"], pooled)
        out = embedding_bag(weights, batch.values(), batch.offsets(), None, layout, True)
        assert torch.equal(out, weights[0].float()[batch.values()])


@given(problems(dtypes=TABLE_DTYPES), st.randoms(use_true_random=False))
def test_a_bag_does_not_depend_on_its_batch(problem, random):
    configs, batch = problem
    layout = make_layout(configs, batch.keys(), True)
    weights, scales = random_weights(configs), batch.weights_or_none()
    combined = embedding_bag(weights, batch.values(), batch.offsets(), scales, layout, True)
    for sample in random.sample(range(batch.stride()), min(3, batch.stride())):
        bags = [key * batch.stride() + sample for key in range(len(batch.keys()))]
        positions = torch.cat([torch.arange(batch.offsets()[bag], batch.offsets()[bag + 1]) for bag in bags])
        local = None if scales is None else scales[positions]
        single = te.KeyedJaggedTensor(batch.keys(), batch.values()[positions], local, lengths=batch.lengths()[bags])
        result = embedding_bag(weights, single.values(), single.offsets(), local, layout, True)
        assert torch.equal(result[0], combined[sample])


@any_pooling
@pytest.mark.usefixtures("poisoned")
def test_any_number_of_threads_gives_the_same_bits(pooled):
    configs = [te.TableConfig(f"table{i}", 500, 60, dtype=dtype) for i, dtype in enumerate(TABLE_DTYPES)]
    rows = {config.name: config.num_embeddings for config in configs}
    batch = random_batch(rows, list(rows), 1001, 9, weighted=True)
    layout = make_layout(configs, batch.keys(), pooled)
    results = []
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        args = (random_weights(configs), batch.values(), batch.offsets())
        out = embedding_bag(*args, batch.weights(), layout, True)
        grad = torch.randn(out.shape, generator=torch.Generator())
        results.append((out, sample_weight_gradient(*args, grad, layout)))
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert not result[1].isnan().any()


def test_ids_out_of_range_read_as_zero_if_not_checked():
    config = te.TableConfig("table", 3, 2, pooling="mean")
    batch = te.KeyedJaggedTensor.from_lists({"table": [[0, 3], [-1], [2, 2**40]]})
    weights = random_weights([config])
    zero, args = torch.zeros(2), (weights, batch.values(), batch.offsets(), None)
    layouts = [make_layout([config], ["table"], is_pooled) for is_pooled in (True, False)]
    pooled, single = (embedding_bag(*args, layout, False) for layout in layouts)
    assert torch.equal(pooled, torch.stack([weights[0][0] / 2, zero, weights[0][2] / 2]))
    assert torch.equal(single, torch.stack([weights[0][0], zero, zero, weights[0][2], zero]))


FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE_DIMS = (*DIMS, 100, 512, 1024)


def on(device, configs, batch, pooled=True):
    """Weights, values, offsets, sample weights and layout on a device, and the same on the CPU."""
    weights, arguments = random_weights(configs), []
    for place, kjt in ((device, batch.to(device)), ("cpu", batch)):
        layout, tables = make_layout(configs, batch.keys(), pooled, place), [weight.to(place) for weight in weights]
        arguments.append((tables, kjt.values(), kjt.offsets(), kjt.weights_or_none(), layout))
    return arguments


def check_triton_forward(device, configs, batch, pooled, output_dtype=torch.float32):
    """The bits of the reference: both sum in the order of positions."""
    device_args, cpu_args = on(device, configs, batch, pooled)
    out = triton.embedding_bag(*device_args, True, output_dtype)
    assert out.dtype == output_dtype
    assert torch.equal(out.cpu(), embedding_bag_reference(*cpu_args, True, output_dtype))


@pytest.mark.triton
@any_pooling
@settings(max_examples=20)
@given(data=st.data(), output_dtype=st.sampled_from(TABLE_DTYPES))
@pytest.mark.usefixtures("poisoned")
def test_triton_looks_up_with_the_references_bits(device, pooled, data, output_dtype):
    problem = draw_problem(data, pooled, dtypes=(*TABLE_DTYPES, *FLOAT8_DTYPES), dims=WIDE_DIMS, max_tables=3)
    check_triton_forward(device, *problem, pooled, output_dtype)


@pytest.mark.triton
@pytest.mark.parametrize("dim", [4, 64, 257])
@pytest.mark.usefixtures("poisoned")
def test_triton_pools_long_bags(device, dim):
    configs = [te.TableConfig("a", 500, dim), te.TableConfig("b", 90, dim, pooling="mean", dtype=torch.float16)]
    lengths = torch.tensor([100, 0, 7, 8, 9, 1, 64, 99])
    values = torch.randint(0, 90, (int(lengths.sum()),))
    batch = te.KeyedJaggedTensor(["a", "b"], values, torch.randn(values.numel()), lengths=lengths)
    check_triton_forward(device, configs, batch, True)


@pytest.mark.triton
def test_triton_reads_rows_that_are_not_aligned(device):
    """Tables that begin anywhere: loads are only as wide as addresses allow."""
    config = te.TableConfig("table", 9, 64, dtype=torch.float16)
    batch = random_batch({"table": 9}, ["table"], 5, 4)
    device_args, cpu_args = on(device, [config], batch)
    for shift in (1, 2, 4):
        room = torch.zeros(9 * 64 + 8, dtype=torch.float16, device=device)
        moved = room[shift : shift + 9 * 64].view(9, 64)
        moved.copy_(device_args[0][0])
        out = triton.embedding_bag([moved], *device_args[1:], True)
        assert torch.equal(out.cpu(), embedding_bag_reference(*cpu_args))


@pytest.mark.triton
@any_pooling
def test_triton_addresses_rows_beyond_two_to_the_31_elements(device, pooled, monkeypatch):
    """A table whose only real rows lie far behind its address: products of ids and dims must be 64 bits wide."""
    first_row, dim = 2**31 // 64 + 5, 64
    config = te.TableConfig("table", first_row + 10, dim)
    real = torch.randn(10, dim, device=device)
    far = TablesOfDtype(torch.float32, (real.data_ptr() - 4 * dim * first_row,), 16, 16, dim)
    monkeypatch.setattr(triton, "by_dtype", lambda weights: [far])
    values = torch.tensor([first_row, first_row + 9, first_row + 3], device=device)
    layout = make_layout([config], ["table"], pooled, device)
    out = triton.embedding_bag([real], values, torch.tensor([0, 2, 3], device=device), None, layout, True)
    expected = torch.stack([real[0] + real[9], real[3]]) if pooled else real[[0, 9, 3]]
    assert torch.equal(out, expected)


@pytest.mark.triton
@pytest.mark.parametrize("mean_length", [1.0, 3.0, 100.0])
@pytest.mark.parametrize("item_size", [1, 2, 4])
@pytest.mark.parametrize("dim", [1, 3, 64, 100, 128, 257, 1024, 5000])
def test_tiles_keep_eight_vectors_in_flight_at_most(dim, item_size, mean_length):
    tile = triton.choose_tile(dim, item_size, mean_length)
    assert all(part & (part - 1) == 0 for part in tile), "Triton's shapes are powers of two"
    assert tile.block >= min(dim, triton.MAX_BLOCK)
    bytes_of_a_lane = tile.rows * tile.unroll * tile.block * item_size / (32 * tile.num_warps)
    assert bytes_of_a_lane <= 16 * triton.VECTORS_IN_FLIGHT


@pytest.mark.triton
def test_the_tile_does_not_change_bits(device, monkeypatch):
    configs = [te.TableConfig("a", 50, 60), te.TableConfig("b", 20, 128, pooling="mean")]
    batch = random_batch({"a": 50, "b": 20}, ["a", "b"], 5, 9, weighted=True)
    device_args, _ = on(device, configs, batch)
    expected = triton.embedding_bag(*device_args)
    for tile in (triton.Tile(1, 128, 1, 1), triton.Tile(4, 32, 4, 1), triton.Tile(16, 64, 2, 4)):
        monkeypatch.setattr(triton, "choose_tile", lambda *_, tile=tile: tile)
        assert torch.equal(triton.embedding_bag(*device_args), expected)


@pytest.mark.triton
@any_pooling
@settings(max_examples=12)
@given(data=st.data(), seed=seeds)
@pytest.mark.usefixtures("poisoned")
def test_triton_gradients_of_per_sample_weights(device, pooled, data, seed):
    configs, batch = draw_problem(data, pooled, max_tables=3)
    device_args, cpu_args = on(device, configs, batch, pooled)
    num_rows = batch.stride() if pooled else batch.values().numel()
    grad = torch.randn(num_rows, cpu_args[4].width, generator=torch.Generator().manual_seed(seed))
    actual = triton.sample_weight_gradient(*device_args[:3], grad.to(device), device_args[4])
    expected = sample_weight_gradient_reference(*cpu_args[:3], grad, cpu_args[4])
    # As above: dot products of up to 257 · 3 normal pairs, summed in another order.
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-4)


def look_up_and_wait(*args):
    """On a GPU what is wrong is raised later than on the CPU: here, at the latest."""
    triton.embedding_bag(*args)
    te.check_errors()


@pytest.mark.triton
@any_pooling
def test_triton_names_the_id_that_is_out_of_range(device, pooled):
    config = te.TableConfig("table", 3, 2, features=["u", "v"])
    batch = te.KeyedJaggedTensor.from_lists({"v": [[0], [1, 2]], "u": [[], [1, -7]]}).to(device)
    layout = make_layout([config], batch.keys(), pooled, device)
    weights = [torch.ones(3, 2, device=device)]
    message = r"table 'table': id -7 of feature 'u', sample 1 \(position 4 of values\).* 0 to 2"
    with pytest.raises(ValueError, match=message):
        look_up_and_wait(weights, batch.values(), batch.offsets(), None, layout, True)
    out = triton.embedding_bag(weights, batch.values(), batch.offsets(), None, layout, False)
    te.check_errors()
    expected = [[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 1.0, 1.0]] if pooled else [[1.0, 1.0]] * 4 + [[0.0, 0.0]]
    columns = [2, 3, 0, 1] if pooled else [0, 1]  # features in the table's order
    assert torch.equal(out.cpu(), torch.tensor(expected)[:, columns])


@pytest.mark.triton
def test_triton_survives_and_names_offsets_that_do_not_ascend(device):
    config = te.TableConfig("table", 3, 2)
    values = torch.zeros(4, dtype=torch.int64, device=device)
    layout = make_layout([config], ["table"], True, device)
    weights = [torch.ones(3, 2, device=device)]
    messages = {
        (0, 3, 2, 4): "offsets must ascend: feature 'table', sample 1 goes from 3 to 2",
        (1, 2, 3, 4): "offsets must start with 0, got 1",
        (0, 1, 2, 3): "offsets end at 3 but there are 4 values",
    }
    for offsets, message in messages.items():
        with pytest.raises(ValueError, match=message):
            look_up_and_wait(weights, values, torch.tensor(offsets, device=device), None, layout, True)


@pytest.mark.triton
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("offsets", [(0, 2, 3), (1, 2, 5), (2, 2, 4)])
def test_triton_zeroes_rows_of_positions_that_no_bag_covers(device, offsets, monkeypatch):
    """Wrong offsets are raised later on a GPU: until then the output holds nothing that was not written."""
    config = te.TableConfig("table", 9, 4)
    values = torch.arange(5, device=device)
    layout = make_layout([config], ["table"], False, device)
    weights = [torch.randn(9, 4, device=device)]
    with monkeypatch.context() as patch:
        patch.setattr(triton, "poll", lambda device: None)
        out = triton.embedding_bag(weights, values, torch.tensor(offsets, device=device), None, layout)
    covered = (values >= offsets[0]) & (values < offsets[-1])
    assert torch.equal(out, torch.where(covered[:, None], weights[0][:5], 0.0))
    with pytest.raises(ValueError, match="offsets"):
        look_up_and_wait(weights, values[:0], torch.zeros(2, dtype=torch.int64, device=device), None, layout)


@pytest.mark.triton
def test_float8_tables_are_looked_up_but_not_trained(device):
    config = te.TableConfig("table", 9, 4, dtype=torch.float8_e4m3fn)
    collection = te.nn.EmbeddingBagCollection([config], device=device)
    batch = te.KeyedJaggedTensor.from_lists({"table": [[1, 2], [8]]}).to(device)
    out = collection(batch)
    rows = collection.tables[0].weight.float()
    assert torch.equal(out, torch.stack([rows[1] + rows[2], rows[8]]))
    assert out.dtype == torch.float32
    with pytest.raises(ValueError, match=r"table 'table': torch\.float8_e4m3fn rows are too coarse to be trained"):
        te.nn.EmbeddingBagCollection([config], optimizer=te.optim.SGD(), device=device)
    collection.tables[0].weight.requires_grad_()
    with pytest.raises(TypeError, match="cannot be trained"):
        collection(batch).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TABLE_DTYPES)
def test_tables_in_pinned_host_memory_are_read_through_their_addresses(device, dtype):
    config = te.TableConfig("table", 50, 60, dtype=dtype)
    device_args, cpu_args = on(device, [config], random_batch({"table": 50}, ["table"], 9, 5))
    pinned = [weight.pin_memory() for weight in cpu_args[0]]
    assert torch.equal(ops.embedding_bag(pinned, *device_args[1:]).cpu(), embedding_bag_reference(*cpu_args))
    with pytest.raises(ValueError, match="table 'table' is on cpu but the batch is on cuda"):
        ops.embedding_bag(cpu_args[0], *device_args[1:])
