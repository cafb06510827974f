"""DIN: its formula against loops, histories that share a table with their target, in logs and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from tests.server.jobs import local_servers
from tests.sharding.cases import EXACT
from tests.sharding.models import whole_state
from tritonemb.data import Batch, ClickLog, LogOptions, Schema, build_vocabulary, load_vocabulary
from tritonemb.data.batch import pad_batch
from tritonemb.training.metrics import predict_logits

DIM, ITEMS = 8, 30


def make_model(optimizer: Any = None, **table: Any) -> te.models.DIN:
    torch.manual_seed(0)
    sizes = table or {"num_embeddings": ITEMS, "init": torch.nn.init.normal_}
    tables = [
        te.TableConfig("item", embedding_dim=DIM, features=["item", "clicks", "views"], pooling="mean", **sizes),
        te.TableConfig("user", 20, 5, placement=sizes.get("placement", "device")),
    ]
    return te.models.DIN(tables, 2, (16,), (16,), optimizer or te.optim.Adam(lr=0.03))


def make_batch(seed: int = 0, size: int = 40) -> tuple[torch.Tensor, te.KeyedJaggedTensor, torch.Tensor]:
    """A label is whether the item was clicked; views do not matter."""
    generator = torch.Generator().manual_seed(seed)
    lists: dict[str, list[list[int]]] = {"clicks": [], "user": [], "item": [], "views": []}
    for sample in range(size):
        clicks = torch.randint(ITEMS, (sample % 5,), generator=generator).tolist()
        item = clicks[0] if clicks and sample % 2 else int(torch.randint(ITEMS, (1,), generator=generator))
        views = torch.randint(ITEMS, (sample % 3,), generator=generator).tolist()
        for name, ids in (("clicks", clicks), ("item", [item]), ("views", views), ("user", [sample % 20])):
            lists[name].append(ids)
    labels = torch.tensor([float(i in c) for (i,), c in zip(lists["item"], lists["clicks"], strict=True)])
    return torch.randn(size, 2, generator=generator), te.KeyedJaggedTensor.from_lists(lists), labels


def train(
    model: torch.nn.Module, steps: int, part: slice = slice(None), dense_optimizer: Any = torch.optim.Adam
) -> list:
    parameters = [p for name, p in model.named_parameters() if "embeddings." not in name]
    optimizer, losses = dense_optimizer(parameters, lr=0.01), []
    for step in range(steps):
        dense, sparse, labels = make_batch(step)
        lists = {name: samples[part] for name, samples in sparse.to_lists().items()}
        logits = model(dense[part], te.KeyedJaggedTensor.from_lists(lists))
        loss = F.binary_cross_entropy_with_logits(logits, labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_logit_is_that_of_its_sample_alone():
    model = make_model()
    dense, sparse, _ = make_batch()
    lists, items = sparse.to_lists(), model.sequence_embeddings["item"].weight
    for sample, logit in enumerate(model(dense, sparse)):
        target = items[lists["item"][sample][0]]
        columns = [dense[sample], target]
        for attention, name in zip(model.attentions, ("clicks", "views"), strict=True):
            interest = torch.zeros(DIM)
            for id in lists[name][sample]:
                row = items[id]
                interest = interest + attention.mlp(torch.cat([row, target, row - target, row * target])) * row
            columns.append(interest)
        columns.append(model.embeddings["user"].weight[lists["user"][sample][0]])
        torch.testing.assert_close(logit, model.top(torch.cat(columns))[0], rtol=1e-4, atol=1e-5)


def test_a_score_does_not_depend_on_the_histories_of_other_rows():
    """After a row without a history, padding has none either, so the attention has a few rows only."""
    tables = [te.TableConfig("item", 500, 16, features=["item", "clicks"])]
    model, random = te.models.DIN(tables, 0, optimizer=te.optim.SGD(lr=0.1)), torch.Generator().manual_seed(1)
    histories = [torch.randint(500, (n % 9,), generator=random).tolist() for n in range(600)]

    def logits(*samples: int) -> torch.Tensor:
        lists = {"item": [[sample % 500] for sample in samples], "clicks": [histories[sample] for sample in samples]}
        batch = Batch(torch.zeros(len(samples), 0), te.KeyedJaggedTensor.from_lists(lists), torch.zeros(len(samples)))
        return predict_logits(model, [pad_batch(batch)], torch.device("cpu"))[0]

    expected = logits(*range(600))
    for sample in range(100):
        assert torch.equal(logits(0, sample), expected[[0, sample]]), sample


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_finds_the_target_in_the_history(dynamic):
    losses = train(make_model(**({"num_embeddings": None, "capacity": 100} if dynamic else {})), 150)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10]), (losses[:10], losses[-10:])


def test_tables_on_servers_have_the_bits_of_local_ones():
    options: dict[str, Any] = {"num_embeddings": None, "capacity": 100}
    expected, model = train(make_model(**options), 4), make_model(**options, placement="server")
    with local_servers(2) as servers:
        te.server.attach(model, servers, 0)
        assert train(model, 4) == expected


def trained_on_ranks(rank: int, world: int) -> dict[str, torch.Tensor]:
    parallel = te.HybridParallel(make_model(te.optim.SGD(lr=0.1)), exchange=EXACT)
    train(parallel, 3, slice(rank * 20, (rank + 1) * 20), torch.optim.SGD)
    return whole_state(parallel)


def test_ranks_train_as_one_process_on_all_samples(ranks):
    single = make_model(te.optim.SGD(lr=0.1))
    train(single, 3, dense_optimizer=torch.optim.SGD)
    for state in ranks(2).run(trained_on_ranks, 2):
        # Means over ranks are added in another order than means over samples.
        torch.testing.assert_close(state, dict(single.state_dict()), rtol=1e-4, atol=1e-5)


LINES = [
    "click,item,history",
    *(f"{i % 3 // 2},{i % 7},{'|'.join(str(j % 7) for j in range(i % 6))}" for i in range(120)),
]


def write_log(path: Path) -> Path:
    path.write_text("\n".join(LINES))
    return path


def schema(**options: Any) -> LogOptions:
    columns = {"label": "click", "sparse": ("item", "history"), "lists": ("history",)}
    options = {"share": ("history=item",), "max_lengths": ("history=3",), **columns, **options}
    return LogOptions(Schema(**options), list_separator="|", shuffle_rows=0)


def read(log: ClickLog) -> dict[str, list[list[int]]]:
    return next(log.open("train", 100)).sparse.to_lists()


OPTIONS = [{"num_embeddings": 50}, {"dynamic": True, "integers": ("item", "history")}, {"vocabulary": None}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_history_has_the_ids_of_its_target_and_its_last_values(tmp_path, options):
    path = write_log(tmp_path / "log.csv")
    if "vocabulary" in options:
        options = {"vocabulary": tmp_path / "vocabulary.parquet"}
        build_vocabulary(ClickLog(path, schema()), options["vocabulary"])
        assert load_vocabulary(options["vocabulary"]).keys() == {"item"}
    log = ClickLog(path, schema(**options))
    lists, everything = read(log), read(ClickLog(path, schema(**options, max_lengths=())))
    id_of = {row.split(",")[1]: ids[0] for row, ids in zip(LINES[1:], lists["item"], strict=False)}
    assert len({*id_of.values()}) == 7
    for row, ids, all_ids in zip(LINES[1:], lists["history"], everything["history"], strict=False):
        values = row.split(",")[2]
        assert all_ids == [id_of[value] for value in values.split("|") if value]
        assert ids == all_ids[-3:]
    (table,) = log.tables(4)
    assert (table.name, table.feature_names, table.pooling) == ("item", ("item", "history"), "mean")
    if "vocabulary" in options:
        with pytest.raises(ValueError, match="the vocabulary has no feature 'history', only item"):
            ClickLog(path, schema(**options, share=()))
        return
    others = [ClickLog(path, schema(**options, **change)) for change in ({"share": ()}, {"max_lengths": ()})]
    assert len({log.encoding, *(other.encoding for other in others)}) == 3
    assert read(others[0])["history"] != lists["history"] or options.get("dynamic")


def test_a_run_of_din_is_evaluated_and_scores_a_user_with_candidates(tmp_path: Path, capsys):
    pytest.importorskip("tyro")
    from tritonemb.cli import main

    log, out = write_log(tmp_path / "log.csv"), tmp_path / "run"
    columns = ["--label", "click", "--sparse", "item", "history", "--lists", "history", "--list-separator", "|"]
    columns += ["--share", "history=item", "--max-lengths", "history=3", "--num-embeddings", "50"]
    train = ["train", "--data", str(log), *columns, "--model", "din", "--attention-mlp", "4", "--top-mlp", "8"]
    assert main([*train, "--batch-size", "20", "--embedding-dim", "4", "--out", str(out)]) == 0, capsys.readouterr().err
    assert main(["evaluate", "--checkpoint", str(out)]) == 0, capsys.readouterr().err
    run = te.load_run(out)
    assert run.model.histories == [("item", "history")]
    histories = [[str((3 * row + j) % 7) for j in range(row % 7)] for row in range(90)]
    rows = [{"item": str(row % 7), "history": history} for row, history in enumerate(histories)]
    expected = run.predict(rows).tolist()
    assert run.predict([row | {"history": row["history"][-3:]} for row in rows]).tolist() == expected
    assert [run.predict(row) for row in rows] == expected
    candidates = [{"item": str(item)} for item in range(7)]
    batch = run.encoder.encode([run.encoder.raw_rows(candidates, {"history": ["6", "1", "2", "3"]})])
    assert batch.sparse.to_lists()["history"] == [run.ids("item", ["1", "2", "3"]).tolist()] * 7
    with pytest.raises(ValueError, match="DIN needs a history with the table of its target"):
        te.models.DIN([te.TableConfig("item", 5, 4)], 1)


@pytest.mark.parametrize("items", [[[3], [], [7]], [[3], [7], []], [[3], [4, 5], [7]]])
def test_a_target_of_no_or_several_ids_is_an_error(items):
    features = {"item": items, "clicks": [[1], [2], [3]], "views": [[], [], []], "user": [[0], [1], [2]]}
    with pytest.raises(ValueError, match=r"sample [12] has [02] ids of 'item', the target of a history, expected one"):
        make_model()(torch.randn(3, 2), te.KeyedJaggedTensor.from_lists(features))


def test_bad_options(tmp_path: Path):
    path = write_log(tmp_path / "log.csv")
    for options, text in (
        ({"share": ("history",)}, "share has 'history', expected \"name=column\""),
        ({"share": ("history=itme",)}, "share has 'itme', not among sparse: item, history; did you mean 'item'"),
        ({"share": ("history=item", "item=history")}, "has a table of another column itself"),
        ({"sizes": ("history=9",)}, "sizes has 'history', too"),
        ({"max_lengths": ("history=0",)}, 'expected "name=number"'),
        ({"max_lengths": ("views=3",)}, "sparse has no 'views'"),
    ):
        with pytest.raises(ValueError, match=text):
            schema(**options)
    with pytest.raises(ValueError, match="max_lengths names 'item', which is not a list of values: set list_separator"):
        ClickLog(path, schema(max_lengths=("item=3",)))
    with pytest.raises(ValueError, match="'history' has strings, 'item' has integers; features that share ids"):
        ClickLog(path, schema(integers=("item",)))
