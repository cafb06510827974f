"""Files of item sequences, and their leave-one-out split, against lists."""

from __future__ import annotations

import gzip
import lzma

import pytest
import torch

from tritonemb.data.sequences import keep_last, leave_one_out, read_sequences, take_rows

USERS = [[5, 3, 9, 1], [7, 7, 2], [1, 2, 3, 4, 5, 6, 7]]


def write(path, opener=open) -> None:
    with opener(path, "wt") as file:
        file.writelines(f"user{i} {' '.join(map(str, items))}\n" for i, items in enumerate(USERS))


def lists(column) -> list[list[int]]:
    return [column.values[a:b].tolist() for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


@pytest.mark.parametrize(("name", "opener"), [("a.txt", open), ("a.txt.gz", gzip.open), ("a.txt.xz", lzma.open)])
def test_a_file_has_a_user_per_line(tmp_path, name, opener):
    write(tmp_path / name, opener)
    sequences = read_sequences(tmp_path / name)
    assert lists(sequences) == USERS
    assert sequences.values.dtype == torch.int64
    with opener(tmp_path / name, "at") as file:
        file.write("\n \n")
    assert lists(read_sequences(tmp_path / name)) == USERS


def test_the_last_items_of_each_user_are_held_out(tmp_path):
    write(tmp_path / "a.txt")
    sequences = read_sequences(tmp_path / "a.txt")
    for split, held_out in (("train", 2), ("validation", 1), ("test", 0)):
        histories, targets = leave_one_out(sequences, split)
        assert lists(histories) == [items[: len(items) - held_out - 1] for items in USERS]
        assert targets.tolist() == [items[len(items) - held_out - 1] for items in USERS]
    for length in (None, 0, 1, 3, 100):
        for drop in (0, 2, 5):
            kept = [items[: max(0, len(items) - drop)] for items in USERS]
            expected = [items[max(0, len(items) - (100 if length is None else length)) :] for items in kept]
            assert lists(keep_last(sequences, length, drop)) == expected
    assert lists(take_rows(sequences, torch.tensor([2, 0, 2]))) == [USERS[2], USERS[0], USERS[2]]


def test_bad_files(tmp_path):
    path = tmp_path / "a.txt"
    for line in ("v 1 x 3", "v 1 9223372036854775808 3", "v 1 é 3"):
        path.write_bytes(f"u 1 2 3\n{line}\n".encode("latin-1"))
        with pytest.raises(ValueError, match=r"a\.txt, line 2: expected a user and integer item ids"):
            read_sequences(path)
    path.write_bytes("é 1 2 3\r\nv 4\n".encode("latin-1"))  # users may have any name
    assert lists(read_sequences(path)) == [[1, 2, 3], [4]]
    cut = tmp_path / "a.txt.gz"
    cut.write_bytes(gzip.compress(b"u 1 2 3\n")[:-9])
    with pytest.raises(ValueError, match=r"a\.txt\.gz, line .*Compressed file ended"):
        read_sequences(cut)
    for name, content in (("b.txt.gz", b"u 1 2 3\n"), ("b.txt.xz", b"u 1 2 3\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}, line 1: expected a user"):
            read_sequences(tmp_path / name)
    with pytest.raises(ValueError, match="length and drop must be at least 0, got -1 and 0"):
        keep_last(read_sequences(path), -1)
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'all'"):
        leave_one_out(read_sequences(path), "all")
    path.write_text("u 1 2 3\nv 1 2\n")
    with pytest.raises(ValueError, match="user 1 has 2 items; leave-one-out needs 3"):
        leave_one_out(read_sequences(path), "test")
    path.write_text("")
    assert lists(read_sequences(path)) == []
