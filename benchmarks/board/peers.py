"""Models of FuxiCTR (Apache-2.0), DeepCTR-Torch (Apache-2.0) and torch-rechub (MIT) over the rows of a `Dataset`.

A peer reads the encoded ids of our data set. Lists of ids are padded to their maximal length, with ids from 1 and 0 as
padding. Its batches are gathered by index from one matrix, and its train steps are plain PyTorch: loaders that collate
single rows, progress bars, clipping and sums of empty regularizers are left out, but for `Peer.library_epoch`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.data import Dataset, Feature, Split
from tritonemb.data.batch import Column, Rows
from tritonemb.data.pipeline import permutation

Batch = dict[str, Tensor]
Columns = dict[str, Any]  # arrays by name


@dataclass(frozen=True)
class Options:
    """Options of a model and of its training, the same for all libraries."""

    model: str
    dim: int = 16
    mlp: tuple[int, ...] = (64, 64, 64)
    attention_mlp: tuple[int, ...] = (64,)
    num_cross_layers: int = 3
    lr: float = 1e-3
    batch_size: int = 512
    max_epochs: int = 20
    patience: int = 2


def import_peer(name: str) -> Any:
    """Import a module of a peer. Raise ModuleNotFoundError, with the command that installs it, if it is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        text = f"{name} of a peer cannot be imported: {error}; docs/board.md says how the peers are installed"
        raise ModuleNotFoundError(text, name=error.name) from error


def pad_lists(column: Column, length: int) -> Tensor:
    """Return lists of ids as int64 `[N, length]`: each id plus one, and zeros after the last one."""
    assert column.offsets is not None
    lengths = column.offsets.diff()
    result = torch.zeros(len(column), length, dtype=torch.int64)
    result[torch.arange(length) < lengths[:, None]] = column.values.long() + 1
    return result


class Peer:
    """Model of another library, trained like ours: the same rows in the same order, Adam and binary cross-entropy.

    Raise ModuleNotFoundError if its library is not installed.

    Args:
        library: name in `PEERS`.
        data: data set with encoded ids.
    """

    def __init__(self, library: str, data: Dataset, options: Options, seed: int) -> None:
        splits = {split: data.rows(split) for split in data.splits()}
        self.lengths = {
            feature.name: max(int(rows.columns[index].offsets.diff().max()) for rows in splits.values())
            for index, feature in enumerate(data.features)
            if feature.multi_hot
        }
        self.data, self.options, self.seed, self.epoch = data, options, seed, 0
        self.matrices = {split: self._matrix(rows) for split, rows in splits.items()}
        self.library = PEERS[library]
        self.module, self.call = self.library.build(data, options, self.lengths)
        initialize(self.module, seed)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=options.lr)

    def _matrix(self, rows: Rows) -> Tensor:
        """Return the columns of rows as float32 `[N, width]`, in which ids below 2^24 are exact."""
        columns, self.slices = [rows.labels[:, None], rows.dense], {"label": slice(0, 1)}
        self.slices |= {f"dense_{i}": slice(i + 1, i + 2) for i in range(rows.dense.shape[1])}
        start = 1 + rows.dense.shape[1]
        for feature, column in zip(self.data.features, rows.columns, strict=True):
            length = self.lengths.get(feature.name)
            columns.append(column.values[:, None].float() if length is None else pad_lists(column, length).float())
            self.slices[feature.name] = slice(start, start := start + (length or 1))
        return torch.cat(columns, dim=1)

    def batch(self, split: Split, indices: Tensor) -> Batch:
        """Gather rows by index: columns by name, `[B]`, or `[B, length]` of lists."""
        rows = self.matrices[split].index_select(0, indices)
        columns = {name: rows[:, part] for name, part in self.slices.items()}
        return {name: column if name in self.lengths else column[:, 0] for name, column in columns.items()}

    def train_epoch(self) -> None:
        """Train on each row once, in the order of our trainer."""
        self.module.train()
        order = torch.from_numpy(permutation(len(self.data.train), self.seed, self.epoch))
        for indices in order.split(self.options.batch_size):
            batch = self.batch("train", indices)
            labels = batch.pop("label")
            self.optimizer.zero_grad()
            F.binary_cross_entropy(self.call(self.module, batch), labels).backward()
            self.optimizer.step()
        self.epoch += 1

    def library_epoch(self) -> Callable[[], object] | None:
        """Return a function that trains an epoch by the loader and the loop of the library, with shuffled rows; None
        where the library has a loader for files of its own only."""
        rows = self.matrices["train"]
        widths = {name: part if name in self.lengths else part.start for name, part in self.slices.items()}
        columns = {name: rows[:, part].numpy() for name, part in widths.items()}
        if (loop := self.library.make_loop(self, columns, columns.pop("label"))) is None:
            return None

        def train() -> None:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                loop()

        return train

    @torch.no_grad()
    def predict(self, split: Split) -> Tensor:
        """Return probabilities of a split in row order."""
        self.module.eval()
        parts = torch.arange(self.data.num_rows(split)).split(4096)
        batches = (self.batch(split, indices) for indices in parts)
        return torch.cat([
            self.call(self.module, {k: v for k, v in batch.items() if k != "label"}) for batch in batches
        ])  # fmt: skip


def initialize(module: nn.Module, seed: int) -> None:
    """Fill a model of any library with initial values: rows of tables normal with deviation 0.01, rows of padding 0,
    factors of numbers 1, matrices by Xavier's uniform, zeros elsewhere."""
    torch.manual_seed(seed)
    padding = {id(m.weight): m.padding_idx for m in module.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or "ctx_bias" in name:
            nn.init.zeros_(parameter)
        elif parameter.numel() == 1 and "lr_layer" not in name:
            nn.init.ones_(parameter)
        elif any(part in name for part in ("embed", "dense_rows", "linear_model")):
            nn.init.normal_(parameter, std=0.01)
            if (row := padding.get(id(parameter))) is not None:
                nn.init.zeros_(parameter.data[row])
        else:
            nn.init.xavier_uniform_(parameter)


# FuxiCTR: its wheel has the models of its zoo for long histories only; the others are put together here of its layers.


def feature_map(data: Dataset, dim: int, dense_dim: int, lengths: dict[str, int]) -> Any:
    """Describe features to FuxiCTR; a number has a vector of `dense_dim` by which it is multiplied."""
    features = import_peer("fuxictr.features").FeatureMap("rows", "")
    for i in range(data.num_dense):
        features.features[f"dense_{i}"] = {"type": "numeric", "source": "", "embedding_dim": dense_dim}
    for feature in [feature for feature in data.features if not feature.table]:
        spec: dict[str, Any] = {"type": "categorical", "source": "", "vocab_size": feature.num_embeddings}
        if feature.name in lengths:
            spec |= {"type": "sequence", "vocab_size": feature.num_embeddings + 1, "padding_idx": 0}
            spec |= {"max_len": lengths[feature.name], "feature_encoder": "layers.MaskedAveragePooling()"}
        features.features[feature.name] = spec
    features.labels, features.default_emb_dim, features.num_fields = ["label"], dim, len(features.features)
    return features


def history_of(data: Dataset) -> Feature:
    """Return the history of a data set, whose `table` is its target."""
    return next(feature for feature in data.features if feature.table)


FUXI = {"optimizer": "adam", "loss": "binary_crossentropy", "verbose": 0, "model_root": "", "metrics": ["AUC"]}


def fuxictr(data: Dataset, options: Options, lengths: dict[str, int]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Build DeepFM, DCNv2 or FinalMLP of FuxiCTR's layers, or its DIN."""
    if options.model == "din":
        return fuxictr_din(data, options, lengths)
    layers, mlp, name = import_peer("fuxictr.pytorch.layers"), list(options.mlp), options.model
    features = feature_map(data, options.dim, options.dim if name == "deepfm" else 1, lengths)
    width = features.sum_emb_out_dim()
    parts: dict[str, Any] = {"mlp": layers.MLP_Block(width, mlp, output_dim=1)}
    if name == "deepfm":
        parts["fm"] = layers.FactorizationMachine(features)
    elif name == "dcnv2":
        parts["cross"] = layers.CrossNetV2(width, options.num_cross_layers)
    else:
        zoo = import_peer("model_zoo.LongCTR.FinalMLP.FinalMLP")
        parts = {f"mlp{i}": layers.MLP_Block(width, mlp) for i in (1, 2)}
        parts["selection"] = zoo.FeatureSelection(features, width, options.dim, [64])
        parts["fusion"] = zoo.InteractionAggregation(mlp[-1], mlp[-1])

    class Model(import_peer("fuxictr.pytorch.models").BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(features, **FUXI)
            self.embedding_layer = layers.FeatureEmbedding(features, options.dim)
            self.parts = nn.ModuleDict(parts)

        def forward(self, inputs: Batch) -> dict[str, Tensor]:
            columns, part = self.get_inputs(inputs), self.parts
            rows = self.embedding_layer(columns, flatten_emb=name != "deepfm")
            if name == "deepfm":
                logits = part["fm"](columns, rows) + part["mlp"](rows.flatten(start_dim=1))
            elif name == "dcnv2":
                logits = part["mlp"](part["cross"](rows))
            else:
                first, second = part["selection"](columns, rows)
                logits = part["fusion"](part["mlp1"](first), part["mlp2"](second))
            return {"y_pred": self.output_activation(logits)}

    return Model(), lambda module, batch: module(batch)["y_pred"].squeeze(1)


def fuxictr_din(data: Dataset, options: Options, lengths: dict[str, int]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Build DIN of FuxiCTR's zoo, which looks up history and target at once."""
    features, history = feature_map(data, options.dim, 1, lengths), history_of(data)
    spec = features.features[history.table]
    spec |= {"source": "item", "padding_idx": 0, "vocab_size": spec["vocab_size"] + 1}
    module = import_peer("model_zoo.LongCTR.DIN.DIN").DIN(
        features, dnn_hidden_units=list(options.mlp), attention_hidden_units=list(options.attention_mlp),
        attention_hidden_activations="ReLU", embedding_dim=options.dim, **FUXI,
    )  # fmt: skip

    def call(module: nn.Module, batch: Batch) -> Tensor:
        pair, history_ids = (history.name, history.table), batch[history.name]
        items = torch.cat([history_ids, batch[history.table][:, None] + 1], dim=1).flatten()
        context = {name: column for name, column in batch.items() if name not in pair}
        return module((context, {history.table: items}, history_ids > 0))["y_pred"].squeeze(1)

    return module, call


def fuxictr_loop(peer: Peer, columns: Columns, labels: Any) -> Callable[[], object] | None:
    if peer.options.model == "din":
        return None
    loader, module = import_peer("fuxictr.pytorch.dataloaders.npz_dataloader").NpzDataLoader, peer.module
    with TemporaryDirectory() as folder:
        np.savez(path := str(Path(folder) / "rows.npz"), label=labels, **columns)
        batches = loader(module.feature_map, path, peer.options.batch_size, shuffle=True, num_workers=0)
    module.optimizer, module.loss_fn = peer.optimizer, F.binary_cross_entropy
    vars(module).update(_max_gradient_norm=10.0, _eval_steps=np.inf, _total_steps=0, _stop_training=False)
    return lambda: module.train_epoch(batches)


# DeepCTR-Torch.


def deepctr_columns(data: Dataset, dim: int, lengths: dict[str, int]) -> list[Any]:
    """Describe features to DeepCTR-Torch, in the order of the matrix of its inputs."""
    inputs = import_peer("deepctr_torch.inputs")
    columns = [inputs.DenseFeat(f"dense_{i}", 1) for i in range(data.num_dense)]
    targets = [feature.table for feature in data.features]
    for feature in data.features:
        size = feature.num_embeddings + (feature.name in lengths or feature.name in targets)
        sparse = inputs.SparseFeat(feature.name, size, dim)
        if feature.table:
            sparse = inputs.SparseFeat(f"hist_{feature.table}", size, dim, embedding_name=feature.table)
            sparse = inputs.VarLenSparseFeat(sparse, lengths[feature.name], length_name="seq_length")
        elif feature.name in lengths:
            sparse = inputs.VarLenSparseFeat(sparse, lengths[feature.name])
        columns.append(sparse)
    return columns


def with_history(data: Dataset, columns: Columns) -> Columns:
    """Rename the history, if there is one, as DIN of DeepCTR-Torch expects it, and add its length; ids begin at 1."""
    for feature in [feature for feature in data.features if feature.table]:
        history_ids, target = columns[feature.name], columns[feature.table]
        columns = columns | {f"hist_{feature.table}": history_ids, feature.table: target + 1}
        columns["seq_length"] = (history_ids > 0).sum(1)
    return columns


def call_deepctr(data: Dataset, module: Any, batch: Batch) -> Tensor:
    batch = with_history(data, batch)
    columns = [batch[name] if batch[name].dim() > 1 else batch[name][:, None] for name in module.feature_index]
    return module(torch.cat(columns, dim=1)).squeeze(1)


def deepctr(data: Dataset, options: Options, lengths: dict[str, int]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Build DeepFM or DIN of DeepCTR-Torch."""
    columns, arguments = deepctr_columns(data, options.dim, lengths), {"dnn_hidden_units": options.mlp}
    if options.model == "din":
        module = import_peer("deepctr_torch.models.din").DIN(
            columns, [history_of(data).table], att_hidden_size=options.attention_mlp, att_activation="relu",
            l2_reg_embedding=0, **arguments,
        )  # fmt: skip
    else:
        model = import_peer("deepctr_torch.models.deepfm").DeepFM
        module = model(columns, columns, l2_reg_linear=0, l2_reg_embedding=0, **arguments)
    return module, partial(call_deepctr, data)


def deepctr_loop(peer: Peer, columns: Columns, labels: Any) -> Callable[[], object]:
    peer.module.compile(peer.optimizer, "binary_crossentropy")
    columns = with_history(peer.data, columns)
    return lambda: peer.module.fit(columns, labels, batch_size=peer.options.batch_size, epochs=1, verbose=0)


# torch-rechub.


def rechub(data: Dataset, options: Options, lengths: dict[str, int]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Build DeepFM or DCNv2 of torch-rechub."""
    kinds = import_peer("torch_rechub.basic.features")
    dense = [kinds.DenseFeature(f"dense_{i}") for i in range(data.num_dense)]

    def describe(feature: Feature) -> Any:
        if feature.name in lengths:
            return kinds.SequenceFeature(feature.name, feature.num_embeddings + 1, options.dim, padding_idx=0)
        return kinds.SparseFeature(feature.name, feature.num_embeddings, options.dim)

    sparse, mlp = [describe(feature) for feature in data.features], {"dims": list(options.mlp)}
    models = import_peer("torch_rechub.models.ranking")
    if options.model == "deepfm":
        module = models.DeepFM(sparse + dense, sparse, mlp)
    else:
        layers = options.num_cross_layers
        module = models.DCNv2(sparse + dense, layers, mlp, model_structure="stacked", use_low_rank_mixture=False)
    # Its MLPs always normalize batches, and a dropout of 0 is a layer, too: leave both out.
    for parent in [m for m in module.modules() if isinstance(m, nn.Sequential)]:
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.Dropout):
                setattr(parent, name, nn.Identity())
    return module, lambda module, batch: module(batch)


def rechub_loop(peer: Peer, columns: Columns, labels: Any) -> Callable[[], object]:
    trainer = import_peer("torch_rechub.trainers").CTRTrainer(peer.module, optimizer_params={"lr": peer.options.lr})
    batches = import_peer("torch_rechub.utils.data").DataGenerator(columns, labels).generate_dataloader(
        *[columns, labels] * 2, batch_size=peer.options.batch_size
    )  # fmt: skip
    return lambda: trainer.train_one_epoch(batches[0])


@dataclass(frozen=True)
class Library:
    """Library of models.

    Args:
        distribution: its name on PyPI.
        build: function of the data, the options and the maximal lengths of lists; it returns a module, and a function
            that calls it with columns by name and returns probabilities.
        make_loop: function of a `Peer`, its columns and labels; it returns a function that trains an epoch, or None.
    """

    distribution: str
    build: Callable[[Dataset, Options, dict[str, int]], tuple[nn.Module, Callable[..., Tensor]]]
    make_loop: Callable[[Peer, Columns, Any], Callable[[], object] | None]


PEERS = {
    "FuxiCTR": Library("fuxictr", fuxictr, fuxictr_loop),
    "DeepCTR-Torch": Library("deepctr-torch", deepctr, deepctr_loop),
    "torch-rechub": Library("torch-rechub", rechub, rechub_loop),
}
