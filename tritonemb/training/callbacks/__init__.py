"""What a trainer calls at each event, and the callbacks that come with it: display, log, report, curves, profiler."""

from tritonemb.training.callbacks.base import (
    Callback,
    CallbackList,
    CheckpointSaved,
    Evaluation,
    FitEnd,
    FitStart,
    Log,
    StepEnd,
)

__all__ = ["Callback", "CallbackList", "CheckpointSaved", "Evaluation", "FitEnd", "FitStart", "Log", "StepEnd"]
