"""Optional packages: imported when first used, with an error that says how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A package of one of tritonemb's extras is not installed."""


def require(module: str, extra: str = "train") -> ModuleType:
    """Import `module`, a part of tritonemb's optional dependencies.

    Raises:
        MissingExtraError: naming the package and the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, something that it needs is not
        raise MissingExtraError(
            f"{package} is needed here and not installed: pip install 'tritonemb[{extra}]'", name=package
        ) from error
