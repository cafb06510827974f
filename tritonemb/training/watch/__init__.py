"""Callbacks that come with the trainer: a display, a log, curves for TensorBoard, a report, a profiler's trace."""
