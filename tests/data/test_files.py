import os
import re
from pathlib import Path
from typing import get_args

import pytest

from tests.data.logs import line, options, pa, random_lines, rows_of, write
from tritonemb.data import CRITEO, ClickLog, LogOptions, SplitRule, convert
from tritonemb.data.click_log import SOURCES
from tritonemb.data.files import SUFFIXES, Format, Part, find_files, natural_sort_key
from tritonemb.data.parquet import ArrowSource
from tritonemb.data.pipeline import LogSource
from tritonemb.data.text import TextSource

GOOD = line()


def convert_to(path: Path, target: Path) -> Path:
    target.unlink(missing_ok=True)
    convert(path, target)
    return target


def test_natural_order():
    names = ["a", "day_0", "day_1", "day_2", "day_10", "part-9.gz", "part-00010.gz"]
    assert sorted(sorted(names), key=natural_sort_key) == names


def test_a_folder_has_its_data_files_in_order(tmp_path):
    for name in ("day_10", "day_9.gz", "day_0", ".hidden", "_SUCCESS", "_metadata"):
        write(tmp_path, [GOOD], name)
    (tmp_path / "more").mkdir()
    assert [file.path.name for file in find_files(tmp_path)] == ["day_0", "day_9.gz", "day_10"]
    assert [(file.format, file.codec, file.stem) for file in find_files(tmp_path)][1] == ("text", "gzip", "day_9")


def test_folders_beside_files_are_not_left_out_silently(tmp_path):
    write(tmp_path, [GOOD], "day_0")
    for name in ("more", "_old"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [GOOD], "day_1")
    with pytest.raises(ValueError, match=r"contains folders, whose files are not read: more; move the files"):
        find_files(tmp_path)


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
        (nothing, "nothing: no data files in this folder"),
        ([], "no files given"),
        ([write(tmp_path, [GOOD]), tmp_path / "missing"], "missing: no such file or folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            ClickLog(source, options())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file; pipes and devices cannot be read twice"):
        ClickLog(tmp_path / "pipe", options())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path):
    path = write(tmp_path, [GOOD])
    path.chmod(0)
    with pytest.raises(ValueError, match=r"train.txt cannot be read: Permission denied"):
        ClickLog(path, options())


def test_names_and_contents_must_agree(tmp_path):
    packed = write(tmp_path, [GOOD], "log.gz").read_bytes()
    for name, content, message in (
        ("plain.gz", GOOD.encode(), "plain.gz is not a gzip file, as its name says; rename it or fetch it again"),
        ("plain.zst", packed, "plain.zst is not a zstd file"),
        ("packed.txt", packed, "packed.txt is compressed with gzip: rename it to end with .gz"),
        ("packed.bz2", b"BZh9123", "packed.bz2 is compressed with bzip2: decompress it, or use gzip or zstd"),
        ("table.txt", b"PAR1....", "table.txt is a Parquet file by its contents; rename it to end with .parquet"),
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
    with pytest.raises(ValueError, match=r"day_2.parquet is Parquet and .* text: a log has one format"):
        ClickLog(folder, options())


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    path = write(tmp_path, [GOOD])
    os.rename(path, os.fsencode(tmp_path) + b"/log-\xff.txt")
    with pytest.raises(ValueError, match=r"names of files must be UTF-8 .*; rename them"):
        ClickLog(tmp_path, options())


def test_zstd_files_may_have_skippable_frames(tmp_path):
    """pzstd writes one before each frame."""
    lines, zstd = random_lines(20), pa.Codec("zstd")
    frames = [
        zstd.compress(b"".join(line + b"\n" for line in lines[part]), asbytes=True) for part in (slice(9), slice(9, 20))
    ]
    skippable = b"\x50*M\x18" + (4).to_bytes(4, "little")
    (tmp_path / "log.zst").write_bytes(
        b"".join(skippable + len(frame).to_bytes(4, "little") + frame for frame in frames)
    )
    assert rows_of(ClickLog(tmp_path / "log.zst", options())) == rows_of(ClickLog(write(tmp_path, lines), options()))


def test_an_empty_compressed_file_is_refused(tmp_path):
    path = write(tmp_path, [], "log.gz")
    with pytest.raises(ValueError, match=r"log.gz is empty"):
        ClickLog(path, options())


def test_a_file_of_empty_lines_has_no_rows(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\n\r\n\n")
    with pytest.raises(ValueError, match="there are no train rows"):
        rows_of(ClickLog(path, options()))


@pytest.mark.parametrize("name", ["log.txt", "log.txt.gz", "log.txt.zst", "log.parquet"])
@pytest.mark.parametrize("num_rows", [150, 250])
def test_a_file_that_has_changed_is_refused(tmp_path, name, num_rows):
    lines = random_lines(250)

    def put(count: int) -> Path:
        path = write(tmp_path, lines[:count], "text.txt" if name.endswith(".parquet") else name)
        return convert_to(path, tmp_path / name) if name.endswith(".parquet") else path

    path = put(200)
    log = ClickLog(path, options(SplitRule()))
    old = path.stat().st_size
    for split in ("train", "test"):
        assert rows_of(log, split)
    put(num_rows)
    message = rf"{name} has changed since it was opened: it had {old} bytes and now has {path.stat().st_size}; "
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=message):
            rows_of(log, split)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.few(1)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, split, more):
    lines = random_lines(100) * 30
    path = write(tmp_path, lines)
    log = ClickLog(path, options(SplitRule(test_share=0.5), chunk_bytes=4000, parser_threads=1, shuffle_rows=8))
    with log.open(split, 8, shuffle=True) as stream:
        next(stream)
        if more:
            with path.open("ab") as file:
                file.write(lines[0] + b"\n")
        else:
            os.truncate(path, sum(len(line) + 1 for line in lines[: 2900 if split == "test" else 1400]))
        if more and split == "train":  # its rows are what they were
            assert sum(map(len, stream)) > 1000
        else:
            with pytest.raises(ValueError, match=r"train.txt has changed since it was opened: it had"):
                list(stream)


def test_parquet_of_the_same_size_with_fewer_rows_is_refused(tmp_path):
    path = convert_to(write(tmp_path, random_lines(50)), tmp_path / "log.parquet")
    file = find_files(path)[0]
    with pytest.raises(ValueError, match=r"log.parquet has changed .*: it had at least 60 rows and now has 50; "):
        list(ArrowSource((file,), LogOptions(CRITEO), True, ()).chunks(Part(0, 0, 60), 0, 1000, 0, 0))


def test_text_of_the_same_packed_size_with_less_in_it_is_refused(tmp_path):
    path = write(tmp_path, random_lines(50), "log.txt.gz")
    with pytest.raises(
        ValueError, match=r"log.txt.gz has changed .*: its text ends at byte \d+ and had at least 90000"
    ):
        list(TextSource(find_files(path), LogOptions(), True, ()).chunks(Part(0, 0, 90_000), 0, 1000, 0, 0))


def test_every_format_has_a_source():
    assert set(SOURCES) == set(get_args(Format)) >= {"text", *SUFFIXES.values()}
    assert all(LogSource in source.__mro__ for source in SOURCES.values())
