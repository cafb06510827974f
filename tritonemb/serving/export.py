"""`te.export`: a trained model as a folder for serving."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import nn

from tritonemb.serving.package import write_package
from tritonemb.serving.programs import write_aten, write_onnx
from tritonemb.serving.run import LoadOptions, Run
from tritonemb.utils import WRITING, on_error, publish

Target = Literal["tritonemb", "aten", "onnx"]


def export(model: nn.Module | Run, folder: str | Path, target: Target = "tritonemb") -> Path:
    """Write a trained model for serving into a new folder, which appears under its name when it is complete.

    Args:
        model: a run of `te.load_run`, which is exported with the encoding of raw rows, or a model.
        folder: its parent folder must exist; it must not, or be empty.
        target: "tritonemb", for `te.load_run(folder)`: tables are files that are mapped into memory. "aten", for C++
            without Python: a run of pooled tables as a program that AOTInductor compiles. "onnx", for ONNX Runtime and
            others: such a run with its small tables; rows of large ones are inputs. See docs/export.md.

    Raises:
        ValueError: the model cannot be exported; the message says why, and what to do.
        FileExistsError, FileNotFoundError: for a folder that is not empty, and one without a parent.
    """
    folder = Path(folder)
    if target not in get_args(Target):
        raise ValueError(f"target must be one of {get_args(Target)}, got {target!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists; remove it, or choose another folder")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"{folder.absolute().parent}: no such folder to export to")
    temporary = folder.absolute().with_name(f"{WRITING}{folder.name}-{os.getpid()}")
    with on_error(lambda: shutil.rmtree(temporary, ignore_errors=True)):
        temporary.mkdir()
        run = model if isinstance(model, Run) else None
        values = {"config": {}, "reading": {}, "run": {}} if run is None else run.description
        _WRITERS[target](temporary, model.model if isinstance(model, Run) else model, values)
        publish(temporary, folder)
    return folder


_WRITERS: dict[str, Callable[..., object]] = {
    "tritonemb": write_package, "aten": write_aten, "onnx": write_onnx,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportOptions(LoadOptions):
    """Write a trained model for serving into a new folder.

    Example: tritonemb export runs/mine --out models/mine

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        out: folder to write; it must not exist.
        target: tritonemb, for tritonemb predict, evaluate and te.load_run; aten, for C++ without Python; or onnx.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer.
        transforms: those of the run, MODULE:FUNCTION; a checkpoint does not select code by itself.
    """

    out: Path
    target: Target = "tritonemb"


def run_export(options: ExportOptions) -> str:
    """Export a run; return a message. Raise the errors of `export` and of `load_run`."""
    run = options.load()
    folder = export(run, options.out, options.target)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder}: {run.path} for {options.target}, {size:,} bytes"
