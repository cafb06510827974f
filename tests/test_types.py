"""`TableConfig`."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

import tritonemb as te


def test_defaults():
    table = te.TableConfig("user", 10, 4)
    assert table.feature_names == ("user",)
    assert (table.pooling, table.dtype, table.placement, table.init) == ("sum", torch.float32, "device", None)


def test_sizes_are_integers_of_any_kind():
    table = te.TableConfig("t", np.int64(10), np.int32(4), cache=te.CacheConfig(rows=np.int64(5)))
    sizes = table.num_embeddings, table.embedding_dim, table.global_rows, table.cache.rows
    assert sizes == (10, 4, 10, 5)
    assert {type(size) for size in sizes} == {int}


@pytest.mark.parametrize("size", [5.0, True, torch.tensor(5.7), np.array(5.5), np.array([5, 6]), "5"])
def test_a_size_that_is_no_integer_is_a_type_error(size):
    with pytest.raises(TypeError):
        te.TableConfig("t", size, 4)


def test_features_keep_their_order_and_become_a_tuple():
    table = te.TableConfig("t", 10, 4, features=["b", "a"])
    assert table.feature_names == table.features == ("b", "a")


def test_it_is_a_value():
    table = te.TableConfig("t", 10, 4, ["a"])
    assert table == te.TableConfig("t", 10, 4, ("a",))
    assert hash(table) == hash(te.TableConfig("t", 10, 4, ("a",)))
    assert table != te.TableConfig("t", 10, 5, ["a"])
    assert pickle.loads(pickle.dumps(table)) == table
    assert pickle.loads(pickle.dumps(table)).seed == table.seed
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.name = "other"
    assert dataclasses.replace(table, name="u").seed == te.TableConfig("u", 1, 1).seed


def test_the_seed_is_63_bits_of_the_names_hash():
    """A checkpoint trained with stochastic rounding goes on alike only as long as this stays."""
    assert te.TableConfig("user", 10, 4).seed == te.TableConfig("user", 99, 5, dtype=torch.bfloat16).seed
    names = ["user", "genre", "", "ünïcode", "a b"]
    seeds = [te.TableConfig(name, 1, 1).seed for name in names if name]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # The first 8 bytes of sha256(b"user"), little-endian, shifted right by 1.
    assert te.TableConfig("user", 10, 4).seed == 0x54DBB1D3B6CCFC02


def test_a_part_rounds_where_it_stands_in_the_whole_table():
    whole = te.TableConfig("t", 100, 64, ["a"], "mean", torch.bfloat16, "host", torch.nn.init.zeros_)
    assert (whole.row_origin, whole.column_origin) == (0, 0)
    part = whole.shard("p", (20, 30), (16, 40), ["b", "c"])
    assert part == te.TableConfig("p", 30, 40, ["b", "c"], "mean", torch.bfloat16, "host")
    assert (part.seed, part.row_origin, part.column_origin) == (whole.seed, 20, 16)
    assert part.init is None
    again = part.shard("q", (29, 1), (8, 8), ["q"])
    assert (again.seed, again.row_origin, again.column_origin) == (whole.seed, 49, 24)
    copied = pickle.loads(pickle.dumps(again))
    assert (copied.seed, copied.row_origin, copied.column_origin) == (whole.seed, 49, 24)
    assert whole.shard("t", (0, 100), (0, 64), ["a"]).row_origin == 0


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ((0, 0), (0, 4), "rows 0 to 9; a shard of 0 rows from 0 on is outside"),
        ((-1, 3), (0, 4), "3 rows from -1 on"),
        ((8, 3), (0, 4), "3 rows from 8 on"),
        ((0, 10), (4, 0), "columns 0 to 3; a shard of 0 columns from 4 on"),
        ((0, 10), (1, 4), "4 columns from 1 on"),
    ],
)
def test_a_part_lies_inside_its_table(rows, columns, message):
    with pytest.raises(ValueError, match=f"table 't' .*{message}"):
        te.TableConfig("t", 10, 4).shard("p", rows, columns, ["p"])


BAD = [
    (ValueError, "'' *: a name must be non-empty", {"name": ""}),
    (ValueError, "'a.b': a name must be non-empty, without dots", {"name": "a.b"}),
    (ValueError, "without dots or line breaks", {"name": "a\nb"}),
    (TypeError, "a table's name must be a str, got int", {"name": 3}),
    (ValueError, "table 't': num_embeddings must be at least 1, got 0", {"num_embeddings": 0}),
    (ValueError, "table 't': num_embeddings must be at least 1, got -5", {"num_embeddings": -5}),
    (ValueError, "table 't': embedding_dim must be at least 1, got 0", {"embedding_dim": 0}),
    (ValueError, "table 't': embedding_dim must be at least 1, got -1", {"embedding_dim": -1}),
    (TypeError, "table 't': embedding_dim must be an int, got 4.0", {"embedding_dim": 4.0}),
    (TypeError, "table 't': num_embeddings must be an int, got True", {"num_embeddings": True}),
    (ValueError, "table 't': pooling must be one of .*'sum', 'mean', 'none'.*, got 'max'", {"pooling": "max"}),
    (ValueError, "table 't': placement must be one of .*, got 'gpu'", {"placement": "gpu"}),
    (ValueError, r"table 't': dtype must be one of .*, got torch\.float64", {"dtype": torch.float64}),
    (TypeError, "table 't': init must be a function", {"init": 0.1}),
    (TypeError, "table 't': features must be a list of keys, got the str 'abc'", {"features": "abc"}),
    (TypeError, "table 't': features must be a list of keys, got the int 3", {"features": 3}),
    (ValueError, "table 't': needs at least one feature", {"features": []}),
    (ValueError, r"table 't': a feature is named twice in \['a', 'b', 'a'\]", {"features": ["a", "b", "a"]}),
    (ValueError, "table 't': a feature must be a non-empty one-line str, got ''", {"features": [""]}),
    (ValueError, "table 't': a feature must be a non-empty one-line str, got 7", {"features": [7]}),
]


@pytest.mark.parametrize(("error", "message", "change"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_fields_have_a_name(error, message, change):
    with pytest.raises(error, match=message):
        te.TableConfig(**({"name": "t", "num_embeddings": 10, "embedding_dim": 4} | change))


def test_init_fills_the_weight():
    def init(weight):
        weight.copy_(torch.arange(6.0).reshape(3, 2))

    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", 3, 2, init=init)])
    assert torch.equal(collection.tables[0].weight, torch.arange(6.0).reshape(3, 2))
    assert torch.equal(collection(te.KeyedJaggedTensor.from_lists({"t": [[0, 2]]})), torch.tensor([[4.0, 6.0]]))


def test_by_default_weights_are_uniform():
    weight = te.nn.EmbeddingBagCollection([te.TableConfig("t", 100, 200)]).tables[0].weight.detach()
    assert weight.abs().max() <= 0.1
    # 20,000 uniform draws from ±0.1: the mean's standard deviation is 0.1 / sqrt(3 · 20,000) = 4e-4, the mean square's
    # 0.01 · sqrt(4 / 45 / 20,000) = 2e-5; five of each.
    assert abs(float(weight.mean())) < 2e-3
    assert abs(float(weight.square().mean()) - 0.01 / 3) < 1e-4
