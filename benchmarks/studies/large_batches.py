"""Train Adult in batches of 64, and in batches 16 times as large with and without CowClip; compare the test AUC.

"scaled" is the scaling of CowClip's paper: the learning rate of the tables stays, the dense one grows by the root of
the factor, with a warm-up of one epoch. Usage:

    python -m benchmarks.studies.large_batches FOLDER_OF_ADULT
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace

import torch

import tritonemb as te
from tritonemb.data import Dataset, open_dataset
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.model import build_model
from tritonemb.training.schedule import Schedule

BATCH, FACTOR, DENSE_LR = 64, 16, 1e-3
TOLERANCE = 0.001


def test_auc(config: TrainConfig, data: Dataset, scaled: bool) -> float:
    """Test AUC of a run, with the learning rates of small batches, or with those of the paper."""
    torch.manual_seed(config.seed)
    factor = config.batch_size / BATCH if scaled else 1.0
    steps = math.ceil(data.train.labels.numel() / config.batch_size)
    trainer = te.Trainer(
        build_model(config, data.features, data.num_dense), data, verbose=False, batch_size=config.batch_size,
        epochs=config.epochs, seed=config.seed, dense_lr=DENSE_LR * math.sqrt(factor),
        dense_schedule=Schedule(warmup_steps=steps) if scaled else None,
    )  # fmt: skip
    trainer.fit()
    return trainer.evaluate("test").auc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the folder of UCI's adult.data and adult.test")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    parser.add_argument("--cow-clip", type=float, default=1.0, help="ratio of CowClip")
    parser.add_argument("--embedding-lr", type=float, default=1e-3, help="learning rate of the tables, by Adam")
    arguments = parser.parse_args()
    data = open_dataset("adult", arguments.folder)
    base = replace(preset("adult"), embedding_optimizer="adam", embedding_lr=arguments.embedding_lr, batch_size=BATCH)
    large = replace(base, batch_size=BATCH * FACTOR)
    runs = {
        "small": (base, False),
        "large": (large, False),
        "large, scaled": (large, True),
        "large, scaled, CowClip": (replace(large, cow_clip=arguments.cow_clip), True),
    }
    means = {}
    for name, (config, scaled) in runs.items():
        aucs = [test_auc(replace(config, seed=seed), data, scaled) for seed in range(arguments.seeds)]
        means[name] = statistics.mean(aucs)
        print(f"{name}: {means[name]:.4f} ({min(aucs):.4f} to {max(aucs):.4f})", flush=True)
    gap = means["large, scaled, CowClip"] - means["small"]
    print(f"CowClip: {gap:+.4f} beside small batches, {'within' if abs(gap) <= TOLERANCE else 'beyond'} {TOLERANCE}")


if __name__ == "__main__":
    main()
