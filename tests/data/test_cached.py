"""Text logs that are read more than once: converted once, with the same batches."""

import os
import re

import pytest

from tests.data.logs import ALL_TRAIN, line, options, random_lines, resumes, rows_of, same, write
from tritonemb.data import ClickLog, LogOptions, Schema, SplitRule, cached_as_parquet, convert

RULES = {
    "all": ALL_TRAIN,
    "end": SplitRule(validation_share=0.2),
    "random": SplitRule(split_by="random", validation_share=0.2),
}


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("name", ["log.txt", "log.txt.gz"])
@pytest.mark.few(1)
def test_batches_and_reports_are_the_same(tmp_path, name, rule):
    lines = [entry for row in random_lines(80) for entry in (row, b"bad" if row[-1:] == b"7" else b"")]
    log = ClickLog(
        write(tmp_path, lines, name), options(RULES[rule], on_bad_row="skip", shuffle_rows=30, chunk_bytes=2000)
    )
    seen = []
    cached = cached_as_parquet(log, tmp_path / "cache", lambda rows, total: seen.append((rows, total)))
    assert (cached.splits(), cached.encoding, cached.features) == (log.splits(), log.encoding, log.features)
    assert cached.contents == log.contents
    assert list(log.contents) == ["split", name]
    assert seen[-1][0] == 80
    assert all(total is not None for _, total in seen)
    for split in log.splits():
        streams = [source.open(split, 8, shuffle=True, seed=5, epoch=1) for source in (log, cached)]
        assert same(*streams)
        assert streams[0].report == streams[1].report
        assert cached.num_rows(split) == streams[0].report.rows
        assert sum(cached.open(split, 8, shard=(index, 3)).report.skipped for index in range(3)) == (
            streams[0].report.skipped
        )


def test_it_is_written_once(tmp_path):
    path = write(tmp_path, random_lines(50))
    first = cached_as_parquet(ClickLog(path, options()), tmp_path / "cache")
    seen = []
    other = ClickLog(path, options(chunk_bytes=999, parser_threads=1))
    second = cached_as_parquet(other, tmp_path / "cache", lambda *rows: seen.append(rows))
    assert not seen
    assert second.files == first.files
    assert resumes(first, other=second, shuffle=True)
    for changed in (options(sparse=("cat_1",), label="label"), options(SplitRule()), options(on_bad_row="skip")):
        cached_as_parquet(ClickLog(path, changed), tmp_path / "cache", lambda *rows: seen.append(rows))
        assert seen
        seen.clear()
    assert cached_as_parquet(first, tmp_path / "cache") is first
    fewer = cached_as_parquet(
        ClickLog(path, options(num_embeddings=9)), tmp_path / "cache", lambda *rows: seen.append(rows)
    )
    assert not seen  # the values are the same
    assert same(fewer.open("train", 8), ClickLog(path, options(num_embeddings=9)).open("train", 8))
    path.write_bytes(path.read_bytes().replace(b"a", b"b"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    changed = ClickLog(path, options())
    assert same(cached_as_parquet(changed, tmp_path / "cache").open("train", 8), changed.open("train", 8))


def test_roles_of_columns_that_skip_other_rows_have_other_files(tmp_path):
    rows = [f"{row % 2},{-1.5 if row % 3 == 0 else row},{row % 5 or ''},u{row % 7}" for row in range(60)]
    path = write(tmp_path, ["y,a,b,u", *rows], "log.csv")
    roles = [
        {"label": "y", "dense": ("a",)},
        {"label": "y", "dense": ("a",), "log_transform": True},
        {"label": "y", "dense": ("a",), "log_transform": True, "clamp_negative": True},
        {"label": "y", "weight": "a"},
        {"label": "y", "dense": ("a", "b"), "log_transform": ("b",)},
        {"label": "y", "dense": ("b",), "weight": "a"},
        {"label": "y", "dense": ("a",), "weight": "b"},
    ]
    for role in roles:
        log = ClickLog(path, LogOptions(Schema(sparse=("u",), **role), on_bad_row="skip"))
        cached = cached_as_parquet(log, tmp_path / "cache")
        assert [rows_of(cached, split) for split in log.splits()] == [rows_of(log, split) for split in log.splits()]


def test_an_interrupted_conversion_begins_again(tmp_path):
    path = write(tmp_path, [*random_lines(50), line("x")])
    log = ClickLog(path, options(chunk_bytes=500))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 51: field 1 (label) is 'x'")):
        cached_as_parquet(log, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*.parquet"))
    path = write(tmp_path, random_lines(50))

    def stop(rows, total):
        raise KeyboardInterrupt

    log = ClickLog(path, options(SplitRule()))
    with pytest.raises(KeyboardInterrupt):
        cached_as_parquet(log, tmp_path / "cache", stop)
    assert rows_of(cached_as_parquet(log, tmp_path / "cache"), "test") == rows_of(log, "test")


def test_splits_without_rows_and_other_formats(tmp_path):
    log = ClickLog(write(tmp_path, [line(), "x"]), options(SplitRule(test_share=0.02), on_bad_row="skip"))
    cached = cached_as_parquet(log, tmp_path / "cache")
    assert rows_of(cached) == rows_of(log)
    for source in (log, cached):
        with pytest.raises(ValueError, match=r"there are no test rows \(1 bad rows were skipped\)"):
            rows_of(source, "test")
    convert(write(tmp_path, random_lines(5)), tmp_path / "log.parquet")
    table = ClickLog(tmp_path / "log.parquet", options())
    assert cached_as_parquet(table, tmp_path / "cache") is table
