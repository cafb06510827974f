import os
import re

import pytest

pytest.importorskip("pyarrow")

from tests.data.logs import line, options, rows_of, write
from tritonemb.data import ClickLog
from tritonemb.data.logs.files import find, natural

GOOD = line()


def test_natural_order():
    names = ["day_10", "day_2", "day_1", "part-00010.gz", "part-9.gz", "a", "day_0"]
    assert sorted(names, key=natural) == ["a", "day_0", "day_1", "day_2", "day_10", "part-9.gz", "part-00010.gz"]


def test_a_folder_has_its_data_files_in_order(tmp_path):
    for name in ("day_10", "day_9.gz", "day_0", ".hidden", "_SUCCESS", "_metadata"):
        write(tmp_path, [GOOD], name)
    (tmp_path / "more").mkdir()
    assert [file.path.name for file in find(tmp_path)] == ["day_0", "day_9.gz", "day_10"]
    assert [(file.format, file.codec, file.stem) for file in find(tmp_path)][1] == ("tsv", "gzip", "day_9")


def test_several_files_keep_their_order(tmp_path):
    paths = [write(tmp_path, [line("1")], "b"), write(tmp_path, [line("0")], "a")]
    log = ClickLog(paths, options())
    assert [row[0] for row in rows_of(log)] == [1, 0]
    assert log.name == tmp_path.name
    assert log.files == tuple(paths)


def test_what_can_not_be_read_is_named_at_once(tmp_path):
    empty, nothing = tmp_path / "empty", tmp_path / "nothing"
    empty.write_bytes(b"")
    nothing.mkdir()
    for source, message in (
        (tmp_path / "missing", "missing: no such file or folder"),
        (empty, "empty is empty"),
        (nothing, "nothing: there are no data files in this folder"),
        ([], "no files are given"),
        ([write(tmp_path, [GOOD]), tmp_path / "missing"], "missing: no such file or folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            ClickLog(source, options())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file; logs are read more than once"):
        ClickLog(tmp_path / "pipe", options())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path):
    path = write(tmp_path, [GOOD])
    path.chmod(0)
    with pytest.raises(ValueError, match=r"train.txt can not be read: Permission denied"):
        ClickLog(path, options())


def test_names_and_contents_must_agree(tmp_path):
    packed = write(tmp_path, [GOOD], "log.gz").read_bytes()
    for name, content, message in (
        ("plain.gz", GOOD.encode(), "plain.gz is not a gzip file, as its name says; rename it or fetch it again"),
        ("plain.zst", packed, "plain.zst is not a zstd file"),
        ("packed.txt", packed, "packed.txt is compressed with gzip: let its name end with .gz"),
        ("packed.bz2", b"BZh9123", "packed.bz2 is compressed with bzip2: gzip and zstd can be read; unpack it"),
        ("table.txt", b"PAR1....", "table.txt holds Parquet but is not named so; let its name end with .parquet"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(message)):
            ClickLog(tmp_path / name, options())


def test_formats_are_not_mixed_and_no_file_is_read_twice(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    write(folder, [GOOD], "day_0")
    write(folder, [GOOD], "day_0.gz")
    with pytest.raises(ValueError, match=r"day_0 and .*day_0.gz look like the same data twice; keep one of them"):
        ClickLog(folder, options())
    (folder / "day_0.gz").rename(folder / "day_1.gz")
    (folder / "day_2.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"day_2.parquet is Parquet and .* is text: a log has files of one format"):
        ClickLog(folder, options())


def test_an_empty_compressed_file_is_refused(tmp_path):
    path = write(tmp_path, [], "log.gz")
    with pytest.raises(ValueError, match=r"log.gz is empty"):
        ClickLog(path, options())


def test_a_file_of_empty_lines_has_no_rows(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\n\r\n\n")
    with pytest.raises(ValueError, match="there are no train rows"):
        rows_of(ClickLog(path, options()))
