"""The DLRM of `make train`, trained by Triton's kernels for a few steps, against the references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb.data import Dataset, make_synthetic, open_dataset
from tritonemb.ops.registry import use_kernels
from tritonemb.training.config import PRESETS
from tritonemb.training.model import build_model

NUM_STEPS = 3
BATCH_SIZE = 24  # interpreted: a step takes seconds


def movielens() -> Dataset:
    try:
        return open_dataset("movielens-100k")
    except ConnectionError as error:
        pytest.skip(f"cannot be fetched here: {error}")


def planted() -> Dataset:
    return make_synthetic(200, 10, seed=0)


def trained(data: Dataset, kernels: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Everything that the model and its optimizers hold after a few steps."""
    config = dataclasses.replace(PRESETS["movielens-100k"], device=str(device))
    torch.manual_seed(0)
    model = build_model(config, data.features, data.num_dense)
    few = dataclasses.replace(data, train=data.train.slice(0, NUM_STEPS * BATCH_SIZE))
    with use_kernels(kernels):
        te.Trainer(model, few, batch_size=BATCH_SIZE, dense_lr=config.dense_lr, epochs=1, verbose=False).fit()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.triton
@pytest.mark.parametrize(
    "make_data", [pytest.param(movielens, marks=pytest.mark.more), planted], ids=["movielens", "synthetic"]
)
def test_the_embedding_kernels_train_to_the_references_bits(make_data, device, monkeypatch):
    """With one formulation of the dense part for both: lookup, grouping and update have the references' bits."""
    monkeypatch.setattr("tritonemb.models.dlrm.is_fused", lambda *_: False)
    data = make_data()
    expected = trained(data, "reference", torch.device("cpu"))
    if device.type == "cpu":
        assert_same_bits(trained(data, "triton", device), expected)
    else:  # the dense layers' own products differ
        assert_same_bits(trained(data, "triton", device), trained(data, "reference", device))


@pytest.mark.triton
def test_all_kernels_train_alike(device):
    """The interaction's products are summed in another order: a few units in the last place, grown by three steps."""
    data = planted()
    actual, expected = trained(data, "triton", device), trained(data, "reference", device)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].double(), tensor.double(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m
        )
