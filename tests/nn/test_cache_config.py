"""How much of a table is kept on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

import tritonemb as te
from tritonemb.types import CacheConfig


@pytest.mark.parametrize(
    ("config", "num_embeddings", "expected"),
    [
        (CacheConfig(), 1000, 100),
        (CacheConfig(), 1001, 101),
        (CacheConfig(), 1, 1),
        (CacheConfig(share=1.0), 7, 7),
        (CacheConfig(share=2**-30), 2**40, 1024),
        (CacheConfig(rows=5), 1000, 5),
        (CacheConfig(rows=5, share=0.5), 1000, 5),
        (CacheConfig(rows=5000), 1000, 1000),
        (CacheConfig(rows=1), 1, 1),
    ],
)
def test_rows_that_are_kept(config, num_embeddings, expected):
    assert config.num_device_rows(num_embeddings) == expected
    assert config.num_host_rows(num_embeddings) is None
    in_host_memory = CacheConfig(host_rows=config.rows, host_share=config.share if config.rows is None else None)
    assert in_host_memory.num_host_rows(num_embeddings) == expected


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rows": 0}, ValueError, "a cache's rows must be at least 1, got 0"),
        ({"rows": -5}, ValueError, "a cache's rows must be at least 1, got -5"),
        ({"rows": 2.0}, TypeError, "a cache's rows must be an int, got 2.0"),
        ({"rows": True}, TypeError, "a cache's rows must be an int, got True"),
        ({"host_rows": 0}, ValueError, "a cache's host_rows must be at least 1, got 0"),
        ({"host_rows": 2.0}, TypeError, "a cache's host_rows must be an int, got 2.0"),
        ({"host_rows": True}, TypeError, "a cache's host_rows must be an int, got True"),
        ({"share": "half"}, TypeError, "a cache's share must be a number, got 'half'"),
        ({"share": 0.0}, ValueError, r"a cache's share must lie in \(0, 1\], got 0.0"),
        ({"share": 1.5}, ValueError, r"a cache's share must lie in \(0, 1\], got 1.5"),
        ({"share": float("nan")}, ValueError, r"a cache's share must lie in \(0, 1\], got nan"),
        ({"host_share": True}, TypeError, "a cache's host_share must be a number, got True"),
        ({"host_share": 0.0}, ValueError, r"a cache's host_share must lie in \(0, 1\], got 0.0"),
        ({"host_share": 1.5}, ValueError, r"a cache's host_share must lie in \(0, 1\], got 1.5"),
        ({"host_rows": 5, "host_share": 0.5}, ValueError, "pass host_rows or host_share, not both, got 5 and 0.5"),
        ({"policy": "fifo"}, ValueError, "a cache's policy must be 'lru' or 'lfu', got 'fifo'"),
        ({"folder": 5}, TypeError, "a cache's folder must be a path, got 5"),
    ],
)
def test_what_it_cannot_be(options, kind, message):
    with pytest.raises(kind, match=message):
        CacheConfig(**options)


def test_a_table_has_one():
    assert te.TableConfig("t", 9, 2).cache == CacheConfig()
    cache = CacheConfig(rows=7, policy="lfu", folder=Path("folder"))
    table = te.TableConfig("t", 9, 2, placement="disk", cache=cache)
    assert table.shard("p", (3, 4), (0, 1), ["f"]).cache is cache
    with pytest.raises(TypeError, match="table 't': cache must be a CacheConfig, got 5"):
        te.TableConfig("t", 9, 2, cache=5)


@pytest.mark.parametrize("placement", ["device", "host", "server"])
@pytest.mark.parametrize("option", [{"host_rows": 100}, {"host_share": 1.0}], ids=str)
def test_rows_in_host_memory_are_of_tables_on_disk(placement, option):
    cache, (name,) = CacheConfig(**option), option
    assert te.TableConfig("t", 9, 2, placement="disk", cache=cache).cache.num_host_rows(9) == 9
    with pytest.raises(ValueError, match=f"table 't': cache {name} .* the placement is '{placement}'"):
        te.TableConfig("t", 9, 2, placement=placement, cache=cache)
