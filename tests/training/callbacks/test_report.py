import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.training.callbacks.events import end, evaluation, log, start, step, train
from tritonemb.training.callbacks import FitEnd
from tritonemb.training.callbacks.jsonl import RunLog, read_run_log
from tritonemb.training.callbacks.report import (
    COUNT,
    HEIGHT,
    PLAIN,
    RATE,
    SHARE,
    WIDTH,
    HtmlReport,
    chart,
    render,
    thin,
    ticks,
    write_report,
)

EVIL = "<script>alert('1')</script>&\"\x1b[0m\x00\udcff"
OPEN = {"meta", "link", "br", "img", "input", "hr"}  # never closed in HTML


class Checker(HTMLParser):
    """Fails where elements are not nested."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.urls += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in OPEN:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def parsed(text: str) -> ElementTree.Element:
    """The page, after checks that hold for every page."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.stack == []
    assert not {"script", "link", "iframe", "img", "object"} & set(checker.tags)
    assert checker.urls == []
    assert not re.search(r"https?:|url\(|@import|\bon\w+=", text)
    page = ElementTree.fromstring(text)
    for svg in page.iter("svg"):
        assert svg.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
        check_svg(svg)
    return page


def check_svg(svg: ElementTree.Element) -> None:
    for element in svg.iter():
        if element.tag == "polyline":
            places = [tuple(map(float, place.split(","))) for place in element.get("points").split()]
            assert 2 <= len(places) <= 1000
            assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
            if element.get(name) is not None:
                assert 0 <= float(element.get(name)) <= WIDTH, (element.tag, name)


def check_chart(drawn: dict) -> None:
    """Every place of a chart is within the picture."""
    places = [at for curve in drawn["curves"] for line in (*curve["lines"], curve["dots"]) for at in line]
    places += [(0, y) for y, _ in drawn["y_ticks"]] + [(x, 0) for x, _ in drawn["x_ticks"] + drawn["resumed"]]
    places += [] if drawn["level"] is None else [(0, drawn["level"][0])]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def words(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def report(tmp_path: Path) -> ElementTree.Element:
    path = tmp_path / "report.html"
    write_report(path, tmp_path / "run.jsonl")
    return parsed(path.read_text(encoding="utf-8"))


def callbacks(tmp_path: Path) -> list:
    log_path = tmp_path / "run.jsonl"
    return [RunLog(log_path), HtmlReport(tmp_path / "report.html", log_path)]


def test_a_run_ends_with_its_whole_report(tmp_path):
    train(callbacks(tmp_path))
    page = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    text = words(page.find("body"))
    for expected in (
        "synthetic finished",
        "test AUC 0.7808 Bayes-optimal 0.8312",
        "samples/s 41,733",
        "training time 24.9 s",
        "steps 1,200 120,000 samples",
        "validation AUC 0.7633 best, at step 1,200",
        "batch_size 100",
        "read.shuffle_rows 7",
        "12.3 MB",
        "450 12 rows were skipped",
    ):
        assert expected in text
    labels = [svg.get("aria-label") for svg in page.iter("svg")]
    assert labels == [
        "training loss over steps",
        "validation AUC over steps",
        "validation log loss over steps",
        "samples per second over steps",
        "waiting for data over steps",
        "memory over steps",
        "learning rate, dense over steps",
        "learning rate, tables over steps",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run.jsonl"]


def test_a_resumed_run_shows_the_whole(tmp_path):
    train(callbacks(tmp_path), last=700, ends=FitEnd("SIGTERM", 700, 70_000, 1.0, 1.0))
    stopped = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "stopped by SIGTERM" in words(stopped)
    assert "of 1,200" in words(stopped)
    train(callbacks(tmp_path), first=600)
    page = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "resumed at step 600" in words(page)
    titles = [words(title) for title in next(page.iter("svg")).iter("title")]
    assert titles.count("resumed at step 600") == 1


def test_a_failed_run_says_why(tmp_path):
    both = callbacks(tmp_path)
    try:
        train(both, last=300, ends=False)
        raise ValueError("the loss <is> nan")
    except ValueError:
        for callback in both:
            callback.on_end(None)
    text = words(report(tmp_path).find("body"))
    assert "failed" in text
    assert "ValueError: the loss <is> nan" in text


def test_a_run_that_still_goes_on_has_a_report(tmp_path):
    train([RunLog(tmp_path / "run.jsonl")], last=300, ends=False)
    assert "not ended" in words(report(tmp_path).find("body"))


@pytest.mark.parametrize("logs", [0, 1])
def test_a_run_of_hardly_a_step_has_a_report(tmp_path, logs):
    both = callbacks(tmp_path)
    for callback in both:
        callback.on_start(start())
        callback.on_step(step(1))
        for number in range(logs):
            callback.on_log(log(number + 1, dense_lr=None, table_lr=None))
        callback.on_end(end(test=None, best_auc=None, step=1))
    page = report(tmp_path)
    assert len(list(page.iter("svg"))) == 4 * logs
    assert ("Nothing was logged." in words(page)) == (logs == 0)
    if logs:
        assert not list(page.iter("polyline"))
        assert next(page.iter("svg")).find(".//circle") is not None


def test_an_empty_log_has_a_report(tmp_path):
    (tmp_path / "run.jsonl").write_text("")
    assert "Training run not ended" in words(report(tmp_path))
    assert parsed(render([])).tag == "html"


def test_any_text_is_escaped(tmp_path):
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(
        start(
            config={"data": EVIL, "model": EVIL, EVIL: [EVIL]},
            versions={EVIL: EVIL},
            folder=Path(EVIL.replace("\0", "")),
        )
    )
    run_log.on_message(EVIL)
    run_log.on_end(end(reason=EVIL))
    page = report(tmp_path)
    assert words(page).count("<script>alert('1')</script>&\"") >= 8
    assert not re.search("[\x00-\x08\x0b-\x1f]", words(page))


def test_a_nested_configuration_is_a_flat_table(tmp_path):
    features = [{"name": "user", "rows": 944, "bag": False}, {"name": "item", "rows": 7, "bag": True}]
    config = {"lr": 1 / 6, "mlp": [64, 32], "path": None, "read": {"split": {"by": "row"}}, "features": features}
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start(config=config))
    rows = [[words(cell) for cell in row.iter("td")] for row in report(tmp_path).iter("tr")]
    assert rows == [
        ["lr", "0.166667"],
        ["mlp", "64, 32"],
        ["path", "-"],
        ["read.split.by", "row"],
        ["features.user", "rows 944, bag False"],
        ["features.item", "rows 7, bag True"],
    ]


def test_numbers_that_are_not_finite_make_gaps(tmp_path):
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start())
    for number in range(1, 21):
        loss = {5: math.nan, 6: math.inf, 8: math.nan, 15: -math.inf}.get(number, 0.5)
        run_log.on_log(log(number, loss=loss, samples_per_second=math.nan))
    run_log.on_evaluation(evaluation(20, auc=math.nan))
    run_log.on_end(end(test=None, seconds=math.nan))
    page = report(tmp_path)
    lines = [line.get("points").split() for line in next(page.iter("svg")).iter("polyline")]
    assert [len(line) for line in lines] == [4, 6, 5]  # 7 stands alone
    assert words(page).count("no finite values") == 2  # samples/s, AUC


def test_a_metric_that_is_nan_is_not_the_best(tmp_path):
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start())
    for number, auc in ((100, math.nan), (200, 0.7), (300, 0.6), (400, math.nan)):
        run_log.on_evaluation(evaluation(number, auc=auc))
    assert "validation AUC 0.7000 best, at step 200" in words(report(tmp_path))


def test_values_apart_by_rounding_only_can_be_drawn():
    check_chart(chart([[(1, 0.3), (2, 0.1 + 0.2)]], PLAIN, 2))


def test_ten_thousand_logs_make_a_small_page(tmp_path):
    run_log = RunLog(tmp_path / "run.jsonl")
    run_log.on_start(start(total_steps=100_000))
    for number in range(10, 100_001, 10):
        run_log.on_log(log(number, loss=random.Random(number).random()))
    run_log.on_end(end(step=100_000))
    page = report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000
    assert sum(len(line.get("points").split()) for line in next(page.iter("svg")).iter("polyline")) > 500


def test_a_damaged_log_leaves_the_old_report(tmp_path):
    train(callbacks(tmp_path))
    initial = (tmp_path / "report.html").read_bytes()
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    (tmp_path / "run.jsonl").write_text("\n".join([lines[0], "{", *lines[1:], ""]))
    with pytest.raises(ValueError, match="line 2"):
        report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == initial


def test_thinning_keeps_extremes_and_gaps():
    points = [(number, math.sin(number / 500)) for number in range(100_000)]
    points[33_333] = (33_333, 7.0)
    points[66_666] = (66_666, -7.0)
    points[77_777] = (77_777, math.nan)
    thinned = thin(points)
    assert len(thinned) <= 1000
    assert {points[33_333], points[66_666], points[77_777]} <= set(thinned)
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    assert thin(points[:1000]) == points[:1000]
    assert len(thin([(number, math.nan if number % 2 else 1.0 + number % 3) for number in range(1001)])) <= 1000


@pytest.mark.parametrize(
    ("low", "high", "outside", "expected"),
    [
        (0, 20_000, False, [0, 5000, 10_000, 15_000, 20_000]),
        (0, 7, False, [0, 2, 4, 6]),
        (0.4723, 0.6931, True, [0.4, 0.5, 0.6, 0.7]),
        (0, 0.05, True, [0, 0.02, 0.04, 0.06]),
        (0, 0, True, [-1, -0.5, 0, 0.5, 1]),
        (0.5, 0.5, True, [0.45, 0.475, 0.5, 0.525, 0.55]),
    ],
)
def test_ticks_are_round(low, high, outside, expected):
    assert ticks(low, high, outside=outside) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_every_range_can_be_drawn(seed):
    """Ticks surround the values and every coordinate is within the picture, whatever the values are."""
    dice = random.Random(seed)
    centre, spread = dice.choice([-1, 0, 1]) * 10 ** dice.uniform(-12, 12), 10 ** dice.uniform(-12, 12)
    points = [(number, centre + dice.gauss(0, spread)) for number in range(dice.randint(1, 40))]
    low, high = min(y for _, y in points), max(y for _, y in points)
    actual = ticks(low, high, outside=True)
    slack = 1e-6 * (actual[-1] - actual[0])
    assert actual[0] <= low + slack
    assert actual[-1] >= high - slack
    assert 2 <= len(actual) <= 9
    for unit in (PLAIN, COUNT, SHARE, RATE):
        check_chart(chart([points, points[::2]], unit, 40, level=high, resumed=[3, 50]))


def test_tick_labels_have_the_digits_that_they_need():
    drawn = [label for _, label in chart([[(1, 0.0), (2, 0.01)]], PLAIN, 2)["y_ticks"]]
    assert drawn == ["0", "0.0025", "0.005", "0.0075", "0.01"]
    assert [PLAIN[1](value) for value in (0.25, 0.1 + 0.2, 2e-9)] == ["0.25", "0.3", "2e-09"]
    assert [COUNT[1](value) for value in (500, 1500, 2e6)] == ["500", "1.5k", "2M"]
    assert SHARE[1](0.07) == "7 %"


def test_the_log_is_read_as_the_report_needs_it(tmp_path):
    train([RunLog(tmp_path / "run.jsonl")])
    assert render(read_run_log(tmp_path / "run.jsonl")).count("<svg") == 8
