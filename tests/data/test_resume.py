"""A stream left after any batch and opened again at its position goes on with the same bits."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.logs import line, options, random_lines, rows_of, same, write
from tritonemb.data import ClickLog, SplitRule, convert, make_synthetic

NUM_ROWS = 200
NAMES = ("log.txt", "log.txt.gz", "log.txt.zst", "log.parquet", "folder", "folder.parquet")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    lines = random_lines(NUM_ROWS)
    lines[7:7] = [b"bad", b"", b"worse"]
    for name in NAMES[:3]:
        write(folder, lines, name)
    convert(folder / "log.txt", folder / "log.parquet", row_group_rows=70, options=options(on_bad_row="skip"))
    (folder / "folder").mkdir()
    for number, start in enumerate(range(0, len(lines), 50)):
        write(folder / "folder", lines[start : start + 50], f"part_{number}.txt")
    convert(folder / "folder", folder / "folder.parquet", row_group_rows=33, options=options(on_bad_row="skip"))
    return folder


@given(
    name=st.sampled_from(NAMES),
    batch_size=st.integers(1, 90),
    shuffle_rows=st.integers(0, 200),
    chunk_bytes=st.tuples(st.integers(1500, 20_000), st.integers(1500, 20_000)),
    split=st.sampled_from(("train", "test")),
    rule=st.sampled_from((SplitRule(), SplitRule(split_by="random", test_share=0.3))),
    stop=st.integers(0, 60),
    seed=st.integers(0, 3),
)
def test_the_rest_has_the_same_bits(logs, name, batch_size, shuffle_rows, chunk_bytes, split, rule, stop, seed):
    kwargs = {"seed": seed, "epoch": 1, "shuffle": True}
    first, second = (
        ClickLog(
            logs / name,
            options(rule, on_bad_row="skip", chunk_bytes=size, shuffle_rows=shuffle_rows, parser_threads=threads),
        )
        for size, threads in zip(chunk_bytes, (1, 3), strict=True)
    )
    with first.open(split, batch_size, **kwargs) as stream:
        whole = list(stream)
        report = stream.report
    stop = min(stop, len(whole))
    with first.open(split, batch_size, **kwargs) as stream:
        assert same(itertools.islice(stream, stop), whole[:stop])
        position = json.loads(json.dumps(stream.position))
    with second.open(split, batch_size, **kwargs, position=position) as stream:
        assert stream.position == position
        assert stream.report.rows == sum(map(len, whole[:stop]))
        assert same(stream, whole[stop:])
        assert (stream.report.rows, stream.report.skipped) == (report.rows, report.skipped)


def test_formats_give_the_same_batches(logs):
    streams = [ClickLog(logs / name, options(on_bad_row="skip")).open("train", 32, shuffle=True) for name in NAMES]
    expected = list(streams[0])
    assert sum(map(len, expected)) == NUM_ROWS
    for stream in streams[1:]:
        assert same(stream, expected)


def test_shuffling_stays_inside_windows_and_follows_seed_and_epoch(tmp_path):
    lines = [line(integers={1: str(number)}) for number in range(100)]
    log = ClickLog(write(tmp_path, lines), options(shuffle_rows=25, log_transform=False, chunk_bytes=700))

    def order(**kwargs):
        return [int(row[1]) for row in rows_of(log, batch_size=10, **kwargs)]

    assert order() == list(range(100))
    shuffled = order(shuffle=True)
    for start in range(0, 100, 30):  # 25 rows, rounded up to whole batches
        assert sorted(shuffled[start : start + 30]) == list(range(start, min(start + 30, 100)))
        assert shuffled[start : start + 30] != sorted(shuffled[start : start + 30])
    places = [[row % 30 for row in shuffled[start : start + 30]] for start in (0, 30)]
    assert places[0] != places[1]
    assert len({tuple(order(shuffle=True, seed=seed, epoch=epoch)) for seed in (0, 2) for epoch in range(2)}) == 4
    assert order(shuffle=True, seed=2, epoch=1) == order(shuffle=True, seed=2, epoch=1)
    unshuffled = ClickLog(log.files[0], options(shuffle_rows=0, log_transform=False))
    assert [int(row[1]) for row in rows_of(unshuffled, shuffle=True)] == list(range(100))


def test_a_position_of_something_else_is_refused(tmp_path):
    log = ClickLog(write(tmp_path, random_lines(40)), options(SplitRule()))
    other = ClickLog(write(tmp_path, random_lines(41), "other.txt"), options(SplitRule()))
    with log.open("train", 4, shuffle=True) as stream:
        next(stream)
        position = stream.position
    for data, split, batch_size, kwargs in (
        (log, "test", 4, {"shuffle": True}),
        (log, "train", 5, {"shuffle": True}),
        (log, "train", 4, {"shuffle": True, "seed": 1}),
        (log, "train", 4, {"shuffle": True, "epoch": 1}),
        (log, "train", 4, {}),
        (other, "train", 4, {"shuffle": True}),
    ):
        with pytest.raises(ValueError, match="this position is of a stream of other data or with other settings"):
            data.open(split, batch_size, **kwargs, position=position)
    for wrong, message in (
        ({}, "is not a position of this data set, whose fields are"),
        (position | {"more": 1}, "is not a position of this data set"),
        (position | {"offset": -1}, "the position's 'offset' is -1, expected an int of 0 or more"),
        (position | {"window": "1"}, "the position's 'window' is '1'"),
        (position | {"part": 1}, "the position is in a file that is not in the train split"),
        (position | {"batch": 1 << 40}, "the position is in batch"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            log.open("train", 4, shuffle=True, position=wrong)
    for wrong in (position | {"skip": 1000}, position | {"batch": 100}):
        with (
            log.open("train", 4, shuffle=True, position=wrong) as stream,
            pytest.raises(ValueError, match=r"fewer rows than the position requires"),
        ):
            next(stream)


def test_a_position_in_memory_is_checked():
    data = make_synthetic(1000, 500)
    with data.open("train", 128) as stream:
        position = stream.position
    for wrong, message in (
        (position | {"row": 5}, "no batch of 128 begins at row 5 of 1000"),
        (position | {"row": 1024}, "no batch of 128 begins at row 1024 of 1000"),
        ({"row": 0}, "is not a position of this data set"),
    ):
        with pytest.raises(ValueError, match=message):
            data.open("train", 128, position=wrong)
    with pytest.raises(ValueError, match="other data or with other settings"):
        data.open("train", 64, position=position)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        data.open("train", 0)


def test_rows_that_were_read_are_known(tmp_path):
    log = ClickLog(write(tmp_path, [*random_lines(40), b"bad"]), options(on_bad_row="skip"))
    assert log.num_rows("train") is None
    with log.open("train", 16) as stream:
        next(stream)
        position = stream.position
    assert log.num_rows("train") is None
    list(log.open("train", 16, position=position))
    assert log.num_rows("train") == 40


@pytest.mark.parametrize("num_good", [100, 128, 129, 256])
def test_bad_rows_after_the_last_batch_are_counted(tmp_path, num_good):
    path = write(tmp_path, [*random_lines(num_good), *[b"bad"] * 500])
    log = ClickLog(path, options(on_bad_row="skip", chunk_bytes=4096, shuffle_rows=128))
    with log.open("train", 128, shuffle=True) as stream:
        assert sum(map(len, stream)) == num_good
        assert (stream.report.rows, stream.report.skipped) == (num_good, 500)
        assert stream.report.reasons == ((f"{path}: not 40 fields", 500),)
        position = stream.position
    with log.open("train", 128, shuffle=True, position=position) as stream:
        assert list(stream) == []
        assert (stream.report.rows, stream.report.skipped) == (num_good, 500)


def test_a_run_that_a_bad_row_stopped_goes_on_without_it(tmp_path):
    lines = random_lines(80)
    path = write(tmp_path, [*lines[:50], b"bad", *lines[50:]])
    strict, lenient = (
        ClickLog(path, options(on_bad_row=kwargs, chunk_bytes=1000, shuffle_rows=16)) for kwargs in ("raise", "skip")
    )
    whole = list(lenient.open("train", 8, shuffle=True))
    with strict.open("train", 8, shuffle=True) as stream:
        initial = list(itertools.islice(stream, 2))
        position = stream.position
    with lenient.open("train", 8, shuffle=True, position=position) as stream:
        assert same([*initial, *stream], whole)
        assert stream.report.skipped == 1


def test_a_run_that_left_out_rows_can_not_become_strict(tmp_path):
    lines = random_lines(80)
    path = write(tmp_path, [*lines[:40], b"bad", *lines[40:], b"bad"])
    strict, lenient = (ClickLog(path, options(on_bad_row=kwargs, chunk_bytes=1000)) for kwargs in ("raise", "skip"))
    with lenient.open("train", 8) as stream:
        list(itertools.islice(stream, 3))
        early = stream.position
    with lenient.open("train", 8) as stream:
        list(stream)
        late = stream.position
    assert (early["skipped"], late["skipped"]) == (0, 1)
    with strict.open("train", 8, position=early) as stream, pytest.raises(ValueError, match="line 41"):
        list(stream)
    with pytest.raises(ValueError, match="1 bad rows were skipped before this position, so it cannot resume with"):
        strict.open("train", 8, position=late)
