"""Several ranks by `fully_shard`: every rank offloads its shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tritonemb as te
from tests.offloading.models import Transformer, loss_of
from tests.offloading.test_safetensors import save
from tritonemb.offloading.checkpoint import CHECKSUMS

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
}


def trained(
    rank: int, ranks: int, folder: str, optimizer: str, offload: dict[str, Any] | None, number: int = 8,
    save: str = "", load: str = "",
) -> tuple[list[float], list[torch.Tensor]]:  # fmt: skip
    """Losses of all ranks' samples, and whole gradients of the first step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Transformer(dim=20, blocks=2, words=51, tied=False)  # whose words no number of ranks divides
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    stepped: Any = OPTIMIZERS[optimizer](model.parameters())
    if offload is not None:
        model, stepped = te.offload(model, stepped, path=folder, **offload)
    if load:
        te.offloading.load_checkpoint(model, stepped, load)
    random, losses, gradients = torch.Generator().manual_seed(1), [], []
    for step in range(number):
        loss = loss_of(model, random, rank, ranks)
        loss.backward()
        if step == 0:
            grads = [p.grad for p in model.parameters()]
            gradients = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
            gradients = [grad.clone() for grad in gradients]
        stepped.step()
        stepped.zero_grad()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if save:
        te.offloading.save_checkpoint(model, stepped, save)
        dist.barrier() if ranks > 1 else None
    if offload is not None:
        with te.gather_parameters(model):
            assert all(p.isfinite().all() for p in model.parameters())
        te.offloading.close(model)
    return losses, gradients


def of_one(folder: str, optimizer: str, number: int = 8, **options: Any) -> Any:
    num_threads = torch.get_num_threads()
    try:
        return trained(0, 1, folder, optimizer, {"states": "host"}, number, **options)
    finally:
        torch.set_num_threads(num_threads)


def job(rank: int, ranks: int, *args: Any) -> Any:
    return trained(rank, ranks, *args)


def load_states(rank: int, ranks: int) -> list[tuple[str, str]]:
    """Names of the states that a load into shards, or from shards, has changed."""
    torch.manual_seed(0)
    mesh, changed = init_device_mesh("cpu", (ranks,)), []
    for source in ("full", "other shards", "shards"):
        models: Any = [torch.nn.Linear(4, 9) for _ in range(2)]
        fully_shard(models[source != "shards"])
        plain, other = (torch.optim.Adam(model.parameters()) for model in models)
        models[0](torch.arange(8.0).view(2, 4)).square().sum().backward()
        plain.step()
        saved = plain.state_dict()
        full = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in saved["state"][0].items()}
        if source == "other shards":
            saved["state"][0]["exp_avg"] = distribute_tensor(full["exp_avg"], mesh, [Shard(1)])
        _, stepped = te.offload(models[1], other, states="host")
        stepped.load_state_dict(saved)
        for name, value in stepped.state_dict()["state"][0].items():
            if not torch.equal(getattr(value, "full_tensor", lambda v=value: v)(), full[name]):
                changed.append((source, name))
    return changed


def test_states_are_sharded_as_they_are_loaded(ranks):
    assert ranks(2).run(load_states, 2) == [[], []]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_train_as_one(ranks, size, optimizer, tmp_path):
    expected, gradients = of_one(str(tmp_path), optimizer)
    offload = {"params": "disk", "states": "disk", "budget": 400_000}
    results = ranks(size).run(job, size, str(tmp_path), optimizer, offload)
    plain = ranks(size).run(job, size, str(tmp_path), optimizer, None)
    for (losses, state), (of_plain, grads) in zip(results, plain, strict=True):
        assert losses == of_plain, "a tier changes no bit"
        assert all(torch.equal(a, b) for a, b in zip(state, grads, strict=True))
        assert losses == pytest.approx(expected, rel=1e-5 if optimizer == "sgd" else 1e-4)
        for one, other in zip(state, gradients, strict=True):
            # Samples are summed in another order. Relative to the largest: single elements are near 0.
            assert (one - other).abs().max() <= 1e-6 * other.abs().max() + 1e-9


MORE = [pytest.param(*sizes, marks=pytest.mark.more) for sizes in ((1, 4), (4, 2))]


@pytest.mark.parametrize(("saving_ranks", "loading_ranks"), [(2, 1), *MORE])
def test_checkpoints_reshard(ranks, saving_ranks, loading_ranks, tmp_path):
    def run(size, number, offload, **options):
        args = str(tmp_path), "adam", offload, number, options.get("save", ""), options.get("load", "")
        if size == 1:
            return of_one(str(tmp_path), "adam", number, **options)
        return ranks(size).run(job, size, *args)[0]

    path = str(tmp_path / "checkpoint")
    on_disk, on_host = ({"params": tier, "states": tier, "budget": 400_000} for tier in ("disk", "host"))
    run(saving_ranks, 5, on_disk, save=path)
    loaded, _ = run(loading_ranks, 5, on_host, load=path)
    again, _ = run(saving_ranks, 5, on_host, load=path)
    assert loaded == pytest.approx(again, rel=1e-5)
    fresh, _ = run(loading_ranks, 5, on_host)
    assert abs(loaded[0] - fresh[0]) > 1e-2, "the checkpoint must have been loaded"
    assert Path(path, ".metadata").exists()


def pretrained(rank: int, folder: Path, params: str) -> list[float]:
    """Losses of a model that was sharded on "meta", and gets its weights from a file; of a plain one without it."""
    torch.manual_seed(0)
    model: Any = Transformer(dim=20, blocks=2, words=51, tied=False)
    if rank == 0:
        save(folder / "model.safetensors", model.state_dict())
    dist.barrier()
    if params != "plain":
        with torch.device("meta"):
            model = Transformer(dim=20, blocks=2, words=51, tied=False)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer: Any = OPTIMIZERS["adam"](model.parameters())
    if params != "plain":
        options = {"params": params, "states": "host", "budget": 400_000, "device": "cpu", "path": folder}
        if params != "device":
            with pytest.raises(ValueError, match=r"is a shard on the meta device; pass checkpoint= to te\.offload"):
                te.offload(model, optimizer, **options, init=lambda module: None)
        model, optimizer = te.offload(model, optimizer, **options, checkpoint=folder)
    random, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = loss_of(model, random, rank, 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if params != "plain":
        te.offloading.close(model)
    return losses


@pytest.mark.few(1)
@pytest.mark.parametrize("params", ["disk", "device"])
def test_shards_on_meta_get_pretrained_weights(ranks, params, tmp_path):
    assert ranks(2).run(pretrained, tmp_path, params) == ranks(2).run(pretrained, tmp_path, "plain")


def damage_of_one_rank(rank: int, folder: Path) -> str:
    """Error of loading a checkpoint if another rank's file is damaged."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(6, 4)
    fully_shard(model)
    model, optimizer = te.offload(model, OPTIMIZERS["adam"](model.parameters()), params="host", states="host")
    path = folder / "saved"
    te.offloading.save_checkpoint(model, optimizer, path)
    names = sorted(file.name for file in path.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", CHECKSUMS]
    te.offloading.load_checkpoint(model, optimizer, path)
    dist.barrier()
    if rank == 1:
        content = bytearray((path / names[1]).read_bytes())
        content[len(content) // 2] ^= 1
        (path / names[1]).write_bytes(content)
    dist.barrier()
    with pytest.raises(ValueError, match="does not have the checksum that was written") as caught:
        te.offloading.load_checkpoint(model, optimizer, path)
    te.offloading.close(model)
    return str(caught.value)


def test_damage_is_an_error_on_every_rank(ranks, tmp_path):
    first, second = ranks(2).run(damage_of_one_rank, tmp_path)
    assert first == second
    assert "__0_0.distcp" in first


def input_gradient_beside_older_graphs(rank: int, ranks: int, offload: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    fully_shard(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if offload:
        model, optimizer = te.offload(model, optimizer, activations="host", budget="64MiB")
    x, graphs = torch.ones(64, 128, requires_grad=True), []
    for _ in range(2):
        graphs.append(model(x))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return x.grad


def test_a_gathered_weight_is_not_taken_for_that_of_an_older_graph(ranks):
    results = [ranks(2).run(input_gradient_beside_older_graphs, 2, offload) for offload in (False, True)]
    assert all(map(torch.equal, *results))


def replicated(rank: int, kind: str, folder: str) -> tuple[str, list[float]]:
    """The error of parameters and gradients that leave the device, and losses with states that do."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4), torch.nn.Linear(4, 1))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        tables = te.nn.EmbeddingBagCollection([te.TableConfig("t", 9, 4)], te.optim.SGD(lr=0.1))
        model = te.HybridParallel(torch.nn.Sequential(tables, torch.nn.Linear(4, 1)))
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if "1" in name], fused=True)
    messages = set()
    for options in ({"params": "host"}, {"grads": "host"}):
        with pytest.raises(ValueError, match="would not be averaged; shard it by fully_shard") as raised:
            te.offload(model, optimizer, **options)
        messages.add(str(raised.value))
    model, optimizer = te.offload(model, optimizer, states="disk", path=f"{folder}/{rank}")
    ids = torch.arange(3) + rank
    batch = ids[:, None] if kind == "ddp" else te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.ones_like(ids))
    for _ in range(3):
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    te.offloading.close(model)
    return messages.pop(), [p.sum().item() for name, p in model.named_parameters() if "1" in name]


@pytest.mark.parametrize("kind", ["ddp", "hybrid"])
def test_gradients_that_are_averaged_must_stay_on_the_device(ranks, tmp_path, kind):
    """Ranks would train apart."""
    first, second = ranks(2).run(replicated, kind, str(tmp_path))
    assert first == second


def replicated_afterwards(rank: int) -> str:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model, _ = te.offload(model, torch.optim.Adam(model.parameters()), grads="host")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(model, torch.nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="would not be averaged") as raised:
        model(torch.randn(3, 4))
    return str(raised.value)


def test_a_model_whose_gradients_leave_the_device_is_not_replicated_afterwards(ranks):
    """Ranks would train apart."""
    first, second = ranks(2).run(replicated_afterwards)
    assert first == second
