"""Codecs: what arrives against PyTorch's casts and FBGEMM's row format, and kernels against what is packed by hand."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import seeds
from tritonemb.kernels import quantize as kernels
from tritonemb.kernels.packing import ROW_PARAMETERS, Packing, make_packing
from tritonemb.kernels.quantize import cast_by_torch, row_codes, scale_and_saturate
from tritonemb.kernels.random import narrow_by_torch
from tritonemb.ops.quantize import quantize_pack, quantize_unpack
from tritonemb.ops.registry import CPU, load
from tritonemb.types import CODECS

INT8 = "int8"
REFERENCES = kernels.quantize_pack_reference, kernels.quantize_unpack_reference
TRITON = kernels.quantize_pack, kernels.quantize_unpack
COMPILED = load("quantize_pack", CPU), load("quantize_unpack", CPU)
DIMS = (1, 3, 4, 60, 64, 100, 128, 257, 700)
MATRIX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOATS = [codec for codec in CODECS if codec != INT8]
LARGEST = {"fp16": 65504.0, "bf16": 2.0**128 - 2.0**120, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
EXTREMES = [
    0.0, -0.0, 1e-45, 1e-30, -3e-8, 2.0**-17, 448.0, 464.0, 464.01, -57344.0, 61439.0, 61440.0, 65519.0, -65520.0, 1e9,
    3.3961e38, -3.3962e38, 3.4028234e38, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip


def counter(device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def values_of(message: Tensor, codec: str) -> Tensor:
    """A message of a floating point codec as numbers, NaN as one that they do not hold."""
    return message.view(CODECS[codec].dtype).float().nan_to_num(nan=0.12345, posinf=torch.inf, neginf=-torch.inf)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@st.composite
def problems(draw: st.DrawFn, max_rows: int = 40) -> tuple[Tensor, list[list[tuple[int, int]]]]:
    """A matrix of several tables, and their columns dealt out to ranks in any order, whole or in pieces."""
    dims = draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=4))
    runs, column = [], 0
    for dim in dims:
        cut = draw(st.integers(1, dim))
        runs += [run for run in ((column, cut), (column + cut, dim - cut)) if run[1]]
        column += dim
    parts: list[list[tuple[int, int]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for run in draw(st.permutations(runs)):
        parts[draw(st.integers(0, len(parts) - 1))].append(run)
    num_rows = draw(st.sampled_from([rows for rows in (0, 1, 2, 7, 40) if rows <= max_rows]))
    generator = torch.Generator().manual_seed(draw(seeds))
    matrix = torch.randn(num_rows, column, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
    if draw(st.booleans()) and num_rows:
        places = torch.randint(0, matrix.numel(), (len(EXTREMES),), generator=generator)
        matrix.view(-1)[places] = torch.tensor(EXTREMES)
    return matrix.to(draw(st.sampled_from(MATRIX_DTYPES))), parts


def message_by_hand(matrix: Tensor, parts: Sequence[Sequence[tuple[int, int]]], codec: str) -> Tensor:
    """Parts cut out of the matrix and cast, one after the other."""
    cast = [
        torch.cat([torch.empty(matrix.shape[0], 0), *[matrix[:, c : c + w].float() for c, w in part]], dim=1)
        for part in parts
    ]
    return torch.cat([narrow_by_torch(part, CODECS[codec].dtype).reshape(-1).view(torch.uint8) for part in cast])


@pytest.mark.parametrize("codec", FLOATS)
@given(problems())
@pytest.mark.usefixtures("poisoned")
def test_messages_are_the_ranks_columns_cast(codec, problem):
    matrix, parts = problem
    if codec == "fp8_e4m3":
        matrix = torch.where(matrix.isinf(), torch.nan, matrix)  # PyTorch's cast depends on its version
    packing = make_packing(parts, matrix.shape[1], codec)
    message = kernels.quantize_pack_reference(matrix, packing, counter())
    assert torch.equal(values_of(message, codec), values_of(message_by_hand(matrix, parts, codec), codec))
    assert packing.row_bytes == matrix.shape[1] * CODECS[codec].dtype.itemsize
    assert packing.part_bytes == tuple(sum(w for _, w in part) * CODECS[codec].dtype.itemsize for part in parts)


def test_an_int8_row_is_its_codes_and_its_scale_and_offset():
    matrix = torch.tensor([[-1.0, 1.0, 4.1, 0.3, 9.0], [2.0, 2.0, 2.0, 5.0, 5.0]])
    packing = make_packing([[(3, 2), (0, 3)]], 5, INT8)
    message = bytes(kernels.quantize_pack_reference(matrix, packing, counter()).tolist())
    assert packing.row_bytes == 8 + 2 * 8
    codes, scale_a, offset_a, scale_b, offset_b = struct.unpack("8s4f", message[:24])
    assert list(codes) == [0, 255, 0, 100, 255, 0, 0, 0]
    expected = torch.tensor([8.7 / 255, 0.3, 5.1 / 255, -1.0])
    # 0.3 and 4.1 are rounded to float32, so are differences and quotients: three roundings.
    torch.testing.assert_close(torch.tensor([scale_a, offset_a, scale_b, offset_b]), expected, rtol=3e-7, atol=0)
    assert struct.unpack("8s4f", message[24:]) == (bytes(8), 0.0, 5.0, 0.0, 2.0)


def test_an_int8_row_of_zeros_has_one_form():
    packing = make_packing([[(0, 2)]], 2, INT8)
    for zeros in ([0.0, 0.0], [-0.0, 0.0], [-0.0, -0.0]):
        assert not quantize_pack(torch.tensor([zeros]), packing, counter()).any()


@given(problems())
@pytest.mark.usefixtures("poisoned")
def test_int8_is_off_by_at_most_half_a_step(problem):
    matrix, parts = problem
    matrix = matrix.float().nan_to_num(nan=1.0).clamp(-1e30, 1e30)
    packing = make_packing(parts, matrix.shape[1], INT8)
    message = kernels.quantize_pack_reference(matrix, packing, counter())
    result = kernels.quantize_unpack_reference(message, packing, torch.float32, counter())
    for column, width, *_ in packing.pieces.tolist():
        piece, arrived = matrix[:, column : column + width].double(), result[:, column : column + width].double()
        if piece.numel():
            extent = piece.amax(1, keepdim=True) - piece.amin(1, keepdim=True)
            # Half a step; eight roundings to float32 of values up to the largest; a range that is too small to divide.
            bound = extent / 510 + 8 * 2.0**-24 * piece.abs().amax(1, keepdim=True) + 255 / 3.4e38
            assert ((arrived - piece).abs() <= bound).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_arrives_as_nan(bad):
    matrix = torch.randn(3, 7)
    matrix[1, 2] = bad
    saturated, packing = counter(), make_packing([[(0, 4), (4, 3)]], 7, INT8)
    result = quantize_unpack(quantize_pack(matrix, packing, saturated), packing, torch.float32, saturated)
    assert result[1, :4].isnan().all()
    assert result[1, 4:].isfinite().all()
    assert result[[0, 2]].isfinite().all()
    assert int(saturated) == 0


@pytest.mark.parametrize("dtype", MATRIX_DTYPES)
@pytest.mark.parametrize("codec", LARGEST)
def test_what_is_finite_stays_finite_and_is_counted(codec, dtype):
    matrix = torch.tensor([EXTREMES]).to(dtype)
    packing, saturated = make_packing([[(0, len(EXTREMES))]], len(EXTREMES), codec), counter()
    result = quantize_unpack(quantize_pack(matrix, packing, saturated), packing, torch.float32, counter())
    assert torch.equal(result.isfinite(), matrix.isfinite())
    assert torch.equal(result.isnan(), matrix.isnan() | (matrix.isinf() & (codec == "fp8_e4m3")))
    largest = LARGEST[codec]
    finite = matrix[matrix.isfinite()].double()
    half_gap = {"fp16": 16.0, "bf16": 2.0**119, "fp8_e4m3": 16.0, "fp8_e5m2": 4096.0}[codec]
    over = finite.abs() > largest + half_gap
    even = codec == "fp8_e4m3"  # a value in the middle rounds down to an even mantissa, elsewhere up to infinity
    assert int(saturated) == int(over.sum()) + (0 if even else int((finite.abs() == largest + half_gap).sum()))


@pytest.mark.parametrize("codec", CODECS)
def test_a_loss_scale_is_multiplied_in_and_divided_out(codec):
    matrix = torch.randn(9, 64) * 2.0**-22
    packing, scale = make_packing([[(0, 64)]], 64, codec), torch.tensor(2.0**20)
    message = quantize_pack(matrix, packing, counter(), scale)
    assert torch.equal(message, quantize_pack(matrix * 2.0**20, packing, counter()))
    plain = quantize_unpack(message, packing, torch.float32, counter())
    assert torch.equal(quantize_unpack(message, packing, torch.float32, counter(), scale) * 2.0**20, plain)
    # 3 bits of mantissa or more: half of the last one.
    assert float((plain * 2.0**-20 - matrix).norm() / matrix.norm()) < (0.08 if codec == "fp8_e5m2" else 0.04)


def test_scaling_saturates_on_both_sides():
    matrix = torch.tensor([[1e30, -1e30, 1.0, torch.inf]])
    packing = make_packing([[(0, 4)]], 4, "fp32")
    sent, arrived = counter(), counter()
    message = quantize_pack(matrix, packing, sent, torch.tensor(1e20))
    largest = torch.finfo(torch.float32).max
    assert message.view(torch.float32).tolist() == [largest, -largest, float(torch.tensor(1e20)), torch.inf]
    assert int(sent) == 2
    result = quantize_unpack(message, packing, torch.float16, arrived, torch.tensor(0.5))
    assert result.tolist() == [[65504.0, -65504.0, 65504.0, torch.inf]]
    assert int(arrived) == 3


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_say_which_row_of_the_message_is_which(codec, dtype):
    matrix = torch.randn(11, 12)
    packing, rows = make_packing([[(4, 8)], [(0, 4)]], 12, codec), torch.randperm(11).to(dtype)
    message = quantize_pack(matrix, packing, counter(), rows=rows)
    moved = torch.empty_like(matrix)
    moved[rows] = matrix
    assert torch.equal(message, quantize_pack(moved, packing, counter()))
    plain = quantize_unpack(message, packing, torch.float32, counter())
    several = torch.tensor([3, 3, 0, 10, -1, 11, 7], dtype=dtype)
    result = quantize_unpack(message, packing, torch.float32, counter(), rows=several)
    known = (several >= 0) & (several < 11)
    assert torch.equal(result[known], plain[several[known]])
    assert (result[~known] == 0).all()


def pack_by_hand(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """Row by row and piece by piece; arguments and result as of `quantize_pack`."""
    num_rows, dtype = matrix.shape[0], CODECS[packing.codec].dtype
    message = torch.empty(num_rows * packing.row_bytes, dtype=torch.uint8, device=matrix.device)
    for row, to in enumerate(range(num_rows) if rows is None else rows.tolist()):
        for columns, codes, parameters in pieces_of(message, packing, num_rows, to):
            x = scale_and_saturate(matrix[row, columns].float(), scale, dtype, saturated)
            if packing.codec == INT8:
                result, scale_and_offset = row_codes(x.unsqueeze(0))
                codes.zero_()[: x.numel()] = result[0]
                parameters.copy_(scale_and_offset[0].view(torch.uint8))
            else:
                codes.copy_(cast_by_torch(x, dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8))
    return message


def unpack_by_hand(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Row by row and piece by piece; arguments and result as of `quantize_unpack`."""
    num_message_rows = message.numel() // max(1, packing.row_bytes)
    source = range(num_message_rows) if rows is None else rows.tolist()
    matrix = torch.zeros(len(source), packing.width, dtype=dtype, device=message.device)
    for row, place in enumerate(source):
        for columns, codes, parameters in pieces_of(message, packing, num_message_rows, place):
            if packing.codec == INT8:
                row_scale, row_offset = parameters.clone().view(torch.float32)
                x = codes[: columns.stop - columns.start].float() * row_scale + row_offset
            else:
                x = codes.clone().view(CODECS[packing.codec].dtype).float()
            x = scale_and_saturate(x, None if scale is None else scale.reciprocal(), dtype, saturated)
            matrix[row, columns] = cast_by_torch(x, dtype)
    return matrix


def pieces_of(message: Tensor, packing: Packing, num_rows: int, row: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of each piece of a row, if the message has that row: its columns, and the bytes of its codes and of its scale."""
    size = CODECS[packing.codec].dtype.itemsize
    for column, width, num_codes, part, first, stride, scales in packing.pieces.tolist() if 0 <= row < num_rows else ():
        of_row = message[(part * num_rows + row * stride) * size :]
        codes = of_row[first * size : (first + num_codes) * size]
        yield slice(column, column + width), codes, of_row[scales : scales + ROW_PARAMETERS]


def bits_alike(codec: str, message: Tensor, expected: Tensor) -> bool:
    if codec == INT8:
        return torch.equal(message, expected)
    return torch.equal(values_of(message, codec), values_of(expected, codec))


def check_kernels(
    serving: tuple[Callable[..., Tensor], ...], matrix: Tensor, packing: Packing, scale: Tensor | None,
    rows: Tensor | None, dtypes: Sequence[torch.dtype] = MATRIX_DTYPES,
) -> None:  # fmt: skip
    """The kernels give the bits that come of it by hand, counts among them."""
    actual, expected = counter(matrix.device), counter(matrix.device)
    pack, unpack = serving
    message = pack(matrix, packing, actual, scale, rows)
    assert bits_alike(packing.codec, message, pack_by_hand(matrix, packing, expected, scale, rows))
    for dtype in dtypes:
        arrived = unpack(message, packing, dtype, actual, scale, rows)
        assert_same(arrived, unpack_by_hand(message, packing, dtype, expected, scale, rows))
    assert int(actual) == int(expected)


@pytest.mark.parametrize("codec", CODECS)
@given(problem=problems(), scale=st.sampled_from((None, 1024.0, 0.3)), mapped=st.booleans())
@pytest.mark.usefixtures("poisoned")
def test_cpu_kernels_give_the_bits_of_packing_by_hand(codec, problem, scale, mapped):
    matrix, parts = problem
    packing, rows = make_packing(parts, matrix.shape[1], codec), torch.randperm(matrix.shape[0]) if mapped else None
    for serving, strided in itertools.product((REFERENCES, COMPILED), (matrix, matrix.T.contiguous().T)):
        check_kernels(serving, strided, packing, None if scale is None else torch.tensor(scale), rows)


@pytest.mark.parametrize("codec", ["fp16", INT8])
def test_cpu_kernels_divide_a_matrix_among_threads(codec, monkeypatch):
    matrix, packing = torch.randn(601, 96) * 1e5, make_packing([[(40, 56)], [(0, 40)]], 96, codec)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check_kernels(COMPILED, matrix[:, :96], packing, None, torch.randperm(601), MATRIX_DTYPES[:2])


@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=25)
@given(
    problem=problems(max_rows=7), scale=st.sampled_from((None, 1024.0, 0.3)), mapped=st.booleans(),
    dtype=st.sampled_from(MATRIX_DTYPES),
)  # fmt: skip
@pytest.mark.usefixtures("poisoned")
def test_triton_gives_the_bits_of_packing_by_hand(device, codec, problem, scale, mapped, dtype):
    matrix, parts = problem
    packing = make_packing(parts, matrix.shape[1], codec, device)
    rows = torch.randperm(matrix.shape[0], device=device) if mapped else None
    factor = None if scale is None else torch.tensor(scale, device=device)
    check_kernels(TRITON, matrix.to(device), packing, factor, rows, [dtype])


@pytest.mark.triton
@pytest.mark.parametrize("codec", CODECS)
def test_triton_takes_matrices_that_are_not_contiguous(device, codec):
    packing = make_packing([[(0, 16), (16, 16)]], 32, codec, device)
    wide = torch.randn(6, 64, device=device)
    for matrix in (wide[:, 16:48], wide[:, 1:33], wide[:1, :32], wide[:32].T[:32], wide[:1, :32].expand(5, 32)):
        packed = make_packing([[(0, matrix.shape[1])]], matrix.shape[1], codec, device)
        check_kernels(TRITON, matrix, packing if matrix.shape[1] == 32 else packed, None, None, MATRIX_DTYPES[:1])


@pytest.mark.triton
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.startswith("fp8")])
def test_triton_rounds_to_fp8_like_pytorch(device, codec):
    """Every code, the middle of every gap, its neighbours."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(CODECS[codec].dtype).float()
    every = every[every.isfinite()].unique()
    middle = (every[1:] + every[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = [torch.nextafter(middle, up), torch.nextafter(middle, down), torch.tensor([-0.0, 1e-45, -1e-40, 1e-7])]
    matrix = torch.cat([every, middle, *near]).unsqueeze(0).to(device)
    packing = make_packing([[(0, matrix.shape[1])]], matrix.shape[1], codec, device)
    message = kernels.quantize_pack(matrix, packing, counter(device))
    assert torch.equal(message, matrix[0].to(CODECS[codec].dtype).view(torch.uint8))
    result = kernels.quantize_unpack(message, packing, torch.float32, counter(device))
    assert torch.equal(result[0], message.view(CODECS[codec].dtype).float())


def test_user_mistakes_have_a_name():
    matrix, packing, saturated = torch.randn(3, 4), make_packing([[(0, 4)]], 4, "fp16"), counter()
    partial, message = make_packing([[(0, 3)]], 4, "fp16"), torch.zeros(8, dtype=torch.uint8)
    for call, args, error, text in (
        (make_packing, ([[(0, 4)]], 4, "fp12"), ValueError, "unknown codec 'fp12'"),
        (make_packing, ([[(0, 3)], [(3, 2)]], 4, "fp16"), ValueError, "part 1: 2 columns from column 3 on are not in"),
        (quantize_pack, (torch.randn(3, 5), packing, saturated), ValueError, r"matrix must have shape \(N, 4\)"),
        (quantize_pack, (matrix.double(), packing, saturated), TypeError, r"matrix must be torch\.float32"),
        (quantize_pack, (matrix, packing, torch.zeros(())), TypeError, r"saturated must be torch\.int64"),
        (quantize_pack, (matrix, packing, saturated, torch.ones(1)), ValueError, r"scale must have shape \(\)"),
        (quantize_pack, (matrix, packing, saturated, None, torch.arange(2)), ValueError, "row of the matrix, 3, got 2"),
        (quantize_unpack, (message[:7], packing, torch.float32, saturated), ValueError, "rows of 8 bytes"),
        (quantize_unpack, (message, packing, torch.float64, saturated), TypeError, "dtype must be one of"),
        (quantize_unpack, (message[:6], partial, torch.float32, saturated), ValueError, "every column exactly once"),
    ):
        with pytest.raises(error, match=text):
            call(*args)
