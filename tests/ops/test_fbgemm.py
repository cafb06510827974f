"""SGD, Adagrad and row-wise Adagrad against FBGEMM's CPU operators, where that package is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.helpers import contents, fewer, make_collection
from tests.strategies import random_batch

training = pytest.importorskip(
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    reason="fbgemm-gpu-cpu is not installed: there is nothing to compare with",
)
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
configs_of_fbgemm = pytest.importorskip("fbgemm_gpu.split_embedding_configs")

pytestmark = [pytest.mark.fbgemm, pytest.mark.public]
NUM_STEPS = fewer(10, 3)
KINDS = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "row_wise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
# Both sum a row's gradients in float32, in different orders, for ten steps: up to 1,600 gradients in one row, whose
# weights and lookups reach about 30, so that a unit in the last place is 2e-6; differences of 13 units have been drawn.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


def fbgemm_twin(collection: te.nn.EmbeddingBagCollection, pooling: str) -> Any:
    optimizer = collection.optimizer
    kind = getattr(configs_of_fbgemm.EmbOptimType, KINDS[optimizer.name])
    options = {} if optimizer.name == "sgd" else {"eps": optimizer.eps}
    twin = training.SplitTableBatchedEmbeddingBagsCodegen(
        [
            (c.num_embeddings, c.embedding_dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
            for c in collection.configs
        ],
        feature_table_map=[index for index, c in enumerate(collection.configs) for _ in c.feature_names],
        optimizer=kind,
        pooling_mode=common.PoolingMode.SUM if pooling == "sum" else common.PoolingMode.MEAN,
        learning_rate=optimizer.lr,
        **options,
    )
    for table, weight in zip(collection.tables, twin.split_embedding_weights(), strict=True):
        weight.data.copy_(table.weight.detach())
    return twin


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=fewer(10, 2))
@given(data=st.data())
def test_steps_equal_fbgemms(name, pooling, data):
    dims, rows = st.sampled_from(fewer((4, 12, 64, 128), (4, 12))), st.sampled_from((1, 5, 300))
    features = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    configs = [
        te.TableConfig(f"t{i}", data.draw(rows), data.draw(dims), [f"t{i}f{k}" for k in range(count)], pooling=pooling)
        for i, count in enumerate(features)
    ]
    collection = make_collection(configs, te.optim.OPTIMIZERS[name](lr=data.draw(st.sampled_from((0.01, 0.3)))))
    twin = fbgemm_twin(collection, pooling)
    weighted = pooling == "sum" and data.draw(st.booleans())
    sizes = {feature: c.num_embeddings for c in configs for feature in c.feature_names}
    batch_size, seed = data.draw(st.sampled_from(fewer((1, 6, 40), (1, 6)))), data.draw(st.integers(0, 2**20))
    for step in range(NUM_STEPS):
        batch = random_batch(sizes, list(sizes), batch_size, 4, weighted, seed=seed + step)
        fused, expected = collection(batch), twin(batch.values(), batch.offsets(), batch.weights_or_none())
        torch.testing.assert_close(fused, expected, **TOLERANCE)
        grad = torch.randn(fused.shape, generator=torch.Generator().manual_seed(seed + step))
        fused.backward(grad)
        expected.backward(grad)
    result = contents(collection)
    for config, weight in zip(configs, twin.split_embedding_weights(), strict=True):
        torch.testing.assert_close(result[f"{config.name}.weight"], weight.detach(), **TOLERANCE)
    if name != "sgd":
        for config, (state, *_) in zip(configs, twin.split_optimizer_states(), strict=True):
            actual = result[f"{config.name}.sum"]
            torch.testing.assert_close(actual.flatten(), state.flatten(), **TOLERANCE)
