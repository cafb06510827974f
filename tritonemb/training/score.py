"""Commands that score rows with a run: `tritonemb predict` and `evaluate`."""

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar

from tritonemb.data.arrow import arrow_csv, pa, parquet
from tritonemb.training.compare import METRICS
from tritonemb.training.metrics import Metrics
from tritonemb.training.run import Run, load_run
from tritonemb.utils import Options, align_columns, atomic_path, number

SUFFIXES = (".parquet", ".csv")  # of scores


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Options):
    """Write the click probability of every row of a log.

    Example: tritonemb predict --checkpoint runs/mine --data day_23 --out scores.csv

    Args:
        checkpoint: a checkpoint, or the folder of a run: its best checkpoint, or its newest if none is marked best.
        data: the log to score: a file or a folder.
        out: the .parquet or .csv file to write: one row a row of the log, in its order.
        keep: columns of the log to write before the scores, as they are read.
        model: of a run of a te.Trainer: MODULE:FUNCTION that makes its model.
        batch_size: rows at a time, at most.
        device: where to compute.
    """

    POSITIONAL: ClassVar[str] = "checkpoint"
    checkpoint: Path
    data: str
    out: Path = Path("scores.parquet")
    keep: tuple[str, ...] = ()
    model: str | None = None
    batch_size: int = number(8192, least=1)
    device: str = "cpu"


def predict(options: PredictOptions) -> str:
    """Score a log and write the file, aside and renamed; returns a line that says what was done. ValueError or
    FileNotFoundError if the checkpoint or the log cannot be used, or the file cannot be written."""
    if options.out.suffix not in SUFFIXES:
        raise ValueError(f"out must end with one of {SUFFIXES}, got {str(options.out)!r}")
    if len({*options.keep, "score"}) <= len(options.keep):
        raise ValueError(f"keep must name each column once, and none 'score', got {list(options.keep)}")
    run = open_run(options.checkpoint, options.model, options.device)
    blocks, names = run.score_log(options.data, options.keep, options.batch_size), [*options.keep, "score"]
    tables = (pa.table([*arrays, scores.numpy()], names) for arrays, scores in blocks)
    num_rows = 0
    if (first := next(tables, None)) is None:
        raise ValueError(f"{options.out} is not written: there are no rows to score")
    kind = arrow_csv.CSVWriter if options.out.suffix == ".csv" else parquet.ParquetWriter
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:  # table by table, so that a log of any size fits
        with atomic_path(options.out) as part, kind(part, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table.cast(first.schema))
                num_rows += table.num_rows
    except pa.ArrowException as error:
        raise ValueError(f"{options.out}: these columns can not be kept in such a file ({error})") from error
    return f"{options.out}: {num_rows:,} scores by {run.path}"


def open_run(path: Path, model: str | None, device: str) -> Run:
    """`load_run`, of a model that MODULE:FUNCTION makes; ValueError if there is no such function."""
    try:
        make = None if model is None else resolve_name(model)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model must be MODULE:FUNCTION, which makes a model, got {model!r} ({error})") from error
    return load_run(path, model=make, device=device)


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Print the metrics of a run on rows with labels.

    Example: tritonemb evaluate --checkpoint runs/mine --data day_23

    Args:
        checkpoint: a checkpoint, or the folder of a run: its best checkpoint, or its newest if none is marked best.
        data: a log: a file or a folder; the run's own test rows if not given.
        model: of a run of a te.Trainer: MODULE:FUNCTION that makes its model.
        json: print the metrics as JSON.
        batch_size: rows at a time, at most.
        device: where to compute.
    """

    POSITIONAL: ClassVar[str] = "checkpoint"
    checkpoint: Path
    data: str | None = None
    model: str | None = None
    json: bool = False
    batch_size: int = number(8192, least=1)
    device: str = "cpu"


def evaluate(options: EvaluateOptions) -> str:
    """Metrics of a run as text. ValueError or FileNotFoundError if checkpoint or log cannot be used."""
    run = open_run(options.checkpoint, options.model, options.device)
    metrics = run.evaluate(options.data, batch_size=options.batch_size)
    return json.dumps(asdict(metrics)) if options.json else f"{run.path}\n{describe(metrics)}"


def describe(metrics: Metrics) -> str:
    """Metrics as lines of text: one per number, then the calibration curve."""
    numbers = [(name, f"{getattr(metrics, key):.{0 if key == 'num_samples' else 4}f}") for key, name in METRICS.items()]
    curve = [(f"{size:,}", f"{score:.4f}", f"{rate:.4f}") for size, score, rate in metrics.calibration]
    return "\n".join([*align_columns(numbers), *align_columns([("rows", "mean score", "share of clicks"), *curve])])
