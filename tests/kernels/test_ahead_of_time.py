"""Every kernel compiles for every supported GPU, without spills, with few registers and with wide loads of rows.

A table of what the compilers made stands in `build/ahead_of_time/kernels.md` (or where `TRITONEMB_AHEAD_OF_TIME` says).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch

from tritonemb.kernels.triton_utils import CODES, MAX_REGISTERS, interpreting, jit, launch, tl

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if interpreting():
    pytest.skip("kernels are interpreted in this process, so there is nothing to compile", allow_module_level=True)

from benchmarks.measuring.workload import WORKLOADS
from tests.gpu import checks
from tests.gpu.archives import run_workload
from tests.gpu.first import SHAPES
from tests.kernels import ahead_of_time
from tests.kernels.ahead_of_time import Launch
from tests.kernels.ahead_of_time_cases import CASES, Case
from tritonemb.ops.registry import TRITON
from tritonemb.optim import OPTIMIZERS

# 128 registers a thread leave room for 16 warps a processor; a gather needs no more to keep its memory busy.
MOST_REGISTERS = MAX_REGISTERS
# A gfx942 wave has 512; with 256 two waves share a SIMD, and a wave of 64 holds twice the elements of a warp.
MOST_VECTOR_REGISTERS = 256
# Kernels that may spill a little, outside the core cases and for NVIDIA: how many bytes a thread, and why. In each,
# ptxas may keep to fewer registers than it is given, so that more programs fit, and store what it computes once, before
# a loop. Every edit of a kernel moves such spills to other specialisations.
EXCEPTIONS = {
    "_pool_kernel": (8, "Two values are stored before the loop over ids and loaded once behind it."),
    "_sample_weight_gradient_kernel": (
        8,
        "An address is stored once and loaded once a position, beside a row's loads.",
    ),
    "_update_kernel": (
        16,
        "The condition of a reduction across warps, or an address, is stored before the loop over groups and loaded "
        "once a group.",
    ),
}


# Loads of 16 bytes that a thread waits for at once, by kernel; or all that there are.
LEAST_IN_FLIGHT = {"_pool_kernel": 4, "_gather_kernel": 4, "_update_kernel": 5}
FEW_IN_FLIGHT = 3  # of other kernels
FEWER_IN_FLIGHT = {
    "interaction-26x128-float32": (0, "Exact products read shared memory, which `LDGSTS` fills: no register waits."),
    "exchange-fp8_e5m2": (2, "Half of a row is narrowed before the other half is asked for."),
}


def least_in_flight(code: ahead_of_time.Code, core: bool) -> int:
    if not core or not code.target.startswith("sm_"):
        return 0
    least = LEAST_IN_FLIGHT.get(code.kernel, FEW_IN_FLIGHT)
    return min(code.wide_loads, least, FEWER_IN_FLIGHT.get(code.case, (least, ""))[0])


def most_spilled(code: ahead_of_time.Code, core: bool) -> int:
    may = not core and code.target.startswith("sm_")
    return EXCEPTIONS.get(code.kernel, (0, ""))[0] if may else 0


def complaints(code: ahead_of_time.Code, aligned: bool, core: bool = True) -> list[str]:
    """What is wrong with the code of a launch; `aligned` if its rows begin at multiples of 16 bytes."""
    results = []
    most = MOST_REGISTERS if code.target.startswith("sm_") else MOST_VECTOR_REGISTERS
    if code.spilled > most_spilled(code, core):
        results.append(f"spills {code.spilled}, more than {most_spilled(code, core)}")
    if code.registers > most:
        results.append(f"needs {code.registers} registers, more than {most}")
    if aligned and not code.wide_loads:
        results.append(f"has no 16-byte load though rows are aligned: {code.loads}")
    if aligned and code.in_flight < least_in_flight(code, core):
        results.append(f"has {code.in_flight} loads in flight, fewer than {least_in_flight(code, core)}")
    return [f"{code.kernel} for {code.target} {problem} ({code.constants})" for problem in results]


def says_aligned(launch: Launch, target: str) -> bool:
    """Whether the launcher told the kernel that rows begin at multiples of 16 bytes, and a lane has 16 of them."""
    constants = launch.constants
    if "STEP" in constants and "ALIGN" not in constants:  # sums of gradients, whose dims are multiples of STEP
        lanes = ahead_of_time.TARGETS[target].warp_size * launch.num_warps
        return constants["CODE"] == CODES[torch.float32] and constants["STEP"] == 4 and constants["BLOCK"] >= 4 * lanes
    return constants.get("ALIGN", 0) >= 16 and "PER_ELEMENT" not in constants  # initial values: no row is loaded


BY_NAME = {case.name: case for case in CASES}


def launches_of(name: str, kernel: str, target: str = "sm_90") -> list[Launch]:
    """Those of one kernel by a case."""
    return [launch for launch in ahead_of_time.record(BY_NAME[name].call, target) if launch.kernel.__name__ == kernel]


def ptx_of(launch: Launch, target: str) -> str:
    source, options = ahead_of_time.source_of(launch, ahead_of_time.TARGETS[target])
    return ahead_of_time.triton.compile(source, target=ahead_of_time.TARGETS[target], options=options).asm["ptx"]


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    ahead_of_time.write_tables([case.name for case in CASES])


AT_ONCE = 16  # cases: the disassembler takes half a second to start, and little for each kernel


def compile_cases(cases: Sequence[Case], target: str) -> None:
    """Keep the figures of several cases, whose own tests find them, or compile again what failed here."""
    launches: list[Launch] = []
    with suppress(Exception):
        for case in cases:
            torch.manual_seed(0)  # as in its own test: launches are specialised on numbers of ids
            launches += ahead_of_time.record(case.call, target)
        ahead_of_time.compile_all("several", launches, target)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Callable[[Case, str], None]:
    """Compiles a case with those that follow it for the same target, unless it has been."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_kernels_compile_well"]
    waiting: dict[str, list[Case]] = {target: [] for target in ahead_of_time.TARGETS}
    for item in items:
        waiting[item.callspec.params["target"]].append(item.callspec.params["case"])

    def compile_next(case: Case, target: str) -> None:
        cases = waiting[target]
        if case in cases:
            at = cases.index(case)
            compile_cases(cases[at : at + AT_ONCE], target)
            del cases[at : at + AT_ONCE]

    return compile_next


SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))
# Every kernel once, and matrix products and narrow floats in the dtypes that GPUs differ in. NVIDIA's targets differ
# little: core variants are compiled for one of them, these for all.
EVERYWHERE = {
    "forward-dim128", "forward-float8_e5m2", "forward-none", "sample_weights-mean", "group-int64", "update-adam",
    "update-row_wise_adagrad", "row_gradients-dim128", "padding-int64", "interaction-26x128-float32",
    "interaction-26x128-bfloat16", "cross-3456-bfloat16", "exchange-fp8_e4m3", "exchange-int8", "jagged-int64",
    "row_cache-lru-several", "move_rows-wide", "dynamic_index-several", "initial-dim128-named",
}  # fmt: skip
# What most models run, for `make test`: with an empty cache each kernel takes a second.
QUICK = {"forward-dim64", "forward-none", "group-int64", "update-row_wise_adagrad", "exchange-fp16", "move_rows-wide"}


def marks(case: Case, target: str) -> tuple[pytest.MarkDecorator, ...]:
    if case.name in QUICK and target == "sm_90":
        return ()
    is_compiled = case.core and (target in ("sm_90", "gfx942") or case.name in EVERYWHERE)
    return (pytest.mark.more,) if is_compiled else SLOW


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(case, target, marks=marks(case, target), id=f"{case.name}-{target}")
        for case in CASES
        for target in ahead_of_time.TARGETS
    ],
)
def test_kernels_compile_well(case: Case, target: str, compiled: Callable[[Case, str], None]) -> None:
    launches = ahead_of_time.record(case.call, target)
    assert launches, "the case launched nothing"
    compiled(case, target)
    ahead_of_time.compile_all(case.name, launches, target)  # at once, which starts the disassembler once
    codes, result = [], []
    for aligned in (True, False):
        chosen = [launch for launch in launches if says_aligned(launch, target) == aligned]
        created = ahead_of_time.compile_all(case.name, chosen, target)
        codes += created
        result += [complaint for code in created for complaint in complaints(code, aligned, case.core)]
    ahead_of_time.keep(codes, case.name, target)
    assert not result, "\n".join(result)


@pytest.mark.more
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_long_bag_has_eight_float32_vectors_in_flight(target):
    compile_cases([case for case in CASES if case.name.startswith("forward-long-bags")], target)
    for dtype, most in (("float32", 8), ("bfloat16", 4)):  # of 4 and of 8 elements
        for dim in (64, 128, 256):
            case = f"forward-long-bags-{dtype}-dim{dim}"
            launches = ahead_of_time.record(BY_NAME[case].call, target)
            assert [code.in_flight for code in ahead_of_time.compile_all(case, launches, target)] == [most], case


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "kernel", "most"),
    [
        ("group-int64", "_segment_kernel", 104),
        ("dynamic_index-several", "_find_kernel", 64),
        ("dynamic_index-several", "_insert_kernel", 80),
        ("dynamic_index-several", "_remove_kernel", 56),
    ],
)
def test_few_registers_are_enough(name, kernel, most):
    """With 64 of them, as many programs of a warp are resident as a processor takes. ptxas gives them out by 8."""
    codes = ahead_of_time.compile_all(name, launches_of(name, kernel), "sm_90")
    assert codes
    assert [code for code in codes if code.registers > most] == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.few(1)
def test_all_warps_have_read_a_rows_state_before_one_writes_it(target):
    update, *_ = launches_of("update-dim1024", "_update_kernel", target)
    assert update.num_warps > 1
    before_note, after_note, *stores = ptx_of(update, target).split("st.global")
    before_storing = before_note + after_note
    assert len(stores) == 2  # of weights and of the state, behind a note of skipped rows
    assert "bar.sync" in before_storing
    assert "ld.global" not in before_storing.rpartition("bar.sync")[2]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("forward-dim64", "_pool_kernel"), ("forward-none", "_gather_kernel"), ("update-adam", "_update_kernel")],
)
@pytest.mark.few(1)
def test_rows_that_are_written_once_are_streamed(name, kernel, target):
    """So that the L2 cache keeps what is read again: rows of tables, and gradients of bags with several ids."""
    launched, *_ = launches_of(name, kernel, target)
    stores = re.findall(r"st\.global(\S*)\.v4\.b32", ptx_of(launched, target))
    assert len(stores) >= (3 if kernel == "_update_kernel" else 1)
    assert set(stores) == {".cs"}


@pytest.mark.more
def test_every_kernel_is_compiled_for_every_target():
    def kernels(cases: Iterable[Case]) -> set[str]:
        return {launch.kernel.__name__ for case in cases for launch in ahead_of_time.record(case.call)}

    assert kernels(case for case in CASES if case.name in EVERYWHERE) == kernels(case for case in CASES if case.core)


@jit
def copy_scaled(source, target, factor, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(tl.multiple_of(source, ALIGN) + place) * factor)


def toy(size: int, factor: int = 3, offset: int = 0, align: int = 4) -> list[Launch]:
    source = torch.zeros(2 * size)[offset:]
    return ahead_of_time.record(
        lambda: launch(copy_scaled, (1,), source, torch.zeros(size), factor, num_warps=1, BLOCK=size, ALIGN=align)
    )


def test_only_what_has_changed_is_compiled_again(tmp_path, monkeypatch):
    compiled: list[str] = []

    def figures(variants, target):
        compiled.extend([target] * len(variants))
        return [ahead_of_time.Figures(len(compiled), 0, 64, {16: 2, 4: 1}, 1, 16)]

    def registers(align: int, target: str = "sm_90") -> int:
        (code,) = ahead_of_time.compile_all("toy", toy(256, align=align), target)
        assert code.loads == {16: 2, 4: 1}
        return code.registers

    monkeypatch.setattr(ahead_of_time, "kernel_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead_of_time, "_figures", figures)
    assert [registers(16), registers(4), registers(16), registers(16, "sm_80"), registers(4)] == [1, 2, 1, 3, 2]
    for path in (tmp_path / "ahead_of_time").iterdir():
        path.write_text("[")
    assert registers(16) == 4


@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.few(1)
def test_a_kernel_that_spills_is_caught(target):
    (code,) = ahead_of_time.compile_all("toy", toy(1 << 15), target)
    assert code.spilled > 0
    assert any("spills" in complaint for complaint in complaints(code, aligned=False))


def test_spills_are_excepted_by_kernel_size_target_and_case():
    (toy_code,) = ahead_of_time.compile_all("toy", toy(256), "sm_90")
    code = replace(toy_code, kernel="_update_kernel", num_warps=4, spilled=16)
    assert not complaints(code, aligned=False, core=False)
    assert complaints(code, aligned=False, core=True)
    for change in ({"spilled": 20}, {"target": "gfx942"}, {"kernel": "_gather_kernel"}):
        assert complaints(replace(code, **change), aligned=False, core=False), change


@pytest.mark.parametrize("target", [name for name in ahead_of_time.TARGETS if name.startswith("sm_")])
@pytest.mark.few(1)
def test_narrow_loads_are_caught(target):
    (wide,) = ahead_of_time.compile_all("toy", toy(256, align=16), target)
    (narrow,) = ahead_of_time.compile_all("toy", toy(256, offset=1), target)
    assert wide.loads == {16: 2}  # 256 floats on 32 lanes
    assert narrow.loads == {4: 8}
    assert not complaints(wide, aligned=True)
    assert "no 16-byte load" in complaints(narrow, aligned=True)[0]


def test_launches_are_specialised_as_triton_does():
    """Integers equal to 1 and divisible by 16 make a difference, others none."""
    launches = [launch for factor in (1, 16, 3, 5, 32) for launch in toy(256, factor)]
    codes = ahead_of_time.compile_all("toy", launches, "sm_90")
    results = [code.constants.split()[2] for code in codes]
    assert results == ["factor=1", "factor%16", "factor"]


@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_specialisations_are_those_of_a_launch(target):
    for recorded in toy(256, factor=16):
        source, options = ahead_of_time.source_of(recorded, ahead_of_time.TARGETS[target])
        assert source.signature == {
            "source": "*fp32", "target": "*fp32", "factor": "i32", "BLOCK": "constexpr", "ALIGN": "constexpr"
        }  # fmt: skip
        attributes = {path: dict(value) for path, value in source.attrs.items() if value}
        assert [attributes[(place,)]["tt.divisibility"] for place in range(3)] == [16, 16, 16]
        assert options["enable_fp_fusion"] is False
        assert options["num_warps"] == 1
        assert options.get("maxnreg") == (MAX_REGISTERS if target.startswith("sm_") else None)


def test_loads_are_told_apart_by_width():
    sass = (
        "LDG.E.128.CONSTANT R4, ; LDG.E R1, ; LDG.E.64 R2, ; LDG.E.U16 R3, ; LDGSTS.E.BYPASS.128 [R1], ; STG.E.128 [R2]"
    )
    assert ahead_of_time.loads_of_sass(sass) == {16: 2, 4: 1, 8: 1, 2: 1}
    assembly = "global_load_dwordx4 v[0:3]\n buffer_load_ushort v1\n global_load_dword v2"
    assert ahead_of_time.read_amdgcn(assembly).loads == {16: 1, 2: 1, 4: 1}


def test_a_load_is_in_flight_until_its_register_is_named():
    loads = "/*0010*/ LDG.E.128 R4, [R2.64] ; /*0020*/ LDG.E.128.CONSTANT R8, [R2.64+0x10] ;"
    assert ahead_of_time.in_flight(loads) == (2, 32)
    between = loads.replace("/*0020*/", "/*0018*/ FADD R20, R20, R7 ; /*0020*/")
    assert ahead_of_time.in_flight(between) == (1, 16)
    assert ahead_of_time.in_flight(between.replace("R7", "R12")) == (2, 32)
    assert ahead_of_time.in_flight("/*0010*/ @P0 LDG.E.64 R4, [R2.64] ; /*0020*/ LDG.E.U8 R6, [R2.64] ;") == (0, 9)


def test_what_goes_to_shared_memory_is_in_flight_until_it_is_waited_for():
    load, wait = "/*0010*/ LDGSTS.E.BYPASS.128 [R9], desc[UR8][R2.64] ;", "/*0020*/ {} ; /*0030*/ FADD R9, R2, R1 ;"
    assert ahead_of_time.in_flight(load + wait.format("LDGDEPBAR") + load) == (0, 32)
    assert ahead_of_time.in_flight(load + wait.format("DEPBAR.LE SB0, 0x0") + load) == (0, 16)


def test_loads_that_wait_for_each_other_are_caught():
    (code,) = ahead_of_time.compile_all("toy", toy(512, align=16), "sm_90")
    code = replace(code, kernel="_pool_kernel", loads={16: 8}, in_flight=4)
    assert not complaints(code, aligned=True)
    assert "3 loads in flight, fewer than 4" in complaints(replace(code, in_flight=3), aligned=True)[0]
    assert not complaints(replace(code, in_flight=3), aligned=True, core=False)


def test_the_table_holds_the_cases_that_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead_of_time, "ARTEFACTS", tmp_path)
    codes = ahead_of_time.compile_all("toy", toy(256, align=16), "sm_90")
    ahead_of_time.keep(codes, "toy", "sm_90")
    ahead_of_time.keep(codes, "gone", "sm_90")
    ahead_of_time.write_tables(["toy"])
    (row,) = csv.DictReader((tmp_path / "kernels.csv").read_text().splitlines())
    assert (row["kernel"], row["target"], row["spilled"], row["loads"]) == ("copy_scaled", "sm_90", "0", "2 of 16 B")
    header, rule, line = (tmp_path / "kernels.md").read_text().splitlines()
    assert header.split("|")[1].strip() == "kernel"
    assert line.count("|") == rule.count("|") == 11


def test_the_first_checks_compile_fewer_than_sixty_variants() -> None:
    """Each is compiled on the first machine with a GPU, while somebody waits."""
    cpu, variants = torch.device("cpu"), set[tuple[str, int]]()

    def count(call: Callable[[], object]) -> None:
        for item in ahead_of_time.record(call):
            source, _ = ahead_of_time.source_of(item, ahead_of_time.TARGETS["sm_90"])
            variants.add((source.hash(), item.num_warps))

    for case in CASES:
        if case.name in checks.CORE:
            count(case.call)
    for name in ("row_wise_adagrad", "adam"):
        count(partial(checks.train_steps, TRITON, OPTIMIZERS[name](lr=0.05), cpu))

    for workload in (w for w in WORKLOADS if any(shape in str(w) for shape in SHAPES)):
        count(partial(run_workload, replace(workload, batch_size=16, num_rows=(1000,) * workload.num_tables)))
    assert 50 < len(variants) < 60
