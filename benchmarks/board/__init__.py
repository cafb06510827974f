"""Board of published results, reproduced: `python -m benchmarks.board CELL --data FOLDER`.

A cell is one model on one data set. A module of `MODULES` has a list `CELLS`, and each cell and seed has a file in
`results/`, from which `docs/board.md` is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = ("amazon", "gowalla", "multi_task", "ranking")  # of this package
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Cell:
    """Row of the board.

    Args:
        name: name on the command line and of the files of results, such as `gowalla-bpr`.
        data, model: names in the table.
        run: function of the folder of data, a folder for what a later call resumes from, and a seed; it returns the
            metrics by name, and may return more, such as the options under "options".
        published: figures to reach, by name of metric.
        source: source of these figures, as Markdown.
        seeds: number of seeds that the board asks for.
        baseline: cell with the same seeds to compare with, in place of published figures.
        tolerance: relative loss of a metric with which it counts as reached.
        notes: what differs from the source.
        peers: libraries to compare with, and what differs in their models; a second table has these cells.
    """

    name: str
    data: str
    model: str
    run: Callable[[Path, Path, int], Mapping[str, Any]]
    published: Mapping[str, float] = field(default_factory=dict)
    source: str = "-"
    seeds: int = 1
    tolerance: float = 0.0
    notes: str = ""
    baseline: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
