"""The `tritonemb` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tritonemb.extras import MissingExtraError, require

if TYPE_CHECKING:
    from tritonemb.training.job import TrainResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, 2 for a mistake of the user's (one line on stderr says which)."""
    parser = argparse.ArgumentParser(prog="tritonemb", description="Train recommendation models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", add_help=False, help="train a click model (tritonemb train --help)")
    _, rest = parser.parse_known_args(arguments)
    try:
        return _train(rest)
    except (ValueError, FileNotFoundError, ConnectionError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _train(arguments: list[str]) -> int:
    tyro = require("tyro")
    from tritonemb.training.config import TrainConfig, preset
    from tritonemb.training.job import train

    # The data set decides the defaults, so it is read before the rest.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--data", default=TrainConfig.data)
    data = first.parse_known_args(arguments)[0].data
    config = tyro.cli(TrainConfig, prog="tritonemb train", default=preset(data), args=arguments)
    print(summary(train(config)))
    return 0


def summary(result: TrainResult) -> str:
    """The lines that a run ends with."""
    best = "" if result.best_auc is None else f"  (best possible {result.best_auc:.4f})"
    return "\n".join(
        (
            f"test AUC            {result.test.auc:.4f}{best}",
            f"log loss            {result.test.log_loss:.4f}",
            f"normalized entropy  {result.test.normalized_entropy:.4f}",
            f"samples/s           {result.fit.samples_per_second:,.0f}  (training took {result.fit.seconds:.1f} s)",
        )
    )
