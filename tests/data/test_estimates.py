"""About how many rows a split has, before it has been read."""

import pytest

from tests.data.logs import random_lines, write
from tritonemb.data import ClickLog, LogOptions, SplitRule, convert, make_synthetic

NUM_ROWS = 6_000


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return random_lines(NUM_ROWS)


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
@pytest.mark.parametrize(
    ("rule", "share"),
    [
        (SplitRule(test_share=0.0), 1.0),
        (SplitRule(test_share=0.25), 0.75),
        (SplitRule(split_by="random", test_share=0.25, validation_share=0.25), 0.5),
    ],
    ids=["all", "end", "random"],
)
def test_text_is_estimated_by_its_first_lines(tmp_path, lines, name, rule, share):
    log = ClickLog(write(tmp_path, lines, name), LogOptions(split=rule))
    assert log.num_rows("train") is None
    assert log.estimated_rows("train") == pytest.approx(NUM_ROWS * share, rel=0.05)


def test_rows_that_are_known_are_not_estimated(tmp_path, lines):
    convert(write(tmp_path, lines), tmp_path / "train.parquet")
    log = ClickLog(tmp_path / "train.parquet")
    assert log.estimated_rows("train") == log.num_rows("train") == NUM_ROWS * 5 // 6
    assert make_synthetic(100, 10).estimated_rows("test") == 10
