"""About how many rows a split has, before it has been read."""

import gzip
import random

import pytest

pytest.importorskip("pyarrow")

from tritonemb.data import ClickLog, LogOptions, SplitRule, convert, make_synthetic

NUM_ROWS = 6_000


@pytest.fixture(scope="module")
def lines() -> bytes:
    chance = random.Random(0)
    rows = []
    for _ in range(NUM_ROWS):
        integers = [str(chance.randrange(10_000)) if chance.random() < 0.8 else "" for _ in range(13)]
        categories = [f"{chance.randrange(1 << 32):08x}" if chance.random() < 0.9 else "" for _ in range(26)]
        rows.append("\t".join([str(chance.randrange(2)), *integers, *categories]) + "\n")
    return "".join(rows).encode()


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
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    log = ClickLog(path, LogOptions(split=rule))
    assert log.num_rows("train") is None
    assert log.estimated_rows("train") == pytest.approx(NUM_ROWS * share, rel=0.05)


def test_rows_that_are_known_are_not_estimated(tmp_path, lines):
    (tmp_path / "train.txt").write_bytes(lines)
    convert(tmp_path / "train.txt", tmp_path / "train.parquet")
    log = ClickLog(tmp_path / "train.parquet")
    assert log.estimated_rows("train") == log.num_rows("train") == NUM_ROWS * 5 // 6
    assert make_synthetic(100, 10).estimated_rows("test") == 10
