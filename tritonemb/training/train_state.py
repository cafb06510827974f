"""What a trainer, its loop and its checkpoints share, and everything of it that a resumed run needs."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tritonemb.data.batch import Batch, BatchLayout
from tritonemb.data.loader import open_shards
from tritonemb.data.prefetch import Prefetcher
from tritonemb.data.protocol import Batches, Data, Split
from tritonemb.data.workers import DataLoaderWorkers
from tritonemb.offloading.checkpoint import TensorSlice, tensor_slices
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.parameters import as_dtensor, is_offloaded, local_shape, source_of, to_local
from tritonemb.offloading.sub_groups import MASTER
from tritonemb.server.attach import Servers
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.cache import RowCache
from tritonemb.tables.cached_table import metadata_only
from tritonemb.tables.lookup import needs_prefetch, released_before, sequence_number, table_sets
from tritonemb.tables.table_set import TableSet
from tritonemb.training.config import TrainerOptions
from tritonemb.training.ranks import Ranks, on_rank_zero
from tritonemb.training.step import PLAIN, PreparedStep, RowsAhead, TrainStep, count, prefetch_for, prepare

SAVED_MASTER = "offload_master"  # of a parameter in 16 bits, by its name in a checkpoint
DEPTH = 2  # steps beyond the one that is trained


@dataclass
class Progress:
    """How far a run has come.

    Args:
        step, epoch, samples: steps and epochs done, samples trained on.
        position: where the epoch's next batch begins, on this rank; None at the beginning of an epoch.
        epoch_samples, logged_samples: samples trained on in this epoch, and since the last log.
        losses: mean training loss of each epoch done.
        best, best_step: the best value of the monitored metric, and the step when it was reached.
        evaluations_since_best: how many have not been better.
        seconds: time trained.
        ended: why the run is over, "" while it is not.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    position: dict[str, Any] | None = None
    epoch_samples: int = 0
    logged_samples: int = 0
    losses: list[float] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    seconds: float = 0.0
    ended: str = ""


@dataclass
class TrainState:
    """What a trainer, its loop and its checkpoints share.

    Args:
        pipeline: whether the next steps are prefetched.
        begun: whether the ranks' generators are their own.
        fitted: whether a fit has been to its end.
        prefetched: steps of the epoch that is being trained, or of the evaluation.
        rows_ahead: of an epoch that trains cached dynamic tables.
        seen: the last step after which tables were saved or evaluated, if that was due.
        servers: embedding servers, if there are some.
        staleness: steps by which pulls from these may precede pushes.

    Attributes:
        last_epoch, last_step: where the whole run ends.
    """

    model: nn.Module
    device: torch.device
    data: Data
    options: TrainerOptions
    config: Mapping[str, Any]
    step: TrainStep
    progress: Progress
    ranks: Ranks
    pipeline: bool
    begun: bool = False
    fitted: bool = False
    prefetched: Prefetcher[PreparedStep] | None = None
    rows_ahead: RowsAhead | None = None
    seen: int = 0
    servers: Servers | None = None
    staleness: int = 0

    def __post_init__(self) -> None:
        self.last_epoch: int = self.options.epochs
        self.last_step: int | None = self.options.max_steps
        self.use(self.data)

    def use(self, data: Data) -> None:
        """Read this data from now on."""
        self.data = data
        self._workers = DataLoaderWorkers(data, self.options.num_workers) if self.options.num_workers else None

    def open(self, split: Split, training: bool = False) -> Batches:
        """This rank's batches of a split; for training shuffled, from where the epoch has come to."""
        options, progress = self.options, self.progress
        return open_shards(
            self.data, split, options.batch_size, self.ranks.rank, self.ranks.size,
            positions=progress.position if training else None, pin_memory=self.device.type == "cuda",
            workers=self._workers, seed=options.seed, epoch=progress.epoch, shuffle=training,
        )  # fmt: skip

    @contextmanager
    def steps(
        self, stream: Batches, training: bool = False, **signals: Callable[[], int]
    ) -> Iterator[Iterator[PreparedStep]]:
        """Steps on a stream's batches, prefetched where that exchanges, copies or reads; `signals`: see `prepare`."""
        ranks, options = self.ranks, self.options
        prefetch = prefetch_for(self.model, training) if self.pipeline else None
        caches = caches_of(self.model)
        protect = [t.config.eviction.protect for tables in table_sets(self.model) for t in tables.dynamic.values()]
        protect += [self.staleness * options.accumulate] * any(tables.on_servers for tables in table_sets(self.model))
        if training and prefetch is not None and protect:
            depth = max(1, (min(protect) + 1) // options.accumulate)
            self.seen = self.progress.step
            prefetch = self.rows_ahead = RowsAhead(prefetch, self.seen, options.accumulate, depth, self._next_to_see)
        # Whether some table is in host memory or on disk: the same on all ranks, whoever has its shards.
        sharded = [module for module in self.model.modules() if isinstance(module, ShardedCollection)]
        placements = {config.placement for module in sharded for config in module.configs}
        cached = needs_prefetch(self.model) or bool(placements - {"device"})
        steps = prepare(
            stream, ranks, self.device, partial(empty_batch, self.data), prefetch=prefetch,
            accumulate=options.accumulate if training else 1, pad=not training,
            counted=partial(count, caches) if caches and prefetch and training else None, **signals,
        )  # fmt: skip
        depth = options.prefetch_depth if cached and options.prefetch_depth is not None else max(DEPTH, self.staleness)
        if depth == 0 or not self.pipeline or (ranks.size == 1 and self.device.type != "cuda" and not cached):
            with closing(steps):
                yield steps
            return
        # Which rows may be evicted is settled when a step may be made, not when the thread comes to it.
        permit = (lambda: released_before(sequence_number())) if caches else None
        with Prefetcher(steps, depth, "tritonemb-pipeline", collective=ranks.size > 1, permit=permit) as prefetcher:
            outer_prefetcher, self.prefetched = self.prefetched, prefetcher
            try:
                yield prefetcher
            finally:
                self.prefetched = outer_prefetcher
                if training:
                    self.hold()
                    self.rows_ahead = None

    @property
    def samples_per_step(self) -> int:
        """Of all ranks; the last step of an epoch may have fewer."""
        return self.options.batch_size * self.options.accumulate * self.ranks.size

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, as far as they are known."""
        rows = self.data.num_rows("train") if "train" in self.data.splits() else None
        by_epochs = None if rows is None else -(-rows // self.samples_per_step) * self.last_epoch
        return min((steps for steps in (by_epochs, self.last_step) if steps is not None), default=None)

    def total_samples(self, rows: int | None) -> int | None:
        """Samples of the whole run, if an epoch has `rows`."""
        if rows is None:
            return None if self.last_step is None else self.last_step * self.samples_per_step
        if self.last_step is None:
            return rows * self.last_epoch
        epochs, extra_steps = divmod(self.last_step, -(-rows // self.samples_per_step))
        return min(rows * self.last_epoch, rows * epochs + extra_steps * self.samples_per_step)

    def settle(self) -> None:
        """Wait until nothing is being prefetched: no collective is running, and no transfer of rows."""
        if self.prefetched is not None:
            was_on_hold = self.rows_ahead is not None and self.rows_ahead.on_hold
            self.hold()
            self.prefetched.settle()
            if self.rows_ahead is not None:
                self.rows_ahead.hold(was_on_hold)

    def hold(self) -> int:
        """Prefetch no more rows of tables that keep account of steps; the last step that is prefetched, or trained."""
        return self.progress.step if self.rows_ahead is None else self.rows_ahead.hold(True)

    def refuse_nonfinite(self, loss: float | None = None) -> None:
        """Raise ValueError if a loss, that of the epoch so far if not given, is not finite. Collective."""
        loss = self.ranks.sum(self.step.loss_sums[1]) if loss is None else loss
        if math.isfinite(loss):
            return
        epoch = self.progress.epoch + 1
        if not math.isfinite(self.ranks.sum(self.step.input_sum)) and (cause := self.nonfinite_input("train")):
            raise ValueError(f"the training loss is {loss} in epoch {epoch}: {cause}")
        raise ValueError(f"the training loss is {loss} in epoch {epoch}; lower the learning rates")

    def nonfinite_input(self, split: Split) -> str:
        """Where the first number of a split is that is not finite, "" if there is none. Collective."""

        def find() -> str:
            first_row = 0
            with self.data.open(split, self.options.batch_size) as stream:
                for batch in stream:
                    for row, column in (~batch.dense.isfinite()).nonzero().tolist():
                        where = f"dense column {column} of {split} row {first_row + row:,}"
                        return f"{where} is {batch.dense[row, column]}; correct such rows, or leave them out"
                    first_row += len(batch)
            return ""

        return on_rank_zero(self.ranks.control, find)

    def _next_to_see(self) -> int:
        """The next step after which tables are saved or evaluated, as far as that is known."""
        every = self.options.checkpoints.checkpoint_steps, self.options.evaluate_every
        ends = [(self.seen // steps + 1) * steps for steps in every if steps]
        return min([*ends, *([] if self.last_step is None else [self.last_step])], default=2**63)


def empty_batch(data: Data) -> Batch:
    """A batch without samples, with the keys of a data set's batches."""
    layout = BatchLayout(tuple(feature.name for feature in data.features), 0, data.num_dense, 0)
    return layout.batch(torch.zeros(layout.num_bytes, dtype=torch.uint8))


def caches_of(model: nn.Module) -> list[RowCache]:
    """The caches of a model's cached tables, this rank's shards among them."""
    return [tables.cache for tables in table_sets_of(model) if tables.cache is not None]


def table_sets_of(model: nn.Module) -> list[TableSet]:
    """Those of a model, this rank's shards among them."""
    sharded = (module for module in model.modules() if isinstance(module, ShardedCollection))
    return [*table_sets(model), *(tables for module in sharded for tables in module.table_sets)]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model.<key>` for every entry of the model's `state_dict`, sharing memory; a table on disk has `DiskTensor`s."""
    with metadata_only():
        state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the model's state_dict has {name!r} of type {type(value).__name__}; checkpoints hold tensors only"
            )
    return {f"model.{name}": value.detach() for name, value in state.items()}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, offloaded: bool = True
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The dense optimizer's tensors by `optimizer.<parameter>.<state>`, and plain values by parameter, for JSON; those
    that are offloaded only with `offloaded`.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, place in _parameters_of(model, optimizer):
        name = place.name
        states = optimizer.state.get(parameter, {}) if optimizer else {}
        if offloaded and isinstance(optimizer, OffloadedOptimizer):
            states = optimizer.states_of(parameter)
            if (master := states.pop(MASTER, parameter)).dtype != parameter.dtype:  # else they are its values
                states[SAVED_MASTER] = master
        for key, value in states.items():
            if isinstance(value, Tensor) and value.ndim and place.is_tile:
                tensors.setdefault(f"optimizer.{name}.{key}", value.new_empty(place.shape))[place.slices] = value
            elif isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            elif isinstance(value, PLAIN):
                plain.setdefault(name, {})[key] = value
            else:
                raise TypeError(
                    f"{type(optimizer).__name__} keeps {key!r} of type {type(value).__name__} for {name}; checkpoints "
                    "hold tensors and plain values only"
                )
    return tensors, plain


def optimizer_templates(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Room for the stored states of parameters that this optimizer has: on the CPU, or sharded as they are."""
    parameters: dict[str, Any] = {f"optimizer.{place.name}": p for p, place in _parameters_of(model, optimizer)}
    templates: dict[str, Tensor] = {}
    for name, entry in stored.items():
        parameter = parameters.get(name.rpartition(".")[0])
        if isinstance(parameter, DTensor) and parameter.shape == entry.size:
            templates[name] = as_dtensor(torch.empty(local_shape(parameter), dtype=entry.properties.dtype), parameter)
        elif parameter is not None:
            templates[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return templates


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor],
    plain: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    """Give the optimizer what `optimizer_state` took out of one like it."""
    by_parameter = {id(parameter): place for parameter, place in _parameters_of(model, optimizer)}
    packed = optimizer.state_dict()
    packed["state"] = {}  # by number, in the order of the groups
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        place = by_parameter[id(parameter)]
        prefix, state = f"optimizer.{place.name}.", dict[str, Any](plain.get(place.name, {}))
        for name, value in tensors.items():
            if name.startswith(prefix):
                state[name.removeprefix(prefix)] = value[place.slices] if place.is_tile and value.ndim else value
        if (master := state.pop(SAVED_MASTER, None)) is not None and isinstance(optimizer, OffloadedOptimizer):
            state[MASTER] = master
        if state:
            packed["state"][number] = state
    optimizer.load_state_dict(packed)


def nonfinite_parameter(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, tensors: Mapping[str, Tensor]
) -> str | None:
    """The name of a parameter that the optimizer trains and that is not finite in `tensors`; None if all are."""
    names = {place.name for p, place in _parameters_of(model, optimizer) if p.requires_grad}
    values = {name: to_local(tensors[f"model.{name}"]) for name in sorted(names)}
    return next((name for name, v in values.items() if v.numel() and not v.norm(torch.inf).isfinite()), None)


def rng_tensors(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """torch's generators, of the CPU and of the device that trains: `rng.<device>`, or `rng.<rank>.<device>`."""
    prefix = "rng." if rank is None else f"rng.{rank}."
    tensors = {f"{prefix}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors[f"{prefix}cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def rng_templates(stored: Mapping[str, TensorStorageMetadata], rank: int, device: torch.device) -> dict[str, Tensor]:
    """Room for the generators of a rank, as far as a checkpoint has them; one process counts as rank 0."""
    prefixes = (f"rng.{rank}.", "rng.") if rank == 0 else (f"rng.{rank}.",)
    names = [prefix + kind for prefix in prefixes for kind in ("cpu", device.type)]
    return {name: torch.empty(stored[name].size, dtype=torch.uint8) for name in names if name in stored}


def set_rng(
    tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], seed: int, rank: int, device: torch.device
) -> None:
    """Set all generators to what a checkpoint has for this rank; a rank that it does not know begins anew."""
    plain = manifest.get("rng_of_ranks", [manifest["rng"]])
    if rank >= len(plain):
        seed_rank(seed, rank)
        return
    for name, tensor in tensors.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(tensor)
        else:
            torch.cuda.set_rng_state(tensor, device)
    version, numbers, gauss = plain[rank]["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(plain[rank]["numpy"]))  # noqa: NPY002


def seed_rank(seed: int, rank: int) -> None:
    """Generators of a rank's own, which depend on nothing else."""
    state = [int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3, np.uint32)]
    torch.manual_seed(state[0])
    random.seed(state[1])
    np.random.seed(state[2])  # noqa: NPY002


def rng_plain() -> dict[str, Any]:
    """The generators of Python and NumPy."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
    }


def write_offloaded(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write what was loaded into `model_tensors` to the tiers of offloaded parameters."""
    for parameter, place in tensor_slices(model.module if isinstance(model, HybridParallel) else model):
        if is_offloaded(parameter):
            values = to_local(tensors[f"model.{place.name}"])
            source_of(parameter).write(values[place.slices] if place.is_tile else values)


def _parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[Any, TensorSlice]]:
    """The optimizer's parameters under their names in the model's `state_dict`, which wrappers of the model keep."""
    owned = {id(parameter) for group in (optimizer.param_groups if optimizer else ()) for parameter in group["params"]}
    candidates: Iterable[tuple[Any, TensorSlice]]
    if isinstance(optimizer, OffloadedOptimizer):
        candidates = tensor_slices(model.module if isinstance(model, HybridParallel) else model)
    else:
        with metadata_only(parameters=True):
            entries = model.state_dict(keep_vars=True)
        candidates = (
            (p, TensorSlice(name, p.shape, (), torch.Size())) for name, p in entries.items() if id(p) in owned
        )
    named: dict[int, tuple[Any, TensorSlice]] = {}
    for p, place in candidates:
        if id(p) in owned:
            named.setdefault(id(p), (p, place))
    return list(named.values())
