"""Every model of `MODELS`: it trains, compiles, saves and loads; formulas against loops."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb.models import MODELS, ModelOptions
from tritonemb.models.deepfm import factorization_machine
from tritonemb.models.finalmlp import BilinearFusion

NUM_DENSE, ROWS = 2, 30
OPTIONS = {"finalmlp": {"num_heads": 2, "gate_features": ("user",)}, "two_tower": {"user_features": ("user",)}}


def make_model(name: str, dynamic: bool = True, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    size = {"num_embeddings": None, "capacity": 100} if dynamic else {"num_embeddings": ROWS}
    tables = [
        te.TableConfig("user", embedding_dim=8, **size),
        te.TableConfig("item", embedding_dim=8, features=["item", "history"], pooling="mean", **size),
    ]
    optimizer = te.optim.RowWiseAdagrad(lr=0.1)
    return MODELS[name](tables, NUM_DENSE, top_mlp=(16, 8), optimizer=optimizer, **OPTIONS.get(name, {}))


def make_batch(seed: int = 0, size: int = 64) -> tuple[torch.Tensor, te.KeyedJaggedTensor, torch.Tensor]:
    """A label is whether user and item agree modulo 2: no sum of effects of single ids predicts it."""
    generator = torch.Generator().manual_seed(seed)
    user, item = (torch.randint(8, (size,), generator=generator) for _ in range(2))
    lengths = torch.randint(4, (size,), generator=generator)
    history = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    ones = torch.ones(size, dtype=torch.int64)
    sparse = te.KeyedJaggedTensor.from_lengths(
        ["user", "item", "history"], torch.cat([user, item, history]), torch.cat([ones, ones, lengths])
    )
    return torch.randn(size, NUM_DENSE, generator=generator), sparse, ((user + item) % 2).float()


@pytest.fixture(params=sorted(MODELS))
def name(request) -> str:
    return request.param


def test_a_model_learns_and_its_state_can_be_loaded(name):
    model = make_model(name)
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "embeddings." not in n], lr=0.01)
    losses = []
    for step in range(60):
        dense, sparse, labels = make_batch(step)
        loss = F.binary_cross_entropy_with_logits(model(dense, sparse), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), (losses[:5], losses[-5:])
    twin = make_model(name, seed=1)
    twin.load_state_dict(model.state_dict())
    assert_same_bits(dict(twin.state_dict()), dict(model.state_dict()))
    with torch.no_grad():
        assert torch.equal(twin.eval()(*make_batch(99)[:2]), model.eval()(*make_batch(99)[:2]))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.more
def test_a_model_is_one_graph(name):
    model, twin = make_model(name), make_model(name)
    dense, sparse, labels = make_batch()
    sparse = te.nn.prefetch(model, sparse)
    for function in (torch.compile(model, fullgraph=True, backend="aot_eager"), twin):
        features = sparse if function is not twin else make_batch()[1]
        F.binary_cross_entropy_with_logits(function(dense, features), labels).backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, twin)]
    # The compiler orders sums of float32 in its factory way.
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    tables = [{k: v for k, v in m.state_dict().items() if "weight" in k and "embeddings" in k} for m in (model, twin)]
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-5)


def test_a_model_may_start_on_the_meta_device(name):
    tables = [te.TableConfig("user", 5, 8), te.TableConfig("item", 5, 8, features=["item", "history"])]
    model = MODELS[name](tables, 3, optimizer=te.optim.SGD(lr=0.1), device="meta", **OPTIONS.get(name, {}))
    model = te.HybridParallel(model)
    sparse = te.KeyedJaggedTensor.from_lists({"user": [[1]], "item": [[2]], "history": [[3, 4]]})
    assert model(torch.randn(1, 3), sparse).isfinite().all()


def test_options_have_the_defaults_of_the_models():
    for name, value in asdict(ModelOptions()).items():
        defaults = [p.parameters[name].default for p in map(inspect.signature, MODELS.values()) if name in p.parameters]
        assert defaults, name
        assert all(default == value for default in defaults), name


def test_the_factorization_machine_sums_dot_products_of_all_pairs():
    weights, factors = (torch.randn(3, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4,), (4, 5)))
    expected = [
        weights[row].sum() + sum(factors[row, i] @ factors[row, j] for i in range(4) for j in range(i))
        for row in range(3)
    ]
    actual = factorization_machine(weights, factors)
    torch.testing.assert_close(actual, torch.stack(expected))
    gradients = [torch.autograd.grad(out.sin().sum(), (weights, factors)) for out in (actual, torch.stack(expected))]
    torch.testing.assert_close(*gradients)


def test_the_fusion_sums_a_bilinear_form_per_head():
    fusion = BilinearFusion(6, 3).double()
    x, y = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (linear,), bias = fusion.linear.weight, fusion.linear.bias
    expected = []
    for row in range(4):
        total = bias[0] + linear[:6] @ x[row] + linear[6:] @ y[row]
        for head in range(3):
            for i in range(2):
                for j in range(2):
                    total = total + x[row, 2 * head + i] * fusion.weight[head, i, j] * y[row, 2 * head + j]
        expected.append(total)
    leaves = (x, y, fusion.weight, fusion.linear.weight, fusion.linear.bias)
    actual = fusion(x, y)
    torch.testing.assert_close(actual, torch.stack(expected))
    gradients = [torch.autograd.grad(out.sin().sum(), leaves) for out in (actual, torch.stack(expected))]
    torch.testing.assert_close(*gradients)


def test_deepfm_is_its_formula():
    """`te.models.DeepFM` from the rows of its tables."""
    model = make_model("deepfm", dynamic=False)
    dense, sparse, _ = make_batch(size=5)
    for row, logit in enumerate(model(dense, sparse)):
        fields = [dense[row, i] * model.dense_rows[i] for i in range(NUM_DENSE)]
        for feature, table in (("user", "user"), ("item", "item"), ("history", "item")):
            start, stop = sparse[feature].offsets()[row : row + 2]
            rows = model.embeddings.state_dict()[f"{table}.weight"][sparse[feature].values()[start:stop]]
            fields.append(rows.mean(0) if len(rows) else torch.zeros(8))
        pairs = sum(a[1:] @ b[1:] for i, a in enumerate(fields) for b in fields[:i])
        deep = model.deep(torch.cat([field[1:] for field in fields])[None])[0, 0]
        torch.testing.assert_close(logit, sum(field[0] for field in fields) + pairs + deep, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
def test_finalmlp_gates_the_inputs_of_its_streams(gated):
    model = make_model("finalmlp", dynamic=False) if gated else te.models.FinalMLP([te.TableConfig("a", 9, 4)], 2)
    dense, sparse, _ = make_batch(size=5)
    if not gated:
        sparse = te.KeyedJaggedTensor.from_lengths(["a"], torch.arange(5), torch.ones(5, dtype=torch.int64))
        torch.nn.init.normal_(model.gates[0].logits)
    pooled = model.embeddings(sparse)
    inputs = torch.cat([dense, pooled], dim=1)
    contexts = (pooled[:, :8], pooled[:, 8:])  # user; item and history
    streams = []
    for gate, stream, context in zip(model.gates, model.streams, contexts, strict=True):
        logits = gate.mlp(context) if gated else gate.logits
        streams.append(stream(2 * torch.sigmoid(logits) * inputs))
    assert torch.equal(model(dense, sparse), model.fusion(*streams))
    if not gated:
        assert torch.equal(2 * model.gates[1].logits.sigmoid(), torch.ones(6))


def test_bad_options():
    tables = [te.TableConfig("a", 2, 8), te.TableConfig("b", 2, 4)]
    with pytest.raises(ValueError, match=r"need one embedding_dim of at least 2, got \{'a': 8, 'b': 4\}"):
        te.models.DeepFM(tables, 3)
    with pytest.raises(ValueError, match="num_dense must be at least 0, got -1"):
        te.models.FinalMLP(tables, -1)
    for num_heads in (3, 0):
        with pytest.raises(ValueError, match=f"num_heads must divide the width of the streams, 8, got {num_heads}"):
            te.models.FinalMLP(tables, 1, (8,), num_heads=num_heads)
    for model in (te.models.MMoE, te.models.PLE):
        with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
            model(tables, 1, num_experts=0)
    for model in (te.models.DeepFM, te.models.DLRM, te.models.DCNv2):
        with pytest.raises(ValueError, match="a collection needs at least one table"):
            model([], 1)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"temperature must be above 0, got {temperature}"):
            te.models.TwoTower(tables, 1, ["a"], temperature=temperature)
    with pytest.raises(ValueError, match="gate_features has 'c', which no table has: a, b"):
        te.models.FinalMLP(tables, 1, gate_features=["c"])


def build_own(tables, num_dense, top_mlp, optimizer, device):
    """A model of `--model tests.models.test_models:build_own`."""
    return te.nn.DCNv2(tables, num_dense, 1, None, top_mlp, optimizer, device)


def test_runs_name_a_model_and_its_options(tmp_path: Path, capsys):
    pytest.importorskip("tyro")
    from tritonemb.cli import main

    header, lines = "click,price,user,item", [f"{i * 7 % 3 % 2},{i % 5},{i % 9},{i * 5 % 11}" for i in range(200)]
    log = tmp_path / "log.csv"
    log.write_text("\n".join([header, *lines]))
    columns = ["--label", "click", "--dense", "price", "--sparse", "user", "item", "--num-embeddings", "50"]
    train = ["train", "--data", str(log), *columns, "--top-mlp", "8", "--batch-size", "50", "--embedding-dim", "4"]
    factory = f"{__name__}:build_own"
    for model, options in (
        ("finalmlp", ["--num-heads", "4", "--gate-features", "user", "--embedding-dims", "item=16"]),
        (factory, []),
    ):
        out = tmp_path / model.replace(":", "-")
        assert main([*train, "--model", model, *options, "--out", str(out)]) == 0, capsys.readouterr().err
    # A checkpoint builds its model, but does not select code.
    run = te.load_run(tmp_path / "finalmlp")
    assert len(run.model.fusion.weight) == 4
    assert {name: table.config.embedding_dim for name, table in run.tables.items()} == {"user": 4, "item": 16}
    assert 0 < run.predict({"price": 1, "user": "3", "item": "5"}) < 1
    with pytest.raises(ValueError, match="code that it must not select: pass model=FUNCTION"):
        te.load_run(out)
    assert 0 < te.load_run(out, model=build_own).predict({"price": 1, "user": "3", "item": "5"}) < 1
    assert main(["evaluate", "--checkpoint", str(out), "--model", factory]) == 0
    # Errors of a user.
    for arguments, text in (
        (["--embedding-dims", "user"], "embedding_dims has 'user', expected \"name=number\""),
        (["--embedding-dims", "users=4"], "embedding_dims names 'users', not a table; the tables are "),
        (["--embedding-dims", "user=8"], "DLRM's tables need one embedding_dim"),
        (["--model", "deepmf"], "did you mean 'deepfm'?"),
        (["--model", "deepfm", "--num-heads", "2"], "DeepFM has no option num_heads"),
        (["--model", "no.such:model"], "model must be MODULE:FUNCTION"),
    ):
        assert main([*train, *arguments, "--out", str(tmp_path / "bad")]) == 2
        assert text in capsys.readouterr().err
    assert main(["plan", "--from-run", str(out)]) == 2
    assert "was trained with the model" in capsys.readouterr().err
