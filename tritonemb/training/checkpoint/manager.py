"""Checkpoints of runs: model, optimizers, progress, position in the data, random generators.

Asynchronous checkpoints are written during training by `torch.distributed.checkpoint.async_save`.
"""

import atexit
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import async_save

from tritonemb.comm.group import RankGroup
from tritonemb.data import ClickLog, Data, merge_positions, rank_position
from tritonemb.nn.embeddings import DynamicModule
from tritonemb.server.attach import collections_on_servers
from tritonemb.server.snapshot import read_tables, steps_of_snapshot
from tritonemb.sharding import HybridParallel, TableShards
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.storage.checkpoint import read_manifest_text
from tritonemb.tables.cached_rows import DiskTensor
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.server_table import TableService
from tritonemb.training import train_state
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint import reader
from tritonemb.training.checkpoint.folder import CheckpointFolder, RunFolder
from tritonemb.training.checkpoint.writer import CheckpointWriter, HostStager, Manifest, Tensors
from tritonemb.training.config import CheckpointOptions
from tritonemb.training.doctor import versions
from tritonemb.training.ranks import CheckpointError, on_each_rank, on_rank_zero
from tritonemb.training.toml import plain
from tritonemb.utils import join_names, print_error


class AsyncSave:
    """Writer of checkpoints in a thread, one at a time. Training stops only while tensors are copied to host memory.

    For tables on disk, snapshots are submitted instead. Later reads and writes of these tables wait for the snapshots,
    which are instantaneous on file systems with reflink copies.

    The thread has its own process group. The exit of the process waits for it; after a kill the latest complete
    checkpoint remains, as with `CheckpointFolder`. Construction and methods are collective, in the same order on all
    ranks of the group, with equal results.
    """

    def __init__(self, folder: CheckpointFolder, group: RankGroup | None = None) -> None:
        self.folder = folder
        self._group = (RankGroup() if group is None else group).duplicate(backend="gloo")
        self._process_group = self._group.process_group
        if self._process_group is None and dist.is_available() and dist.is_initialized():
            # torch requires a group with a CPU backend, although it does not use it for one process.
            self._process_group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        self._stager = HostStager(self._group)
        self._running: tuple[CheckpointWriter, Future[Metadata]] | None = None
        atexit.register(_finish, weakref.ref(self))

    def start(
        self, step: int, tensors: Tensors, manifest: Manifest, best: bool = False,
        services: Mapping[str, TableService] | None = None,
    ) -> CheckpointSaved | None:  # fmt: skip
        """Start to write a checkpoint, see `CheckpointFolder.save`; first wait for the previous one and return it.

        Raise its errors, also if the previous checkpoint could not be written, or a rank lacks memory for the copy;
        this one is removed then. If ranks cannot be reached, raise the exception of the collective."""
        previous = self.wait()
        writer = self.folder.begin(step, tensors, manifest, self._group, best, services)
        writer.per_thread_copy_ahead = 0  # the staged copies are in host memory
        with self.folder.convert_errors(writer):
            future = async_save(
                dict(writer.tensors), storage_writer=writer, process_group=self._process_group,
                async_stager=self._stager, no_dist=self._group.size == 1,
            )  # fmt: skip
        assert isinstance(future, Future)  # an asynchronous stager would return another type
        self._running = writer, future
        return previous

    def wait(self) -> CheckpointSaved | None:
        """Wait for the checkpoint that is being written, and return it. An error is raised once, as by `start`."""
        if self._running is None:
            return None
        writer, future = self._running
        try:
            with self.folder.convert_errors(writer):
                return writer.result(future.result())
        finally:
            if future.done():
                self._running = None


def _finish(save: weakref.ref[AsyncSave]) -> None:
    """Complete a checkpoint at the exit of the process, and print a failure that `wait` has not raised."""
    if (async_save := save()) is not None:
        print_error(async_save.wait)


def load_model(
    path: str | Path, model: nn.Module, extra_tensors: Mapping[str, Tensor],
    stored: Mapping[str, TensorStorageMetadata], ignore: tuple[str, ...], group: RankGroup | None = None,
    servers: bool = True,
) -> None:  # fmt: skip
    """Load the `stored` tensors into a model and `extra_tensors`; without `servers`, tables on these stay unchanged."""
    path, tensors = Path(path), train_state.model_tensors(model)
    collections, services, snapshots = {}, {}, dict[str, list[list[Path]]]()
    if servers:
        collections, services = collections_on_servers(model), services_of(model)
        snapshots = on_each_rank(group, lambda: reader.saved_on_servers(path))
    assert services.keys() == collections.keys(), "attach the servers first"

    # Tables that are now in this process, and were on servers: read the servers' files.
    local_tables = dict[str, Tensor]()
    for name, chains in snapshots.items():
        if name not in collections:
            for table_name, fields in on_each_rank(group, partial(read_tables, chains)).items():
                prefix = f"{_prefix(name)}{table_name}"
                local_tables |= {f"{prefix}.{field}": value for field, value in fields.items()}
    tensors = {name: value for name, value in tensors.items() if name.removeprefix("model.") not in local_tables}

    # Tables that are now on servers, and were not: read their tensors, to send them to the servers.
    server_tables = dict[tuple[str, str], dict[str, Tensor]]()
    moved = [(n, config.name) for n, c in collections.items() if n not in snapshots for config in c.configs]
    for name, table_name in moved:
        prefix = f"model.{_prefix(name)}{table_name}."
        fields = {key.removeprefix(prefix): _allocate(stored[key]) for key in stored if key.startswith(prefix)}
        server_tables[name, table_name] = fields
        tensors |= {prefix + field: value for field, value in fields.items()}

    # Dynamic tables: read as many ids and rows as the checkpoint has; the tables adopt them below.
    dynamic = dict[DynamicTable, dict[str, Tensor]]()
    disk_tables = on_each_rank(group, lambda: reader.saved_tables(path))
    for name, table in dynamic_tables(model):
        prefix = f"model.{name}.".replace("..", ".")
        current = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        tensors = {key: value for key, value in tensors.items() if not key.startswith(prefix)}
        if table is None or (ids := stored.get(f"{prefix}ids")) is None:
            continue
        templates = table.templates(ids.size[0], stored, prefix)
        if "sketch" in templates and (sketch := stored.get(f"{prefix}sketch")) is not None:
            templates["sketch"] = _allocate(sketch)  # its size follows from the capacity
        if (entry := disk_tables.get(f"{prefix}rows")) is not None:  # rows are in files
            if table.config.placement == "disk" and reader.find_shard(entry, table.rows):
                rows = {key: value for key, value in current.items() if key.startswith("rows.")}
            else:
                rows = {f"rows.{field}": _allocate(stored[f"{prefix}rows.{field}"]) for field in entry["fields"]}
            templates = {key: value for key, value in templates.items() if key not in entry["fields"]}
            templates |= {"row": torch.empty_like(templates["ids"]), **rows}
        dynamic[table] = templates
        tensors |= {prefix + field: value for field, value in templates.items()}
        tensors |= {f"{prefix}updates": current["updates"]} if "updates" in current else {}

    # Read all tensors, and install what the tables do not share memory with.
    reader.load_tensors(path, tensors | {**extra_tensors}, ignore, group)
    train_state.write_offloaded(model, tensors)
    for table, fields in dynamic.items():
        table.load_state(rows_by_id(fields, path))
    for name, module in (model.module if isinstance(model, HybridParallel) else model).named_modules():
        updates = tensors.get(f"model.{name}.updates".replace("..", ".")) if isinstance(module, DynamicModule) else None
        if updates is not None:
            module.optimizer_states()["step"].copy_(updates)
    if local_tables:
        model.load_state_dict(local_tables, strict=False)

    # Servers restore their snapshots, or get the tables of other tiers; all ranks continue from the same step.
    steps = {name: steps_of_snapshot(chains[0][-1]) for name, chains in snapshots.items() if name in collections}

    def load_servers() -> None:
        for name in steps:
            services[name].restore(snapshots[name], steps[name])
        for (name, table_name), fields in server_tables.items():
            services[name].load(table_name, fields)

    on_rank_zero(group, load_servers)
    for name, service in services.items():
        if name in steps:
            service.restore([], steps[name])
        else:
            service.discard_leases()
    for tables in train_state.table_sets_of(model):
        for loaded in tables.tables:
            loaded.rows.reload()


def _prefix(collection: str) -> str:
    return "" if collection == "tables" else f"{collection}."  # of its keys in the model's `state_dict`


def data_changes(path: Path, manifest: Mapping[str, Any], data: Data, options: CheckpointOptions | None = None) -> str:
    """Describe how the data differ from those of a checkpoint; "" if they do not, or if that is unknown. ValueError
    for a difference if `options.on_changed_data` is "stop"."""
    if not (recorded := manifest.get("data")) and isinstance(data, ClickLog):
        data.number_by_line()
    if not recorded or not (current := getattr(data, "contents", None)):
        return ""
    if isinstance(data, ClickLog) and (read := manifest.get("reading", {}).get("read")):
        recorded = recorded | _columns_by_role(read)
        current = current | _columns_by_role(plain(replace(data.options, schema=data.schema)))
    if list(current.items()) == list(recorded.items()):
        return ""
    pairs = {name: (recorded.get(name, "absent"), current.get(name, "absent")) for name in {**recorded, **current}}
    changes = [f"{name} was {old}, is {new}" for name, (old, new) in pairs.items() if old != new]
    text = f"the data have changed since {path}: {join_names(changes or ['another order of the files'], limit=5)}"
    if options is not None and options.on_changed_data == "stop":
        raise ValueError(f"{text}. Restore them, or restart the epoch with --on-changed-data continue")
    return text


def _columns_by_role(read: Mapping[str, Any]) -> dict[str, str]:
    """Names of the label, weight and time columns, by role, from a log's options as plain values."""
    schema, rule = read["schema"], read.get("split", {})
    label = ", ".join(schema.get("labels") or [schema.get("label", "")])
    columns = {"label": label, "weight": schema.get("weight"), "time": rule.get("time_column")}
    return {f"{role} column": name for role, name in columns.items() if name}


def services_of(model: nn.Module) -> dict[str, TableService]:
    return {path: c.service for path, c in collections_on_servers(model).items() if c.service is not None}


def _allocate(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def rows_by_id(tensors: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Order the rows of a saved dynamic table as its ids, if they were saved on disk and read into memory."""
    fields = {name.removeprefix("rows."): value for name, value in tensors.items() if name.startswith("rows.")}
    result = {name: value for name, value in tensors.items() if not name.startswith("rows.")}
    if not fields or any(isinstance(value, DiskTensor | TableShards) for value in fields.values()):
        return result  # saved in memory; or the table's store on disk has adopted the rows
    rows = result.pop("row")
    if not torch.equal(fields.pop("id")[rows], result["ids"]):
        raise ValueError(f"{path} is damaged: rows of a dynamic table do not match its ids; use another checkpoint")
    return result | {name: value[rows] for name, value in fields.items()}


def dynamic_tables(model: nn.Module) -> Iterator[tuple[str, DynamicTable | None]]:
    """Dynamic tables by their names in `state_dict`; for a sharded table this rank's shard, if any."""
    for path, module in (model.module if isinstance(model, HybridParallel) else model).named_modules():
        table = module.table if isinstance(module, DynamicModule) else module
        if isinstance(table, DynamicTable):
            yield path, table
        elif isinstance(module, ShardedCollection) and module.service is None:
            local_tables = {spec.table: table for spec, table in module.local_shards.dynamic_tables()}
            dynamic = [(number, config.name) for number, config in enumerate(module.configs) if config.is_dynamic]
            yield from ((f"{path}.{name}".lstrip("."), local_tables.get(number)) for number, name in dynamic)


class CheckpointManager:
    """Manager that saves and restores a run, or without `folder` only restores. Collective."""

    def __init__(self, state: train_state.TrainState, folder: RunFolder | None, asynchronous: bool) -> None:
        self._state, self._folder = state, folder
        self._control = state.ranks.control
        self._async = AsyncSave(folder.checkpoints, self._control) if folder is not None and asynchronous else None

    def save(self, best: bool = False) -> CheckpointSaved:
        assert self._folder is not None
        self.finish()
        return self._folder.checkpoints.save(**self._contents(), group=self._control, best=best)

    def start(self, best: bool) -> CheckpointSaved | None:
        """Write a checkpoint, or start to; return the latest completed one. Raise CheckpointError if either failed."""
        return self.save(best) if self._async is None else self._async.start(**self._contents(), best=best)

    def finish(self) -> CheckpointSaved | None:
        """Wait for an asynchronous checkpoint, and return it; raise CheckpointError if it could not be written."""
        return None if self._async is None else self._async.wait()

    def restore_best(self) -> None:
        """Compare evaluations with the best checkpoint on the disk, since a better one was not written. Collective."""
        assert self._folder is not None
        progress, best = self._state.progress, on_rank_zero(self._control, self._folder.checkpoints.best)
        saved = {} if best is None else on_each_rank(self._control, lambda: read_manifest_text(best)[1]["progress"])
        is_comparable = saved.get("monitor") == progress.monitor
        progress.best, progress.best_step = (saved["best"], saved["best_step"]) if is_comparable else (None, 0)

    def _contents(self) -> dict[str, Any]:
        step, model, services = self._state.progress.step, self._state.model, services_of(self._state.model)
        if isinstance(model, HybridParallel) and model.groups.replicas.size > 1 and model.steps % model.average_every:
            for collection in model.collections:
                collection.local_shards.average_replicas()  # a checkpoint has one of them
        return {"step": step, "tensors": self._finite_tensors(), "manifest": self.manifest(), "services": services}

    def _finite_tensors(self) -> dict[str, Tensor]:
        """Return `tensors()`; raise ValueError if training has diverged. Collective."""
        state = self._state
        state.check_finite()
        tensors = self.tensors()
        name = train_state.nonfinite_parameter(state.model, state.step.dense_optimizer, tensors)
        if name := next(filter(None, self._control.all_gather_object(name)), ""):
            text = f"parameter {name!r} is not finite after step {state.progress.step}; lower the learning rates"
            raise ValueError(text)
        return tensors

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint: model, dense optimizer, generators, sums of losses. Collective."""
        state, ranks = self._state, self._state.ranks
        if train_state.caches_of(state.model):
            state.settle()  # a running prefetch must not change which rows are written back
        for service in services_of(state.model).values():
            service.return_leases()
        return {
            **train_state.model_tensors(state.model),
            **train_state.optimizer_state(state.model, state.step.dense_optimizer)[0],
            **train_state.rng_tensors(state.device, ranks.rank if ranks.size > 1 else None),
            "trainer.loss_sums": state.step.all_loss_sums(),
        }

    def manifest(self) -> dict[str, Any]:
        """Manifest of a checkpoint, for JSON: all state that is not in `tensors()`. Collective."""
        state = self._state
        generators = self._control.all_gather_object(train_state.rng_plain())
        positions = self._control.all_gather_object(state.progress.position)
        position = None if state.progress.position is None else merge_positions(positions)
        return {
            "versions": versions(state.device),
            "run": self._run(state.data),
            "data": getattr(state.data, "contents", {}),
            "progress": asdict(state.progress) | {"position": position},
            **state.step.to_json(),
            "optimizer": train_state.optimizer_state(state.model, state.step.dense_optimizer, False)[1],
            "rng": generators[0],
            **({"rng_of_ranks": generators} if len(generators) > 1 else {}),
            "config": plain(state.config),
            "reading": self._reading(),
        }

    def restore(self, checkpoint: str | Path) -> Path | None:
        """See `Trainer.resume`. Collective."""
        # Find the checkpoint and read its manifest.
        state, step = self._state, self._state.step
        self.finish()
        newest = None if self._folder is None else self._folder.checkpoints.latest(self._control)
        if checkpoint == "auto" and self._folder is None:
            raise ValueError('resume("auto") needs a folder: pass folder= to the trainer, or a path to resume()')
        if checkpoint == "auto" and newest is None:
            return None
        path = newest if checkpoint == "auto" and newest is not None else Path(checkpoint)
        manifest = reader.read_manifest(path, self._control)

        # Check that it is of this run, and that the data have not changed.
        run, data = manifest["run"], state.data
        if isinstance(data, ClickLog):
            data = data.read_as(run.get("kinds", {}), run.get("encoding", ""))
        current_run = self._run(data)
        run["kinds"] = current_run["kinds"] | run.get("kinds", {})  # older checkpoints have none
        pairs = ((name, run.get(name), value) for name, value in current_run.items())
        if differences := [f"{name} was {old!r}, is {value!r}" for name, old, value in pairs if old != value]:
            raise ValueError(f"checkpoint {path} is of another run: {'; '.join(differences)}")
        changes = on_each_rank(self._control, lambda: data_changes(path, manifest, data, state.options.checkpoints))
        try:
            progress = train_state.Progress(**manifest["progress"])
            options = {name: manifest[name] for name in (*step.to_json(), "optimizer", "rng")}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / 'trainer.json'} is damaged ({error!r}); use another checkpoint") from error
        if self._folder is not None and newest is None:
            newest = on_rank_zero(self._control, self._folder.checkpoints.best)
        if self._folder is not None and newest is not None and path.resolve().parent != newest.resolve().parent:
            raise ValueError(f"{self._folder.path} holds another run than {path}; choose another folder")

        # Load the tensors.
        stored, optimizer = reader.stored_tensors(path, self._control), step.dense_optimizer
        random = train_state.rng_templates(stored, state.ranks.rank, state.device)
        tensors = train_state.optimizer_templates(state.model, optimizer, stored) | random
        entry = stored.get("trainer.loss_sums")
        sums = torch.zeros(2 if entry is None else entry.size, dtype=torch.float64)
        load_model(path, state.model, tensors | {"trainer.loss_sums": sums}, stored, ("rng.",), self._control)
        if optimizer is not None:
            train_state.load_optimizer_state(state.model, optimizer, tensors, options["optimizer"])

        # Set progress, generators and position. Changed data restart the epoch; another metric has no best value yet.
        if changes:
            progress, sums = replace(progress, position=None, epoch_samples=0), sums * torch.tensor([1.0, 0.0])
            if state.ranks.is_first:
                text = f"{changes}. The epoch restarts; rows that are held out now may have been trained on"
                warnings.warn(text, stacklevel=3)
        monitor = state.options.monitor
        if progress.best is not None and progress.monitor not in ("", monitor):
            if state.ranks.is_first:
                text = f"{path} has the best {progress.monitor}; with monitor={monitor!r} the best is chosen anew"
                warnings.warn(text, stacklevel=3)
            progress = replace(progress, best=None, best_step=0, evaluations_since_best=0)
        progress = replace(progress, monitor=monitor)
        step.load_loss_sums(sums)
        step.load_json(options)
        train_state.set_rng(random, manifest, state.options.seed, state.ranks.rank, state.device)
        if progress.position is not None:
            progress.position = rank_position(progress.position, state.ranks.rank, state.ranks.size)
        state.progress = progress
        if isinstance(state.model, HybridParallel):
            state.model.steps = progress.step
        state.use(data)
        return path

    def clean_folder(self) -> None:
        """Remove checkpoints of later steps before training, so that a killed run does not resume from a later one than
        its log; mark the best checkpoint if a process was killed after writing and before marking it.

        Raise CheckpointError if they cannot be removed or marked.
        """
        if self._folder is not None:
            on_rank_zero(self._control, partial(self._clean, self._folder.checkpoints), CheckpointError)

    def _clean(self, checkpoints: CheckpointFolder) -> None:
        progress = self._state.progress
        if checkpoints.later(progress.step):
            if self._state.finished or progress.ended:
                return  # nothing is trained
            checkpoints.remove_later(progress.step)
        best, step = checkpoints.best(), progress.best_step
        marked = best is not None and best.name == f"best-{step}"
        if progress.best is not None and not marked and checkpoints.path(step).is_dir():
            checkpoints.mark_best(step)

    def _reading(self) -> dict[str, Any]:
        """Features of the model, and options of reading a log, for `tritonemb.load_run`."""
        state, data = self._state, self._state.data
        reading = {"features": data.features, "num_dense": data.num_dense, "precision": state.options.precision}
        reading |= {"labels": state.labels} if state.labels else {}
        if isinstance(data, ClickLog):
            from_text = data.text_schema() is not None or bool(state.config.get("converted"))
            reading |= {"read": replace(data.options, schema=data.schema), "from_text": from_text}
        return dict(plain(reading))

    def _run(self, data: Data) -> dict[str, Any]:
        """Properties of a run that must be equal to resume it."""
        step, kinds = self._state.step, {feature.name: feature.kind for feature in data.features if feature.kind}
        table_optimizers = [c.optimizer.name for c in step.fused_modules if c.optimizer]
        options = {name: getattr(self._state.options, name) for name in ("batch_size", "accumulate", "seed")}
        optimizers = {"dense_optimizer": step.optimizer_name, "table_optimizers": table_optimizers}
        return {"data": data.name, "encoding": data.encoding, "kinds": kinds} | options | optimizers
