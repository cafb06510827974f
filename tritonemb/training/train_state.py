"""State of a training run, shared by trainer, loop and checkpoints; conversion of it for checkpoints."""

import math
import random
from collections import defaultdict
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
from tritonemb.data.loader import DataLoaderWorkers, open_shards
from tritonemb.data.protocol import Batches, Data, Prefetcher, Split
from tritonemb.nn.single_table import SingleTable
from tritonemb.offloading.dispatch import is_offloaded, source_of
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.shards import TensorSlice, as_dtensor, local_shape, tensor_slices, to_local
from tritonemb.offloading.states import MASTER
from tritonemb.server.attach import Servers, collections_on_servers
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.cache import RowCache, released_before, sequence_number
from tritonemb.tables.cached_rows import metadata_only
from tritonemb.tables.table_set import TableSet, needs_prefetch, table_sets
from tritonemb.training.config import TrainerOptions
from tritonemb.training.model import fused_modules
from tritonemb.training.ranks import Ranks, on_rank_zero
from tritonemb.training.step import PLAIN, OrderedPrefetch, PreparedStep, StepPipeline, TrainStep, count, prefetch_for

Steps = Iterator[PreparedStep]
TensorMetadata = Mapping[str, TensorStorageMetadata]
DenseOptimizer = torch.optim.Optimizer | None
OptimizerState = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]
SAVED_MASTER = "offload_master"  # name in a checkpoint of the fp32 master copy of a 16-bit parameter
DEPTH = 2  # default of prefetch_depth: one step is ready, and one is in preparation


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0  # steps trained
    epoch: int = 0
    samples: int = 0
    position: dict[str, Any] | None = None  # of this rank's data after the last step; None if an epoch begins
    epoch_samples: int = 0  # trained in this epoch
    logged_samples: int = 0  # trained since the last log
    losses: list[float] = field(default_factory=list)  # mean training loss of each finished epoch
    monitor: str = ""  # name of the monitored metric; "" in old checkpoints
    best: float | None = None  # its value
    best_step: int = 0
    evaluations_since_best: int = 0
    seconds: float = 0.0  # training time
    ended: str = ""  # reason of the end of the run

    @property
    def is_best(self) -> bool:
        return self.best is not None and self.best_step == self.step

    def advance(self, rows: int, position: Any) -> None:
        self.step, self.position = self.step + 1, position
        self.samples += rows
        self.epoch_samples += rows
        self.logged_samples += rows


@dataclass
class TrainState:
    """State of a run, shared by trainer, loop and checkpoints."""

    model: nn.Module
    device: torch.device
    data: Data
    options: TrainerOptions
    config: Mapping[str, Any]
    step: TrainStep
    progress: Progress
    ranks: Ranks
    pipeline: bool  # whether the next steps are prefetched
    seeded: bool = False  # whether the random generators of the ranks have been seeded or restored
    fitted: bool = False  # whether a fit has finished
    prefetcher: Prefetcher[PreparedStep] | None = None  # steps of the running epoch or evaluation
    ordered_prefetch: OrderedPrefetch | None = None  # of a training epoch; None without such tables
    last_due_step: int = 0  # after which saving or evaluating tables was due
    servers: Servers | None = None
    staleness: int = 0  # steps by which pulls from servers may precede pushes

    def __post_init__(self) -> None:
        if self.options.fresh_tables and collections_on_servers(self.model):
            raise ValueError("fresh_tables initializes tables anew, but tables on embedding servers keep their rows")
        self.progress.monitor = self.options.monitor
        self.last_epoch: int = self.options.epochs  # the end of the run
        self.last_step: int | None = self.options.max_steps
        self.use(self.data)

    def use(self, data: Data) -> None:
        self.data = data
        self.is_stream: bool = getattr(data, "is_stream", False)  # train rows may come at any time
        self.labels: tuple[str, ...] = getattr(data, "labels", ())  # names, of several
        self.has_weights: bool = getattr(data, "has_weights", False)
        self.num_totals = len(self.labels) or int(self.has_weights)  # see `label_totals`
        self._workers = DataLoaderWorkers(data, self.options.num_workers) if self.options.num_workers else None

    def begin_epoch(self) -> None:
        """Train the model from here on; with `fresh_tables` initialize its tables by the seed of a later epoch."""
        self.model.train()
        if not (self.options.fresh_tables and self.progress.epoch and self.progress.position is None):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed * 1_000_003 + self.progress.epoch)
            for module in fused_modules(self.model):
                # Frozen tables keep the values that they were loaded with.
                if isinstance(module, ShardedCollection):
                    if not module._no_columns.requires_grad:
                        continue
                    module.local_shards.init(None)
                    continue
                if not any(weight.requires_grad for _, weight, _ in module._states()):
                    continue
                rate = module.current_learning_rate
                module.reset_parameters()  # type: ignore[operator]
                module.set_learning_rate(rate)

    def open(self, split: Split, training: bool = False, shards: int | None = None) -> Batches:
        """Open this rank's batches of a split, in `shards`, by default one per rank; with `training` shuffled, from the
        epoch's current position."""
        options, progress = self.options, self.progress
        return open_shards(
            self.data, split, options.batch_size, self.ranks.rank, self.ranks.size, shards,
            positions=progress.position if training else None, pin_memory=self.device.type == "cuda",
            workers=self._workers, seed=options.seed, epoch=progress.epoch, shuffle=training,
        )  # fmt: skip

    @contextmanager
    def steps(self, stream: Batches, training: bool = False, **signals: Callable[[], int]) -> Iterator[Steps]:
        """Yield the steps of a stream, prepared in a thread where that pays; for `signals` see `StepPipeline`."""
        ranks, options = self.ranks, self.options

        # Prefetch of rows; in training order for tables whose prefetch has effects.
        prefetch = prefetch_for(self.model, training) if self.pipeline else None
        caches = caches_of(self.model)
        protect = [t.config.eviction.protect for tables in table_sets(self.model) for t in tables.dynamic.values()]
        protect += [self.staleness * options.accumulate] * any(tables.on_servers for tables in table_sets(self.model))
        sharded = [module for module in self.model.modules() if isinstance(module, ShardedCollection)]
        dynamic = [tables for module in sharded for tables in module.table_sets if tables.dynamic]
        if protect or any(tables.cache is not None for tables in dynamic):
            protect += [table.config.eviction.protect for tables in dynamic for table in tables.dynamic.values()]
        elif prefetch is not None:
            prefetch = partial(prefetch, assign=False)
        if training and prefetch is not None and protect:
            depth = max(1, (min(protect) + 1) // options.accumulate)
            self.last_due_step = self.progress.step
            steps_done, limit = (self.progress.step, options.accumulate), self._next_due_step
            skip = partial(prefetch, effects=False)
            prefetch = self.ordered_prefetch = OrderedPrefetch(prefetch, skip, *steps_done, depth, limit)

        # Steps. `cached` must be equal on all ranks, so it covers tables whose shards other ranks hold.
        placements = {config.placement for module in sharded for config in module.configs}
        cached = needs_prefetch(self.model) or bool(placements - {"device"})
        count_caches = partial(count, caches) if caches and prefetch and training else None
        empty, accumulate = partial(empty_batch, self.data), options.accumulate if training else 1
        in_thread = prefetch is None or getattr(self.model, "prefetches_in_thread", True)
        kind: dict[str, Any] = {"pad": not training, "is_stream": training and self.is_stream, **signals}
        kind |= {"host_ids": not in_thread, "num_labels": self.num_totals}
        pipeline = StepPipeline(ranks, self.device, empty, accumulate, prefetch, count_caches, **kind)
        steps = pipeline.steps(stream)

        # Pipeline; on one CPU without cached tables there is nothing to overlap.
        depth = options.prefetch_depth if cached and options.prefetch_depth is not None else max(DEPTH, self.staleness)
        if depth == 0 or not self.pipeline or (ranks.size == 1 and self.device.type != "cuda" and not cached):
            with closing(steps):
                yield steps
            return
        # Evictions must not depend on timing: the release clock is read when a step is permitted, not when it runs.
        permit = (lambda: released_before(sequence_number())) if caches else None
        with Prefetcher(steps, depth, "tritonemb-pipeline", collective=ranks.size > 1, permit=permit) as prefetcher:
            outer_prefetcher, self.prefetcher = self.prefetcher, prefetcher
            try:
                # With ids over NCCL this thread exchanges those of the next step, while the device computes this one.
                yield prefetcher if in_thread else map(pipeline.prefetch_now, prefetcher)
            finally:
                self.prefetcher = outer_prefetcher
                if training:
                    self.hold()
                    self.ordered_prefetch = None

    @property
    def samples_per_step(self) -> int:
        """Samples per step of all ranks; the last step of an epoch may have fewer."""
        return self.options.batch_size * self.options.accumulate * self.ranks.size

    def steps_per_epoch(self, rows: int) -> int:
        """Steps per epoch of `rows` rows: those of the rank with the largest shard, which ends last."""
        size, shard_rows = self.ranks.size, getattr(self.data, "shard_rows", None)
        sizes = shard_rows("train", size) if shard_rows is not None and size > 1 else None
        largest = -(-rows // size) if sizes is None else max(sizes)
        return max(1, -(-largest // (self.options.batch_size * self.options.accumulate)))

    @property
    def total_steps(self) -> int | None:
        rows = self.data.num_rows("train") if "train" in self.data.splits() else None
        by_epochs = None if rows is None else self.steps_per_epoch(rows) * self.last_epoch
        return min((steps for steps in (by_epochs, self.last_step) if steps is not None), default=None)

    def total_samples(self, rows: int | None) -> int | None:
        """Samples of the whole run for epochs of `rows`; None if they are unknown."""
        if rows is None:
            return None if self.last_step is None else self.last_step * self.samples_per_step
        if self.last_step is None:
            return rows * self.last_epoch
        epochs, extra_steps = divmod(self.last_step, self.steps_per_epoch(rows))
        return min(rows * self.last_epoch, rows * epochs + min(rows, extra_steps * self.samples_per_step))

    def settle(self) -> None:
        """Wait until the prefetch is idle: no collectives and no transfers of rows are running."""
        if self.prefetcher is not None:
            was_on_hold = self.ordered_prefetch is not None and self.ordered_prefetch.on_hold
            self.hold()
            self.prefetcher.settle()
            if self.ordered_prefetch is not None:
                self.ordered_prefetch.hold(was_on_hold)

    def hold(self) -> int:
        """Hold the prefetch of `ordered_prefetch`; return the last step that has been prefetched or trained."""
        return self.progress.step if self.ordered_prefetch is None else self.ordered_prefetch.hold(True)

    def has_prefetched_steps(self) -> bool:
        """Hold the prefetch of rows; return whether a rank has prefetched rows of a step that is not trained yet."""
        if self.ordered_prefetch is not None:
            self.hold()
            self.settle()
        return self.ranks.max(self.hold()) > self.progress.step

    @property
    def finished(self) -> bool:
        last = self.last_step
        return self.progress.epoch >= self.last_epoch or (last is not None and self.progress.step >= last)

    def check_finite(self, loss: float | None = None) -> None:
        """Raise ValueError if a loss, by default that of the epoch so far, is not finite. Collective."""
        loss = self.ranks.sum(self.step.loss_sums[1]) if loss is None else loss
        if math.isfinite(loss):
            return
        epoch = self.progress.epoch + 1
        if not math.isfinite(self.ranks.sum(self.step.input_sum)) and (cause := self.nonfinite_input("train")):
            raise ValueError(f"the training loss is {loss} in epoch {epoch}: {cause}")
        raise ValueError(f"the training loss is {loss} in epoch {epoch}; lower the learning rates")

    def nonfinite_input(self, split: Split) -> str:
        """Describe the first non-finite dense feature of a split; "" if all are finite. Collective."""

        def find() -> str:
            size = self.options.batch_size
            with self.data.open(split, size) as stream:
                for number, batch in enumerate(stream):
                    for row, column in (~batch.dense.isfinite()).nonzero().tolist():
                        location = f"dense column {column} of {split} row {number * size + row:,}"
                        return f"{location} is {batch.dense[row, column]}; correct or remove such rows"
            return ""

        return on_rank_zero(self.ranks.control, find)

    def _next_due_step(self) -> int:
        """Next step after which a checkpoint or an evaluation is known to be due."""
        intervals = filter(None, (self.options.checkpoints.checkpoint_steps, self.options.evaluate_every))
        due = [(self.last_due_step // interval + 1) * interval for interval in intervals]
        return min([*due, 2**63 if self.last_step is None else self.last_step])


def empty_batch(data: Data) -> Batch:
    kinds = len(getattr(data, "labels", ())), getattr(data, "has_weights", False)
    layout = BatchLayout(tuple(feature.name for feature in data.features), 0, data.num_dense, 0, False, *kinds)
    return layout.batch(torch.zeros(layout.num_bytes, dtype=torch.uint8))


def caches_of(model: nn.Module) -> list[RowCache]:
    """Caches of a model's cached tables, including this rank's shards."""
    return [tables.cache for tables in table_sets_of(model) if tables.cache is not None]


def table_sets_of(model: nn.Module) -> list[TableSet]:
    sharded = (module for module in model.modules() if isinstance(module, ShardedCollection))
    return [*table_sets(model), *(tables for module in sharded for tables in module.table_sets)]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the model's `state_dict`, as `model.<key>`, sharing memory; tables on disk have `DiskTensor`s."""
    with metadata_only():
        state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"the model's state_dict has {name!r} of type {kind}; checkpoints store tensors only")
    # `te.fuse` leaves the state_dict of a model as it was, without the states of the tables' optimizer.
    for path, module in model.named_modules():
        if isinstance(module, SingleTable):
            names = sorted(module._non_persistent_buffers_set - {"skipped"})
            state |= {f"{path}.{name}".lstrip("."): module.get_buffer(name) for name in names}
    return {f"model.{name}": value.detach() for name, value in state.items()}


def optimizer_state(model: nn.Module, optimizer: DenseOptimizer, offloaded: bool = True) -> OptimizerState:
    """State of the dense optimizer: tensors, offloaded ones if `offloaded`, and scalars by parameter, for JSON."""
    tensors, plain = dict[str, Tensor](), defaultdict[str, dict[str, Any]](dict)
    for parameter, tensor_slice in _parameters_of(model, optimizer):
        name = tensor_slice.name
        states = optimizer.state.get(parameter, {}) if optimizer else {}
        if offloaded and isinstance(optimizer, OffloadedOptimizer):
            states = optimizer.states_of(parameter)
            if (master := states.pop(MASTER, parameter)).dtype != parameter.dtype:  # otherwise the parameter has it
                states[SAVED_MASTER] = master
        for key, value in states.items():
            state_name = f"optimizer.{name}.{key}"
            if isinstance(value, Tensor) and value.ndim and tensor_slice.is_tile:
                tensors.setdefault(state_name, value.new_empty(tensor_slice.shape))[tensor_slice.slices] = value
            elif isinstance(value, Tensor):
                tensors[state_name] = value
            elif isinstance(value, PLAIN):
                plain[name][key] = value
            else:
                raise TypeError(
                    f"{type(optimizer).__name__} has state {key!r} of type {type(value).__name__} for {name}; "
                    "checkpoints store tensors and scalars only"
                )
    return tensors, plain


def optimizer_templates(model: nn.Module, optimizer: DenseOptimizer, stored: TensorMetadata) -> dict[str, Tensor]:
    """Allocate tensors for stored states of this optimizer's parameters: on the CPU, or sharded as the parameter."""
    parameters: dict[str, Any] = {f"optimizer.{entry.name}": p for p, entry in _parameters_of(model, optimizer)}
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
    by_parameter = {id(parameter): tensor_slice for parameter, tensor_slice in _parameters_of(model, optimizer)}
    state_dict = optimizer.state_dict()
    state_dict["state"] = {}  # by index, in the order of the groups
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        tensor_slice = by_parameter[id(parameter)]
        prefix, state = f"optimizer.{tensor_slice.name}.", dict[str, Any](plain.get(tensor_slice.name, {}))
        for name, value in tensors.items():
            if name.startswith(prefix):
                is_part = tensor_slice.is_tile and value.ndim > 0
                value = value[tensor_slice.slices] if is_part else value
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    # Fused optimizers read a parameter and its states in the order of their memory.
                    value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
                state[name.removeprefix(prefix)] = value
        if (master := state.pop(SAVED_MASTER, None)) is not None and isinstance(optimizer, OffloadedOptimizer):
            state[MASTER] = master
        if state:
            state_dict["state"][number] = state
    optimizer.load_state_dict(state_dict)


def nonfinite_parameter(model: nn.Module, optimizer: DenseOptimizer, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a parameter of the optimizer that is not finite in `tensors`; None if all are finite."""
    names = {tensor_slice.name for p, tensor_slice in _parameters_of(model, optimizer) if p.requires_grad}
    values = {name: to_local(tensors[f"model.{name}"]) for name in sorted(names)}
    return next((name for name, v in values.items() if v.numel() and not v.norm(torch.inf).isfinite()), None)


def rng_tensors(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """States of torch's generators of CPU and device, as `rng.<device>`, or with a rank as `rng.<rank>.<device>`."""
    prefix = "rng." if rank is None else f"rng.{rank}."
    tensors = {f"{prefix}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors[f"{prefix}cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def rng_templates(stored: TensorMetadata, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Allocate tensors to load the stored generators of a rank; those of a single process are rank 0's."""
    prefixes = (f"rng.{rank}.", "rng.") if rank == 0 else (f"rng.{rank}.",)
    names = [prefix + kind for prefix in prefixes for kind in ("cpu", device.type)]
    return {name: torch.empty(stored[name].size, dtype=torch.uint8) for name in names if name in stored}


def set_rng(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], seed: int, rank: int, device: Any) -> None:
    """Restore all generators of this rank from a checkpoint; a rank that it does not have is seeded."""
    states = manifest.get("rng_of_ranks", [manifest["rng"]])
    if rank >= len(states):
        seed_rank(seed, rank)
        return
    for name, tensor in tensors.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(tensor)
        else:
            torch.cuda.set_rng_state(tensor, device)
    version, numbers, gauss = states[rank]["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states[rank]["numpy"]))  # noqa: NPY002


def seed_rank(seed: int, rank: int) -> None:
    state = np.random.SeedSequence([seed, rank]).generate_state(3, np.uint32).tolist()
    torch.manual_seed(state[0])
    random.seed(state[1])
    np.random.seed(state[2])  # noqa: NPY002


def rng_plain() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
    }


def write_offloaded(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for parameter, tensor_slice in tensor_slices(model.module if isinstance(model, HybridParallel) else model):
        if is_offloaded(parameter):
            values = to_local(tensors[f"model.{tensor_slice.name}"])
            source_of(parameter).write(values[tensor_slice.slices] if tensor_slice.is_tile else values)


def _parameters_of(model: nn.Module, optimizer: DenseOptimizer) -> list[tuple[Any, TensorSlice]]:
    """Parameters of an optimizer with their names in the model's `state_dict`, which wrappers do not change."""
    ids = {id(parameter) for group in (optimizer.param_groups if optimizer else ()) for parameter in group["params"]}
    candidates: Iterable[tuple[Any, TensorSlice]]
    if isinstance(optimizer, OffloadedOptimizer):
        candidates = tensor_slices(model.module if isinstance(model, HybridParallel) else model)
    else:
        with metadata_only(parameters=True):
            entries = model.state_dict(keep_vars=True)
        candidates = ((p, TensorSlice(name, p.shape, (), torch.Size())) for name, p in entries.items() if id(p) in ids)
    result: dict[int, tuple[Any, TensorSlice]] = {}  # by id: a shared parameter has its first name
    for p, tensor_slice in candidates:
        if id(p) in ids:
            result.setdefault(id(p), (p, tensor_slice))
    return list(result.values())
