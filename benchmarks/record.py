"""What one benchmark leaves behind: a long-format row per implementation, and a line per target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import COPY, OURS, copy_contender
from benchmarks.clock import Clock, Timing
from benchmarks.peers import Implementation
from benchmarks.workload import Batch, Shape

LIMIT = "limit"  # no peer: the program that says what the machine can do
TOLERANCE = 1e-5  # fp32 sums of up to thousands of terms, added in a different order by each implementation


def copy_bandwidth(clock: Clock, num_bytes: int = 1 << 29, rounds: int = 7) -> float:
    """GB/s of a plain copy (bytes read + bytes written) between two arrays far larger than the caches."""
    (timing,) = clock.measure([copy_contender(num_bytes, clock.device)], rounds, 0).timings
    return num_bytes / timing.percentile(50) / 1e6


def timing_rows(
    op: str, shape: Shape | str, timings: Sequence[Timing], num_bytes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A row per implementation; `num_bytes` says what each has to move."""
    return [
        {
            "op": op,
            "shape": str(shape),
            "implementation": timing.name,
            "p20_ms": timing.percentile(20),
            "p50_ms": timing.percentile(50),
            "p80_ms": timing.percentile(80),
            "rounds": len(timing.samples),
            "other_load_percent": timing.other_load_percent,
            "bytes": num_bytes[timing.name],
            "gb_per_s": num_bytes[timing.name] / timing.percentile(50) / 1e6,
        }
        for timing in timings
    ]


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each row: time, rate, share of the copy's rate, times as fast as the fastest peer in the same case."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), []).append(row)
    for case in cases.values():
        peers = [row for row in case if row["implementation"] not in (COPY, LIMIT) and not is_ours(row)]
        fastest = min(peers, key=lambda row: float(row["p50_ms"]), default=None)
        copy = next((row["gb_per_s"] for row in case if row["implementation"] == COPY), None)
        for row in case:
            rate = copy or row.get("copy_gb_per_s")
            share = f"{100 * row['gb_per_s'] / rate:4.0f} % of a copy" if rate and row["bytes"] else ""
            ratio = f"{fastest['p50_ms'] / row['p50_ms']:.2f} x {fastest['implementation']}" if fastest else ""
            yield (
                f"{row['op']:38} {row['implementation']:24} p20 {row['p20_ms']:8.3f}  p50 {row['p50_ms']:8.3f}  "
                f"p80 {row['p80_ms']:8.3f} ms {row['gb_per_s']:7.1f} GB/s {share:16} "
                f"{ratio if is_ours(row) else '':20} {row['shape']}"
            )


def is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["implementation"]).startswith(OURS)


def at_least(op: str, shape: Shape, ours: Timing, peers: Sequence[Timing], factor: float) -> dict[str, Any]:
    """The target that ours be `factor` times as fast as the fastest of the peers, by the medians."""
    peer = min(peers, key=lambda timing: timing.percentile(50))
    ratio = peer.percentile(50) / ours.percentile(50)
    return {
        "op": op,
        "shape": str(shape),
        "measured": f"{peer.name} / {ours.name}",
        "ratio": ratio,
        "target": f"at least {factor:g}",
        "met": ratio >= factor,
    }


def at_most(op: str, shape: Shape, slow: Timing, fast: Timing, factor: float) -> dict[str, Any]:
    """The target that `slow` take at most `factor` times as long as `fast`, by the medians."""
    ratio = slow.percentile(50) / fast.percentile(50)
    return {
        "op": op,
        "shape": str(shape),
        "measured": f"{slow.name} / {fast.name}",
        "ratio": ratio,
        "target": f"at most {factor:g}",
        "met": ratio <= factor,
    }


def check_forward(ours: Implementation, peer: Implementation, batch: Batch) -> None:
    """Fail unless both look the batch up alike."""
    with torch.no_grad():
        _assert_same(ours.forward(batch), peer.forward(batch), f"the output of {ours.name} and {peer.name}")


def check_step(ours: Implementation, peer: Implementation, batch: Batch, gradient: Tensor) -> None:
    """Take one step with both; fail unless output and updated rows agree and the step did something."""
    ids = [values.unique() for values, _ in batch.bags]
    before = [weight[rows].clone() for weight, rows in zip(ours.weights(), ids, strict=True)]
    outputs = [implementation.forward(batch) for implementation in (ours, peer)]
    _assert_same(outputs[0], outputs[1], f"the output of {ours.name} and {peer.name}")
    for implementation, pooled in zip((ours, peer), outputs, strict=True):
        implementation.backward(pooled, gradient)
    for index, rows in enumerate(ids):
        updated, expected = ours.weights()[index][rows], peer.weights()[index][rows]
        _assert_same(updated, expected, f"table {index} after a step of {ours.name} and {peer.name}")
        assert not torch.equal(updated, before[index]), f"table {index}: the step changed nothing"


def _assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual.detach(), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what} differ: {text}"
    )
