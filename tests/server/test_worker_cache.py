"""Rows that trainers keep: the bits of rows that servers send, and fewer of these."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.server.jobs import batches, local_servers, make, same, train, train_on
from tritonemb.server import AtMost, flush


@pytest.mark.parametrize("cache", [32, 64, 10_000])
@pytest.mark.parametrize(("servers", "staleness"), [(1, 0), (2, 3)])
@pytest.mark.parametrize("fallback_rows", [0, 9])
@pytest.mark.few(1)
def test_a_cache_changes_no_bit(servers, staleness, cache, fallback_rows):
    """Also of rows that are evicted on servers and come back, and of ids that are not admitted yet."""
    dynamic = {
        "capacity": 70, "eviction": te.EvictionConfig(protect=4), "admission": te.AdmissionConfig(appearances=2),
        "fallback_rows": fallback_rows,
    }  # fmt: skip
    options = {"trainers": 2, "staleness": staleness, "ahead": min(staleness, 2), "dynamic": dynamic}
    expected = train_on(servers, 14, **options)
    same(train_on(servers, 14, **options, cache=cache), expected)


def test_only_rows_that_have_changed_are_sent():
    with local_servers(2) as servers:
        model = make(servers, 1, cache=10_000)
        batch = next(batches(1))
        model(batch).square().sum().backward()
        caches = model.table_set.service.caches
        assert [cache.rows_saved for cache in caches] == [0, 0]
        flush(model)
        model(batch).detach()  # its rows have been updated
        assert [cache.rows_saved for cache in caches] == [0, 0]
        model(batch).detach()  # they have not
        assert all(2 * cache.rows_read == 6 * cache.rows_saved > 0 for cache in caches)


def test_evaluation_reads_one_server_past_the_cache():
    batch, outputs = next(batches(1)), []
    for cache in (None, 10_000):
        with local_servers(1) as servers, torch.no_grad():
            outputs.append(make(servers, 1, cache=cache)(batch))
    assert torch.equal(*outputs)


def test_at_most_reads_rows_that_are_new_enough():
    """The rows of a step k have the updates of all steps up to k - 1 - s: so does what is cached."""
    staleness = 2
    with local_servers(2) as servers:
        model = make(servers, AtMost(staleness), cache=10_000, optimizer=te.optim.SGD(lr=1.0))
        batch = next(batches(1))
        seen = []
        for _ in range(8):
            output = model(batch)
            seen.append(output.detach())
            output.sum().backward()  # each step moves a row by the same
        caches = model.table_set.service.caches
        assert sum(cache.rows_saved for cache in caches) > sum(cache.rows_read for cache in caches) // 2
    single = make(None, optimizer=te.optim.SGD(lr=1.0))
    states = []
    for _ in range(8):
        output = single(batch)
        states.append(output.detach())
        output.sum().backward()
    for step, output in enumerate(seen):
        assert any(torch.equal(output, states[step - s]) for s in range(min(step, staleness) + 1)), step


def test_a_cache_survives_servers_that_load_other_rows(tmp_path):
    with local_servers(2) as servers:
        model = make(servers, cache=10_000)
        train(model, 3)
        service = model.table_set.service
        service.snapshot(tmp_path / "a-")
        expected = train(model, 3)
        service.restore([[tmp_path / f"a-{n}.server"] for n in range(2)], 3)
        assert all(torch.equal(*pair) for pair in zip(train(model, 3), expected, strict=True))


@pytest.mark.parametrize("staleness", [1, AtMost(3), None])
def test_rows_of_a_cache_are_not_used_after_others_are_loaded(staleness, tmp_path):
    """Nor are those of a batch that was pulled before, and is read afterwards."""
    batch = next(batches(1))
    with local_servers(2) as servers:
        model = make(servers, staleness, te.optim.SGD(lr=1.0), dynamic={"capacity": 400}, cache=10_000)

        def check() -> None:
            with torch.no_grad():
                expected = model(batch)
            for _ in range(2):  # the second reads what the first has cached
                assert torch.equal(model(batch), expected)

        def read_rows() -> None:
            for _ in range(4):
                model(batch).sum().backward()
            flush(model)

        read_rows()
        service = model.table_set.service
        service.snapshot(tmp_path / "a-")
        steps, state = service.steps, model.state_dict()
        read_rows()
        waiting = te.nn.prefetch(model, batch)
        model.load_state_dict(
            {name: value + 100 if name.endswith(".weight") else value for name, value in state.items()}
        )
        model(waiting).detach()
        del waiting
        check()
        read_rows()
        service.restore([[tmp_path / f"a-{n}.server"] for n in range(2)], steps)
        check()
