"""Implementation of `tritonemb predict` and `tritonemb evaluate`."""

import itertools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tritonemb.data.files import arrow_csv, pa, parquet
from tritonemb.serving.retrieval import top_rows
from tritonemb.serving.run import LoadOptions, Run
from tritonemb.training.callbacks.report import describe_metrics
from tritonemb.utils import atomic_path, join_names, number

SUFFIXES = (".parquet", ".csv")  # of output files


@dataclass(frozen=True, kw_only=True)
class ReadOptions(LoadOptions):
    """Run that a command loads, and the format of text files to score, if not that of training."""

    delimiter: str = ""
    quoted_newlines: bool = False
    list_separator: str = ""

    def text_options(self) -> dict[str, Any]:
        """Return the options of text files that are set, by name."""
        names = "delimiter", "quoted_newlines", "list_separator"
        return {name: value for name in names if (value := getattr(self, name))}

    def load(self) -> Run:
        """Load the run; ValueError if its logs cannot be read with these options."""
        run = super().load()
        if changes := self.text_options():
            schema = run.log_options.schema
            if self.list_separator:
                if not (lists := tuple(feature.name for feature in run.features if feature.multi_hot)):
                    raise ValueError(f"{run.path} was trained without lists of values; omit list_separator")
                schema = replace(schema, lists=lists)
            run._log_options = replace(run.log_options, schema=schema, **changes)
        return run


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ReadOptions):
    """Write the click probability of every row of a log.

    Example: tritonemb predict --checkpoint runs/mine --data day_23 --out scores.csv

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        data: log to score: a file or a folder.
        out: .parquet or .csv file to write: one row per row of the log, in the same order.
        keep: columns of the log to write before the scores, without encoding.
        top: for a two-tower model, number of items to write per row of `data`, which then has users, best first.
        items: file of the items to rank, with `top`.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer or of such a model.
        batch_size: maximum number of rows per batch.
        device: device of the model.
        transforms: those of the run, MODULE:FUNCTION; a checkpoint does not select code by itself.
        delimiter: field delimiter of text files with a header; by default that of training.
        quoted_newlines: allow line ends in quoted fields, as if set in training.
        list_separator: separator of the values of a list in a field; by default that of training.
    """

    data: str
    out: Path = Path("scores.parquet")
    keep: tuple[str, ...] = ()
    top: int | None = number(None, least=1)
    items: str | None = None


def predict(options: PredictOptions) -> str:
    """Score a log and write the file atomically; return a message. Raise ValueError or FileNotFoundError if the
    checkpoint or the log cannot be used, or the file cannot be written."""
    if options.out.suffix not in SUFFIXES:
        raise ValueError(f"out must end with one of {SUFFIXES}, got {str(options.out)!r}")
    if len({*options.keep, "score"}) <= len(options.keep):
        raise ValueError(f"keep must name each column once, and not 'score', got {list(options.keep)}")
    run, num_rows = options.load(), 0
    blocks, names = run.score_log(options.data, options.keep, options.batch_size), [*options.keep, *run.score_names]
    tables = (pa.table([*arrays, *scores.view(len(scores), -1).numpy().T], names) for arrays, scores in blocks)
    if len({*names}) < len(names):
        raise ValueError(f"keep must name other columns than the scores, {join_names(run.score_names)}")
    if options.top or options.items:
        tables = top_rows(run, options.data, options.items, options.top, options.keep, options.batch_size)
    if (first := next(tables, None)) is None:
        raise ValueError(f"{options.out} is not written: {options.data} has no rows to score")
    writer_class = arrow_csv.CSVWriter if options.out.suffix == ".csv" else parquet.ParquetWriter
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:  # write table by table: memory does not depend on the size of the log
        # A column without values in the first table may have some later, of any type.
        schema = pa.schema(f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in first.schema)
        with atomic_path(options.out) as temporary, writer_class(temporary, schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table.cast(schema))
                num_rows += table.num_rows
    except pa.ArrowException as error:
        hint = "; a .csv file cannot have lists, a .parquet file can" * (options.out.suffix == ".csv")
        raise ValueError(f"{options.out}: these columns cannot be written in this format ({error}){hint}") from error
    return f"{options.out}: {num_rows:,} scores by {run.path}"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ReadOptions):
    """Print the metrics of a run on rows with labels.

    Example: tritonemb evaluate --checkpoint runs/mine --data day_23

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        data: log with labels: a file or a folder; the run's test rows if not given.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer or of such a model.
        json: print the metrics as JSON.
        group_by: sparse column, such as the user, by whose values rows are grouped for GAUC.
        batch_size: maximum number of rows per batch.
        device: device of the model.
        transforms: those of the run, MODULE:FUNCTION; a checkpoint does not select code by itself.
        delimiter: field delimiter of text files with a header; by default that of training.
        quoted_newlines: allow line ends in quoted fields, as if set in training.
        list_separator: separator of the values of a list in a field; by default that of training.
    """

    data: str | None = None
    json: bool = False
    group_by: str | None = None


def evaluate(options: EvaluateOptions) -> str:
    """Evaluate a run; return the text. Raise ValueError or FileNotFoundError for an unusable checkpoint or log."""
    if options.data is None and (changes := options.text_options()):
        raise ValueError(f"{join_names(changes)}: no effect without data; the run's test rows are read as in training")
    run = options.load()
    metrics = run.evaluate(options.data, batch_size=options.batch_size, group_by=options.group_by)
    return json.dumps(asdict(metrics)) if options.json else f"{run.path}\n{describe_metrics(metrics)}"
