"""Dynamic tables from a vocabulary, from TorchRec's managed collisions and from dumps of dynamicemb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb.interop import from_dynamicemb, from_torchrec, from_vocabulary

DIM, LARGEST = 3, 2**63 - 1
IDS = [7, -(2**63), 2**40, -1, LARGEST]
ROWS = torch.arange(5.0 * DIM).view(5, DIM) / 7


def table(dtype: torch.dtype = torch.float32, capacity: int = 30) -> te.nn.DynamicTable:
    config = te.TableConfig("user", None, DIM, capacity=capacity, dtype=dtype)
    result = te.nn.EmbeddingBagCollection([config], te.optim.RowWiseAdagrad(lr=0.1))["user"]
    assert isinstance(result, te.nn.DynamicTable)
    return result


def has(found: te.nn.DynamicTable, rows: dict[int, Tensor]) -> None:
    assert found.ids().tolist() == sorted(rows)
    assert torch.equal(found.lookup([*rows]), torch.stack([*rows.values()]).to(found.weight.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ids", [IDS, torch.tensor(IDS), torch.tensor(IDS)[:, None], np.array(IDS), {id: row for row, id in enumerate(IDS)}]
)
def test_rows_of_a_vocabulary(ids, dtype):
    result = table(dtype)
    from_vocabulary(result, nn.Parameter(ROWS.double()), ids)
    has(result, dict(zip(IDS, ROWS, strict=True)))


def test_some_rows_with_their_states():
    result = table()
    result.insert([5, 7], torch.ones(2, DIM), sum=torch.ones(2))
    from_vocabulary(result, ROWS, {7: 4, 2**40: 0, -1: 4}, sum=torch.arange(5.0))
    has(result, {5: torch.ones(DIM), 7: ROWS[4], 2**40: ROWS[0], -1: ROWS[4]})
    assert result.export()["sum"].tolist() == [4, 1, 4, 0]
    from_vocabulary(result, ROWS[:0], [])
    from_vocabulary(result, ROWS, {})
    assert result.num_rows == 4


def test_a_module_goes_on_from_a_static_one():
    static = te.nn.EmbeddingBag(5, DIM, mode="sum", optimizer=te.optim.RowWiseAdagrad(lr=0.1))
    dynamic = te.nn.EmbeddingBag(None, DIM, mode="sum", capacity=30, optimizer=te.optim.RowWiseAdagrad(lr=0.1))
    numbers = torch.tensor([[0, 3], [3, 4]])
    static(numbers).square().sum().backward()
    te.interop.from_vocabulary(dynamic.table, static.weight, IDS, sum=static.optimizer_states()["sum"])
    for module, ids in ((static, numbers), (dynamic, torch.tensor(IDS)[numbers])):
        module(ids).square().sum().backward()
    assert torch.equal(dynamic.table.lookup(IDS), static.weight)


def mpzch(name: str = "user", kind: str = "embedding_bags", prefix: str = "") -> dict[str, Tensor]:
    """A state of TorchRec's, 4 of 6 slots taken."""
    module = f"{prefix}_managed_collision_collection._managed_collision_modules.{name}."
    return {
        f"{module}_hash_zch_identities": torch.tensor([-1, 7, -(2**63), -1, LARGEST, 0])[:, None],
        f"{module}_hash_zch_metadata": torch.zeros(6, 1, dtype=torch.int32),
        f"{prefix}_embedding_module.{kind}.{name}.weight": torch.cat([ROWS, ROWS[:1] + 5]),
    }


def mch(name: str = "user", prefix: str = "") -> dict[str, Tensor]:
    """As above, of the module that sorts ids; the last rows are of ids that it does not keep."""
    module = f"{prefix}_managed_collision_collection._managed_collision_modules.{name}."
    return {
        f"{module}_mch_sorted_raw_ids": torch.tensor([-(2**63), -1, 7, LARGEST]),
        f"{module}_mch_remapped_ids_mapping": torch.tensor([2, 0, 3, 1]),
        f"{module}_mch_counts": torch.ones(4, dtype=torch.int64),
        f"{prefix}_embedding_module.embeddings.{name}.weight": ROWS,
    }


@pytest.mark.parametrize(
    ("state", "given"),
    [
        (mpzch(), {}),
        (mpzch("t_user", "embeddings", "model.mc."), {"prefix": "model.mc", "name": "t_user"}),
        (mpzch() | mch("item"), {}),
    ],
)
def test_rows_of_torchrecs_hashing_module(state, given):
    result = table()
    from_torchrec(result, state, **given, sum=torch.arange(6.0))
    has(result, {7: ROWS[1], -(2**63): ROWS[2], LARGEST: ROWS[4], 0: ROWS[0] + 5})
    assert result.export()["sum"].tolist() == [2, 5, 1, 4]


def test_rows_of_torchrecs_sorting_module():
    result = table()
    from_torchrec(result, mch(prefix="mc.") | mpzch("item"), "mc")
    has(result, {-(2**63): ROWS[2], -1: ROWS[0], 7: ROWS[3]})


def dump(folder: Path, name: str = "user", world: int = 2) -> list[Path]:
    """As dynamicemb writes it: ids of a rank by their remainder, here as they come."""
    paths = []
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        for kind, values in (("keys", np.array(IDS[rank::world])), ("values", ROWS[rank::world].numpy())):
            paths.append(folder / f"{name}_emb_{kind}.rank_{rank}.world_size_{world}")
            paths[-1].write_bytes(values.tobytes())
        (folder / f"{name}_emb_scores.rank_{rank}.world_size_{world}").write_bytes(b"12345678")
    (folder / f"{name}_opt_args.json").write_text("{}")
    return paths


@pytest.mark.parametrize("world", [1, 2, 7])  # of seven ranks, two have no rows
def test_rows_of_dynamicemb(tmp_path, world):
    paths = dump(tmp_path, "user_emb", world)
    for source in (tmp_path, str(tmp_path), paths[::-1]):
        result = table()
        from_dynamicemb(result, source)
        has(result, dict(zip(IDS, ROWS, strict=True)))
    dump(tmp_path, "other")
    result = table(torch.bfloat16)
    message = r"no file user_emb_keys\.rank_\*, only those of tables \['other', 'user_emb'\]"
    with pytest.raises(ValueError, match=message):
        from_dynamicemb(result, tmp_path)
    from_dynamicemb(result, tmp_path, "user_emb")
    has(result, dict(zip(IDS, ROWS, strict=True)))


class Part(Tensor):
    """As a sharded tensor is one."""


def spoilt(spoil: Callable[[list[Path]], Any]) -> Callable[[te.nn.DynamicTable, Path], None]:
    def call(result: te.nn.DynamicTable, folder: Path) -> None:
        spoil(dump(folder))
        from_dynamicemb(result, folder)

    return call


def edited(state: dict[str, Tensor], end: str, edit: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """With another value of the key that ends so, or without it."""
    result = {key: edit(value) if key.endswith(end) else value for key, value in state.items()}
    return {key: value for key, value in result.items() if value is not None}


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "4 ids with 4 rows of {'weight': 5}", lambda t, _: from_vocabulary(t, ROWS, IDS[:4])),
        (ValueError, "5 ids.*'sum': 4", lambda t, _: from_vocabulary(t, ROWS, IDS, sum=torch.ones(4))),
        (ValueError, "'weight': 5, 'sum': 9", lambda t, _: from_vocabulary(t, ROWS, {7: 4}, sum=torch.ones(9))),
        (ValueError, "'weight': 5, 'sum': 7", lambda t, _: from_torchrec(t, mch(), sum=torch.ones(7))),
        (ValueError, r"'weight': 0", lambda t, _: from_vocabulary(t, torch.tensor(1.0), IDS)),
        (ValueError, "rows 0 to 5", lambda t, _: from_vocabulary(t, ROWS, {1: 0, 2: 5})),
        (ValueError, "rows -1 to 2", lambda t, _: from_vocabulary(t, ROWS, {1: -1, 2: 2})),
        (ValueError, "duplicate id 7", lambda t, _: from_vocabulary(t, ROWS[:2], [7, 7])),
        (ValueError, r"weight must have shape \(5, 3\)", lambda t, _: from_vocabulary(t, ROWS[:, :2], IDS)),
        (ValueError, "no state 'moment'", lambda t, _: from_vocabulary(t, ROWS, IDS, moment=ROWS)),
        (ValueError, "no room for", lambda t, _: from_vocabulary(t, torch.ones(99, DIM), range(99))),
        (TypeError, "ids must be .*float64", lambda t, _: from_vocabulary(t, ROWS[:1], [1.0])),
        (TypeError, "ids must be .*uint64", lambda t, _: from_vocabulary(t, ROWS[:1], [2**63])),
        (TypeError, "ids must be .*bool", lambda t, _: from_vocabulary(t, ROWS[:1], torch.tensor([True]))),
        (TypeError, "rows must be .*float64", lambda t, _: from_vocabulary(t, ROWS, {1: 1.0})),
        (TypeError, "ids must be .*ndarray <U1", lambda t, _: from_vocabulary(t, ROWS[:1], ["a"])),
        (TypeError, "weight must be .*int64", lambda t, _: from_vocabulary(t, ROWS.long(), IDS)),
        (TypeError, "weight must be .*list", lambda t, _: from_vocabulary(t, ROWS.tolist(), IDS)),
        (TypeError, "weight.*unsharded.*Part.*gather", lambda t, _: from_vocabulary(t, ROWS.as_subclass(Part), IDS)),
        (TypeError, "a DynamicTable.*EmbeddingBag", lambda t, _: from_vocabulary(te.nn.EmbeddingBag(5, 3), ROWS, IDS)),
        (TypeError, "a DynamicTable.*Embedding", lambda t, f: from_dynamicemb(nn.Embedding(3, 3), f)),
        (ValueError, "either .*item._hash.*it has.*user._hash", lambda t, _: from_torchrec(t, mpzch(), name="item")),
        (ValueError, "either mc._managed", lambda t, _: from_torchrec(t, mpzch(), "mc")),
        (ValueError, "must have .*weight", lambda t, _: from_torchrec(t, edited(mpzch(), "weight", lambda _: None))),
        (ValueError, "_mapping", lambda t, _: from_torchrec(t, edited(mch(), "_mapping", lambda _: None))),
        (ValueError, "6 ids", lambda t, _: from_torchrec(t, edited(mpzch(), "weight", lambda rows: rows[1:]))),
        (ValueError, "4 ids", lambda t, _: from_torchrec(t, edited(mch(), "_mapping", lambda rows: rows[1:]))),
        (ValueError, "rows 2 to 5", lambda t, _: from_torchrec(t, edited(mch(), "_mapping", lambda rows: rows + 2))),
        (ValueError, "missing.*: user_emb_values.rank_1", spoilt(lambda paths: paths[3].unlink())),
        (ValueError, "surplus .*rank_0.world_size_2", spoilt(lambda paths: dump(paths[0].parent, world=3))),
        (ValueError, "rank_0.*not an int64 and 3 float32", spoilt(lambda paths: paths[0].open("ab").write(b"1"))),
        (ValueError, "rank_1.*not an int64 and 3 float32", spoilt(lambda paths: paths[3].write_bytes(b"1234"))),
        (ValueError, "have the same rank", lambda t, f: from_dynamicemb(t, [*dump(f / "a"), *dump(f / "b")])),
        (ValueError, r"only those of tables \[\]", lambda t, folder: from_dynamicemb(t, folder / "nowhere")),
    ],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing(error, message, call, tmp_path):
    result = table()
    result.insert([5], torch.ones(1, DIM))
    initial = result.state_dict()
    with pytest.raises(error, match=message):
        call(result, tmp_path)
    assert_same_bits(result.state_dict(), initial)
