import pytest
import torch
from torch import nn

pytest.importorskip("torchmetrics")

import tritonemb as te
from tritonemb.data import Column, Dataset, Feature, Rows, make_synthetic
from tritonemb.training.trainer import dense_parameters

SPEC = te.optim.RowWiseAdagrad(lr=0.05)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return make_synthetic(num_train=20_000, num_test=4_000, seed=0)


def make_model(data: Dataset, optimizer=SPEC, seed: int = 0) -> te.nn.DLRM:
    torch.manual_seed(seed)
    return te.nn.DLRM(data.tables(8), data.num_dense, bottom_mlp=(16,), top_mlp=(32,), optimizer=optimizer)


def make_trainer(data: Dataset, model: nn.Module, **options) -> te.Trainer:
    return te.Trainer(model, data, **({"batch_size": 256, "dense_lr": 3e-3, "verbose": False} | options))


@pytest.mark.parametrize("optimizer", [SPEC, None], ids=["fused", "dense"])
def test_it_learns_the_planted_model(data, optimizer):
    """0.77 of at most 0.83: a model that learned nothing has 0.5, one that learned only the dense part 0.6."""
    trainer = make_trainer(data, make_model(data, optimizer), epochs=3 if optimizer is None else 2)
    before = trainer.evaluate().auc
    result = trainer.fit()
    metrics = trainer.evaluate()
    assert before < 0.65
    assert 0.77 < metrics.auc < data.best_auc
    assert metrics.normalized_entropy < 0.9
    assert result.losses[-1] < result.losses[0]
    assert result.num_samples == 20_000 * len(result.losses)
    assert result.samples_per_second > 0


def test_the_same_seed_gives_the_same_bits(data):
    states = []
    for _ in range(2):
        model = make_model(data)
        make_trainer(data, model, seed=4).fit()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    other = make_model(data)
    make_trainer(data, other, seed=5).fit()
    assert not any(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_fit_goes_on_with_the_next_epoch(data):
    once, twice = make_model(data), make_model(data)
    make_trainer(data, once, epochs=2).fit()
    trainer = make_trainer(data, twice, epochs=1)
    trainer.fit()
    trainer.fit()
    for a, b in zip(once.state_dict().values(), twice.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_every_epoch_has_an_order_of_its_own(data):
    class Recorder(nn.Linear):
        def forward(self, dense, sparse):
            seen.append(sparse.values().clone())
            return super().forward(dense).squeeze(1)

    seen: list[torch.Tensor] = []
    trainer = make_trainer(data, Recorder(data.num_dense, 1), batch_size=5_000, epochs=2, seed=7)
    trainer.fit()
    trainer.fit()
    expected = [b.sparse.values() for epoch in range(4) for b in data.train_batches(5_000, seed=7, epoch=epoch)]
    assert len(seen) == len(expected) == 16
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_only_parameters_without_a_fused_optimizer_are_dense(data):
    fused, plain = make_model(data), make_model(data, None)
    tables = {id(p) for p in fused.embeddings.parameters()}
    assert len(tables) == len(data.features)
    assert {id(p) for p in dense_parameters(fused)} == {id(p) for p in fused.parameters()} - tables
    assert {id(p) for p in dense_parameters(plain)} == {id(p) for p in plain.parameters()}
    frozen = make_model(data)
    frozen.top.requires_grad_(False)
    assert not {id(p) for p in frozen.top.parameters()} & {id(p) for p in dense_parameters(frozen)}


def test_a_model_of_fused_tables_alone_trains():
    class Sum(nn.Module):
        def __init__(self, tables):
            super().__init__()
            self.embeddings = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.SGD(lr=1.0))

        def forward(self, dense, sparse):
            return self.embeddings(sparse).sum(1)

    rows = Rows(torch.zeros(64, 1), (Column(torch.arange(64) % 2),), (torch.arange(64) % 2).float())
    data = Dataset("parity", (Feature("id", 2),), rows, rows)
    trainer = make_trainer(data, Sum(data.tables(1)), batch_size=8, epochs=20)
    assert trainer.dense_optimizer is None
    trainer.fit()
    assert trainer.evaluate().auc == 1.0


def test_evaluate_changes_nothing_and_follows_the_split(data):
    model = make_model(data)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer(data, model)
    assert trainer.evaluate("train").num_samples == 20_000
    assert trainer.evaluate("test").num_samples == 4_000
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="no 'validation' rows"):
        trainer.evaluate("validation")


def test_evaluation_does_not_depend_on_the_batch_size(data):
    model = make_model(data)
    aucs = [make_trainer(data, model, batch_size=size).evaluate().auc for size in (333, 4_000)]
    assert aucs[0] == pytest.approx(aucs[1], abs=1e-6)  # matrix products round differently with other shapes


def test_lines_are_printed_where_there_is_no_terminal(data, capsys):
    pytest.importorskip("rich")
    small = Dataset("small", data.features, data.train.slice(0, 500), data.test, data.train.slice(500, 900))
    make_trainer(small, make_model(data), epochs=2, verbose=True).fit()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("epoch 2/2: training loss 0.")
    assert "validation AUC 0." in lines[1]


def test_divergence_is_reported(data):
    trainer = make_trainer(data, make_model(data), dense_lr=1e30)
    with pytest.raises(ValueError, match=r"training loss is (nan|inf) in epoch 1; lower the learning rates"):
        trainer.fit()


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"epochs": 0}])
def test_sizes_are_checked(data, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least 1, got 0"):
        make_trainer(data, make_model(data), **options)


def test_a_model_of_another_shape_is_refused(data):
    class Column2d(nn.Linear):
        def forward(self, dense, sparse):
            return super().forward(dense)

    with pytest.raises(ValueError, match=r"must return logits \[256\], got shape \[256, 1\]"):
        make_trainer(data, Column2d(data.num_dense, 1)).fit()


def test_compiled_training_learns(data):
    small = Dataset("small", data.features, data.train.slice(0, 2_048), data.test.slice(0, 512))
    eager, compiled = make_model(data), make_model(data)
    losses = [
        make_trainer(small, model, compile=compile).fit().losses[0]
        for model, compile in ((eager, False), (compiled, True))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # fused kernels round the dense part differently
