"""A run's state to a checkpoint and back: model, optimizers, progress, position in the data, generators.

Checkpoints may be written while training goes on, by `torch.distributed.checkpoint.async_save`.
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
from tritonemb.data.click_log import ClickLog
from tritonemb.data.loader import merge_positions, rank_position
from tritonemb.data.protocol import Data
from tritonemb.server.attach import collections_on_servers
from tritonemb.server.snapshot import read_tables, steps_of_snapshot
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.tables.cached_table import CachedTable, DiskTensor
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.server_table import TableService
from tritonemb.training import train_state
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint import reader
from tritonemb.training.checkpoint.folder import CheckpointFolder, RunFolder
from tritonemb.training.checkpoint.writer import CheckpointWriter, HostStager, Manifest, Tensors
from tritonemb.training.config import CheckpointOptions, plain
from tritonemb.training.doctor import versions
from tritonemb.training.ranks import on_each_rank, on_rank_zero
from tritonemb.utils import join_names, print_error


class AsyncSave:
    """Writes one checkpoint at a time in a thread: training stops only while the tensors are copied to host memory.

    Tables on disk are not copied there: snapshots of them are submitted, for which what training reads and writes of
    them afterwards has to wait, and which take no time where the file system makes reflink copies.

    The thread has a process group of its own. The end of the process waits for it; a process that is killed leaves the
    last checkpoint whole, as `CheckpointFolder` does. All ranks of the group make it, start it and wait for it
    together, in the same order, and get the same answer.
    """

    def __init__(self, folder: CheckpointFolder, group: RankGroup | None = None) -> None:
        self.folder = folder
        self._group = (RankGroup() if group is None else group).duplicate(backend="gloo")
        self._process_group = self._group.process_group
        if self._process_group is None and dist.is_available() and dist.is_initialized():
            # torch does not use it, and wants one that serves the CPU.
            self._process_group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        self._stager = HostStager(self._group)
        self._running: tuple[CheckpointWriter, Future[Metadata]] | None = None
        atexit.register(_finish, weakref.ref(self))

    def start(
        self, step: int, tensors: Tensors, manifest: Manifest, best: bool = False,
        services: Mapping[str, TableService] | None = None,
    ) -> CheckpointSaved | None:  # fmt: skip
        """Begin to write a checkpoint, see `CheckpointFolder.save`; wait for the one before, return it if nobody has.

        Raises:
            CheckpointError, ValueError: the one before could not be written, or there is no memory for this one on some
                rank, or its folder cannot be made; nothing is left of this one then. Where the ranks could not be
                reached, the error is that of the exchange.
            StorageError: what was trained could not be written to a table on disk.
        """
        previous = self.wait()
        writer = self.folder.begin(step, tensors, manifest, self._group, best, services)
        writer.per_thread_copy_ahead = 0  # the copies are in host memory
        with self.folder.reporting(writer):
            future = async_save(
                dict(writer.tensors), storage_writer=writer, process_group=self._process_group,
                async_stager=self._stager, no_dist=self._group.size == 1,
            )  # fmt: skip
        assert isinstance(future, Future)  # not of an asynchronous stager
        self._running = writer, future
        return previous

    def wait(self) -> CheckpointSaved | None:
        """Wait for what is being written, and return it. Raises as `start`, once."""
        if self._running is None:
            return None
        writer, future = self._running
        try:
            with self.folder.reporting(writer):
                return writer.result(future.result())
        finally:
            if future.done():
                self._running = None


def _finish(save: weakref.ref[AsyncSave]) -> None:
    """The process ends: what is being written is written first, and a failure that nobody has asked for is printed."""
    if (async_save := save()) is not None:
        print_error(async_save.wait)


def load_model(
    path: str | Path, model: nn.Module, extra_tensors: Mapping[str, Tensor],
    stored: Mapping[str, TensorStorageMetadata], ignore: tuple[str, ...], group: RankGroup | None = None,
    servers: bool = True,
) -> None:  # fmt: skip
    """Load the tensors that are `stored` in a checkpoint into a model and into `others`; see `load_tensors`. Without
    `servers` tables on these stay as they are."""
    tensors, dynamic = train_state.model_tensors(model), dict[DynamicTable, dict[str, Tensor]]()
    server_collections = collections_on_servers(model) if servers else {}
    saved_chains = on_each_rank(group, lambda: reader.saved_on_servers(Path(path))) if servers else {}
    services = services_of(model) if servers else {}
    assert services.keys() == server_collections.keys(), "attach the servers first"
    servers_to_tables, tables_to_servers = dict[str, Tensor](), dict[tuple[str, str], dict[str, Tensor]]()
    for name, chains in saved_chains.items():
        if name not in server_collections:
            for of_servers, saved in on_each_rank(group, partial(read_tables, chains)).items():
                servers_to_tables |= {f"{_prefix(name)}{of_servers}.{field}": value for field, value in saved.items()}
    tensors = {name: value for name, value in tensors.items() if name.removeprefix("model.") not in servers_to_tables}
    for name, table_name in [
        (n, config.name)
        for n in server_collections
        if n not in saved_chains
        for config in server_collections[n].configs
    ]:
        prefix = f"model.{_prefix(name)}{table_name}."
        fields = {key.removeprefix(prefix): _room_for(stored[key]) for key in stored if key.startswith(prefix)}
        tables_to_servers[name, table_name] = fields
        tensors |= {prefix + field: value for field, value in fields.items()}
    on_disk = on_each_rank(group, lambda: reader.saved_tables(Path(path)))
    for name, table in _dynamic_tables(model):
        prefix = f"model.{name}."
        of_table = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        tensors = {key: value for key, value in tensors.items() if not key.startswith(prefix)}
        if table is None or (ids := stored.get(f"{prefix}ids")) is None:
            continue
        wanted = table.templates(ids.size[0])
        if (entry := on_disk.get(f"{prefix}rows")) is not None:
            if isinstance(table, CachedTable) and table.config.placement == "disk" and reader.same_part(entry, table):
                rows = {key: value for key, value in of_table.items() if key.startswith("rows.")}
            else:
                rows = {f"rows.{field}": _room_for(stored[f"{prefix}rows.{field}"]) for field in entry["fields"]}
            wanted = {key: value for key, value in wanted.items() if key not in entry["fields"]}
            wanted |= {"row": torch.empty_like(wanted["ids"]), **rows}
        dynamic[table] = wanted
        tensors |= {prefix + part: value for part, value in wanted.items()}
    reader.load_tensors(path, tensors | {**extra_tensors}, ignore, group)
    train_state.write_offloaded(model, tensors)
    for table, saved in dynamic.items():
        table.load_state(_by_id(saved, path))
    if servers_to_tables:
        model.load_state_dict(servers_to_tables, strict=False)
    steps = {
        name: steps_of_snapshot(chains[0][-1]) for name, chains in saved_chains.items() if name in server_collections
    }

    def load_servers() -> None:
        for name in steps:
            services[name].restore(saved_chains[name], steps[name])
        for (name, table_name), fields in tables_to_servers.items():
            services[name].load(table_name, fields)

    on_rank_zero(group, load_servers)
    for name, service in services.items():  # the ranks go on from the same step
        if name in steps:
            service.restore([], steps[name])
        else:
            service.discard_leases()
    for cached in model.modules():
        if isinstance(cached, CachedTable) and cached.config.placement == "host":
            cached.reload_cached_rows()


def _prefix(collection: str) -> str:
    """Of a collection's names in the model's `state_dict`."""
    return "" if collection == "tables" else f"{collection}."


def data_changes(path: Path, manifest: Mapping[str, Any], data: Data, options: CheckpointOptions) -> str:
    """What is not as it was in the data of a checkpoint's run, as far as both say; ValueError if that is to stop it."""
    if not (recorded := manifest.get("data")) and isinstance(data, ClickLog):
        data.number_by_line()
    current = getattr(data, "contents", None)
    if not recorded or not current or list(current.items()) == list(recorded.items()):
        return ""
    pairs = {name: (recorded.get(name, "absent"), current.get(name, "absent")) for name in {**recorded, **current}}
    changes = [
        f"{name} was {recorded_value}, is {current_value}"
        for name, (recorded_value, current_value) in pairs.items()
        if recorded_value != current_value
    ]
    text = f"the data have changed since {path}: {join_names(changes or ['another order of the files'], most=5)}"
    if options.on_changed_data == "stop":
        raise ValueError(f"{text}. Bring them back, or begin the epoch again (--on-changed-data continue)")
    return text


def services_of(model: nn.Module) -> dict[str, TableService]:
    """Of a model's collections on embedding servers, by path."""
    return {
        path: collection.service
        for path, collection in collections_on_servers(model).items()
        if collection.service is not None
    }


def _room_for(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _by_id(saved: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """What a checkpoint has of a dynamic table; if that was on disk, the memory's rows become those of the ids."""
    fields = {name.removeprefix("rows."): value for name, value in saved.items() if name.startswith("rows.")}
    non_row_fields = {name: value for name, value in saved.items() if not name.startswith("rows.")}
    if not fields or any(isinstance(value, DiskTensor | TableShards) for value in fields.values()):
        return non_row_fields  # or it is in the table's store
    rows = non_row_fields.pop("row")
    if not torch.equal(fields.pop("id")[rows], non_row_fields["ids"]):
        raise ValueError(f"{path} is damaged: rows of a dynamic table are not those of its ids; use another checkpoint")
    return non_row_fields | {name: value[rows] for name, value in fields.items()}


def _dynamic_tables(model: nn.Module) -> Iterator[tuple[str, DynamicTable | None]]:
    """By the names that they have in `state_dict`; of sharded ones, this rank's parts, if it has one."""
    for path, module in (model.module if isinstance(model, HybridParallel) else model).named_modules():
        if isinstance(module, DynamicTable):
            yield path, module
        elif isinstance(module, ShardedCollection) and module.service is None:
            local_tables = {spec.table: table for spec, table in module.dynamic_tables()}
            for number, config in enumerate(module.configs):
                if config.is_dynamic:
                    yield f"{path}.{config.name}".lstrip("."), local_tables.get(number)


class CheckpointManager:
    """Checkpoints of a run in its folder, None to read only; all ranks call each method together."""

    def __init__(self, state: train_state.TrainState, folder: RunFolder | None, asynchronous: bool) -> None:
        self._state, self._folder = state, folder
        self._control = state.ranks.control
        self._async = AsyncSave(folder.checkpoints, self._control) if folder is not None and asynchronous else None

    def save(self, best: bool = False) -> CheckpointSaved:
        """Write a checkpoint of this moment, and mark it if it is the best."""
        assert self._folder is not None
        self.finish()
        step, save = self._state.progress.step, self._folder.checkpoints.save
        return save(step, self._finite_tensors(), self.manifest(), self._control, best, services_of(self._state.model))

    def start(self, best: bool) -> CheckpointSaved | None:
        """Write a checkpoint of this moment, in a thread if asynchronous; what has been written since the last call.

        CheckpointError if this one could not be written, or the one that was being written.
        """
        if self._async is None:
            return self.save(best)
        services, step = services_of(self._state.model), self._state.progress.step
        return self._async.start(step, self._finite_tensors(), self.manifest(), best, services)

    def finish(self) -> CheckpointSaved | None:
        """Wait for what is being written; CheckpointError if it could not be."""
        return None if self._async is None else self._async.wait()

    def _finite_tensors(self) -> dict[str, Tensor]:
        """All tensors; ValueError, and nothing is written, if training has diverged. Collective."""
        state = self._state
        state.refuse_nonfinite()
        tensors = self.tensors()
        name = train_state.nonfinite_parameter(state.model, state.step.dense_optimizer, tensors)
        if name := next(filter(None, self._control.all_gather_object(name)), ""):
            step = state.progress.step
            raise ValueError(f"parameter {name!r} is not finite after step {step}; lower the learning rates")
        return tensors

    def tensors(self) -> dict[str, Tensor]:
        """All that is saved as tensors. Collective."""
        state, ranks = self._state, self._state.ranks
        if train_state.caches_of(state.model):
            state.settle()  # prefetched rows are written back, or not, whenever this is done
        for service in services_of(state.model).values():
            service.return_leases()
        return {
            **train_state.model_tensors(state.model),
            **train_state.optimizer_state(state.model, state.step.dense_optimizer)[0],
            **train_state.rng_tensors(state.device, ranks.rank if ranks.size > 1 else None),
            "trainer.loss_sums": state.step.all_loss_sums(),
        }

    def manifest(self) -> dict[str, Any]:
        """All else, for JSON. Collective."""
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
        state, step = self._state, self._state.step
        self.finish()
        newest = None if self._folder is None else self._folder.checkpoints.latest(self._control)
        if checkpoint == "auto":
            if self._folder is None:
                raise ValueError('resume("auto") looks into the trainer\'s folder: give it one')
            if newest is None:
                return None
            checkpoint = newest
        path = Path(checkpoint)
        manifest = reader.read_manifest(path, self._control)
        run, data = manifest["run"], state.data
        if isinstance(data, ClickLog):
            data = data.read_as(run.get("kinds", {}), run.get("encoding", ""))
        current_run = self._run(data)
        run["kinds"] = current_run["kinds"] | run.get("kinds", {})  # older checkpoints have none
        different = [
            f"{name} was {run.get(name)!r}, is {current_run[name]!r}"
            for name in current_run
            if run.get(name) != current_run[name]
        ]
        if different:
            raise ValueError(f"checkpoint {path} is of another run: {'; '.join(different)}")
        changes = on_each_rank(self._control, lambda: data_changes(path, manifest, data, state.options.checkpoints))
        try:
            progress = train_state.Progress(**manifest["progress"])
            options = {name: manifest[name] for name in (*step.to_json(), "optimizer", "rng")}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / 'trainer.json'} is damaged ({error!r}); use another checkpoint") from error
        if self._folder is not None and newest is not None and path.resolve().parent != newest.resolve().parent:
            raise ValueError(f"{self._folder.path} holds another run than {path}; choose another folder")
        stored = reader.stored_tensors(path, self._control)
        random = train_state.rng_templates(stored, state.ranks.rank, state.device)
        tensors = train_state.optimizer_templates(state.model, state.step.dense_optimizer, stored) | random
        entry = stored.get("trainer.loss_sums")
        sums = torch.zeros(2 if entry is None else entry.size, dtype=torch.float64)
        extra_tensors = tensors | {"trainer.loss_sums": sums}
        load_model(path, state.model, extra_tensors, stored, ("rng.",), self._control)
        if state.step.dense_optimizer is not None:
            train_state.load_optimizer_state(state.model, state.step.dense_optimizer, tensors, options["optimizer"])
        if changes:
            progress, sums = replace(progress, position=None, epoch_samples=0), sums * torch.tensor([1.0, 0.0])
            if state.ranks.is_first:
                warnings.warn(
                    f"{changes}. The epoch begins again; rows held out now may have been trained", stacklevel=3
                )
        step.load_loss_sums(sums)
        step.load_json(options)
        train_state.set_rng(random, manifest, state.options.seed, state.ranks.rank, state.device)
        position = progress.position
        local_position = None if position is None else rank_position(position, state.ranks.rank, state.ranks.size)
        state.progress = replace(progress, position=local_position)
        state.use(data)
        return path

    def mark_best_again(self) -> None:
        """For rank 0: mark the best checkpoint, where a process was killed before it marked what it had written."""
        assert self._folder is not None
        progress, checkpoints = self._state.progress, self._folder.checkpoints
        best, step = checkpoints.best(), progress.best_step
        marked = best is not None and best.name == f"best-{step}"
        if progress.best is not None and not marked and checkpoints.path(step).is_dir():
            checkpoints.mark_best(step)

    def _reading(self) -> dict[str, Any]:
        """Features of a model's rows, and options by which a log is read; for `tritonemb.load_run`."""
        state, data = self._state, self._state.data
        reading = {"features": data.features, "num_dense": data.num_dense, "precision": state.options.precision}
        if isinstance(data, ClickLog):
            from_text = data.text_schema() is not None or bool(state.config.get("converted"))
            reading |= {"read": replace(data.options, schema=data.schema), "from_text": from_text}
        return dict(plain(reading))

    def _run(self, data: Data) -> dict[str, Any]:
        state = self._state
        return {
            "data": data.name,
            "encoding": data.encoding,
            "kinds": {feature.name: feature.kind for feature in data.features if feature.kind},
            "batch_size": state.options.batch_size,
            "accumulate": state.options.accumulate,
            "seed": state.options.seed,
            "dense_optimizer": state.step.optimizer_name,
            "table_optimizers": [c.optimizer.name for c in state.step.collections if c.optimizer],
        }
