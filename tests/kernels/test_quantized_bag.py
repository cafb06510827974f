"""Quantized tables: bytes against those packed by hand, by ATen and by FBGEMM; lookups against decoded tables."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests import plain
from tests.strategies import TABLE_DTYPES, problems, random_batch, random_weights
from tritonemb.kernels import quantized_bag as triton
from tritonemb.kernels.by_torch import embedding_bag
from tritonemb.kernels.cpu.quantized_bag import quantized_bag
from tritonemb.kernels.quantized_bag import (
    dequantize_rows,
    from_aten,
    quantize_rows,
    quantized_bag_reference,
    to_aten,
    unpack_rows,
)
from tritonemb.layout import ADDRESS_BITS, INDEXED, NUM_ROWS, make_layout

BITS = (8, 4, 2)
any_bits = pytest.mark.parametrize("bits", BITS)
any_pooling = pytest.mark.parametrize("pooled", [True, False])
FP32 = torch.float32
# Rows whose range is a multiple of a scale that float16 has: values, scale, bias, packed codes.
GOLDEN = {
    8: ([-2.0, -1.75, 61.75], 0.25, -2.0, [0, 1, 255]),
    4: ([1.0, 1.5, 8.5, 5.0, 3.0], 0.5, 1.0, [0x10, 0x8F, 0x04]),
    2: ([-1.0, 0.0, 1.0, 2.0, 2.0, 0.0], 1.0, -1.0, [0b11100100, 0b0111]),
}
PREPACK = {8: "byte", 4: "4bit", 2: "2bit"}


def prepack(weight: torch.Tensor, bits: int, **options: bool) -> torch.Tensor:
    return getattr(torch.ops.quantized, f"embedding_bag_{PREPACK[bits]}_prepack")(weight, **options)


@any_bits
@pytest.mark.parametrize("search", [False, True])
def test_golden_bytes(bits, search):
    values, scale, bias, codes = GOLDEN[bits]
    rows = quantize_rows(torch.tensor([values] * 2), bits, search)
    assert bytes(rows[1].tolist()) == struct.pack("<ee", scale, bias) + bytes(codes)
    assert torch.equal(dequantize_rows(rows, bits, len(values)), torch.tensor([values] * 2))
    pair = struct.pack("<ff" if bits == 8 else "<ee", scale, bias)
    assert bytes(to_aten(rows, bits)[0].tolist()) == bytes(codes) + pair
    assert torch.equal(from_aten(to_aten(rows, bits), bits), rows)
    assert bytes(to_aten(rows, bits, torch.float16)[1].tolist()) == bytes(codes) + struct.pack("<ee", scale, bias)
    assert torch.equal(from_aten(to_aten(rows, bits, torch.float16), bits, torch.float16), rows)


@any_bits
def test_bytes_are_atens(bits):
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    rows, aten = quantize_rows(weight, bits, False), prepack(weight, bits)
    assert rows.shape == (70, 4 + 8 * bits)
    if bits < 8:
        assert torch.equal(to_aten(rows, bits), aten)
    else:  # of which scale and bias are float32, so that a code may be the next one
        assert (rows[:, 4:].int() - from_aten(aten, 8)[:, 4:].int()).abs().max() <= 1
    # ATen looks up what it gets from here.
    ids, offsets = torch.randint(70, (40,)), torch.arange(0, 41, 4)
    look_up = getattr(torch.ops.quantized, f"embedding_bag_{PREPACK[bits]}_rowwise_offsets", None)
    look_up = look_up or getattr(torch.ops.quantized, f"embedding_bag_{PREPACK[bits]}")
    expected = look_up(to_aten(rows, bits), ids, offsets, include_last_offset=True)
    layout = make_layout([te.TableConfig("a", 70, 64)], ["a"], True)
    result = quantized_bag([rows], [bits], (ids, offsets, None), layout, True, FP32)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.fbgemm
@any_bits
def test_bytes_are_fbgemms(bits):
    """Of its fused rows, and of the rows that its inference module looks up, with the bits of its results."""
    inference = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
    kind = pytest.importorskip("fbgemm_gpu.split_embedding_configs").SparseType(f"int{bits}")
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    if bits < 8:
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
        rows = quantize_rows(weight, bits, False)
        assert torch.equal(fused, to_aten(rows, bits))
    else:
        rows = from_aten(torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight), 8)
        torch.testing.assert_close(dequantize_rows(rows, 8, 64), weight, rtol=0, atol=0.02)  # half a step of a range
    specs = [("a", 50, 64, kind, inference.EmbeddingLocation.HOST)]
    module = inference.IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", output_dtype=type(kind).FP32)
    module.fill_random_weights()
    ((memory, _),) = module.split_embedding_weights(split_scale_shifts=False)
    assert memory.shape == rows.shape
    memory.copy_(rows)
    ids, offsets = torch.randint(50, (60,)), torch.arange(0, 61, 6)
    layout = make_layout([te.TableConfig("a", 50, 64)], ["a"], True)
    result = quantized_bag([rows], [bits], (ids, offsets, None), layout, True, FP32)
    assert torch.equal(result, module(ids.int(), offsets.int()))


@any_bits
def test_a_search_is_no_worse_than_the_whole_range_or_atens(bits):
    weight = torch.randn(300, 48, generator=torch.Generator().manual_seed(2))
    weight[:3] = torch.tensor([[0.0], [0.1], [-7e-6]])  # constant rows

    def errors(rows):
        return (dequantize_rows(rows, bits, 48) - weight).square().sum(1)

    searched, whole = errors(quantize_rows(weight, bits, True)), errors(quantize_rows(weight, bits, False))
    assert (searched <= whole).all()
    assert searched[:3].max() < 1e-6
    if bits < 8:
        assert searched.sum() < (0.9 if bits == 4 else 0.97) * whole.sum()
        aten = errors(from_aten(prepack(weight, bits, optimized_qparams=True), bits))
        assert searched.sum() < 1.01 * aten.sum()


@any_bits
@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-5])
def test_small_rows_are_not_cut_off(bits, size):
    """Each value is at most half a step, of the range or of float16's least numbers, from one that a code has."""
    weight = torch.rand(300, 64, generator=torch.Generator().manual_seed(4)).sub_(0.5).mul_(size)
    rows = quantize_rows(weight, bits, False)
    steps = unpack_rows(rows, bits, 64)[1]
    bounds = torch.maximum(steps / 2, weight.abs() / 2048)  # of a code, and of the bias
    assert ((dequantize_rows(rows, bits, 64) - weight).abs() <= bounds * (1 + 1e-5)).all()  # float32 rounds
    assert (steps <= size / (2**bits - 1) * (1 + 2.0**-10) + 2.0**-24).all()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 7e4])
def test_values_that_float16_does_not_have(value):
    weight = torch.zeros(3, 5)
    weight[2, 4] = value
    with pytest.raises(ValueError, match="not finite or exceed float16"):
        quantize_rows(weight, 8, False)


def quantized(configs: Sequence[te.TableConfig], bits: Sequence[int]) -> list[torch.Tensor]:
    return [quantize_rows(w, b, False) for w, b in zip(random_weights(configs), bits, strict=True)]


def bits_of(data, configs):
    return data.draw(st.lists(st.sampled_from(BITS), min_size=len(configs), max_size=len(configs)))


@any_pooling
@given(data=st.data())
@pytest.mark.usefixtures("poisoned")
def test_lookups(pooled, data):
    """The bits of the reference; and the sums of decoded rows in float64, of at most 12 normal values."""
    configs, batch = data.draw(problems(pooled=pooled))
    bits, layout = bits_of(data, configs), make_layout(configs, batch.keys(), pooled)
    tables, dtype = quantized(configs, bits), data.draw(st.sampled_from(TABLE_DTYPES))
    args = tables, bits, (batch.values(), batch.offsets(), batch.weights_or_none()), layout, True
    result = quantized_bag(*args, dtype)
    assert result.dtype == dtype
    assert torch.equal(result, quantized_bag_reference(*args, dtype))
    decoded = zip(tables, bits, configs, strict=True)
    wide = [dequantize_rows(rows, count, config.embedding_dim).double() for rows, count, config in decoded]
    expected = (plain.pooled_lookup if pooled else plain.unpooled_lookup)(configs, wide, batch, batch.weights_or_none())
    torch.testing.assert_close(quantized_bag(*args, FP32).double(), expected, rtol=1e-5, atol=1e-5)


@any_pooling
@pytest.mark.usefixtures("poisoned")
def test_any_number_of_threads_and_streamed_stores_give_the_same_bits(pooled, monkeypatch):
    configs = [te.TableConfig(name, 500, 128 if pooled else 48) for name in "abc"]
    batch = random_batch(dict.fromkeys("abc", 500), list("abc"), 700, 9, weighted=True)
    layout, tables = make_layout(configs, batch.keys(), pooled), quantized(configs, BITS)
    args = tables, BITS, (batch.values(), batch.offsets(), batch.weights()), layout, True, FP32
    expected = quantized_bag_reference(*args)
    for num_threads, streamed_bytes in ((1, 1 << 40), (2, 0), (4, 1 << 40)):
        torch.set_num_threads(num_threads)
        monkeypatch.setattr("tritonemb.kernels.cpu.embedding_bag.STREAMED_BYTES", streamed_bytes)
        assert torch.equal(quantized_bag(*args), expected)


def on(device, configs, batch, pooled, bits):
    """Arguments on a device, and on the CPU."""
    tables, moved = quantized(configs, bits), batch.to(device)
    arguments = []
    for place, kjt in ((device, moved), ("cpu", batch)):
        arrays = kjt.values(), kjt.offsets(), kjt.weights_or_none()
        layout = make_layout(configs, batch.keys(), pooled, place)
        arguments.append(([table.to(place) for table in tables], bits, arrays, layout, True))
    return arguments


@pytest.mark.triton
@any_pooling
@settings(max_examples=6)
@given(data=st.data(), dtype=st.sampled_from(TABLE_DTYPES))
@pytest.mark.usefixtures("poisoned")
def test_triton_looks_up_with_the_references_bits(device, pooled, data, dtype):
    configs, batch = data.draw(problems(pooled=pooled, max_tables=2))
    device_args, cpu_args = on(device, configs, batch, pooled, bits_of(data, configs))
    result = triton.quantized_bag(*device_args, dtype)
    assert result.dtype == dtype
    assert torch.equal(result.cpu(), quantized_bag_reference(*cpu_args, dtype))


def indexed(dims, pooled, device="cpu"):
    """Arguments of a lookup in a table of 8 bits, and in tables whose rows of 8, 4 and 2 bits are addressed; and the
    arguments of `embedding_bag` with the decoded rows."""
    names = [f"t{number}" for number in range(len(dims))]
    configs = [te.TableConfig(name, 12, dim) for name, dim in zip(names, dims, strict=True)]
    batch = random_batch(dict.fromkeys(names, 12), names[::-1], 7, 5, True).to(device)
    parts = [[quantize_rows(torch.randn(4, dim), b, False).to(device) for b in BITS] for dim in dims]
    decoded = [
        torch.cat([dequantize_rows(rows, b, dim) for rows, b in zip(table, BITS, strict=True)])
        for table, dim in zip(parts, dims, strict=True)
    ]
    weights, bits = [parts[0][0].repeat(3, 1), *(parts[number][0] for number in range(1, len(dims)))], [8]
    bits += [INDEXED] * (len(dims) - 1)
    decoded[0] = dequantize_rows(weights[0], 8, dims[0])
    values, ends = batch.values().clone(), batch.offsets()[::7].tolist()
    for key, name in enumerate(batch.keys()):
        table = parts[names.index(name)]
        for position in range(ends[key], ends[key + 1]) if name != "t0" else ():
            number, row = divmod(int(values[position]), 4)
            values[position] = table[number][row].data_ptr() | BITS[number] << ADDRESS_BITS
    layout = make_layout(configs, batch.keys(), pooled, device)
    floats = decoded, batch.values(), batch.offsets(), batch.weights(), layout, True, FP32
    addressed = values, batch.offsets(), batch.weights()
    tables = layout.tables.clone()
    tables[1:, NUM_ROWS] = 2**63 - 1
    return (weights, bits, addressed, layout._replace(tables=tables), True, FP32), floats, parts


@any_pooling
@settings(max_examples=10)
@given(dim=st.integers(1, 300))
@pytest.mark.usefixtures("poisoned")
def test_rows_by_address(pooled, dim):
    args, floats, _rows = indexed([dim + n if pooled else dim for n in range(3)], pooled)
    expected = embedding_bag(*floats)
    assert torch.equal(quantized_bag(*args), expected)
    assert torch.equal(quantized_bag_reference(*args), expected)


@pytest.mark.triton
@any_pooling
@pytest.mark.usefixtures("poisoned")
def test_triton_reads_rows_by_address(device, pooled):
    args, floats, _rows = indexed([19] * 3, pooled, device)
    layout = floats[4]
    arrays = {name: getattr(layout, name).cpu() for name in ("tables", "lookups", "key_starts")}
    decoded = [rows.cpu() for rows in floats[0]]
    expected = embedding_bag(decoded, *(t.cpu() for t in floats[1:4]), layout._replace(**arrays), *floats[5:])
    assert torch.equal(triton.quantized_bag(*args).cpu(), expected)


def look_up_and_wait(kernel, *args):
    result = kernel(*args)
    te.check_errors()
    return result


@pytest.mark.parametrize("kernel", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
@any_pooling
def test_errors_name_ids_and_offsets(kernel, device, pooled):
    kernel = {"cpu": quantized_bag, "reference": quantized_bag_reference, "triton": triton.quantized_bag}[kernel]
    device = device if kernel is triton.quantized_bag else "cpu"
    config = te.TableConfig("table", 3, 2, features=["u", "v"])
    batch = te.KeyedJaggedTensor.from_lists({"v": [[0], [1, 2]], "u": [[], [1, -7]]})
    args = on(device, [config], batch, pooled, [4])[0]
    message = r"table 'table': id -7 of feature 'u', sample 1 \(position 4 of values\).* 0 to 2"
    with pytest.raises(ValueError, match=message):
        look_up_and_wait(kernel, *args, FP32)
    decoded = dequantize_rows(args[0][0].cpu(), 4, 2)
    zero, result = torch.zeros(1, 2), look_up_and_wait(kernel, *args[:-1], False, FP32).cpu()
    if pooled:
        expected = torch.cat([torch.cat([zero, decoded[1:2]]), torch.stack([decoded[0], decoded[1] + decoded[2]])], 1)
    else:
        expected = torch.cat([decoded[[0, 1, 2, 1]], zero])
    assert torch.equal(result, expected)
    offsets = torch.tensor([0, 3, 2, 4, 5] if pooled else [1, 1, 2, 4, 5], device=device)
    message = "ascend: feature 'v', sample 1 goes from 3 to 2" if pooled else "offsets must start with 0, got 1"
    with pytest.raises(ValueError, match=message):
        look_up_and_wait(kernel, *args[:2], (args[2][0], offsets, None), *args[3:], FP32)
