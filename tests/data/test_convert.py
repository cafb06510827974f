import re

import pytest

from tests.data.logs import line, options, parquet, random_lines, same, write
from tritonemb.data import ClickLog, convert


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_a_file_keeps_its_values(tmp_path, compression):
    lines = [
        line("1", {1: "", 2: "-2", 3: "123456789012345678"}, {1: "68FD1E64", 2: ""}),
        line("0", {1: "7", 2: "-", 3: "1"}),
        line("0", {1: "7", 2: "0", 3: "1"}, {1: "f", 2: "ffffffff"}),
    ]
    path, messages = write(tmp_path, lines), []
    settings = {"options": options(on_bad_row="skip"), "compression": compression, "progress": messages.append}
    report = convert(path, tmp_path / "log.parquet", **settings)
    assert (report.rows, report.skipped) == (2, 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.parquet", "train.txt"]
    assert messages[-1] == 2
    table = parquet.read_table(tmp_path / "log.parquet")
    columns = table.to_pydict()
    assert columns["label"] == [1, 0]
    assert [columns[f"int_{i}"] for i in (1, 2, 3)] == [[None, 7], [-2, 0], [123456789012345678, 1]]
    assert [columns[f"cat_{i}"] for i in (1, 2)] == [[0x68FD1E64, 15], [None, 0xFFFFFFFF]]
    assert [str(table.schema.field(name).type) for name in ("label", "int_1", "cat_1")] == ["int8", "int64", "uint32"]


def test_row_groups_have_the_number_of_rows_asked_for(tmp_path):
    path = write(tmp_path, random_lines(100), "log.gz")
    convert(path, tmp_path / "log.parquet", options=options(chunk_bytes=3000), row_group_rows=30)
    metadata = parquet.read_metadata(tmp_path / "log.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [30, 30, 30, 10]
    logs = [ClickLog(source, options()) for source in (path, tmp_path / "log.parquet")]
    assert same(*(log.open("train", 7, shuffle=True) for log in logs))


def test_a_folder_becomes_a_folder(tmp_path):
    (tmp_path / "text").mkdir()
    for day in (0, 1, 10):
        write(tmp_path / "text", random_lines(10, seed=day), f"day_{day}.gz")
    assert convert(tmp_path / "text", tmp_path / "parquet").rows == 30
    names = sorted(path.name for path in (tmp_path / "parquet").iterdir())
    assert names == ["day_0.parquet", "day_1.parquet", "day_10.parquet"]
    logs = [ClickLog(tmp_path / name, options()) for name in ("text", "parquet")]
    assert same(*(log.open("train", 8, shuffle=True) for log in logs))


def test_nothing_half_written_is_left(tmp_path):
    path = write(tmp_path, [*random_lines(50), line("x")])
    with pytest.raises(ValueError, match=r"train.txt, line 51: field 1 \(label\) is 'x'"):
        convert(path, tmp_path / "log.parquet", options=options(chunk_bytes=2000), row_group_rows=10)
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.txt"]


def test_mistakes_are_named(tmp_path):
    path = write(tmp_path, random_lines(5))
    convert(path, tmp_path / "log.parquet")
    for source, target, message in (
        (path, tmp_path / "log.parquet", "log.parquet exists already; remove it, or name another target"),
        (tmp_path / "log.parquet", tmp_path / "other", "log.parquet is Parquet already; only text files can"),
        (path, tmp_path / "nowhere" / "log.parquet", "nowhere: no such folder to write log.parquet to"),
        (tmp_path / "missing", tmp_path / "other", "missing: no such file or folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            convert(source, target)
    with pytest.raises(ValueError, match="row_group_rows must be at least 1, got 0"):
        convert(path, tmp_path / "other", row_group_rows=0)


def test_files_without_good_rows_leave_nothing(tmp_path):
    source = tmp_path / "logs"
    source.mkdir()
    for name in ("a", "b"):
        write(source, [line("7")], name)
    with pytest.raises(ValueError, match="logs has no valid rows to convert"):
        convert(source, tmp_path / "converted", options=options(on_bad_row="skip"))
    assert list(tmp_path.rglob("*.parquet")) == []
    # Beside files with rows they become files without.
    write(source, random_lines(5), "c")
    assert convert(source, tmp_path / "converted", options=options(on_bad_row="skip")).rows == 5
    rows = [parquet.read_metadata(tmp_path / "converted" / f"{name}.parquet").num_rows for name in "abc"]
    assert rows == [0, 0, 5]
    assert ClickLog(tmp_path / "converted", options()).num_rows("train") == 5
