"""What the ranks of a job read together, also where an epoch goes on with other ranks or other workers."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.bundle import KINDS, SIZES
from tests.data.logs import line, options, same, write
from tests.data.threads import running
from tritonemb.data import ClickLog
from tritonemb.data.loader import merge_positions, open_shards, rank_position


def epoch(data, split, batch_size, world, reading, positions=None, rounds=None, shards=None, **how):
    """What each rank draws in turn until all are out or for some rounds, and the position of all after that."""
    streams = [
        open_shards(data, split, batch_size, rank, world, shards, positions, workers=reading, **how)
        for rank in range(world)
    ]
    drawn = [[] for _ in streams]
    for _ in itertools.count() if rounds is None else range(rounds):
        batches = [next(stream, None) for stream in streams]
        for local, batch in zip(drawn, batches, strict=True):
            local += [] if batch is None else [batch]
        if not any(batches):
            break
    ranks = [json.loads(json.dumps(stream.position)) for stream in streams]
    rows = sum(stream.report.rows for stream in streams)
    for stream in streams:
        stream.close()
    assert [json.loads(json.dumps(stream.position)) for stream in streams] == ranks
    return drawn, merge_positions(ranks), rows


def rows_of(drawn):
    return [int(row) for local in drawn for batch in local for row in batch.dense[:, 0]]


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    batch_size=st.integers(1, 30),
    world=st.sampled_from((1, 2, 4, 7)),
    count=st.sampled_from((0, 1, 3)),
    how=st.fixed_dictionaries({"seed": st.integers(0, 2), "epoch": st.integers(0, 1), "shuffle": st.booleans()}),
    worlds=st.lists(st.sampled_from((1, 2, 3, 9)), max_size=3),
    rounds=st.integers(0, 6),
)
@pytest.mark.more
def test_every_row_is_seen_once(workers, bundle, kind, size, batch_size, world, count, how, worlds, rounds):
    """With any number of workers, and where the epoch resumes on other numbers of ranks; the same bits in each case."""
    split, reading = f"{kind}-{size}/train", workers[count]
    drawn, _, rows = epoch(bundle, split, batch_size, world, reading, **how)
    assert sorted(rows_of(drawn)) == list(range(size))
    assert rows == size
    other = workers[{0: 1, 1: 3, 3: 0}[count]]
    again, _, _ = epoch(bundle, split, batch_size, world, other, **how)
    assert all(same(a, b) for a, b in zip(drawn, again, strict=True))
    seen, position = [], None
    for number, part_reading in zip((world, *worlds), itertools.cycle((reading, other)), strict=False):
        parts, position, rows = epoch(bundle, split, batch_size, number, part_reading, position, rounds, world, **how)
        seen += rows_of(parts)
        assert rows == len(seen)
    position = json.loads(json.dumps(position))
    remainder, _, rows = epoch(bundle, split, batch_size, world, other, position, **how)
    assert rows == size
    assert sorted([*seen, *rows_of(remainder)]) == list(range(size))
    if not worlds:  # as if it had not been interrupted
        assert all(same(local[rounds:], final) for local, final in zip(drawn, remainder, strict=True))


def test_a_shard_is_drawn_from_in_turn(bundle):
    data = bundle.data["memory-60"]
    with open_shards(data, "train", 4, 1, 2, 6) as stream:  # shards 1, 3 and 5 with 10 rows each
        drawn = [[int(row) for row in batch.dense[:, 0]] for batch in stream]
        assert stream.report.rows == 30
    assert [rows[0] % 6 for rows in drawn] == [1, 3, 5] * 3
    assert list(map(len, drawn)) == [4, 4, 4, 4, 4, 4, 2, 2, 2]
    with open_shards(data, "train", 4, 3, 4, 2) as stream:
        assert list(stream) == []
        assert stream.position == {"shares": 2, "at": {}}


@pytest.mark.parametrize("rounds", [0, 1, 4, 5, 9, 30])
@pytest.mark.few(2)
def test_ranks_with_several_shards_resume_in_their_turn(bundle, rounds):
    kwargs = {"shards": 5, "shuffle": True}
    whole, _, _ = epoch(bundle, "tsv-60/train", 2, 2, None, **kwargs)
    initial, position, _ = epoch(bundle, "tsv-60/train", 2, 2, None, rounds=rounds, **kwargs)
    final, _, _ = epoch(bundle, "tsv-60/train", 2, 2, None, position, **kwargs)
    for local, first, remainder in zip(whole, initial, final, strict=True):
        assert same(local, [*first, *remainder])


def test_one_shard_is_the_stream_itself(bundle):
    data = bundle.data["memory-60"]
    with open_shards(data, "train", 4) as stream, data.open("train", 4) as plain:
        assert type(stream) is type(plain)
        next(stream)
        next(plain)
        assert stream.position == plain.position
        position = stream.position
    assert merge_positions([{"shares": 1, "at": {}}, position]) == position
    assert rank_position(position, 0, 2) == position
    assert rank_position(position, 1, 2) == {"shares": 1, "at": {}}
    with open_shards(data, "train", 4, 0, 2, positions=position) as stream:
        assert sum(map(len, stream)) == 56
    with open_shards(data, "train", 4, 1, 2, positions=position) as stream:
        assert list(stream) == []


def test_positions_that_do_not_fit_are_refused(bundle):
    data = bundle.data["memory-60"]
    _, whole, _ = epoch(data, "train", 4, 3, None, rounds=2)
    parts = [rank_position(whole, rank, 3) for rank in range(3)]
    assert [list(part["at"]) for part in parts] == [["0"], ["1"], ["2"]]
    assert merge_positions(parts[::-1]) == whole
    for wrong, message in (
        (parts[:2], "no rank's position has shard 2 of 3"),
        ([*parts, parts[0]], "shard 0 is in the positions of two ranks"),
        ([parts[0], {"shares": 4, "at": {}}], r"of epochs in \[3, 4\] shards"),
        ([{"shares": 2, "at": {"2": parts[2]["at"]["2"]}}], "is not a position of shards"),
        ([{"shares": 0, "at": {}}], "is not a position of shards"),
        ([{"shares": 2, "at": {"0": {}}}], "is not a position of shards"),
        (["no"], "'no' is not a position"),
        ([], "positions are of epochs in"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_positions(wrong)
    with pytest.raises(ValueError, match="the position lacks shard 1 of 3; merge the positions of all ranks"):
        open_shards(data, "train", 4, 1, 3, positions=parts[0])
    with pytest.raises(ValueError, match="of an epoch in 3 shards, which cannot resume in 2"):
        open_shards(data, "train", 4, 1, 3, 2, whole)
    with pytest.raises(ValueError, match="other data or with other settings"):
        open_shards(data, "train", 5, 1, 3, positions=whole)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        open_shards(data, "train", 4, 2, 2)
    assert not running()


def test_a_rank_whose_shard_fails_gives_no_more_batches(bundle):
    log = bundle.data["strict"]
    stream = open_shards(log, "train", 4, 0, 1, 3)
    with pytest.raises(ValueError, match="line 41: expected 40 tab-separated fields"):
        list(stream)
    assert list(stream) == []
    assert not running()


@pytest.mark.more
def test_bad_rows_are_reported_by_all_shards(bundle, workers):
    for reading in workers.values():
        split = "lenient/train"
        with open_shards(bundle, split, 4, 0, 1, 3, workers=reading) as stream:
            list(stream)
            assert (stream.report.rows, stream.report.skipped, len(stream.report.problems)) == (40, 1, 1)
            ((reason, number),) = stream.report.reasons
            assert reason.endswith("bad.txt: not 40 fields")
            assert number == 1


@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 1, 3), (3, 3, 2)])
def test_bad_rows_of_shards_that_have_ended_are_reported_after_a_resume(tmp_path, worlds):
    """Of three shards of 20 lines the first begins and ends with 6 bad ones; it ends first, and may be another rank's
    then."""
    lines = [line() if 6 <= number < 14 or number >= 20 else "0\tbad".ljust(len(line())) for number in range(60)]
    subset = {"chunk_bytes": 2 * len(line()), "shuffle_rows": 8}  # those at its end are read after its last batch
    log = ClickLog(write(tmp_path, lines), options(on_bad_row="skip", **subset))
    position, at = None, 0
    for world, rounds in zip(worlds, (15, 2, None), strict=True):
        streams = [open_shards(log, "train", 2, rank, world, 3, position, shuffle=True) for rank in range(world)]
        reports = [stream.report for stream in streams]
        assert sum(report.rows for report in reports) == at
        assert sum(report.skipped for report in reports) == (12 if at else 0)
        for _ in range(30 if rounds is None else rounds):
            for stream in streams:
                at += len(next(stream, ()))
        for stream in streams:
            stream.close()
        position = json.loads(json.dumps(merge_positions([stream.position for stream in streams])))
        entry = position["at"]["0"]
        assert (entry["ended"], entry["rows"], entry["skipped"]) == (True, 8, 12)
        assert sum(stream.report.skipped for stream in streams) == 12
    assert at == sum(stream.report.rows for stream in streams) == 48
