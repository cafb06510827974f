"""Offloaded layers under Accelerate, Lightning and Hugging Face's Trainer: bitwise the losses of the plain model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tritonemb as te
from tritonemb.storage.store import StorageError

EVERYWHERE = [
    pytest.param({"states": "host"}, id="states"),
    pytest.param({"params": "disk", "states": "disk", "activations": "host"}, id="all"),
]


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """The state that Accelerate keeps for the process, which would refuse another precision."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def adam_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def loader() -> DataLoader[Any]:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32)


def test_moving_a_model_to_its_own_device_does_nothing():
    """Calls of frameworks that prepare a model, and that end its use."""
    net = make_net()
    model, _ = te.offload(net, adam_of(net), params="host", budget="1MiB")
    parameters, values = list(model.parameters()), model.state_dict()
    for moved in (
        model.to("cpu"),
        model.cpu(),
        model.to(torch.device("cpu"), non_blocking=True),
        model.to(torch.float32),
    ):
        assert [*moved.parameters()] == parameters
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    with pytest.raises(RuntimeError, match="gather_parameters"):
        model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="gather_parameters"):
        model.to("meta")
    with pytest.raises(RuntimeError, match="gather_parameters"):
        model.cuda()


def test_a_forward_may_still_cast_its_weight():
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.to(x.dtype).cpu()

    net = Cast()
    model, _ = te.offload(net, adam_of(net), params="host", budget="1MiB")
    assert model(torch.ones(2, 4, dtype=torch.float64)).dtype is torch.float64
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))


@pytest.mark.more
def test_an_offloaded_model_that_is_dropped_is_collected_with_its_folder(tmp_path):
    for tiers in [("disk", "disk", "disk"), ("host", "disk", "host"), ("device", "disk", "device")] * 2:
        params, states, activations = tiers
        net, options = make_net(), {"path": tmp_path, "budget": "1MiB"}
        model, optimizer = te.offload(
            net, adam_of(net), params=params, states=states, activations=activations, **options
        )  # fmt: skip
        model(torch.ones(2048, 16)).sum().backward()
        optimizer.step()
        del net, model, optimizer
    first, second = make_net(), make_net()
    te.offload(first, adam_of(first), params="disk", path=tmp_path, budget="1MiB")
    with pytest.raises(StorageError, match="another process uses"):
        te.offload(second, adam_of(second), params="disk", path=tmp_path, budget="1MiB")


@pytest.mark.parametrize("params", ["device", "host"])
def test_frozen_parameters_stay_as_they_are_until_they_are_not(params):
    losses = []
    for offloaded in (False, True):
        net = make_net()
        net[0].weight.requires_grad_(False)
        optimizer: Any = adam_of(net)
        if offloaded:
            net, optimizer = te.offload(net, optimizer, params=params, states="host", budget="1MiB")
        for number, (x, y) in enumerate(loader()):
            if number == 4:
                assert torch.equal(net.state_dict()["0.weight"], make_net()[0].weight)
                net[0].weight.requires_grad_(True)
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert not torch.equal(net.state_dict()["0.weight"], make_net()[0].weight)
    assert losses[:8] == losses[8:]


@pytest.mark.more
@pytest.mark.parametrize("tiers", EVERYWHERE)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(tmp_path, tiers, precision):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    def run(name: str, offloaded: bool) -> list[float]:
        AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = make_net()
        optimizer: Any = adam_of(model)
        if offloaded:
            model, optimizer = te.offload(model, optimizer, path=tmp_path / "swap", budget="1MiB", **tiers)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(), schedule)
        losses = []
        for epoch in range(3):
            for x, y in batches:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
            if epoch == 0:
                accelerator.save_state(str(tmp_path / name))
        accelerator.load_state(str(tmp_path / name))
        for x, y in batches:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            losses.append(loss.item())
        return losses

    assert run("offloaded", True) == run("plain", False)


@pytest.mark.more
@pytest.mark.parametrize("tiers", EVERYWHERE)
@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 1.0}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}],
    ids=lambda item: next(iter(item)),
)
def test_lightning(tmp_path, tiers, options):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, swap: str | None = None) -> None:
            super().__init__()
            self.swap, self.net, self.losses = swap, make_net(), list[float]()
            self.optimizer: Any = None

        def configure_model(self) -> None:
            if self.optimizer is None:
                self.optimizer = adam_of(self.net)
                if self.swap is not None:
                    path = tmp_path / self.swap
                    self.net, self.optimizer = te.offload(self.net, self.optimizer, path=path, budget="1MiB", **tiers)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("loss", (self.net(x) - y).square().mean())

        def configure_optimizers(self) -> Any:
            return [self.optimizer], [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)]

    def fit(module: Module, epochs: int, path: Path | None = None) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, enable_checkpointing=False, **quiet, **options
        )  # fmt: skip
        trainer.fit(module, loader(), loader(), ckpt_path=path)
        return trainer

    plain, whole, first, second = Module(), Module("whole"), Module("first"), Module("second")
    fit(plain, 2)
    fit(whole, 2)
    assert whole.losses == plain.losses
    fit(first, 1).save_checkpoint(tmp_path / "a.ckpt")
    fit(second, 2, tmp_path / "a.ckpt")
    assert first.losses + second.losses == plain.losses
    loaded = Module.load_from_checkpoint(tmp_path / "a.ckpt")
    for name, value in first.net.state_dict().items():
        assert torch.equal(loaded.net.state_dict()[name], value)
    fit(whole, 3)  # the module is moved again


@pytest.mark.more
@pytest.mark.parametrize(
    "tiers", [*EVERYWHERE, pytest.param({"params": "host", "states": "host", "grads": "host"}, id="gradients")]
)
@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        *(pytest.param(case, marks=pytest.mark.slow) for case in ({}, {"gradient_checkpointing": True})),
    ],
    ids=lambda case: "".join(case) or "plain",
)
def test_hugging_face_trainer(tmp_path, monkeypatch, tiers, options):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(64, (16,), generator=generator) for _ in range(32)]

    def run(folder: str, mode: str, resume: str | None = None) -> tuple[list[float], Any]:
        """Losses of a run: by the Trainer's optimizer, offloaded ("made") or not ("plain"), or by one of the test."""
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder), use_cpu=True, num_train_epochs=2, per_device_train_batch_size=8, logging_steps=1,
            report_to=[], save_strategy="epoch", disable_tqdm=True, learning_rate=1e-2, weight_decay=0.1, **options,
        )  # fmt: skip
        optimizers: Any = None, None
        options_of_offload = {"path": tmp_path / f"swap-{folder}-{resume}", "budget": "1MiB", **tiers}
        if mode == "made":
            optimizers = te.offloading.trainer_optimizers(model, arguments, **options_of_offload)
        elif mode == "given":
            optimizers = te.offload(model, adam_of(model), **options_of_offload)[1], None
        elif mode == "plain given":
            optimizers = adam_of(model), None
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=optimizers)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / folder / resume))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer

    losses, trainer = run("made", "made")
    assert losses == run("plain", "plain")[0]
    if "grads" not in tiers:  # which the Trainer's own clipping would miss
        assert run("given", "given")[0] == run("plain-given", "plain given")[0]
    steps = len(losses) // 2
    assert run("made", "made", f"checkpoint-{steps}")[0] == losses
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "made" / f"checkpoint-{2 * steps}")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)


@pytest.mark.more
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
@pytest.mark.parametrize("params", ["host", "disk"])
def test_models_of_transformers_on_meta_get_pretrained_weights(tmp_path, monkeypatch, name, params):
    """Their buffers too: inverse frequencies, masks and positions."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, intermediate_size=64, tie_word_embeddings=name != "Llama")
    kind = getattr(
        transformers, {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}[name]
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) > 1
    plain = kind.from_pretrained(tmp_path / "saved")
    with torch.device("meta"):
        model = kind(config)
    options = {"params": params, "states": "host", "path": tmp_path / "swap", "budget": "1MiB", "device": "cpu"}
    model, optimizer = te.offload(model, adam_of(model), **options, checkpoint=tmp_path / "saved")
    for (buffer, value), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(value, expected), buffer
    ids, losses = torch.arange(24).view(2, 12), []
    for trained, stepped in ((model.eval(), optimizer), (plain.eval(), adam_of(plain))):
        for _ in range(2):
            stepped.zero_grad()
            loss = trained(input_ids=ids, labels=ids).loss
            loss.backward()
            stepped.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
