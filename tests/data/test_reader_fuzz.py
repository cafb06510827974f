"""Whatever stands in a file, a log either says what is wrong with it or gives every good row."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.logs import line as line_of
from tests.data.logs import options, random_lines, rows_of, write
from tritonemb.data import CRITEO as COLUMNS
from tritonemb.data import ClickLog, LogOptions
from tritonemb.data.delimited import CriteoFormat, parse
from tritonemb.data.schema import FIELDS

CRITEO = CriteoFormat(FIELDS, LogOptions(COLUMNS), True, ())
LINES = random_lines(40)
RULES = [rb"[01]", *[rb"(-?[0-9]{1,18})?"] * 13, *[rb"[0-9a-fA-F]{0,8}"] * 26]
RULE = re.compile(rb"\t".join(RULES))


def is_good(line: bytes) -> bool:
    return RULE.fullmatch(line) is not None


def lines_of(text: bytes) -> list[bytes]:
    """The lines that count, without their ends."""
    return [line for line in (part.removesuffix(b"\r") for part in text.split(b"\n")) if line]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Real-looking lines with bytes changed, put in and taken out."""
    text = bytearray(b"\n".join(draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=12))))
    odd = st.one_of(st.sampled_from(b"\t\n\r \0-+.xXgG09afAF\x80\xff"), st.integers(0, 255))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, max(len(text) - 1, 0)))
        match draw(st.sampled_from(("flip", "insert", "remove", "cut", "copy"))):
            case "flip" if text:
                text[place] = draw(odd)
            case "insert":
                text[place:place] = bytes([draw(odd)]) * draw(st.integers(1, 3))
            case "remove":
                del text[place : place + draw(st.integers(1, 30))]
            case "cut":
                del text[place:]
            case _:
                text += text[place : place + 200]
    return bytes(text + draw(st.sampled_from((b"", b"\n", b"\r\n"))))


@pytest.mark.timeout(120)
@given(damaged(), st.integers(200, 3000), st.integers(1, 7))
def test_no_row_is_dropped_in_silence(tmp_path, text, chunk_bytes, batch_size):
    path = tmp_path / "log"
    path.write_bytes(text)
    good = [line for line in lines_of(text) if is_good(line)]
    bad = len(lines_of(text)) - len(good)
    if not text or text.startswith(
        (b"\xff\xfe", b"\xfe\xff", b"PAR1", b"BZh", b"PK\3\4", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
    ):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            ClickLog(path, options())
        return
    log = ClickLog(path, options(on_bad_row="skip", chunk_bytes=chunk_bytes))
    if good:
        with log.open("train", batch_size) as stream:
            labels = torch.cat([batch.labels for batch in stream])
            report = stream.report
        assert labels.tolist() == [float(line[:1]) for line in good]
        assert (report.rows, report.skipped) == (len(good), bad)
        assert sum(count for _, count in report.reasons) == bad
    else:
        with pytest.raises(ValueError, match="no train rows"):
            rows_of(log)
    strict = options(chunk_bytes=chunk_bytes)
    if bad:
        number = next(n for n, part in enumerate(text.split(b"\n"), 1) if part.removesuffix(b"\r") and not is_good(
            part.removesuffix(b"\r")
        ))  # fmt: skip
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, line {number}: "):
            rows_of(ClickLog(path, strict))
    elif good:
        assert len(rows_of(ClickLog(path, strict))) == len(good)


@given(st.data())
def test_a_row_is_accepted_alone_if_and_only_if_it_is_among_others(data):
    """And has the same values there."""
    lines = [
        line.removesuffix(b"\r")
        for line in lines_of(data.draw(damaged()))
        if not line.startswith((b"\xff\xfe", b"\xfe"))
    ]
    checked = parse(CRITEO, b"\n".join(lines))
    bad = set(checked.bad_rows.tolist())
    for number, line in enumerate(lines):
        one = parse(CRITEO, line)
        assert (number in bad) == (len(one.bad_rows) == 1) == (not is_good(line))
        if number not in bad:
            place = checked.rows.tolist().index(number)
            assert checked.batch.slice(place, 1).to_pylist() == one.batch.to_pylist()


NUMBERS = st.one_of(
    st.binary(max_size=22).map(lambda field: re.sub(rb"[\t\n]", b"0", field)),
    st.from_regex(rb"-?[0-9]{0,19}", fullmatch=True),
    st.from_regex(rb"[0-9a-fA-F]{0,9}", fullmatch=True),
)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_numbers_are_read_as_python_reads_them(fields):
    check_numbers(fields)


def check_numbers(fields: list[bytes]) -> None:
    """Each as an integer and as a category of a line."""
    for name, place, rule, base in (("int_1", 1, rb"(-?[0-9]{1,18})?", 10), ("cat_1", 14, rb"[0-9a-fA-F]{0,8}", 16)):
        lines = []
        for field in fields:
            parts = line_of().encode().split(b"\t")
            parts[place] = field
            lines.append(b"\t".join(parts))
        checked = parse(CRITEO, b"\n".join(lines))
        rows = dict(zip(checked.rows.tolist(), checked.batch.column(name).to_pylist(), strict=True))
        bad = set(checked.bad_rows.tolist())
        for number, field in enumerate(fields):
            assert (number not in bad) == bool(re.fullmatch(rule, field))
            if number not in bad and field:
                assert rows[number] == int(field, base)


@pytest.mark.parametrize("place", range(8))
def test_every_byte_is_judged_at_every_place_of_a_word(place):
    fields = [b"1" * place + bytes([byte]) + b"2" * (7 - place) for byte in range(256) if byte not in b"\t\n"]
    check_numbers(fields)


def test_chunks_of_any_size_and_any_number_of_workers_give_the_same_rows(tmp_path):
    lines = [*random_lines(15, seed=1), b"bad", b"", *random_lines(15, seed=2)]
    path = write(tmp_path, lines)
    expected = rows_of(ClickLog(path, options(on_bad_row="skip")))
    assert len(expected) == 30
    for chunk_bytes in (1, 7, 300, 1000, 20_000):
        for threads in (1, 3):
            log = ClickLog(path, options(on_bad_row="skip", chunk_bytes=chunk_bytes, parser_threads=threads))
            assert rows_of(log) == expected
