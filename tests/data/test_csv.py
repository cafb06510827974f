"""CSV with a header: parsed at once, and line by line where a block has a bad line; the same rows either way."""

import csv
import io
import itertools
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import logs
from tests.data.logs import ALL_TRAIN, contents, options, pa, parquet, resumes, rows_of, same
from tritonemb.data import ClickLog, LogOptions, Schema, SplitRule, convert, delimited, open_dataset, open_for_scoring
from tritonemb.data.delimited import MAX_LINE_BYTES, CsvFormat, count_rows, parse, read_line
from tritonemb.data.protocol import Feature

SCHEMA = {"label": "click", "dense": ("price",), "sparse": ("user", "item"), "integers": ("item",)}
HEADER = "click,note,price,user,item"


def write(folder, *lines, name="log.csv", header=HEADER):
    return logs.write(folder, [header, *lines], name)


def reader(path, **changes):
    return ClickLog(path, options(changes.pop("split", ALL_TRAIN), **(SCHEMA | {"log_transform": False} | changes)))


def as_parquet(folder, columns):
    path = folder / "log.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.csv.zst"])
def test_rows_are_those_of_parquet(tmp_path, name):
    path = write(tmp_path, "1,a,1.5,ann,7", '0,"b, c",,"b ""x"" é",-1', "0,,1e3,,", "", "1,x,nan,ann,0", name=name)
    columns = {
        "click": [1, 0, 0, 1],
        "price": [1.5, None, 1000.0, None],
        "user": ["ann", 'b "x" é', None, "ann"],
        "item": [7, -1, None, 0],
    }
    table = reader(as_parquet(tmp_path, columns))
    assert rows_of(reader(path)) == rows_of(table)
    assert [row[1] for row in rows_of(reader(path))] == [1.5, 0.0, 1000.0, 0.0]
    assert reader(path).encoding == table.encoding


@pytest.mark.parametrize("written", ["\t", "\\t", ";", "|"])
def test_any_delimiter(tmp_path, written):
    delimiter = "\t" if written == "\\t" else written
    expected = rows_of(reader(write(tmp_path, "1,a,1.5,ann,7", "0,b,2,bob,8")))
    lines = [line.replace(",", delimiter) + "\r" for line in ("1,a,1.5,ann,7", "0,b,2,bob,8")]
    path = write(tmp_path, *lines, name="log.txt", header=HEADER.replace(",", delimiter))
    assert rows_of(reader(path, delimiter=written)) == expected


def test_integers_of_more_bits_than_float64_are_those_of_parquet(tmp_path):
    """Rounded to float64 first, as CSV is read, and requests are."""
    price = 2**60 + 2**36 + 1  # to float32 at once it would be rounded up
    path = write(tmp_path, f"1,a,{price},ann,7")
    table = as_parquet(tmp_path, {"click": [1], "price": [price], "user": ["ann"], "item": [7]})
    assert rows_of(reader(path)) == rows_of(reader(table))
    assert rows_of(reader(table))[0][1] == np.float32(float(price)) != np.float32(price + 2**20)


def test_a_tab_between_the_values_of_a_list_may_be_written_as_for_a_shell(tmp_path):
    log = reader(write(tmp_path, "1,a,1,x\ty,7"), list_separator=r"\t", lists=("user",), integers=())
    assert log.options.list_separator == "\t"
    (batch,) = log.open("train", 1)
    assert batch.sparse["user"].lengths().tolist() == [2]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_lists_are_those_of_parquet(tmp_path, chunk_bytes):
    path = write(tmp_path, "1,a,1,x|yy|x,7", "0,b,2,,8|-9|", '1,c,3,"z",', "0,d,4,|,1")
    columns = {"click": [1, 0, 1, 0], "price": [1, 2, 3, 4], "user": [["x", "yy", "x"], None, ["z"], [None, None]]}
    columns["item"] = [[7], [8, -9, None], None, [1]]
    logs = [reader(path, list_separator="|", chunk_bytes=chunk_bytes), reader(as_parquet(tmp_path, columns))]
    assert logs[0].encoding == logs[1].encoding
    assert [feature.kind for feature in logs[0].features] == ["strings", "integers"]
    assert same(*(log.open("train", 2) for log in logs))
    convert(path, tmp_path / "converted.parquet", options(**SCHEMA, list_separator="|"))
    assert same(reader(tmp_path / "converted.parquet").open("train", 2), logs[0].open("train", 2))
    subset = reader(path, list_separator="|", lists=("user",), integers=())
    assert [feature.multi_hot for feature in subset.features] == [True, False]
    bad = reader(write(tmp_path, "1,a,1,u,1", "1,a,1,u|v,1|x"), list_separator="|", chunk_bytes=chunk_bytes)
    with pytest.raises(ValueError, match=r"line 3: field 5 \(item\) is '1\|x', expected an integer or nothing"):
        rows_of(bad)


@pytest.mark.parametrize(
    ("times", "bounds"),
    [
        (["5", "90", "100", "", "110"], ("100", "105")),
        (["0.5", "9", "10.0", "", "11"], ("10.0", "10.5")),
        (["2026-01-01", "2026-01-02", "2026-01-03", "", "2026-01-04"], ("2026-01-03", "2026-01-04")),
    ],
    ids=["integers", "numbers", "dates"],
)
def test_rows_are_split_by_a_time_column(tmp_path, times, bounds):
    rule = SplitRule(time_column="note", validation_from=bounds[0], test_from=bounds[1])
    path = write(tmp_path, *(f"{row % 2},{time},{row},u,{row}" for row, time in enumerate(times)), "1,x")
    log = reader(path, split=rule, on_bad_row="skip", chunk_bytes=20)
    assert [[row[1] for row in rows_of(log, split)] for split in log.splits()] == [[0, 1, 3], [2], [4]]
    shards = [row[1] for index in range(2) for row in rows_of(log, "train", shard=(index, 2))]
    assert sorted(shards) == [0, 1, 3]
    reports = []
    for split in log.splits():
        with log.open(split, 2) as stream:
            list(stream)
            reports.append(stream.report.skipped)
    assert reports == [1, 0, 0]  # a bad line has no time, like the fourth row
    report = convert(path, tmp_path / "log.parquet", options(rule, **SCHEMA, on_bad_row="skip"))
    assert (report.rows, report.skipped) == (5, 1)
    retained = parquet.read_table(tmp_path / "log.parquet")
    kinds = {"click": "int8", "price": "double", "user": "string", "item": "int64", "note": "string"}
    kinds |= {"note": "int64"} if times[0] == "5" else {}
    assert dict(zip(retained.schema.names, map(str, retained.schema.types), strict=True)) == kinds
    converted = reader(tmp_path / "log.parquet", split=rule)
    assert all(same(log.open(split, 2), converted.open(split, 2)) for split in log.splits())


def test_rows_to_score_have_ids_of_the_kind_that_was_trained(tmp_path):
    """Text becomes integers where a Parquet file had them; where it had strings, it stays what it is."""
    path, schema = write(tmp_path, "1,a,1,123,7", "0,b,2,,-8"), SCHEMA | {"integers": ()}
    for integers in ((), ("user",), ("user", "item")):
        values = {"user": [123, None] if "user" in integers else ["123", None]}
        values["item"] = [7, -8] if "item" in integers else ["7", "-8"]
        trained = reader(as_parquet(tmp_path, {"click": [1, 0], "price": [1, 2], **values}), integers=())
        for schema in (SCHEMA | {"integers": ()}, SCHEMA):
            scored = open_for_scoring(path, options(**schema), trained.features)
            assert [row[1:] for row in rows_of(scored, "test")] == [row[1:] for row in rows_of(trained)]
    other = open_for_scoring(write(tmp_path, "1,a,1,1,1", "0,a,1,u7,1"), options(**SCHEMA), trained.features)
    with pytest.raises(ValueError, match=r"line 3: field 4 \(user\) is 'u7', expected an integer or nothing"):
        rows_of(other, "test")


def test_negative_numbers_have_no_logarithm(tmp_path):
    path = write(tmp_path, "1,a,1,u,7", "0,b,-2.5,v,8")
    assert [row[1] for row in rows_of(reader(path, log_transform=None))] == [1, -2.5]
    for log_transform in (True, ("price",)):
        with pytest.raises(ValueError, match=r"line 3: field 3 \(price\) is '-2.5', expected 0 or more under log_tran"):
            rows_of(reader(path, log_transform=log_transform))
    clamped = rows_of(reader(path, log_transform=True, clamp_negative=True))
    assert [row[1] for row in clamped] == pytest.approx([np.log(2), 0])
    assert rows_of(reader(path, log_transform=("False",))) == rows_of(reader(path))
    assert reader(path, log_transform=("tRUE",)).schema.log_transform is True


def test_options_and_header_are_checked(tmp_path):
    path = write(tmp_path, "1,a,1.5,ann,7")
    for changes, message in (
        ({"delimiter": ",,"}, "delimiter must be one ASCII character, got ',,'"),
        ({"delimiter": "\n"}, "delimiter must be one ASCII character"),
        ({"integers": ("price",)}, "integers names price, not among sparse: user, item"),
        ({"delimiter": "|"}, "log.csv, line 1: expected names separated by '|', found 'click,note"),
        ({"sparse": ("shop",), "integers": ()}, "the schema's sparse column 'shop' is missing; columns: click, note"),
        ({"split": SplitRule(time_column="note", test_from="3")}, "line 2: field 2 (note) is 'a', expected an integer"),
        ({"split": SplitRule(time_column="then", test_from="3")}, "column 'then' is missing; columns: click, note"),
        ({"list_separator": ","}, "lists need a list_separator other than the delimiter, got ','"),
        ({"lists": ("user",)}, "lists need a list_separator other than the delimiter, got ''"),
        ({"lists": ("price",), "list_separator": "|"}, "lists names price, not among sparse: user, item"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            reader(path, **changes)
    with pytest.raises(ValueError, match=r"a schema must name the label"):
        ClickLog(path, options())
    with pytest.raises(ValueError, match="there are 2 columns 'user'"):
        reader(write(tmp_path, "1,a,2,3,4", header="click,user,price,user,item"))
    other = write(tmp_path, "1,1.5,ann,7", name="other.csv", header="click,price,user,item")
    with pytest.raises(
        ValueError, match=r"other.csv: its header differs from that of .*log.csv: click, price, user, item"
    ):
        reader([write(tmp_path, "1,a,1.5,ann,7"), other])
    with pytest.raises(ValueError, match=r"line 1: field 1 \(label\) is 'click,.*; for a file with a header, set a d"):
        ClickLog(write(tmp_path, header="click,a\t" + "\t".join("x" * 39), name="log.txt"), options())


def test_several_files_have_a_header_each(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for day in range(3):
        write(folder, *(f"{day % 2},a,{day * 10 + row},u,1" for row in range(5)), name=f"day_{day}.csv")
    log = reader(folder, chunk_bytes=30)
    assert [row[1] for row in rows_of(log)] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    days = ClickLog(folder, options(SplitRule(), **SCHEMA, log_transform=False))
    assert [row[1] for row in rows_of(days, "test")] == [20, 21, 22, 23, 24]


def test_a_mark_of_utf_8_before_the_header_is_left_out(tmp_path):
    assert len(rows_of(reader(write(tmp_path, "1,a,2,3,4", header="\ufeff" + HEADER)))) == 1


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("blank", ["\n", "\r\n", "\n\r\n\n"])
def test_blank_lines_before_the_header_are_skipped(tmp_path, blank, quoted):
    rows = [f"{n % 2},a,{n},u{n},{n}" for n in range(40)]
    path, expected = write(tmp_path, *rows, header=blank + HEADER), write(tmp_path, *rows, name="plain.csv")
    for changes in ({}, {"chunk_bytes": 90}, {"split": SplitRule(split_by="random")}, {"split": SplitRule()}):
        log, plain = (reader(file, quoted_newlines=quoted, **changes) for file in (path, expected))
        assert rows_of(log) == rows_of(plain)
        if changes.get("split", ALL_TRAIN) is not ALL_TRAIN:
            assert rows_of(log, "test") == rows_of(plain, "test")
    for bad in (0, 7):  # in the first row, and later
        path = write(tmp_path, *rows[:bad], "2,a,1,u,1", header=blank + HEADER)
        with pytest.raises(
            ValueError, match=rf"log.csv, line {blank.count(chr(10)) + 2 + bad}: field 1 \(click\) is '2'"
        ):
            rows_of(reader(path, quoted_newlines=quoted))


BAD = [
    ("2,a,1,u,1", "field 1 (click) is '2', expected 0 or 1"),
    (",a,1,u,1", "field 1 (click) is '', expected 0 or 1"),
    ("yes,a,1,u,1", "field 1 (click) is 'yes', expected 0 or 1"),
    ("1,a,1.5.2,u,1", "field 3 (price) is '1.5.2', expected a number or nothing"),
    ("1,a,inf,u,1", "field 3 (price) is 'inf', expected a finite number or nothing"),
    ("1,a,1e39,u,1", "field 3 (price) is '1e39', expected a number that fits float32"),
    ("1,a,1,u,1.5", "field 5 (item) is '1.5', expected an integer or nothing"),
    ("1,a,1,u,9223372036854775808", "field 5 (item) is '9223372036854775808', expected an integer of 64 bits"),
    ("1,a,1,\udcff,1", "field 4 (user) is '\\\\xff', expected text in UTF-8"),
    ("1,a,1,u", "expected 5 comma-separated fields, found 4"),
    ("1,a,1,u,1,", "expected 5 comma-separated fields, found 6"),
    ('1,a,1,u,"1', "field 5 (item) is '1', expected an integer or nothing; a quote is not closed in this line"),
    (
        '1,"a,1,u,1',
        "expected 5 comma-separated fields, found 2; a quote is not closed in this line; set quoted_newlines",
    ),
    ('1,a,1,u,1,"', "expected 5 comma-separated fields, found 6; a quote is not closed in this line"),
    ('1,a,1,"u\n",1', "expected 5 comma-separated fields, found 4"),
    ("1,a\rb,1,u,1", "the line contains a carriage return"),
    (f"1,{'a' * MAX_LINE_BYTES},1,u,1", "the line has more than 65,536 characters"),
]


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize(("bad", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_or_skipped_alone(tmp_path, bad, message, chunk_bytes):
    lines = ["1,a,1,u,1", "0,b,2,v,2", bad, '1,"c",3,"w",3', "", "0,d,4,x,4"]
    path = write(tmp_path, *lines)
    with pytest.raises(ValueError, match="line 4: ") as caught:
        rows_of(reader(path, chunk_bytes=chunk_bytes))
    assert f"{path}, line 4: {message}" in str(caught.value)
    log = reader(path, on_bad_row="skip", chunk_bytes=chunk_bytes)
    with log.open("train", 2) as stream:
        dense = [value for batch in stream for value in batch.dense[:, 0].tolist()]
        report = stream.report
    assert dense == [1, 2, 3, 4]
    assert report.skipped == (2 if "\n" in bad else 1)
    assert f"{path}, line 4: {message}" in report.problems[0]


def test_a_bad_first_row_is_named_before_anything_is_read(tmp_path):
    path = write(tmp_path, "", "1,a,x,u,1", "1,a,1,u,1")
    with pytest.raises(ValueError, match=r"log.csv, line 3: field 3 \(price\) is 'x', expected a number or nothing"):
        reader(path)


@given(st.data())
def test_a_line_is_accepted_alone_if_and_only_if_it_is_among_others(tmp_path, data):
    pieces = st.sampled_from(
        ["0", "1", "2.5", "", " ", "u", '"', '""', ",", ",", "\r", "é", "-", "x\0", '"q"', '"a,b"']
    )
    lines = data.draw(st.lists(st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=8))
    lines += ["1,a,1.5,u,1", "0,b,2,v,2"]
    kwargs = {"on_bad_row": "skip", "chunk_bytes": data.draw(st.sampled_from((1, 60, 10_000)))}
    combined = rows_of(reader(write(tmp_path, *lines, name="all.csv"), **kwargs))
    single = [row for line in lines[:-2] for row in rows_of(reader(write(tmp_path, line, lines[-1]), **kwargs))[:-1]]
    assert combined[:-2] == single


def test_line_ends_inside_quotes(tmp_path):
    rows = [(number % 2, f'a "{number}",\n' * (number % 4), number, f"u\r\n{number}", number) for number in range(60)]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    path = tmp_path / "log.csv"
    path.write_bytes(f"{HEADER}\n".encode() + text.getvalue().encode())
    columns = {name: [row[place] for row in rows] for place, name in enumerate(HEADER.split(","))}
    expected = rows_of(reader(as_parquet(tmp_path, columns)))
    for chunk_bytes in (1, 50, 1 << 20):
        assert rows_of(reader(path, quoted_newlines=True, chunk_bytes=chunk_bytes)) == expected
    log = reader(path, quoted_newlines=True, split=SplitRule(test_share=0.4), chunk_bytes=100)
    shards = [[rows_of(log, split, shard=(index, 3)) for index in range(3)] for split in ("train", "test")]
    assert sorted(row for split in shards for shard in split for row in shard) == sorted(expected)
    assert rows_of(log) + rows_of(log, "test") == expected
    assert resumes(log, "test", 4)


def test_lines_are_counted_where_quotes_contain_line_ends(tmp_path):
    lines = ['1,"a\nb",1,u,1'] * 20 + ["1,a,x,u,1", '1,"\n\n",2,u,1']
    for split in (ALL_TRAIN, SplitRule(test_share=0.3)):
        log = reader(write(tmp_path, *lines), quoted_newlines=True, split=split, chunk_bytes=30)
        with pytest.raises(ValueError, match=r"line 42: field 3 \(price\) is 'x'"):
            rows_of(log, log.splits()[-1])


@given(st.lists(st.sampled_from(list('"\n,a')), max_size=40).map("".join))
def test_quoted_line_ends_are_those_of_a_parser(text):
    inside, expected = False, []
    for place, character in enumerate(text):
        inside ^= character == '"'
        if character == "\n" and not inside:
            expected.append(place + 1)
    source = io.BytesIO(text.encode())
    ends = []
    while read_line(source, quoted=True):
        ends.append(source.tell())
    assert ends == expected + [len(text)] * (not text.endswith("\n") or inside) * bool(text)


@pytest.mark.parametrize("quoted", [False, True])
@given(
    st.lists(st.sampled_from([*'01u",,', '""', "\r", "\n", "\r\n", ',"', '",', '1,"u\n"\n']), max_size=40).map("".join)
)
def test_lines_are_read_alone_as_among_others(quoted, text):
    """So neither rows nor their numbers depend on where chunks end."""
    text += "\n"
    schema = Schema("click", sparse=("user",))
    form = CsvFormat(("click", "user"), LogOptions(schema, delimiter=",", quoted_newlines=quoted), True, ())
    lines = list(iter(partial(read_line, io.BytesIO(text.encode()), quoted), b""))
    whole, single = parse(form, text.encode()), [parse(form, line) for line in lines]
    assert whole.batch.to_pylist() == [row for item in single for row in item.batch.to_pylist()]
    assert len(whole.bad_rows) == sum(len(item.bad_rows) for item in single)
    assert sorted([*whole.rows, *whole.bad_rows]) == list(range(len(whole.lines)))
    assert count_rows(text.encode(), quoted) == len(whole.lines)
    places = list(zip(itertools.accumulate((line.count(b"\n") for line in lines), initial=0), lines, strict=False))
    blank = (b"\n", b"\r\n") if quoted else (b"\n", b"\r\n", b"\r\r\n")
    assert whole.lines.tolist() == [place for place, line in places if line not in blank]


@pytest.mark.parametrize("block_bytes", range(24, 40))
def test_a_carriage_return_in_quotes_may_stand_anywhere(monkeypatch, block_bytes):
    """pyarrow loses the line feed behind one that ends a block."""
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block_bytes)
    schema = Schema("click", sparse=("user",))
    form = CsvFormat(("click", "user"), LogOptions(schema, delimiter=",", quoted_newlines=True), True, ())
    users = [f"{'u' * number}\r\n{number}" for number in range(9)]
    parsed = parse(form, "".join(f'1,"{user}"\r\n' for user in users).encode())
    assert parsed.batch["user"].to_pylist() == users


def test_a_carriage_return_outside_quotes_is_named(tmp_path):
    path = write(tmp_path, '1,"a\rb",1,u,1', "1,a,1,u,1\r0,b,2,v,2", '1,"a\nb",1,u,1')
    with pytest.raises(ValueError, match="line 3: the line contains a carriage return"):
        rows_of(reader(path, quoted_newlines=True))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(ValueError, match="its lines end with carriage returns only; convert it"):
        reader(path)


@pytest.mark.parametrize("quoted", [False, True])
def test_a_file_of_one_column_may_have_quotes(tmp_path, quoted):
    path = tmp_path / "log.csv"
    kwargs = LogOptions(Schema("click", sparse=("user",)), quoted_newlines=quoted)
    ids = []
    for text in ("user\na\nb\n", 'user\n"a"\n"b"\n'):
        path.write_text(text)
        log = open_for_scoring(path, kwargs, [Feature("user", 100_000, kind="strings")])
        ids += [batch.sparse.values().tolist() for batch in log.open("test", 4)]
    assert len(ids) == 2
    assert ids[0] == ids[1]
    path.write_text('user\na\n"b\n')
    log = open_for_scoring(path, kwargs, [Feature("user", 100_000, kind="strings")])
    with pytest.raises(ValueError, match="line 3: a quote is not closed in this line"):
        list(log.open("test", 4))


def test_a_quote_that_is_never_closed_costs_one_row(tmp_path):
    good = ["1,a,1,u,1"] * 9000
    path = write(tmp_path, *good[:100], '1,"a,1,u,1', *good)
    for chunk_bytes in (1000, 1 << 20):
        log = reader(path, quoted_newlines=True, on_bad_row="skip", chunk_bytes=chunk_bytes)
        with log.open("train", 64) as stream:
            rows = sum(map(len, stream))
            report = stream.report
        assert (rows, report.skipped) == (9100 - MAX_LINE_BYTES // 10, 1)
        assert "line 102: the line has" in report.problems[0]


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("rule", [SplitRule(), SplitRule(split_by="random", test_share=0.3)], ids=["end", "random"])
def test_shards_and_positions(tmp_path, name, rule):
    path = write(tmp_path, *(f"{row % 2},{'n' * (row % 7)},{row},u{row % 5},{row}" for row in range(200)), name=name)
    log = reader(path, split=rule, chunk_bytes=300, shuffle_rows=20)
    rows = [rows_of(log, split, shard=(index, 4)) for split in ("train", "test") for index in range(4)]
    assert sorted(row[1] for shard in rows for row in shard) == list(range(200))
    assert resumes(log, after=7, shuffle=True)


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_a_long_line_of_a_quoted_file_moves_no_row_to_another_split(tmp_path, name):
    rows = [f'{row % 2},"n\nn",{row},u,{row}' for row in range(400)]
    rows[100] = f"1,n,100,{'u' * 2 * MAX_LINE_BYTES},100"
    log = reader(
        write(tmp_path, *rows, name=name), split=SplitRule(split_by="end", test_share=0.5), quoted_newlines=True,
        on_bad_row="skip",
    )  # fmt: skip
    results = [row[1] for split in ("train", "test") for row in rows_of(log, split)]
    assert results == [row for row in range(400) if row != 100]
    shards = [row[1] for index in range(3) for row in rows_of(log, "train", shard=(index, 3))]
    assert sorted(shards) == [row[1] for row in rows_of(log, "train")]


def test_labels_of_rows_to_score_are_not_read(tmp_path):
    log = reader(write(tmp_path, "1,a,1,u,1", "0,b,2,v,2"))
    for labels, retained in ((("", "-1"), [None, -1.0]), (("unknown", "1"), [])):
        path = write(tmp_path, *(f"{label},a,1,u,1" for label in labels), name="score.csv")
        scored = open_for_scoring(path, log.options, log.features, extra_columns=("click",) if retained else ())
        assert [row[:2] for row in rows_of(scored, "test")] == [(0, 1), (0, 1)]
        (block,) = scored.scan(
            "test",
            lambda batch: [
                value for name in batch.schema.names for value in batch[name].to_pylist() if name == "click"
            ],
        )
        assert block.rows == retained
    with pytest.raises(ValueError, match=r"field 1 \(click\) is 'unknown', expected a number or nothing"):
        open_for_scoring(path, log.options, log.features, extra_columns=("click",))


def test_names_open_csv_and_rows_without_labels_are_scored(tmp_path):
    path = write(tmp_path, "1,a,1,u,1", "0,b,2,v,2")
    log = open_dataset(str(path), log=options(**SCHEMA))
    unlabelled = write(tmp_path, "a,1,u,1", "b,2,v,2", name="score.csv", header=HEADER.partition(",")[2])
    for source in (path, unlabelled):
        scored = open_for_scoring(source, options(**SCHEMA), log.features)
        batch = next(scored.open("test", 2))
        assert contents(batch)[2].tolist() == contents(next(log.open("train", 2)))[2].tolist()
    assert batch.labels.tolist() == [0, 0]
