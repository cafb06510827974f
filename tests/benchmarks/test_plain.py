"""The plain twin of a fused DLRM: same function, same optimizer formula."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from benchmarks.studies.accuracy import PlainDLRM, PlainRowWiseAdagrad

pytestmark = pytest.mark.more

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
    before = [table.detach().clone() for table in plain.tables()]
    for _ in range(3):
        fused(dense, sparse).square().sum().backward()
        optimizer.zero_grad()
        plain(dense, sparse).square().sum().backward()
        optimizer.step()
    for table, weight, old in zip(TABLES, plain.tables(), before, strict=True):
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
