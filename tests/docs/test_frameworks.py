"""What the pages on Lightning, Accelerate, TorchRec, serving and several processes say, beyond what blocks show."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tritonemb as te
from tests.docs.blocks import ROOT, blocks_of
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.more


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50, 4, mode="mean")
        self.item = nn.Embedding(30, 4)
        self.top = nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)


def loader(batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    user, item = torch.randint(50, (48, 2), generator=generator), torch.randint(30, (48,), generator=generator)
    return DataLoader(TensorDataset(user, item, item.remainder(2).float()), batch_size=batch_size)


def made() -> tuple[Clicks, te.optim.ModelOptimizer]:
    torch.manual_seed(0)
    model = Clicks()
    return model, te.optim.fused(model, te.optim.RowWiseAdagrad(lr=0.1))


def trained_by_hand(epochs: int) -> Clicks:
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(epochs):
        for user, item, clicked in loader():
            optimizer.zero_grad()
            (model(user, item) - clicked).square().mean().backward()
            optimizer.step()
        schedule.step()
    return model


class TestLightning:
    @staticmethod
    def module(clip: bool = False, update: str = "backward") -> Any:
        lightning = pytest.importorskip("lightning", reason="lightning is not installed")

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Clicks()
                self.losses: list[float] = []

            def training_step(self, batch, _):
                user, item, clicked = batch
                loss = (self.net(user, item) - clicked).square().mean()
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                optimizer = te.optim.fused(self, te.optim.RowWiseAdagrad(lr=0.1), update=update)
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        class Clipped(Module):
            def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
                torch.nn.utils.clip_grad_norm_(self.net.top.parameters(), 1e-3)

        torch.manual_seed(0)
        return Clipped() if clip else Module()

    @staticmethod
    def trainer(epochs: int, **options: Any) -> Any:
        import lightning

        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, enable_checkpointing=False, **{**quiet, **options}
        )

    def test_it_trains_as_a_loop_by_hand(self):
        module = self.module()
        self.trainer(3).fit(module, loader())
        assert_same_bits(module.net.state_dict(), trained_by_hand(3).state_dict())

    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_a_resumed_run_has_the_bits_of_a_whole_one(self, precision, tmp_path):
        whole, first, second = self.module(), self.module(), self.module()
        with torch.no_grad():
            second.net.item.weight.zero_()
        self.trainer(4, precision=precision).fit(whole, loader())
        half = self.trainer(2, precision=precision)
        half.fit(first, loader())
        half.save_checkpoint(tmp_path / "half.ckpt")
        assert not any("sum" in name for name in first.state_dict())
        self.trainer(4, precision=precision).fit(second, loader(), ckpt_path=tmp_path / "half.ckpt")
        assert first.losses + second.losses == whole.losses
        assert_same_bits(second.state_dict(), whole.state_dict())
        assert torch.equal(second.net.item.optimizer_states()["sum"], whole.net.item.optimizer_states()["sum"])

    def test_a_loss_scale_is_refused(self):
        module = self.module()
        from lightning.pytorch.plugins import MixedPrecision

        scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(ValueError, match="GradScaler"):
            self.trainer(1, plugins=[scaled]).fit(module, loader())

    def test_clipping_in_bfloat16_needs_the_hook(self):
        """If the first fails one day, the page can recommend gradient_clip_val."""
        module = self.module()
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            self.trainer(1, precision="bf16-mixed", gradient_clip_val=1.0).fit(module, loader())
        clipped = self.module(clip=True)
        self.trainer(1, precision="bf16-mixed").fit(clipped, loader())
        assert all(parameter.grad.norm() <= 1.001e-3 for parameter in clipped.net.top.parameters())

    @pytest.mark.parametrize(("update", "steps"), [("backward", 6), ("step", 3)])
    def test_accumulated_batches_are_as_many_updates_as_was_asked_for(self, update, steps):
        module = self.module(update=update)
        self.trainer(1, accumulate_grad_batches=2).fit(module, loader())
        assert int(module.net.item.step) == steps


class TestAccelerate:
    @pytest.fixture(params=["no", "bf16"])
    def accelerator(self, request):
        accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
        accelerate.state.AcceleratorState._reset_state(True)
        yield accelerate.Accelerator(cpu=True, mixed_precision=request.param)
        accelerate.state.AcceleratorState._reset_state(True)

    @staticmethod
    def prepared(accelerator: Any) -> Any:
        model, optimizer = made()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return accelerator.prepare(model, optimizer, loader(), schedule)

    @staticmethod
    def train(accelerator: Any, parts: Any, epochs: int) -> list[float]:
        model, optimizer, batches, schedule = parts
        losses = []
        for _ in range(epochs):
            for user, item, clicked in batches:
                optimizer.zero_grad()
                loss = (model(user, item) - clicked).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            schedule.step()
        return losses

    def test_a_resumed_run_has_the_bits_of_a_whole_one(self, accelerator, tmp_path):
        parts = self.prepared(accelerator)
        self.train(accelerator, parts, 2)
        accelerator.save_state(str(tmp_path / "state"))
        expected = self.train(accelerator, parts, 2)
        accelerator.free_memory()
        resumed = self.prepared(accelerator)
        accelerator.load_state(str(tmp_path / "state"))
        assert self.train(accelerator, resumed, 2) == expected
        actual, whole = (accelerator.unwrap_model(item[0]) for item in (resumed, parts))
        assert_same_bits(actual.state_dict(), whole.state_dict())
        if accelerator.mixed_precision == "no":
            assert_same_bits(actual.state_dict(), trained_by_hand(4).state_dict())

    def test_a_loss_scale_is_refused(self, accelerator):
        accelerator.scaler = torch.amp.GradScaler("cpu")
        model, optimizer, batches, _ = self.prepared(accelerator)
        user, item, clicked = next(iter(batches))
        accelerator.backward((model(user, item) - clicked).square().mean())
        with pytest.raises(ValueError, match="GradScaler"):
            optimizer.step()


class Pooling(Enum):
    """As TorchRec's `PoolingType`."""

    SUM = "SUM"
    MEAN = "MEAN"


class DataType(Enum):
    FP32 = "FP32"
    BF16 = "BF16"


@dataclass
class RowConfig:
    """As TorchRec's `EmbeddingConfig`."""

    name: str
    num_embeddings: int = 9
    embedding_dim: int = 4
    feature_names: list[str] = field(default_factory=lambda: ["a", "b"])
    data_type: DataType = DataType.BF16
    init_fn: Any = torch.nn.init.ones_


@dataclass
class BagConfig(RowConfig):
    """As TorchRec's `EmbeddingBagConfig`."""

    pooling: Pooling = Pooling.MEAN


def test_torchrec_configs_and_weights_are_mapped_without_torchrec():
    names: dict[str, Any] = {}
    exec(blocks_of(ROOT / "docs" / "from-torchrec.md")[0].text, names)
    expected = te.TableConfig("t", 9, 4, ["a", "b"], "mean", torch.bfloat16, init=torch.nn.init.ones_)
    assert names["to_table"](BagConfig("t")) == expected
    assert names["to_table"](RowConfig("t")).pooling == "none"
    assert names["to_weights"]({"embedding_bags.t.weight": 1, "embeddings.u.weight": 2}) == {
        "t.weight": 1,
        "u.weight": 2,
    }


def test_an_unfused_export_is_loaded_where_there_is_no_tritonemb(tmp_path):
    model, _ = made()
    te.unfuse(model)
    user, item, _ = next(iter(loader()))
    samples = torch.export.Dim("samples")
    program = torch.export.export(model.eval(), (user, item), dynamic_shapes=({0: samples}, {0: samples}))
    torch.export.save(program, tmp_path / "exported.pt2")
    torch.save((user[:3], item[:3]), tmp_path / "inputs.pt")
    script = """
import sys
sys.modules["tritonemb"] = None
import torch
score = torch.export.load("exported.pt2").module()
torch.save(score(*torch.load("inputs.pt")).detach(), "scores.pt")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "scores.pt"), model(user[:3], item[:3]).detach())


def trained_in_parallel(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Clicks()
    te.fuse(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for batch in loader(16):
        user, item, clicked = (part[8 * rank : 8 * rank + 8] for part in batch)
        optimizer.zero_grad()
        (parallel(user, item) - clicked).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def test_fused_without_an_optimizer_processes_train_as_one(ranks):
    first, second = ranks(2).run(trained_in_parallel)
    assert_same_bits(first, second)
    torch.manual_seed(0)
    single = Clicks()
    optimizer = torch.optim.Adagrad(single.parameters(), lr=0.1)
    for user, item, clicked in loader(16):
        optimizer.zero_grad()
        (single(user, item) - clicked).square().mean().backward()
        optimizer.step()
    # Sums of 16 gradients in another order; Adagrad divides by their size, so that small ones' rounding counts more.
    torch.testing.assert_close(dict(first), dict(single.state_dict()), rtol=1e-4, atol=1e-5)
