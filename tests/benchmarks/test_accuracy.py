"""The plain twin of a fused DLRM: same function, same optimizer formula; and comparing the two, on little data."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tritonemb as te
from benchmarks.studies.accuracy import TOLERANCE, PlainDLRM, PlainRowWiseAdagrad, compare, criteo, seen_share
from tritonemb.data import Column, Dataset, Feature, Rows
from tritonemb.training.config import preset

pytestmark = pytest.mark.more


def planted(num_rows: int) -> Dataset:
    """A label that depends on the first number and the first id alone."""
    generator = torch.Generator().manual_seed(0)
    dense, ids = torch.randn(num_rows, 2, generator=generator), torch.randint(0, 20, (num_rows,), generator=generator)
    lengths = torch.randint(0, 3, (num_rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bags = Column(torch.randint(0, 5, (int(offsets[-1]),), generator=generator), offsets)
    rows = Rows(dense, (Column(ids), bags), (dense[:, 0] + (ids % 2) > 0.5).float())
    features = (Feature("id", 20), Feature("bag", 5, multi_hot=True))
    return Dataset("planted", features, train=rows.slice(0, num_rows // 2), test=rows.slice(num_rows // 2, num_rows))


def test_both_networks_learn_and_agree() -> None:
    config = dataclasses.replace(preset("synthetic"), embedding_optimizer="row_wise_adagrad", epochs=2, batch_size=64)
    row = compare(config, planted(4000), seeds=range(2))
    assert row["torch_auc"] > 0.9
    assert abs(row["difference"]) <= TOLERANCE
    assert row["within_tolerance"]
    assert row["seeds"] == 2


def test_test_rows_that_stand_among_the_training_rows_are_counted() -> None:
    data = planted(400)
    assert seen_share(data) == 0
    assert seen_share(dataclasses.replace(data, test=data.train)) == 1
    assert seen_share(dataclasses.replace(data, train=data.train.slice(0, 150), test=data.train.slice(100, 200))) == 0.5
    flipped = dataclasses.replace(data.train, labels=1 - data.train.labels)
    assert seen_share(dataclasses.replace(data, test=flipped)) == 0


def test_a_criteo_file_is_read_into_memory(tmp_path) -> None:
    lines = ["\t".join([str(i % 2), *["1"] * 13, "ab"[i % 2] if i else "c", *[""] * 25]) for i in range(600)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    data = criteo(str(tmp_path / "train.txt"))
    assert len(data.train) + len(data.test) == 600
    assert 95 <= len(data.test) <= 105  # the last sixth of the file's bytes
    ids = data.train.columns[0].values
    assert ids.unique().numel() == 3, "two categories, and one that is too rare"
    assert torch.equal(ids[1:] == ids[1], data.train.labels[1:] == 1)


TABLES = [te.TableConfig("a", 11, 8), te.TableConfig("b", 7, 8, pooling="mean"), te.TableConfig("c", 5, 8)]


def sparse_batch(batch_size: int) -> te.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (len(TABLES) * batch_size,), generator=generator)
    sizes = lengths.view(len(TABLES), batch_size).sum(1).tolist()
    values = [
        torch.randint(0, table.num_embeddings, (size,), generator=generator)
        for table, size in zip(TABLES, sizes, strict=True)
    ]
    return te.KeyedJaggedTensor.from_lengths([table.name for table in TABLES], torch.cat(values), lengths)


def twins(optimizer: te.optim.Optimizer) -> tuple[te.nn.DLRM, PlainDLRM]:
    torch.manual_seed(0)
    fused = te.nn.DLRM(TABLES, 3, bottom_mlp=(6,), top_mlp=(9, 5), optimizer=optimizer)
    plain = PlainDLRM(TABLES, 3, bottom_mlp=(6,), top_mlp=(9, 5))
    plain.copy_weights(fused)
    return fused, plain


def test_same_weights_give_the_same_logits() -> None:
    fused, plain = twins(te.optim.RowWiseAdagrad(0.1))
    dense, sparse = torch.randn(16, 3), sparse_batch(16)
    logits = plain(dense, sparse)
    torch.testing.assert_close(logits, fused(dense, sparse), rtol=1e-5, atol=1e-6)  # sums in another order
    assert logits.std() > 1e-3


@pytest.mark.parametrize("kind", [te.optim.RowWiseAdagrad, te.optim.Adagrad])
def test_same_formula_gives_the_same_tables(kind: type[te.optim.Optimizer]) -> None:
    fused, plain = twins(kind(0.1))
    if kind is te.optim.RowWiseAdagrad:
        optimizer: torch.optim.Optimizer = PlainRowWiseAdagrad(plain.tables(), lr=0.1, eps=1e-8)
    else:
        optimizer = torch.optim.Adagrad(plain.tables(), lr=0.1, eps=1e-8)
    dense, sparse = torch.randn(16, 3), sparse_batch(16)
    initial = [table.detach().clone() for table in plain.tables()]
    for _ in range(3):
        fused(dense, sparse).square().sum().backward()
        optimizer.zero_grad()
        plain(dense, sparse).square().sum().backward()
        optimizer.step()
    for table, weight, old in zip(TABLES, plain.tables(), initial, strict=True):
        # Adagrad's first steps divide each gradient by itself, which magnifies the rounding of the smallest ones.
        torch.testing.assert_close(weight, fused.state_dict()[f"embeddings.{table.name}.weight"], rtol=1e-3, atol=1e-4)
        assert (weight - old).abs().max() > 0.01


def test_row_wise_adagrad_on_numbers_worked_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    optimizer = PlainRowWiseAdagrad([weight], lr=0.5, eps=0.0001)
    for _ in range(2):
        weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        optimizer.step()
    # mean(g²) = 12.5, so the steps divide by sqrt(12.5) = 3.5355 and sqrt(25) = 5.
    first = 1 - 0.5 * 3 / (12.5**0.5 + 0.0001) - 0.5 * 3 / 5.0001
    second = 1 - 0.5 * 4 / (12.5**0.5 + 0.0001) - 0.5 * 4 / 5.0001
    torch.testing.assert_close(weight.detach(), torch.tensor([[first, second], [2.0, 2.0]]))
