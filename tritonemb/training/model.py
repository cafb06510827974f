"""Models of `tritonemb train`, built from its options, and the parts of a model that an optimizer updates."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from inspect import signature
from pkgutil import resolve_name

from torch import nn

from tritonemb.data.protocol import Feature, tables_of
from tritonemb.models import MODELS, ModelOptions
from tritonemb.nn.collections import FusedModule
from tritonemb.nn.single_table import SingleTable
from tritonemb.optimizers import OPTIMIZERS, Optimizer
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.tables.optimizer import FusedGroup
from tritonemb.training.config import TrainConfig

Factory = Callable[..., nn.Module]


def build_model(
    config: TrainConfig,
    features: Sequence[Feature],
    num_dense: int,
    factory: Factory | None = None,
    num_labels: int = 0,
) -> nn.Module:
    """Build the model of a configuration by its class, or by `factory`, the function that it names as MODULE:FUNCTION.

    It gets the options that its signature names, `num_labels` among them: 0 for one label is passed as 1. Raise
    ValueError for an option that was set, or several labels, that it does not name.
    """
    create = factory or MODELS[config.model]
    names, options, defaults = signature(create).parameters, asdict(config.model_options), asdict(ModelOptions())
    for name, value in options.items():
        if value != defaults[name] and name not in names:
            raise ValueError(f"{create.__name__} has no option {name}; remove it, or choose another model")
    if num_labels and "num_labels" not in names:
        able = ", ".join(name for name, model in MODELS.items() if "num_labels" in signature(model).parameters)
        text = f"predicts one label, the data have {num_labels}; choose another model: {able}"
        raise ValueError(f"{create.__name__} {text}")
    options |= {"num_labels": num_labels or 1, "bottom_mlp": config.bottom_mlp, "top_mlp": config.top_mlp}
    tables = config.tables.place(tables_of(tuple(features), config.embedding_dim))
    tables = config.server.place(tables, config.accumulate)
    options = {name: value for name, value in options.items() if name in names}
    return create(tables, num_dense, optimizer=build_optimizer(config), device=config.device, **options)


def import_factory(name: str) -> Factory:
    """Import MODULE:FUNCTION, that builds a model; raise ValueError if it cannot be imported."""
    try:
        factory: Factory = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model must be MODULE:FUNCTION that builds a model, got {name!r} ({error})") from error
    return factory


def build_optimizer(config: TrainConfig) -> Optimizer:
    return OPTIMIZERS[config.embedding_optimizer](
        lr=config.embedding_lr,
        weight_decay=config.embedding_weight_decay,
        cow_clip=config.cow_clip,
        cow_clip_floor=config.cow_clip_floor,
    )


def fused_modules(model: nn.Module) -> list[FusedModule | ShardedCollection]:
    """Return the modules of tables with a fused optimizer."""
    modules = (module for module in model.modules() if isinstance(module, FusedModule | ShardedCollection))
    return [module for module in modules if module.fused_optimizer is not None]


def unfused_tables(model: nn.Module) -> list[str]:
    """Return the paths of modules of tables that another optimizer trains."""
    modules = ((path, m) for path, m in model.named_modules() if isinstance(m, FusedModule) and m.optimizer is None)
    return [path for path, module in modules if any(p.requires_grad for p in module.parameters())]


def optimizers_of_tables(model: nn.Module) -> list[FusedModule | ShardedCollection]:
    """Return one module per fused optimizer, since `te.fuse` gives one to all modules of a model.

    ValueError for tables that only `step` of an optimizer of `te.optim.fused` updates.
    """
    modules = fused_modules(model)
    groups = [module._optimized if isinstance(module, SingleTable) else module for module in modules]
    if any(isinstance(group, FusedGroup) and group.by_step for group in groups):
        raise ValueError(
            'the tables are fused with update="step", but a trainer does not call step() of that optimizer; fuse them '
            'with update="backward", or by te.fuse'
        )
    return list(dict(zip(map(id, reversed(groups)), reversed(modules), strict=True)).values())[::-1]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    owned = {id(parameter) for module in fused_modules(model) for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in owned and parameter.requires_grad]
