from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tomli_w")

from tritonemb.data.schema import LogOptions, Schema, SplitRule
from tritonemb.training.config import TrainConfig
from tritonemb.training.toml import from_plain, plain, read_toml, to_toml


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = (1, 2)
    pairs: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    name: str = "x"
    count: int | None = None
    path: Path | None = None
    flag: bool = False
    either: bool | tuple[str, ...] = True
    inner: Inner = field(default_factory=Inner)


OLD_CONFIG = """\
num_workers = 1
data = "log.csv"

[read]
shuffle_rows = 262144
on_bad_row = "raise"
workers = 3
chunk_bytes = 3000
delimiter = ""
quoted_newlines = false
list_separator = ""

[read.schema]
label = "click"
dense = ["price"]
sparse = ["item", "user"]
num_embeddings = 100000
sizes = []
dynamic = false
integers = []
lists = []
clamp_negative = false

[read.split]
split_by = "auto"
test_share = 0.16666666666666666
validation_share = 0.0
test_files = []
validation_files = []
"""

inners = st.builds(
    Inner,
    rate=st.floats(0, 1e9),
    kind=st.sampled_from(["a", "b"]),
    sizes=st.lists(st.integers(-(2**40), 2**40)).map(tuple),
    pairs=st.lists(st.tuples(st.text(), st.integers(0, 9))).map(tuple),
)
outers = st.builds(
    Outer,
    name=st.text(),
    count=st.none() | st.integers(0, 9),
    path=st.none() | st.just(Path("a/b")),
    flag=st.booleans(),
    either=st.booleans() | st.lists(st.text(), min_size=1).map(tuple),
    inner=inners,
)


@given(outers)
def test_what_is_written_is_read_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert read_toml(path, Outer()) == config
    assert from_plain(plain(config), Outer(), "here") == config


@pytest.mark.parametrize(("written", "read"), [("5", "5"), ("2020-01-31", "2020-01-31"), ("'x'", "x")])
def test_times_of_a_split_need_no_quotes(tmp_path, written, read):
    (tmp_path / "run.toml").write_text(f"time_column = 'ts'\ntest_from = {written}\n")
    assert read_toml(tmp_path / "run.toml", SplitRule()).test_from == read
    (tmp_path / "run.toml").write_text("time_column = 'ts'\ntest_from = 2020-01-31T10:00:00\n")
    assert read_toml(tmp_path / "run.toml", SplitRule()).test_from == "2020-01-31 10:00:00"


def test_parser_threads_of_an_older_configuration_are_read(tmp_path):
    """A file that a run wrote while the key was `workers`; checkpoints have the same keys."""
    (tmp_path / "config.toml").write_text(OLD_CONFIG)
    config = read_toml(tmp_path / "config.toml", TrainConfig())
    schema = Schema("click", ("price",), ("item", "user"))
    assert config.read == LogOptions(schema, parser_threads=3, chunk_bytes=3000)
    assert config.num_workers == 1
    assert from_plain(tomllib.loads(OLD_CONFIG)["read"], LogOptions(), "here") == config.read
    assert "parser_threads = 3" in to_toml(config)


@pytest.mark.parametrize(("recorded", "clamps"), [(True, True), (["price"], True), (False, False)])
def test_logarithms_of_an_older_configuration_clamp_negative_numbers_as_then(recorded, clamps):
    """Saved schemas have all options of their version; options in files have current defaults."""
    columns = {"label": "click", "dense": ["price"], "sparse": ["user"], "log_transform": recorded}
    defaults = {"num_embeddings": 100_000, "sizes": [], "dynamic": False, "integers": []}
    saved = from_plain(columns | defaults, Schema(), "here")
    assert (saved.is_logarithmic("price"), saved.clamps("price")) == (clamps, clamps)
    assert from_plain(plain(saved), Schema(), "here") == saved
    assert not from_plain(columns | {"integers": ["user"]}, Schema(), "here").clamps("price")
    assert not from_plain(plain(Schema("click", ("price",), ("user",), True)), Schema(), "here").clamps("price")
    criteo = from_plain({"log_transform": True, "label": "", "dense": [], "sparse": []} | defaults, Schema(), "here")
    assert all(schema.is_logarithmic("int_2") and schema.clamps("int_2") for schema in (criteo, Schema()))


def test_only_what_is_written_changes(tmp_path):
    (tmp_path / "run.toml").write_text('count = 3\n[inner]\nkind = "b"\nrate = 2\n')
    base = Outer(name="kept", inner=Inner(sizes=(7,)))
    assert read_toml(tmp_path / "run.toml", base) == Outer("kept", 3, inner=Inner(2.0, "b", (7,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("naem = 'x'", "unknown key 'naem'; did you mean 'name'?"),
        ("zzz = 1", "unknown key 'zzz'; known keys are count, either, flag, inner, name, path"),
        ("[inner]\nsize = [1]", "unknown key 'inner.size'; did you mean 'sizes'?"),
        ("count = 'three'", "count is 'three', expected a whole number"),
        ("count = true", "count is True, expected a whole number"),
        ("flag = 1", "flag is 1, expected true or false"),
        ("path = 1", "path is 1, expected a path"),
        ("[inner]\nkind = 'c'", "inner.kind is 'c', expected one of 'a', 'b'"),
        ("[inner]\nsizes = [1, 'x']", "inner.sizes is [1, 'x'], expected a list of a whole number"),
        ("[inner]\nrate = -1.0", "[inner]: rate must not be negative, got -1.0"),
        ("inner = 3", "inner is 3, expected a section"),
        ("name = ", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is compared below)
        read_toml(tmp_path / "run.toml", Outer())
    assert str(tmp_path / "run.toml") in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml: no such file; expected a configuration in TOML"):
        read_toml(tmp_path / "nowhere.toml", Outer())
