import io
import logging
import math
import re
import sys
from dataclasses import replace

import pytest

from tests.training.callbacks.events import STEPS, checkpoint, end, evaluation, log, start, step, train
from tritonemb.training.callbacks import CallbackList
from tritonemb.training.callbacks.console import (
    Lines,
    LiveView,
    escape_unprintable,
    format_bytes,
    format_duration,
    make_display,
    start_line,
    summary,
    wrap_line,
)

SUMMARY = """\
test AUC            0.7808  (Bayes-optimal 0.8312)
log loss            0.5551
normalized entropy  0.8074
samples/s           41,733  (training took 24.9 s)"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(*calls, started=None) -> list[str]:
    """The lines for `calls`, pairs of a method and its argument, after the start."""
    stream = io.StringIO()
    lines = Lines(stream)
    lines.on_start(started or start())
    stream.truncate(0)
    stream.seek(0)
    for method, argument in calls:
        getattr(lines, method)(argument)
    return stream.getvalue().splitlines()


def test_a_model_worse_than_the_base_rate_gets_a_hint():
    worse = summary(end(test=replace(end().test, normalized_entropy=1.0154)))
    assert "normalized entropy  1.0154  (above 1: worse than always predicting the base rate; try lower" in worse
    assert "above 1" not in summary(end())


def test_a_file_gets_a_line_for_every_event_and_the_summary():
    stream = io.StringIO()
    train([make_display(stream)])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "training  synthetic  120,000 samples in 2 epochs  batch 100  1,200 steps"
    kinds = [re.split(r"[ :]", line)[0] for line in lines[1:-4]]
    assert kinds == [
        *("step", "step", "validation", "checkpoint"),
        *("step", "step", "validation", "checkpoint"),
        *("note", "step", "step", "validation", "checkpoint"),
        *("step", "step", "validation", "checkpoint") * 3,
    ]
    assert "\n".join(lines[-4:]) == SUMMARY
    assert "\x1b" not in stream.getvalue()


def test_the_lines_of_a_log_keep_their_columns():
    lines = written(("on_log", log(100, data_wait=0.256)), ("on_log", log(1000, loss=math.nan, memory_bytes=10**9)))
    assert lines == [
        "step 100/1,200    epoch 0.17  loss 0.5432  41,003 samples/s  wait 26 %  812 MB   ETA 0:03",
        "step 1,000/1,200  epoch 1.67  loss nan     41,003 samples/s  wait 2 %   1.00 GB  ETA 0:00",
    ]
    assert [re.split(r"\s{2,}", line)[2] for line in lines] == ["loss 0.5432", "loss nan"]


def test_a_line_shows_who_takes_the_time_of_the_processor():
    (line,) = written(("on_log", log(700, cpu={"reader": 0.406, "step": 0.594})))
    assert re.split(r"\s{2,}", line)[4:6] == ["wait 2 %", "CPU 41 % reader, 59 % step"]


def test_without_known_totals_there_is_no_eta():
    unknown = start(total_steps=None, total_samples=None, epoch_samples=None)
    assert start_line(unknown) == "training  synthetic  2 epochs  batch 100"
    assert written(("on_log", log(700)), started=unknown) == [
        "step 700  epoch 2/2  loss 0.5432  41,003 samples/s  wait 2 %   812 MB"
    ]


def test_estimated_totals_are_said_to_be_so_and_never_show_a_wrong_epoch():
    estimated = start(total_steps=None, estimated=True)
    assert start_line(estimated) == "training  synthetic  about 120,000 samples in 2 epochs  batch 100"
    texts = [written(("on_log", log(number)), started=estimated)[0] for number in (599, 600, 601, 1201)]
    assert [text.split("  ")[1] for text in texts] == ["epoch 0.99", "epoch 0.99", "epoch 1.00", "epoch 1.99"]
    assert "ETA 0:00" in texts[-1]


def test_a_number_of_steps_that_ends_the_run_before_its_epochs_is_what_is_told():
    capped = start(total_steps=300, total_samples=30_000)
    assert start_line(capped) == "training  synthetic  30,000 samples  batch 100  300 steps"
    assert written(("on_log", log(150)), started=capped)[0].split("  ")[1] == "epoch 0.25"


@pytest.mark.parametrize("rate", [0.0, math.nan, math.inf])
def test_a_rate_that_says_nothing_gives_no_eta(rate):
    assert "ETA" not in written(("on_log", log(700, samples_per_second=rate)))[0]


def test_events_read_as_documented():
    assert written(
        ("on_evaluation", evaluation(200)),
        ("on_evaluation", evaluation(400, best=False)),
        ("on_checkpoint", checkpoint(400)),
        ("on_message", "look here"),
    ) == [
        "validation  step 200/1,200    AUC 0.7812  log loss 0.5530  normalized entropy 0.8061  (best)",
        "validation  step 400/1,200    AUC 0.7812  log loss 0.5530  normalized entropy 0.8061",
        f"checkpoint  {checkpoint(400).path}  12.3 MB in 0.1 s",
        "note: look here",
    ]


def test_a_resumed_run_says_from_where():
    assert start_line(start(first_step=400)).endswith("  1,200 steps  resumed at step 400")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SUMMARY),
        ({"best_auc": None}, SUMMARY.replace("  (Bayes-optimal 0.8312)", "")),
        ({"test": None}, SUMMARY.splitlines()[-1]),
        ({"reason": "SIGTERM", "step": 1100}, f"{SUMMARY}\nended by            SIGTERM after step 1,100"),
        ({"seconds": 3725.0}, SUMMARY.replace("24.9 s", "1:02:05")),
    ],
)
def test_the_summary_keeps_its_format(changes, expected):
    assert summary(end(**changes)) == expected


def test_every_line_is_flushed_and_a_closed_pipe_ends_training():
    class Pipe(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed += 1
            if self.flushed > 2:
                raise BrokenPipeError

    stream = Pipe()
    lines = Lines(stream)
    lines.on_start(start())
    lines.on_log(log(100))
    assert stream.flushed == 2
    with pytest.raises(BrokenPipeError):
        lines.on_log(log(200))


def test_a_text_that_the_stream_cannot_encode_is_still_shown():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    lines = Lines(stream)
    lines.on_message("f\N{LATIN SMALL LETTER U WITH DIAERESIS}r \udcff \x1b[31m")
    assert stream.buffer.getvalue() == rb"note: f\xfcr \udcff \x1b[31m" + b"\n"
    assert escape_unprintable("two\nlines", "utf-8") == "two\nlines"


def test_the_default_stream_is_standard_output(capsys):
    make_display().on_message("hello")
    assert capsys.readouterr().out == "note: hello\n"


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal()), Lines)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3725, "1:02:05"), (math.inf, "?")]
)
def test_durations(seconds, expected):
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0.00 MB"),
        (1_234_567, "1.23 MB"),
        (12_345_678, "12.3 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1.00 GB"),
    ],
)
def test_sizes(num_bytes, expected):
    assert format_bytes(num_bytes) == expected


def test_folding_breaks_between_fields_only():
    assert wrap_line("training  some data  batch 100", 20) == "training  some data\n  batch 100"
    assert wrap_line("checkpoint  a/very/long/path/of/a/run", 10) == "checkpoint\n  a/very/long/path/of/a/run"
    assert wrap_line("unbreakable", 5) == "unbreakable"
    assert wrap_line("short  line", 80) == "short  line"


def test_what_the_library_logs_is_a_note_on_stderr_while_it_trains(capsys):
    logger = logging.getLogger("tritonemb.some.module")
    display = Lines(io.StringIO())
    display.on_start(start())
    logger.info("compiling %d kernels", 3)
    display.on_end(None)
    logger.info("unseen")
    assert capsys.readouterr().err == "note: compiling 3 kernels\n"


class TestLive:
    @pytest.fixture(autouse=True)
    def _terminal(self, monkeypatch):
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        for name in ("NO_COLOR", "LINES"):
            monkeypatch.delenv(name, raising=False)
        self.stream, self.now = Terminal(), 0.0

    def view(self, **changes):
        view = LiveView(self.stream, clock=lambda: self.now)
        view.on_start(start(**changes))
        return view

    def shown(self) -> list[str]:
        """Lines written since the last call, without control sequences."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.stream.getvalue())
        self.stream.truncate(0)
        self.stream.seek(0)
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def test_a_terminal_gets_the_live_view(self):
        assert isinstance(make_display(self.stream), LiveView)

    def test_a_terminal_that_is_gone_is_told_and_does_not_end_training(self, monkeypatch, capsys):
        def write(text):
            raise OSError("the terminal is gone")

        monkeypatch.setattr(self.stream, "write", write)
        callbacks = CallbackList([LiveView(self.stream)])
        callbacks.on_start(start())
        callbacks.on_step(step(1))
        callbacks.on_end(None)
        assert "LiveView cannot write: the terminal is gone. Training continues" in capsys.readouterr().err

    def test_it_draws_at_most_twice_a_second(self):
        view = self.view()
        self.shown()
        draws = 0
        for number in range(1, 101):
            self.now = number / 100
            view.on_step(step(number))
            draws += bool(self.shown())
        view.on_end(None)
        assert draws == 2

    @pytest.mark.parametrize("total", [STEPS, 1_000_000, None])
    @pytest.mark.parametrize("columns", [80, 40, 200])
    def test_every_line_fits(self, monkeypatch, columns, total):
        monkeypatch.setenv("COLUMNS", str(columns))
        view = self.view(total_steps=total, total_samples=total and total * 100)
        view.on_evaluation(evaluation(600))
        self.now = 1.0
        view.on_log(log(600, loss=math.nan, dense_lr=None, memory_bytes=123 * 10**9))
        self.now = 2.0
        view.on_step(step(600))
        view.on_end(None)
        assert max(map(len, self.shown())) <= columns

    def test_it_shows_where_training_stands(self):
        view = self.view()
        self.now = 0.5
        view.on_step(step(300))
        self.shown()
        view.on_evaluation(evaluation(500, auc=0.7703, best=False))
        view.on_log(log(600))
        lines = [line for line in self.shown() if "%" not in line or "wait" in line]
        assert lines == [
            "validation  step 500/1,200    AUC 0.7703  log loss 0.5530",
            "  normalized entropy 0.8061",
            "step 600/1,200    epoch 1.00  loss 0.5432  41,003 samples/s  wait 2 %   812 MB",
        ]
        self.now = 1.0
        view.on_step(step(600))
        (bar,) = self.shown()
        view.on_end(None)
        assert re.fullmatch(r"step 600/1,200 +\S+  50% 0:00:0\d", bar.replace("\u2501", "-"))

    def test_events_stay_above_and_the_summary_ends_it(self):
        train([make_display(self.stream)])
        lines = self.shown()
        assert sum(line.startswith("checkpoint") for line in lines) == 6
        assert "note: 12 rows were skipped" in lines
        assert "\n".join(lines[-4:]) == SUMMARY

    def test_markup_in_a_message_is_text(self):
        view = self.view()
        view.on_message("[bold]:smile: [/nothing] 1.5")
        view.on_end(None)
        assert "note: [bold]:smile: [/nothing] 1.5" in self.shown()

    def test_a_failure_gives_the_terminal_back_and_leaves_the_last_state(self, monkeypatch):
        monkeypatch.setattr(sys, "stdout", self.stream)
        view = self.view()
        assert sys.stdout is not self.stream  # prints of others go above the view
        view.on_step(step(600))
        view.on_end(None)
        assert sys.stdout is self.stream
        hidden, shown = self.stream.getvalue().rfind("\x1b[?25l"), self.stream.getvalue().rfind("\x1b[?25h")
        assert 0 <= hidden < shown
        assert "600/1,200" in self.stream.getvalue().rpartition("\x1b[2K")[2]  # and is not erased

    def test_a_finished_view_is_erased(self):
        view = self.view()
        view.on_step(step(600))
        view.on_end(end())
        tail = self.stream.getvalue().rpartition("\x1b[2K")[2]
        assert "600/1,200" not in tail
        assert SUMMARY in tail

    def test_errors_that_go_to_a_file_stay_there(self, monkeypatch):
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stdout", self.stream)
        monkeypatch.setattr(sys, "stderr", errors)
        view = self.view()
        print("a warning", file=sys.stderr)
        view.on_end(None)
        assert errors.getvalue() == "a warning\n"

    def test_a_second_fit_starts_afresh(self):
        view = self.view()
        view.on_evaluation(evaluation(400))
        view.on_end(end())
        self.shown()
        view.on_start(start(first_step=1200))
        lines = self.shown()
        view.on_end(None)
        assert any("resumed at step 1,200" in line for line in lines)
        assert not any("0.7812" in line for line in lines)
