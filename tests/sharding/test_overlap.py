"""Exchanges run beside what does not need them: in which order they begin and are waited for, and that no bit depends
on it."""

import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.models import BATCH, KEYS, dcn, dlrm, loss_of, part, plan, tables, whole_state
from tests.sharding.models import batch as batch_of
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import OutputExchange
from tritonemb.sharding import (
    ColumnWise,
    DataParallel,
    ExchangePrecision,
    Grid,
    RowWise,
    ShardingPlan,
    TableColumnWise,
    TableRowWise,
    TableWise,
)
from tritonemb.types import CODECS

SEVEN = [f"t{n}" for n in range(7)]


class Events(list[str]):
    """Names of what happens, in order: exchanges that begin and are waited for, and the layers of an MLP."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        mlp.register_forward_hook(lambda *_: self.append("mlp"))
        next(iter(mlp.parameters())).register_hook(lambda _: self.append("mlp gradient"))

    def patch(self):
        start = RankGroup.all_to_all

        def logged(group, message, send, receive, kind):
            arrive = start(group, message, send, receive, kind)
            self.append(f"send {kind}")

            def wait():
                self.append(f"wait {kind}")
                return arrive()

            return wait

        return mock.patch.object(RankGroup, "all_to_all", logged)

    def of(self, *kinds: str) -> list[str]:
        """Without what belongs to ids."""
        return [event for event in self if "mlp" in event or event.split(" ", 1)[1] in kinds]


def hidden(kind: str) -> list[str]:
    """The events of an exchange whose messages cross while the MLP computes."""
    forward = [f"send {kind}", "mlp", f"wait {kind}"]
    return [*forward, f"send {kind} gradients", "mlp gradient", f"wait {kind} gradients"]


def step_of_dlrm(rank, world, ahead):
    parallel = te.HybridParallel(dlrm(), plan(world))
    events = Events(parallel.module.bottom)
    dense, sparse, labels = part(batch_of(0, world), rank)
    with events.patch():
        features = parallel.prefetch(sparse) if ahead else sparse
        F.binary_cross_entropy_with_logits(parallel(dense, features), labels).backward()
    return events.of("pooled", "pooled gradients")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_dlrm_computes_its_bottom_mlp_beside_the_exchanges(ranks, ahead):
    assert ranks(2).run(step_of_dlrm, 2, ahead) == [hidden("pooled")] * 2


def step_of_dcn(rank, world):
    """Model in two sub-batches; its last layer is recorded."""
    torch._dynamo.reset()
    parallel = te.HybridParallel(dcn(), plan(world), pipeline=2)
    events = Events(parallel.module.top)
    dense, sparse, labels = part(batch_of(0, world), rank)
    with events.patch():
        F.binary_cross_entropy_with_logits(parallel(dense, sparse), labels).backward()
    return events.of("pooled", "pooled gradients")


def test_a_dcn_computes_a_sub_batch_beside_the_exchange_of_another(ranks):
    forward = ["send pooled"] * 2 + ["wait pooled", "mlp"] * 2
    backward = ["send pooled gradients"] * 2 + ["wait pooled gradients"] * 2
    for events in ranks(2).run(step_of_dcn, 2):
        assert events[:6] == forward
        assert [event for event in events[6:] if event != "mlp gradient"] == backward


def graphs_of_dlrm(rank, world, backend):
    """Calls of Inductor's programs, in order: of the forward and of the backward.

    Only the programs are looked at, so the loops that they call are not compiled, which takes a minute, and compute
    nothing.
    """
    torch._dynamo.reset()
    parallel = te.HybridParallel(dlrm(), plan(world))
    dense, sparse, labels = part(batch_of(0, world), rank)
    compiled = torch.compile(parallel, fullgraph=True, backend=backend)

    def step():
        F.binary_cross_entropy_with_logits(compiled(dense, parallel.prefetch(sparse)), labels).backward()

    caches = torch._inductor.config.patch({"force_disable_caches": True, "cpp.vec_isa_ok": True})
    with caches, mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *args: None):
        _, programs = run_and_get_code(step)
    torch._dynamo.reset()
    called = r"((?:start|finish)_exchange|interaction|row_update_|\bmm|addmm)(?=(?:\.default)?\()"
    return [re.findall(called, program) for program in programs]


@pytest.mark.more
def test_a_graph_computes_its_bottom_mlp_beside_the_exchanges(ranks):
    for forward, backward in ranks(2).run(graphs_of_dlrm, 2, "tritonemb"):
        send, wait, reads = (forward.index(name) for name in ("start_exchange", "finish_exchange", "interaction"))
        assert send < forward.index("addmm") < wait < reads
        assert "addmm" not in forward[wait:reads]
        # Gradients of looked-up vectors are sent first, those of the layers when all are there.
        places = [n for n, name in enumerate(backward) if name in ("start_exchange", "finish_exchange")]
        assert [backward[n].split("_")[0] for n in places] == ["start", "start", "finish", "finish"]
        send, average, wait, _ = places
        assert "mm" in backward[send:average]
        assert backward[average + 1 :] == ["finish_exchange", "row_update_", "finish_exchange"]


class Rows(nn.Module):
    """Embeddings of single ids, then dense features that are added to them."""

    def __init__(self) -> None:
        super().__init__()
        configs = [te.TableConfig(key, 50 + n, 8, pooling="none") for n, key in enumerate(KEYS)]
        self.embeddings = te.nn.EmbeddingCollection(configs, te.optim.RowWiseAdagrad(lr=0.1))
        self.mlp = nn.Linear(4, 8)

    def forward(self, dense: torch.Tensor, sparse: te.KeyedJaggedTensor) -> torch.Tensor:
        rows = self.embeddings(sparse).values()
        vectors = self.mlp(dense)
        return (rows.view(len(KEYS), -1, 2, 8).sum((0, 2)) * vectors).sum(1)


def step_of_rows(rank, world):
    torch.manual_seed(1)
    parallel = te.HybridParallel(Rows(), ShardingPlan(dict.fromkeys(KEYS, RowWise()), world))
    events = Events(parallel.module.mlp)
    dense, sparse, labels = part(batch_of(0, world), rank)
    with events.patch():
        F.binary_cross_entropy_with_logits(parallel(dense, sparse), labels).backward()
    return events.of("rows", "rows gradients")


def test_rows_are_sent_back_beside_what_follows(ranks):
    assert ranks(2).run(step_of_rows, 2) == [hidden("rows")] * 2


def outputs(rank, world):
    """Outputs of a collection, and of a model that returns them."""
    torch.manual_seed(1)
    model = te.nn.EmbeddingBagCollection(tables(), te.optim.SGD(lr=0.1))
    parallel = te.HybridParallel(model, plan(world))
    sparse = part(batch_of(0, world), rank)[1]
    output = parallel(sparse)
    return type(output).__name__, output.requires_grad, tuple(output.shape), output.detach()


def test_a_model_returns_ordinary_tensors(ranks):
    for name, requires_grad, shape, values in ranks(2).run(outputs, 2):
        assert (name, requires_grad, shape) == ("Tensor", True, (BATCH, 32))
        assert values.isfinite().all()


def waiting(self, values, batch, back):
    return self.start([values], batch, back)()


def trained(rank, world, codec, overlapped, dense):
    """Losses and state after five steps with a table of each sharding type, on nodes of two ranks."""
    local = min(2, world)
    kinds = [RowWise(), ColumnWise(), DataParallel(), TableWise(world - 1), TableRowWise(0), TableColumnWise(0), Grid()]
    configs = [te.TableConfig(key, 50, 16, pooling=("sum", "mean")[n % 2]) for n, key in enumerate(SEVEN)]
    torch.manual_seed(1)
    model, losses = te.nn.DLRM(configs, 4, (16,), (16,), te.optim.RowWiseAdagrad(lr=0.1)), []
    with nullcontext() if overlapped else mock.patch.object(OutputExchange, "exchange", waiting):
        options = {"exchange": ExchangePrecision(codec, codec), "local_world_size": local, "dense": dense}
        parallel = te.HybridParallel(model, ShardingPlan(dict(zip(SEVEN, kinds, strict=True)), world, local), **options)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(5):
            generator = torch.Generator().manual_seed(world * step + rank)
            lengths = torch.randint(0, 4, (7 * BATCH,), generator=generator)
            ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
            sparse = te.KeyedJaggedTensor(SEVEN, ids, lengths=lengths)
            labels = torch.rand(BATCH, generator=generator).round()
            loss = loss_of(parallel, torch.randn(BATCH, 4, generator=generator), sparse, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, whole_state(parallel)


@pytest.mark.parametrize("dense", ["ddp", pytest.param("fsdp", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    "codec", ["fp16", *(pytest.param(name, marks=pytest.mark.more) for name in sorted({*CODECS} - {"fp16"}))]
)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_bit_depends_on_what_runs_beside_it(ranks, world, codec, dense):
    results = [ranks(world).run(trained, world, codec, overlapped, dense) for overlapped in (True, False)]
    for (losses, state), (expected_losses, expected) in zip(*results, strict=True):
        assert losses == expected_losses
        assert_same_bits(state, expected)
