"""Linear layer as a grid of tiles, to bound the device memory of its weight (ZeRO-Infinity, section 5.1.3)."""

from collections.abc import Iterator
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.utils import split_evenly


class TileLayer(nn.Linear):
    """Tile of a linear layer, initialized like a layer with `fan_in` inputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool, fan_in: int, **options: Any) -> None:
        self.fan_in = fan_in
        super().__init__(in_features, out_features, bias, **options)

    def reset_parameters(self) -> None:
        """Initialize like `nn.Linear`: uniform within 1 / sqrt(fan_in)."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.fan_in**-0.5), self.fan_in**-0.5)


class TiledLinear(nn.Module):
    """`torch.nn.Linear` as a grid of tiles, each a module with its own parameters; equal up to rounding.

    With offloaded parameters (`te.offload`) only one tile at a time is in device memory. The `state_dict` is that of
    `torch.nn.Linear`, with the full "weight" `[out_features, in_features]` and "bias".

    Args:
        in_splits, out_splits: number of tiles along the inputs and the outputs; sizes differ by at most one.

    ValueError for more tiles than features, or fewer than one.

    Shape: `[..., in_features]` to `[..., out_features]`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, in_splits: int = 1, out_splits: int = 1,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, splits, size in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= size:
                raise ValueError(f"{name}_splits must be between 1 and {name}_features = {size}, got {splits}")
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self._columns, rows = split_evenly(in_features, in_splits), split_evenly(out_features, out_splits)
        self.tiles: Any = nn.ModuleList(
            nn.ModuleList(
                TileLayer(num_columns, num_rows, bias and column == 0, in_features, device=device, dtype=dtype)
                for column, num_columns in enumerate(self._columns)
            )
            for num_rows in rows
        )
        self.register_state_dict_post_hook(_merge)
        self.register_load_state_dict_pre_hook(_split)

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.split(self._columns, -1)
        outputs = [reduce(add, (layer(chunk) for layer, chunk in zip(row, chunks, strict=True))) for row in self.tiles]
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    def grid(self) -> Iterator[tuple[TileLayer, int, int]]:
        """Tiles in row-major order, each with its first row and column in the full weight."""
        first_row = 0
        for row in self.tiles:
            for layer, first_column in zip(row, accumulate([0, *self._columns]), strict=False):
                yield layer, first_row, first_column
            first_row += row[0].out_features

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> "TiledLinear":
        """Create tiles with the values, dtype and device of a linear layer."""
        state = {"weight": linear.weight} if linear.bias is None else {"weight": linear.weight, "bias": linear.bias}
        tiled = cls(
            linear.in_features, linear.out_features, "bias" in state, in_splits=in_splits, out_splits=out_splits,
            device=linear.weight.device, dtype=linear.weight.dtype,
        )  # fmt: skip
        tiled.load_state_dict(state)
        for path, parameter in tiled.tiles.named_parameters():
            parameter.requires_grad_(state[path.rpartition(".")[2]].requires_grad)
        return tiled.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Create a `torch.nn.Linear` with these values and mode; raise ValueError if only some tiles are frozen."""
        state = self.state_dict()
        weight = state["weight"]
        linear = nn.Linear(self.in_features, self.out_features, "bias" in state, weight.device, weight.dtype)
        linear.load_state_dict(state)
        for name, parameter in linear.named_parameters():
            requires_grad = {tile.requires_grad for path, tile in self.tiles.named_parameters() if path.endswith(name)}
            if len(requires_grad) > 1:
                raise ValueError(f"only some tiles have a frozen {name}; freeze or train all tiles")
            parameter.requires_grad_(requires_grad.pop())
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, in_splits={self.in_splits}, out_splits={self.out_splits}"


def _merge(module: TiledLinear, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the weights and biases of tiles in a `state_dict` by the full ones."""
    tiles = {key: state.pop(key) for key in [*state] if key.startswith(f"{prefix}tiles.")}
    rows = [
        [tiles[f"{prefix}tiles.{row}.{column}.weight"] for column in range(module.in_splits)]
        for row in range(module.out_splits)
    ]
    state[f"{prefix}weight"] = torch.cat([torch.cat(row, 1) for row in rows])
    biases = [tiles.get(f"{prefix}tiles.{row}.0.bias") for row in range(module.out_splits)]
    if biases[0] is not None:
        state[f"{prefix}bias"] = torch.cat(biases)  # type: ignore[arg-type]


def _split(module: TiledLinear, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Replace the full weight and bias in a `state_dict` by those of the tiles."""
    weight, bias = (state.pop(f"{prefix}{name}", None) for name in ("weight", "bias"))
    shape = torch.Size((module.out_features, module.in_features))
    for name, values, expected in (("weight", weight, shape), ("bias", bias, shape[:1])):
        if values is not None and values.shape != expected:
            errors: list[str] = args[-1]
            errors.append(f"size mismatch for {prefix}{name}: expected {list(expected)}, got {list(values.shape)}")
            return
    for number, (layer, row, column) in enumerate(module.grid()):
        name = f"{prefix}tiles.{number // module.in_splits}.{number % module.in_splits}"
        if weight is not None:
            state[f"{name}.weight"] = weight[row : row + layer.out_features, column : column + layer.in_features]
        if bias is not None and column == 0:
            state[f"{name}.bias"] = bias[row : row + layer.out_features]
