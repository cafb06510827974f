"""`tritonemb predict` and `tritonemb evaluate`: scores and metrics of rows, by a trained model."""

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

SUFFIXES = (".parquet", ".csv")  # of output files


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Options):
    """Write the click probability of every row of a log.

    Example: tritonemb predict --checkpoint runs/mine --data day_23 --out scores.csv

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        data: log to score: a file or a folder.
        out: .parquet or .csv file to write: one row per row of the log, in the same order.
        keep: columns of the log to write before the scores, without encoding.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer.
        batch_size: maximum number of rows per batch.
        device: device of the model.
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
    """Score a log and write the file atomically; return a message. Raise ValueError or FileNotFoundError if the
    checkpoint or the log cannot be used, or the file cannot be written."""
    if options.out.suffix not in SUFFIXES:
        raise ValueError(f"out must end with one of {SUFFIXES}, got {str(options.out)!r}")
    if len({*options.keep, "score"}) <= len(options.keep):
        raise ValueError(f"keep must name each column once, and not 'score', got {list(options.keep)}")
    run = open_run(options.checkpoint, options.model, options.device)
    blocks, names = run.score_log(options.data, options.keep, options.batch_size), [*options.keep, "score"]
    tables = (pa.table([*arrays, scores.numpy()], names) for arrays, scores in blocks)
    num_rows = 0
    if (first := next(tables, None)) is None:
        raise ValueError(f"{options.out} is not written: {options.data} has no rows to score")
    writer_class = arrow_csv.CSVWriter if options.out.suffix == ".csv" else parquet.ParquetWriter
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:  # write table by table: memory does not depend on the size of the log
        with atomic_path(options.out) as temporary, writer_class(temporary, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table.cast(first.schema))
                num_rows += table.num_rows
    except pa.ArrowException as error:
        raise ValueError(f"{options.out}: these columns cannot be written in this format ({error})") from error
    return f"{options.out}: {num_rows:,} scores by {run.path}"


def open_run(path: Path, model: str | None, device: str) -> Run:
    """Load a run, with the model of a function MODULE:FUNCTION if given; raise ValueError if it cannot be imported."""
    try:
        factory = None if model is None else resolve_name(model)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model must be MODULE:FUNCTION that builds a model, got {model!r} ({error})") from error
    return load_run(path, model=factory, device=device)


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Print the metrics of a run on rows with labels.

    Example: tritonemb evaluate --checkpoint runs/mine --data day_23

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        data: log with labels: a file or a folder; the run's test rows if not given.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer.
        json: print the metrics as JSON.
        batch_size: maximum number of rows per batch.
        device: device of the model.
    """

    POSITIONAL: ClassVar[str] = "checkpoint"
    checkpoint: Path
    data: str | None = None
    model: str | None = None
    json: bool = False
    batch_size: int = number(8192, least=1)
    device: str = "cpu"


def evaluate(options: EvaluateOptions) -> str:
    """Evaluate a run; return the text. Raise ValueError or FileNotFoundError if the checkpoint or the log cannot be
    used."""
    run = open_run(options.checkpoint, options.model, options.device)
    metrics = run.evaluate(options.data, batch_size=options.batch_size)
    return json.dumps(asdict(metrics)) if options.json else f"{run.path}\n{describe(metrics)}"


def describe(metrics: Metrics) -> str:
    """Format metrics as lines of text: one per number, then the calibration curve."""
    numbers = [(name, f"{getattr(metrics, key):.{0 if key == 'num_samples' else 4}f}") for key, name in METRICS.items()]
    curve = [(f"{size:,}", f"{score:.4f}", f"{rate:.4f}") for size, score, rate in metrics.calibration]
    return "\n".join([*align_columns(numbers), *align_columns([("rows", "mean score", "share of clicks"), *curve])])
