from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import tritonemb as te
from tests.training.jobs import Record
from tritonemb.data import ClickLog, Column, Dataset, Feature, LogOptions, Rows, Schema, SplitRule, make_synthetic
from tritonemb.training import Schedule
from tritonemb.training.model import dense_parameters

SPEC = te.optim.RowWiseAdagrad(lr=0.05)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return make_synthetic(num_train=20_000, num_test=4_000, seed=0)


@pytest.fixture(scope="module")
def small(data) -> Dataset:
    return Dataset("small", data.features, data.train.slice(0, 2_048), data.test.slice(0, 512))


def make_model(data: Dataset, optimizer=SPEC, seed: int = 0) -> te.nn.DLRM:
    torch.manual_seed(seed)
    return te.nn.DLRM(data.tables(8), data.num_dense, bottom_mlp=(16,), top_mlp=(32,), optimizer=optimizer)


def make_trainer(data: Dataset, model: nn.Module, **options) -> te.Trainer:
    return te.Trainer(model, data, **({"batch_size": 256, "dense_lr": 3e-3, "verbose": False} | options))


@pytest.mark.parametrize("optimizer", [SPEC, None], ids=["fused", "dense"])
def test_it_learns_the_planted_model(data, optimizer):
    """0.77 of at most 0.83: a model that learned nothing has 0.5, one that learned only the dense part 0.6."""
    trainer = make_trainer(data, make_model(data, optimizer), epochs=3 if optimizer is None else 2)
    initial = trainer.evaluate().auc
    result = trainer.fit()
    metrics = trainer.evaluate()
    assert initial < 0.65
    assert 0.77 < metrics.auc < data.best_auc
    assert metrics.normalized_entropy < 0.9
    assert result.losses[-1] < result.losses[0]
    assert result.num_samples == 20_000 * len(result.losses)
    assert result.samples_per_second > 0


def test_the_same_seed_gives_the_same_bits(small):
    states = []
    for _ in range(2):
        model = make_model(small)
        make_trainer(small, model, seed=4).fit()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    other = make_model(small)
    make_trainer(small, other, seed=5).fit()
    assert not any(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_fit_goes_on_with_the_next_epoch(small):
    once, twice = make_model(small), make_model(small)
    make_trainer(small, once, epochs=2).fit()
    trainer = make_trainer(small, twice, epochs=1)
    trainer.fit()
    trainer.fit()
    for a, b in zip(once.state_dict().values(), twice.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("part", ["dense", "table"])
def test_fit_does_not_go_on_at_a_learning_rate_of_0(part, small):
    def trainer(**options):
        return make_trainer(small, make_model(small), max_steps=2, **{f"{part}_schedule": Schedule(**options)})

    ended = trainer(decay="cosine")
    ended.fit()
    expected = {name: value.clone() for name, value in ended.model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{part}_schedule has decayed to a learning rate of 0 at step 2"):
        ended.fit()
    assert all(torch.equal(value, expected[name]) for name, value in ended.model.state_dict().items())
    for options in ({"decay": "cosine", "final": 0.1}, {"decay": "cosine", "decay_steps": 4}, {"warmup_steps": 3}):
        longer = trainer(**options)
        longer.fit()
        assert longer.fit().steps == 4


def test_a_split_that_is_missing_or_empty_is_an_error_before_training(tmp_path):
    (tmp_path / "log.csv").write_text("\n".join(["y,t,u", *(f"{n % 2},{n},u{n % 9}" for n in range(99))]))
    for rule, message in (
        (SplitRule(test_share=0.0), "data set 'log.csv' has no 'test' rows, only train"),
        (SplitRule(time_column="t", test_from="99"), "there are no test rows: no 't' is 99 or later"),
        (SplitRule(time_column="t", test_from="0"), "there are no train rows: no 't' is before 0"),
    ):
        log = ClickLog(tmp_path / "log.csv", LogOptions(Schema("y", sparse=("u",), num_embeddings=50), rule))
        model = te.nn.DCNv2(log.tables(4), 0, top_mlp=(4,), optimizer=SPEC)
        trainer = make_trainer(log, model, folder=tmp_path / "run")
        with pytest.raises(ValueError, match=message):
            trainer.fit(test=True)
        assert trainer.progress.step == 0
        assert not (tmp_path / "run" / "log.jsonl").exists()


def test_every_epoch_has_an_order_of_its_own(data):
    class Recorder(nn.Linear):
        def forward(self, dense, sparse):
            seen.append(sparse.values().clone())
            return super().forward(dense).squeeze(1)

    seen: list[torch.Tensor] = []
    trainer = make_trainer(data, Recorder(data.num_dense, 1), batch_size=5_000, epochs=2, seed=7)
    trainer.fit()
    trainer.fit()
    expected = [
        b.sparse.values() for epoch in range(4) for b in data.open("train", 5_000, seed=7, epoch=epoch, shuffle=True)
    ]
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
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = make_trainer(data, model)
    assert trainer.evaluate("train").num_samples == 20_000
    assert trainer.evaluate("test").num_samples == 4_000
    assert model.training
    assert all(torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="no 'validation' rows"):
        trainer.evaluate("validation")


def test_evaluation_does_not_depend_on_the_batch_size(data):
    model = make_model(data)
    aucs = [make_trainer(data, model, batch_size=size).evaluate().auc for size in (333, 4_000)]
    assert aucs[0] == pytest.approx(aucs[1], abs=1e-6)  # matrix products round differently with other shapes


def test_lines_are_printed_where_there_is_no_terminal(data, capsys):
    pytest.importorskip("rich")
    small = Dataset("small", data.features, data.train.slice(0, 500), data.test, data.train.slice(500, 900))
    make_trainer(small, make_model(data), epochs=2, verbose=True).fit(test=True)
    lines = capsys.readouterr().out.splitlines()
    starts = ["training", "validation", "step 4/4", "validation", "test AUC", "log loss", "normalized", "samples/s"]
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "log_every": 10_000}], ids=["log", "end of an epoch"])
def test_divergence_is_reported(small, options):
    trainer = make_trainer(small, make_model(small), dense_lr=1e30, **options)
    with pytest.raises(ValueError, match=r"training loss is (nan|inf) in epoch 1; lower the learning rates"):
        trainer.fit()


@pytest.mark.parametrize(
    "options",
    [{name: 0} for name in ("batch_size", "epochs", "max_steps", "accumulate", "log_every", "evaluate_every")],
    ids=str,
)
def test_sizes_are_checked(data, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_trainer(data, make_model(data), **options)
    for value in (float("nan"), 2.0, True, "2", []):
        with pytest.raises(TypeError, match=f"{name} must be an int, got"):
            make_trainer(data, make_model(data), **{name: value})


def test_a_trainer_takes_a_model_and_data(data):
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        make_trainer(data, make_model(data), seed=-1)
    for model, source in ((None, data), (make_model(data), "criteo"), (data, make_model(data))):
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module and a data set as of te\.data, got"):
            te.Trainer(model, source)
    assert type(te.Trainer(make_model(data), data, batch_size=np.int64(7)).batch_size) is int


def test_a_model_of_another_shape_is_refused(data):
    class Column2d(nn.Linear):
        def forward(self, dense, sparse):
            return super().forward(dense)

    with pytest.raises(ValueError, match=r"must return logits \[256\], got shape \[256, 1\]"):
        make_trainer(data, Column2d(data.num_dense, 1)).fit()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_compiled_training_learns(small, monkeypatch, dynamo, backend):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    eager, compiled = make_model(small), make_model(small)
    expected, losses = (
        make_trainer(small, model, compile=model is compiled).fit().losses for model in (eager, compiled)
    )
    assert losses == pytest.approx(expected, rel=1e-4)  # fused kernels round the dense part differently


def test_steps_of_several_batches_are_those_of_one_large_batch(data, small):
    """The tables' gradients are gathered and applied once; the dense ones are added up in another order."""
    small = replace(small, train=data.train.slice(0, 1_000))
    large, parts = make_model(data), make_model(data)
    make_trainer(small, large, batch_size=192).fit()
    trainer = make_trainer(small, parts, batch_size=64, accumulate=3)
    assert trainer.state.total_steps == 6
    assert trainer.fit().steps == 6
    for name, tensor in large.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: n + m)


class Modules(nn.Module):
    """Model of one module per table, with an optimizer of each or of all."""

    def __init__(self, data: Dataset, fuse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        optimizer = te.optim.Adagrad(lr=0.1)
        options = {} if fuse else {"optimizer": optimizer}
        kind = nn.EmbeddingBag if fuse else te.nn.EmbeddingBag
        self.tables = nn.ModuleDict({f.name: kind(f.num_embeddings, 4, mode="sum", **options) for f in data.features})
        self.top = nn.Linear(4 * len(data.features), 1)
        if fuse:
            te.fuse(self, optimizer)

    def forward(self, dense, sparse):
        outputs = [table(sparse[n].values(), sparse[n].offsets()[:-1]) for n, table in self.tables.items()]
        return self.top(torch.cat(outputs, 1)).squeeze(1)


@pytest.mark.parametrize("fuse", [False, True], ids=["optimizers", "fused"])
def test_single_modules_train_like_collections(small, fuse, tmp_path):
    """They accumulate, follow the schedule, get unscaled gradients, and resume bitwise."""
    small, states = replace(small, train=small.train.slice(0, 768)), []
    assert len(dense_parameters(Modules(small, fuse))) == 2
    for options in ({}, {"batch_size": 64, "accumulate": 4}, {"precision": "fp16"}):
        model = Modules(small, fuse)
        trainer = make_trainer(small, model, **options)
        assert len(trainer.state.step.fused_modules) == (1 if fuse else len(small.features))
        trainer.fit()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for name, tensor in states[0].items():  # sums in another order; products in 16 bits
        torch.testing.assert_close(states[1][name], tensor, rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(states[2][name], tensor, rtol=0.05, atol=0.1)

    frozen = Modules(small, fuse)
    initial = frozen.tables["user"].weight.detach().clone()
    make_trainer(small, frozen, table_schedule=Schedule(warmup_steps=10**9), max_steps=2).fit()
    torch.testing.assert_close(frozen.tables["user"].weight.detach(), initial, rtol=0, atol=1e-6)

    make_trainer(small, Modules(small, fuse), folder=tmp_path, max_steps=2).fit()
    resumed = make_trainer(small, Modules(small, fuse), folder=tmp_path)
    resumed.resume()
    resumed.fit()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in resumed.model.state_dict().items())


def test_tables_that_only_a_step_updates_are_refused(small):
    model = te.nn.DLRM(small.tables(8), small.num_dense, (8,), (8,))
    model.extra = nn.Embedding(3, 4)
    te.optim.fused(model, te.optim.SGD(lr=0.1), update="step")
    with pytest.raises(ValueError, match='fused with update="step"'):
        make_trainer(small, model)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.few(1)
def test_sixteen_bit_products_learn_and_tables_stay_fp32(data, precision):
    model = make_model(data)
    trainer = make_trainer(data, model, precision=precision)
    initial = trainer.evaluate().auc
    trainer.fit()
    assert trainer.evaluate().auc > initial + 0.1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_single_steps_follow_the_schedules_and_count(data):
    schedule = Schedule(warmup_steps=4)
    trainer = make_trainer(data, make_model(data), dense_lr=1.0, dense_schedule=schedule, table_schedule=schedule)
    base = trainer.state.step.current_rates()[1]
    for step, batch in zip(range(1, 6), data.open("train", 32), strict=False):
        assert trainer.step([batch]) == 32
        factor = min(step / 4, 1)
        assert trainer.state.step.current_rates() == pytest.approx((factor, base * factor), rel=1e-6)
        assert (trainer.progress.step, trainer.progress.samples) == (step, 32 * step)


def test_an_overflow_under_fp16_changes_nothing_but_the_scale(data):
    model = make_model(data)
    trainer = make_trainer(data, model, precision="fp16")
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (batch,) = [next(data.open("train", 64, shuffle=True))]
    trainer.state.step.loss_scale.factor = 2.0**40  # fp16 ends at 65,504
    assert trainer.step([batch]) == 64
    assert (trainer.state.step.loss_scale.factor, trainer.state.step.loss_scale.overflows) == (2.0**39, 1)
    assert all(torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())
    trainer.state.step.loss_scale.factor = 2.0**10
    trainer.step([batch])
    assert not any(torch.equal(tensor, initial[name]) for name, tensor in model.named_parameters())


def test_the_loss_scale_does_not_change_the_step(data):
    """Powers of two only move the exponent, as long as nothing leaves the range of fp16."""
    states = []
    for factor in (2.0**8, 2.0**12):
        model = make_model(data)
        trainer = make_trainer(data, model, precision="fp16")
        trainer.state.step.loss_scale.factor = factor
        trainer.step([next(data.open("train", 64, shuffle=True))])
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-2, atol=1e-4, msg=lambda m, n=name: n + m)


def test_an_unknown_precision_is_refused(data):
    with pytest.raises(ValueError, match=r"precision must be one of \('fp32', 'bf16', 'fp16'\), got 'fp8'"):
        make_trainer(data, make_model(data), precision="fp8")


def test_schedules_set_the_rates_of_dense_part_and_tables_apart(data):
    class Rates(te.training.Callback):
        logged: list[tuple[float | None, float | None]] = []  # noqa: RUF012 (one object is made)

        def on_log(self, log):
            self.logged.append((log.dense_lr, log.table_lr))

    rates = Rates()
    schedules = {"dense_schedule": Schedule(warmup_steps=2), "table_schedule": Schedule(decay="polynomial", power=1.0)}
    options = {"dense_lr": 0.5, "max_steps": 4, "log_every": 1, "callbacks": [rates], **schedules}
    trainer = make_trainer(data, make_model(data), **options)
    trainer.fit()
    assert [dense for dense, _ in rates.logged] == [0.25, 0.5, 0.5, 0.5]
    assert [table for _, table in rates.logged] == pytest.approx([0.05, 0.0375, 0.025, 0.0125])
    (group,) = trainer.model.embeddings.fused_optimizer.param_groups
    assert group["lr"] == pytest.approx(0.0125)
    assert float(trainer.model.embeddings.learning_rate) == pytest.approx(0.0125)


def test_callbacks_hear_everything_in_order(data):
    class Recorder(te.training.Callback):
        def __init__(self):
            self.heard = []

        def on_start(self, start):
            self.heard.append(f"start {start.first_step} of {start.total_steps}, {start.total_samples} samples")

        def on_step(self, step):
            self.heard.append(f"step {step.step} epoch {step.epoch} samples {step.samples}")

        def on_log(self, log):
            self.heard.append(f"log {log.step}")

        def on_evaluation(self, evaluation):
            self.heard.append(f"evaluation {evaluation.step} {evaluation.split} {evaluation.best}")

        def on_end(self, end):
            self.heard.append(None if end is None else f"end {end.reason} {end.step}")

    small = Dataset("small", data.features, data.train.slice(0, 300), data.test, data.train.slice(500, 900))
    recorder = Recorder()
    make_trainer(small, make_model(data), batch_size=200, log_every=2, callbacks=[recorder]).fit()
    assert recorder.heard == [
        "start 0 of 2, 300 samples",
        "step 1 epoch 0 samples 200",
        "step 2 epoch 0 samples 300",
        "log 2",
        "evaluation 2 validation True",
        "end finished 2",
    ]


@pytest.mark.parametrize("new_rows", [0, 1])
def test_a_message_says_that_all_test_rows_were_trained(new_rows):
    """Lists of ids included; one test row that differs by one id is enough for silence."""
    bags = Column(torch.tensor([1, 2, 3, 1, 2]), torch.tensor([0, 2, 2, 3, 5]))
    dense = torch.tensor([[0.0], [2.0], [1.0], [0.0]])
    train = Rows(dense, (bags, Column(torch.tensor([0, 1, 0, 0]))), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    changed = Column(torch.tensor([1, 2, 3, 1, 3 if new_rows else 2]), bags.offsets)
    test = replace(train, columns=(changed, train.columns[1])).take(torch.tensor([3, 1, 0]))
    data = Dataset("rows", (Feature("bags", 4, multi_hot=True), Feature("single", 2)), train, test)
    record = Record()
    make_trainer(data, make_model(data), batch_size=3, callbacks=[record]).fit(test=True)
    said = [text for text in record.messages if "test rows were trained" in text]
    assert len(said) == 1 - new_rows
    assert new_rows or "all, are among the first 4 training" in said[0], said


def test_a_run_ends_well_though_its_test_rows_cannot_be_compared(small):
    class Damaged(Dataset):
        def open(self, split, batch_size, **options):
            if split == "train" and not options.get("shuffle"):
                raise ValueError("row 9 is bad")
            return super().open(split, batch_size, **options)

    data, record = Damaged("damaged", small.features, small.train, small.test), Record()
    result = make_trainer(data, make_model(data), callbacks=[record]).fit(test=True)
    assert result.test is not None
    assert record.messages == ["test rows were not compared with training rows: row 9 is bad"]


def test_callbacks_hear_of_a_failure(data):
    class Failing(te.training.Callback):
        ended = "not yet"

        def on_step(self, step):
            raise RuntimeError("no")

        def on_end(self, end):
            self.ended = end

    failing = Failing()
    with pytest.raises(RuntimeError, match="no"):
        make_trainer(data, make_model(data), callbacks=[failing]).fit()
    assert failing.ended is None


@pytest.mark.parametrize(("option", "value"), [("patience", 2), ("evaluate_every", 2), ("monitor", "log_loss")])
def test_watching_validation_rows_needs_them(data, option, value):
    message = f"{option} needs validation rows, and data set 'synthetic' has none; .* or omit {option}"
    with pytest.raises(ValueError, match=message):
        make_trainer(data, make_model(data), **{option: value})
