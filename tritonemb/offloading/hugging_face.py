"""Optimizers for Hugging Face's Trainer, whose model is offloaded."""

from typing import Any

from torch import nn

from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.setup import offload
from tritonemb.utils import require


def trainer_optimizers(model: nn.Module, args: Any, **settings: Any) -> tuple[OffloadedOptimizer, None]:
    """Offload a model for `transformers.Trainer(model, args, optimizers=trainer_optimizers(model, args, ...))`.

    The optimizer is the one that the Trainer creates by its arguments, with their learning rate and weight decay; the
    Trainer creates the schedule. Gradients that are not in `.grad` are clipped in the step, not by the Trainer.

    Args:
        model: changed in place. With `params` on the device it is moved to `args.device`, unless it is on "meta".
        args: the `transformers.TrainingArguments`.
        settings: arguments of `te.offload`; `device` is `args.device` by default.

    Returns:
        The optimizer, and None for the schedule.

    Raises:
        ValueError: as `te.offload`.
    """
    trainer: Any = require("transformers", "frameworks").Trainer
    if settings.get("params", "device") == "device" and not any(p.is_meta for p in model.parameters()):
        model.to(args.device)
    # Parameter groups and options as of `Trainer.create_optimizer`.
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = {*trainer.get_decay_parameter_names(None, model)}  # uses no attribute of a Trainer
    groups = [
        {"params": [p for name, p in named if (name in decayed) == decays], "weight_decay": decays * args.weight_decay}
        for decays in (True, False)
    ]
    kind, options = trainer.get_optimizer_cls_and_kwargs(args, model)
    _, optimizer = offload(model, kind(groups, **options), **{"device": args.device, **settings})

    def clip(stepped: Any, *_: Any) -> None:
        stepped.clip_grad_norm_(args.max_grad_norm)

    if args.max_grad_norm and optimizer.stores_gradients:
        optimizer.register_step_pre_hook(clip)
    return optimizer, None
