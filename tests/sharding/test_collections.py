"""Sharded collections: what each rank looks up and learns is what one process would on the batches of all."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.formulas import CUSTOM, custom
from tests.helpers import output_of
from tests.sharding.cases import (
    Case,
    alone,
    cases,
    differences,
    groups_of,
    own_outputs,
    sizes,
    tables,
    together,
)
from tritonemb.optim import OPTIMIZERS
from tritonemb.sharding import (
    ColumnWise,
    DataParallel,
    ExchangePrecision,
    Grid,
    RowWise,
    TableColumnWise,
    TableRowWise,
    TableWise,
)

UNSHRUNK = [Phase.explicit, Phase.generate]  # a smaller case takes as long, as every rank must run it


ALONE = {
    "table-wise": lambda world: ([TableWise(0), TableWise(world - 1)], 0),
    "row-wise": lambda world: ([RowWise(), RowWise(range(world - 1, -1, -1), [38 - world, *[1] * (world - 1)])], 0),
    "column-wise": lambda world: ([ColumnWise(), ColumnWise([world - 1])], 0),
    "data-parallel": lambda world: ([DataParallel()] * 2, 0),
    "table-row-wise": lambda world: ([TableRowWise(0), TableRowWise((world - 1) // 2)], min(2, world)),
    "table-column-wise": lambda world: ([TableColumnWise(0), TableColumnWise((world - 1) // 2)], min(2, world)),
    "grid": lambda world: ([Grid(), Grid()], min(2, world)),
    "mixed": lambda world: (
        [TableWise(world - 1), RowWise(), ColumnWise(), DataParallel(), Grid(), TableRowWise(0)],
        min(2, world),
    ),
}


def case_of(
    kind: str,
    world: int,
    pooled: bool,
    optimizer: te.optim.Optimizer,
    steps: int,
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:
    shardings, local = ALONE[kind](world)
    batches = sizes(world * options.get("copies", 1), steps, micro)
    configs = tables(pooled, len(shardings), dtype)
    return Case(configs, tuple(shardings), optimizer, batches, pooled, **{"local": local} | options)


def run(ranks, cases: list[Case]) -> list[str]:
    problems = ranks(cases[0].world).run(together, cases)
    wrong = []
    for number, case in enumerate(cases):
        wrong += differences(case, alone(case), [of_rank[number][0] for of_rank in problems])
    return wrong


QUICK = {"grid": 4, "mixed": None}  # how many ranks; every optimizer's test has a mixed plan


@pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param(kind, world, marks=() if world == QUICK.get(kind, 2) else pytest.mark.more)
        for kind in sorted(ALONE)
        for world in (1, 2, 4)
    ],
)
def test_every_way_to_cut_trains_as_one_process(ranks, kind, world, steps):
    """Pooled and not, uneven and empty batches, weights or none, int32 and int64 ids."""
    cases = [
        case_of(
            kind,
            world,
            pooled,
            OPTIMIZERS[optimizer](lr=0.05),
            steps,
            weighted=pooled != (optimizer == "adagrad"),
            spare=optimizer == "adagrad",
            seed=1,
            id_dtype=torch.int32 if pooled else torch.int64,
        )
        for pooled in (True, False)
        for optimizer in ("row_wise_adagrad", "adagrad")
    ]
    assert not run(ranks, cases)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("lamb", 2),
        *(pytest.param(name, 2, marks=pytest.mark.more) for name in ("ftrl", "custom adam", "custom row_wise_adagrad")),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in [*sorted(OPTIMIZERS), *(f"custom {n}" for n in CUSTOM)]
        ),
    ],
)
def test_every_optimizer_with_its_options(ranks, name, world):
    plain = custom(name.split()[1], lr=0.05) if " " in name else OPTIMIZERS[name](lr=0.05)
    options = [
        plain,
        replace(plain, weight_decay=0.01, max_norm=0.7),
        replace(plain, weight_decay=0.01, weight_decay_mode="decoupled", on_nonfinite="skip"),
        replace(plain, max_gradient=0.02),
    ]
    cases = [
        case_of(
            "mixed",
            world,
            pooled,
            optimizer,
            4,
            1 + (pooled == number % 2),
            weighted=pooled,
            bad_at=3 if optimizer.on_nonfinite == "skip" else -1,
            rates=(0.05, 0.02, 0.1),
            seed=2,
        )
        for number, optimizer in enumerate(options)
        for pooled in (True, False)
    ]
    assert not run(ranks, cases)


@pytest.mark.more
def test_cow_clip_counts_the_occurrences_of_all_ranks(ranks):
    """Rows that occur on both ranks, and in several micro-batches; ids of sequences are not deduplicated."""
    optimizer = te.optim.RowWiseAdagrad(lr=0.05, cow_clip=0.01, cow_clip_floor=1e-4)
    cases = [
        case_of(kind, 2, pooled, optimizer, 2, 1 + pooled, weighted=pooled, seed=4)
        for kind, pooled in (("table-wise", True), ("row-wise", True), ("row-wise", False), ("table-row-wise", True))
    ]
    for case in cases[1:3]:
        unclipped = alone(replace(case, optimizer=replace(optimizer, cow_clip=None)))
        assert not torch.equal(alone(case).state["table0.weight"], unclipped.state["table0.weight"])
    assert not run(ranks, cases)


@pytest.mark.parametrize(
    "options", [{"kind": "data-parallel"}, {"kind": "column-wise"}, {"kind": "table-wise", "local": 0, "copies": 2}]
)
def test_cow_clip_raises_where_occurrences_are_not_exchanged(ranks, options):
    world = 2 // options.get("copies", 1)
    case = case_of(world=world, pooled=True, optimizer=te.optim.SGD(lr=0.1, cow_clip=1.0), steps=1, **options)
    with pytest.raises(Exception, match="'table0': cow_clip counts a row's occurrences over all ranks"):
        ranks(2).run(together, [case])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.few(1)
@pytest.mark.more
def test_16_bit_tables_are_rounded_as_whole_ones(ranks, dtype):
    """The same random numbers round the same elements, however the table is cut: bit for bit where sums are."""
    cut = [TableWise(1), ColumnWise(), RowWise(), TableColumnWise(1), Grid(), TableRowWise(0)]
    cases = [
        Case(
            tuple(replace(t, pooling="sum" if pooled else "none") for t in tables(pooled, 6, dtype)),
            tuple(cut),
            OPTIMIZERS[name](lr=0.05),
            sizes(4, 4),
            pooled,
            2,
            seed=3,
        )
        for name in ("row_wise_adagrad", "lamb")
        for pooled in (True, False)
    ]
    assert not run(ranks, cases)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("mixed", 2),
        *(pytest.param(kind, 2, marks=pytest.mark.more) for kind in sorted(ALONE) if kind != "mixed"),
        *(pytest.param(kind, world, marks=pytest.mark.slow) for kind in sorted(ALONE) for world in (1, 4)),
    ],
)
def test_a_custom_optimizer_trains_as_one_process_however_tables_are_cut(ranks, kind, world):
    """Cases of a whole-row optimizer, and of element-wise ones, whose columns are not exchanged."""
    cases = [
        case_of(kind, world, pooled, custom(name, lr=0.05), 3, 1 + pooled, dtype, seed=5)
        for name in ("adagrad", "row_wise_adagrad", "adam")
        for pooled, dtype in ((True, torch.float32), (False, torch.bfloat16))
    ]
    assert not run(ranks, cases)


@pytest.mark.parametrize("name", ["row_wise_adagrad", "adam", pytest.param("lamb", marks=pytest.mark.slow)])
@pytest.mark.more
def test_copies_of_the_tables_are_alike(ranks, name):
    """Two copies, each on two ranks: gradients of both make a step, of whole rows and of blocks of columns."""
    plain = OPTIMIZERS[name](lr=0.05)
    cases = [
        case_of("mixed", 2, pooled, optimizer, 5, micro, local=0, copies=2, weighted=pooled, seed=9)
        for pooled, optimizer, micro in (
            (True, plain, 1),
            (False, plain, 1),
            (True, replace(plain, max_gradient=0.02, max_norm=0.7), 2),
            (False, replace(plain, max_gradient=0.02), 1),
        )
    ]
    assert not run(ranks, cases)


def skipping(world: int) -> Case:
    shardings = (TableWise(world - 1), TableWise(0), RowWise())
    bad = te.optim.SGD(lr=0.1, on_nonfinite="skip")
    return Case(tables(True, 3), shardings, bad, sizes(world, 3), bad_at=0, seed=5)


def test_skipped_rows_are_counted_where_they_are(ranks):
    case = skipping(4)
    results = ranks(4).run(together, [case])
    expected = alone(case).skipped
    assert sum(expected.values()) > 0
    assert {name: sum(rank[0][0].skipped[name] for rank in results) for name in expected} == expected


@pytest.mark.parametrize(
    ("world", "steps", "examples"),
    [
        (2, 3, 3),
        *(pytest.param(world, 3, 3, marks=pytest.mark.more) for world in (1, 4)),
        *(pytest.param(world, 20, 25, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]) for world in (1, 2, 3, 4)),
    ],
)
def test_any_tables_any_plan(ranks, world, steps, examples):
    @settings(max_examples=examples, phases=UNSHRUNK)
    @given(st.lists(cases(world, steps), min_size=8, max_size=8))
    def check(drawn_cases):
        problems = run(ranks, drawn_cases)
        assert not problems, problems[0]

    check()


PRECISIONS = {
    ("fp32", "fp32"): 0.0,
    ("fp16", "bf16"): 2.0**-11,
    ("bf16", "fp16"): 2.0**-8,
    ("fp8_e4m3", "fp8_e5m2"): 2.0**-4,
    ("int8", "int8"): 1 / 255,  # half a step of a row's range, which is at most twice its largest magnitude
}


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.more
def test_the_same_bits_in_every_run_whatever_crosses(ranks, pooled):
    """Two trainings are alike to the bit, and vectors are as near as their codec allows."""
    optimizer = te.optim.RowWiseAdagrad(lr=0.05)
    cases = [
        case_of("mixed", 4, pooled, optimizer, 2, precision=ExchangePrecision(*codecs), weighted=True, seed=6)
        for codecs in PRECISIONS
    ]
    results = ranks(4).run(together, cases, 2)
    for number, case in enumerate(cases):
        for rank in range(4):
            one, other = results[rank][number]
            for a, b in zip([*one.outputs, *one.state.values()], [*other.outputs, *other.state.values()], strict=True):
                assert torch.equal(a, b), (case.precision, rank)
            expected = own_outputs(case, alone(case), rank)[0]
            # Twice: those of Grid and TableRowWise cross twice, in parts; the parts may be larger than their sum.
            parts = 4 * float(expected.abs().max())
            error = float((one.outputs[0] - expected).abs().max())
            assert error <= PRECISIONS[case.precision.forward, case.precision.backward] * 2 * parts + 1e-6, (
                case.precision
            )


OUT_OF_RANGE = (te.TableConfig("cut", 10, 8, features=["a"]), te.TableConfig("everywhere", 5, 8, features=["b"]))


def refused(rank, pooled, shardings, copies):
    """One rank brings a bad id of either table, then all bring good ones."""
    pooling = "sum" if pooled else "none"
    tables = tuple(replace(table, pooling=pooling) for table in OUT_OF_RANGE)
    case = Case(tables, shardings, te.optim.SGD(lr=0.1), (((1, 1, 1, 1),),), pooled, copies=copies)
    collection = case.sharded(groups_of(None, copies))
    messages = []
    for bad in ({"a": [[1], [2, 10]], "b": [[0], [1]]}, {"a": [[1], [2]], "b": [[0], [1, -7]]}):
        good = {"a": [[1], [2]], "b": [[], [4]]}
        try:
            collection(te.KeyedJaggedTensor.from_lists(bad if rank == 2 else good))
            messages.append("nothing")
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    output_of(collection, te.KeyedJaggedTensor.from_lists(good)).sum().backward()
    return messages


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("shardings", "copies"),
    [
        ((RowWise(), DataParallel()), 1),
        ((DataParallel(), DataParallel()), 1),
        ((RowWise(), DataParallel()), 2),
        ((TableWise(0), TableWise(0)), 4),
    ],
)
def test_ids_out_of_range_stop_all_ranks(ranks, pooled, shardings, copies):
    """Out-of-range ids of replicated tables stop all ranks, too, and those of one replica the others."""
    errors = ranks(4).run(refused, pooled, shardings, copies)
    for rank, (cut, replicated) in enumerate(errors):
        if rank == 2:
            for part, message in (
                (("cut", "'a'", "sample 1", "position 2", "10"), cut),
                (("everywhere", "'b'", "sample 1", "position 4", "-7"), replicated),
            ):
                assert message.startswith("ValueError")
                assert all(piece in message for piece in part), message
        else:
            for message in (cut, replicated):
                assert message.startswith("RuntimeError: rank 2 rejected its batch"), message
