"""Events of made-up runs."""

from pathlib import Path

from tritonemb.training.callbacks import (
    Callback,
    CheckpointSaved,
    Evaluation,
    FitEnd,
    FitStart,
    Log,
    StepEnd,
)
from tritonemb.training.metrics import Metrics

BATCH, STEPS = 100, 1200
TEST = Metrics(auc=0.78081, log_loss=0.5551, normalized_entropy=0.8074, num_samples=500)


def start(**changes) -> FitStart:
    return FitStart(
        **{
            "total_steps": STEPS,
            "total_samples": STEPS * BATCH,
            "epoch_samples": STEPS * BATCH // 2,
            "num_epochs": 2,
            "config": {"data": "synthetic", "batch_size": BATCH, "read": {"shuffle_rows": 7}},
        }
        | changes
    )


def step(number: int) -> StepEnd:
    return StepEnd(number, epoch=number // 601, samples=number * BATCH)


def log(number: int, **changes) -> Log:
    values = {
        "loss": 0.54321,
        "dense_lr": 0.001,
        "table_lr": 0.05,
        "samples_per_second": 41_003.0,
        "data_wait": 0.02,
        "memory_bytes": 812_000_000,
        "seconds": number * 0.5,
    }
    return Log(number, epoch=number // 601, samples=number * BATCH, **(values | changes))


def evaluation(number: int, auc: float = 0.7812, best: bool = True) -> Evaluation:
    return Evaluation(number, number // 601, "validation", Metrics(auc, 0.553, 0.8061, 500), best)


def checkpoint(number: int) -> CheckpointSaved:
    return CheckpointSaved(number, Path("runs") / f"step-{number}", 12_340_000, 0.12)


def end(**changes) -> FitEnd:
    values = {
        "reason": "finished",
        "step": STEPS,
        "samples": STEPS * BATCH,
        "seconds": 24.91,
        "samples_per_second": 41_733.4,
        "test": TEST,
        "best_auc": 0.8312,
    }
    return FitEnd(**(values | changes))


def train(callbacks: list[Callback], first: int = 0, last: int = STEPS, ends: FitEnd | bool | None = True) -> None:
    """A log every 100 steps; an evaluation and a checkpoint every 200.

    Args:
        first: steps done before.
        ends: how; True as usual, False not at all, as a killed process.
    """

    def tell(method: str, *arguments) -> None:
        for callback in callbacks:
            getattr(callback, method)(*arguments)

    tell("on_start", start(first_step=first, samples_done=first * BATCH))
    for number in range(first + 1, last + 1):
        tell("on_step", step(number))
        if number % 100 == 0:
            tell("on_log", log(number, loss=0.5 + 20 / number))
        if number % 200 == 0:
            tell("on_evaluation", evaluation(number, auc=0.78 - 20 / number))
            tell("on_checkpoint", checkpoint(number))
        if number == 450:
            tell("on_message", "12 rows were skipped")
    if ends is not False:
        tell("on_end", end() if ends is True else ends)
