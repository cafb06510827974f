"""Pretrained weights in safetensors files: loaded by `te.offload(checkpoint=)` and by `load_safetensors`."""

import json
import subprocess
import sys
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from tests.offloading.models import Transformer, adam, build, steps
from tritonemb.offloading.safetensors import INDEX
from tritonemb.storage.checkpoint import SAFETENSORS_DTYPES as DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(path: Path, tensors: dict[str, Tensor], **header: Any) -> None:
    """Write a safetensors file, byte by byte as the format says."""
    entries, data = dict[str, Any](header), b""
    for name, tensor in tensors.items():
        content = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_shards(folder: Path, state: dict[str, Tensor]) -> None:
    """Write two shards and their index, beside a file that is not of the model."""
    folder.mkdir(exist_ok=True)
    half, weight_map = len(state) // 2, dict[str, str]()
    for number, names in enumerate(([*state][:half], [*state][half:])):
        file = f"model-{number}.safetensors"
        save(folder / file, {name: state[name] for name in names}, __metadata__={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    save(folder / "consolidated.safetensors", {"other": torch.zeros(3)})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def offload_on_meta(make: Any, **options: Any) -> Any:
    return build(lambda: on_meta(make), **options)


def fill(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(7)


def make_transformer(tied: bool) -> Transformer:
    torch.manual_seed(4)
    return Transformer(tied=tied)


def test_files_are_those_of_the_package(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {str(dtype): torch.randn(3, 5).mul(20).to(dtype) for dtype in DTYPES.values() if dtype.itemsize != 1} | {
        "scalar": torch.tensor(2.5),
        "empty": torch.ones(0, 4),
        "bytes": torch.arange(6, dtype=torch.uint8),
    }
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    weights = te.offloading.safetensors.PretrainedWeights(nn.Identity(), tmp_path)
    assert sorted(weights.unexpected) == sorted(tensors)
    for name, tensor in weights._tensors.items():
        assert torch.equal(tensor.read(), tensors[name])
        if tensor.shape and tensor.shape[0] == 3:
            assert torch.equal(tensor.read((slice(1, 3), slice(0, 4))), tensors[name][1:3, :4])
    save(tmp_path / "model.safetensors", tensors)
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("params", ["disk", "host", "device"])
def test_a_model_on_meta_gets_pretrained_weights(tmp_path, params, tied):
    """Modules without `reset_parameters` among them: attention has none."""
    plain = make_transformer(tied)
    state = plain.state_dict()
    if tied:
        del state["output.weight"]
    save_shards(tmp_path / "files", state)
    options = {"params": params, "states": "disk", "budget": 250_000, "checkpoint": tmp_path / "files"}
    model, optimizer = offload_on_meta(lambda: Transformer(tied=tied), folder=tmp_path / "swap", **options)
    assert (model.output.weight is model.embedding.weight) == tied
    for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    written = te.offloading.report(model).moved["disk"][1]
    if params == "disk":
        assert written <= sum(-(-p.nbytes // 4096) * 4096 for p in model.parameters()), "each is written once"
    assert steps(model, optimizer, 2) == steps(plain, adam(plain.parameters()), 2)


def test_values_are_cast_to_the_dtype_of_the_model(tmp_path):
    plain = nn.Linear(5, 3)
    save(tmp_path / "file.safetensors", plain.state_dict())
    options = {"params": "host", "checkpoint": tmp_path / "file.safetensors"}
    model, _ = offload_on_meta(lambda: nn.Linear(5, 3), dtype=torch.bfloat16, **options)
    assert torch.equal(model.state_dict()["weight"], plain.weight.bfloat16())


def changed(state: dict[str, Tensor], **values: Any) -> dict[str, Tensor]:
    return {name: value for name, value in (state | values).items() if value is not None}


MISMATCHES = {
    "missing": ({"output.weight": None}, r"lacks 'output\.weight' \(initialize them by init="),
    "unexpected": ({"head": torch.zeros(1)}, r"has 'head', which the model lacks \(map names by rename="),
    "shape": ({"output.weight": torch.zeros(3, 4)}, r"'output\.weight' has shape \[3, 4\], the model \[50, 32\]"),
    "dtype": ({"output.weight": torch.zeros(50, 32, dtype=torch.int32)}, "has torch.int32, the model torch.float32"),
    "quantized": ({"output.weight": torch.zeros(50, 32).to(torch.float8_e4m3fn)}, "has torch.float8_e4m3fn, the"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_files_that_do_not_fit_change_nothing(tmp_path, mismatch):
    values, message = MISMATCHES[mismatch]
    save(tmp_path / "model.safetensors", changed(make_transformer(False).state_dict(), **values))
    model = on_meta(lambda: Transformer(tied=False))
    optimizer = adam(model.parameters())
    with pytest.raises(ValueError, match=message):
        te.offload(model, optimizer, params="host", checkpoint=tmp_path)
    assert all(p.is_meta for p in model.parameters())
    # The same for a model that is offloaded already.
    model, _ = te.offload(model, optimizer, params="host", init=fill)
    initial = model.state_dict()
    if mismatch == "unexpected":
        assert te.offloading.load_safetensors(model, tmp_path) == ["head"]
    else:
        with pytest.raises(ValueError, match=r"'output\.weight'"):
            te.offloading.load_safetensors(model, tmp_path)
        for name, value in model.state_dict().items():
            assert torch.equal(value, initial[name]), name


def test_tied_parameters_have_the_same_values_in_the_files(tmp_path):
    state = make_transformer(True).state_dict()
    save(tmp_path / "model.safetensors", state)
    model, _ = offload_on_meta(Transformer, params="host", checkpoint=tmp_path)
    assert torch.equal(model.state_dict()["output.weight"], state["embedding.weight"])
    save(tmp_path / "model.safetensors", changed(state, **{"output.weight": state["output.weight"] + 1}))
    with pytest.raises(ValueError, match=r"'output\.weight' differs from 'embedding\.weight', to which the model ties"):
        offload_on_meta(Transformer, params="host", checkpoint=tmp_path)


def test_init_sets_what_the_files_lack(tmp_path):
    """A new head, and buffers; not what they have."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    plain = make()
    state = {name: value for name, value in plain.state_dict().items() if not name.startswith("2.")}
    del state["1.running_var"]
    save(tmp_path / "model.safetensors", state)
    model, _ = offload_on_meta(make, params="host", checkpoint=tmp_path, init=fill)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state.get(name, torch.full_like(value, 7))), name


class Rotary(nn.Module):
    """Buffers that no file has, as those of rotary embeddings in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)


class Pretrained(nn.Module):
    sets_mask = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Rotary(), nn.Linear(4, 4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.frequencies = torch.arange(4.0)
            if self.sets_mask:
                module.mask.fill_(True)


def test_buffers_of_no_file_are_set_by_the_enclosing_model(tmp_path, monkeypatch):
    plain = Pretrained()
    save(tmp_path / "model.safetensors", plain.state_dict())
    offload = partial(offload_on_meta, Pretrained, params="host", checkpoint=tmp_path)
    for (name, value), expected in zip(offload()[0].named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(value, expected), name
    monkeypatch.setattr(Pretrained, "sets_mask", False)
    with pytest.raises(ValueError, match=r"module 'inner\.0' \(Rotary\) .* sets 'frequencies', 'mask', or checkpoint="):
        offload()
    # A model that sets its buffers by no method needs init.
    model = on_meta(lambda: nn.Sequential(Rotary()))
    model.append(nn.Linear(4, 4, device="meta"))
    save(tmp_path / "model.safetensors", {"1.weight": torch.ones(4, 4), "1.bias": torch.ones(4)})
    with pytest.raises(ValueError, match=r"module '0' \(Rotary\) is on the meta device and has no reset_parameters"):
        te.offload(model, adam(model.parameters()), params="host", checkpoint=tmp_path)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def header(**entry: Any) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


DAMAGED = {
    "empty": b"",
    "pickle": b"\x80\x04\x95" + bytes(40),
    "long header": (1 << 40).to_bytes(8, "little") + bytes(40),
    "no json": (4).to_bytes(8, "little") + b"\xff{}!",
    "list": (2).to_bytes(8, "little") + b"[]",
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "truncated": header()[:-1],
    "outside": header(data_offsets=[8, 16]),
    "in the header": header(data_offsets=[-8, 0]),
    "other size": header(shape=[3]),
    "negative": header(shape=[-1, -2]),
    "fractions": header(data_offsets=[0.0, 8.0]),
    "dtype": header(dtype="F4"),
    "no shape": header(shape=None),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header())
    assert te.offloading.safetensors.read_header(path).keys() == {"w"}
    path.write_bytes(DAMAGED[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or not a safetensors file"):
        te.offloading.safetensors.read_header(path)


def test_folders_that_are_not_of_a_model_are_named(tmp_path):
    model = nn.Linear(2, 2)
    load = te.offloading.safetensors.PretrainedWeights
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        load(model, tmp_path / "nowhere")
    other = nn.Linear(2, 2)
    te.offloading.save_checkpoint(*te.offload(other, adam(other.parameters())), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"load it by te\.offloading\.load_checkpoint"):
        load(model, tmp_path / "saved")
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", {"weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"has 'weight' in a\.safetensors and in b\.safetensors; remove one"):
        load(model, tmp_path)
    for shard in ("c.safetensors", "../a.safetensors"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": shard}}))
        with pytest.raises(ValueError, match=rf"has no '.*{Path(shard).name}', which its {INDEX} names"):
            load(model, tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        load(model, tmp_path)


def test_pretrained_models_load_shard_by_shard(tmp_path):
    plain = make_transformer(False)
    state = plain.state_dict()
    half = len(state) // 2
    for number, keys in enumerate(([*state][:half], [*state][half:])):
        shard = {f"body.{key}": state[key] for key in keys} | {f"extra{number}": torch.zeros(1)}
        save(tmp_path / f"{number}.safetensors", shard)
    options = {"params": "disk", "states": "disk", "budget": 250_000, "init": lambda module: None}
    model, optimizer = offload_on_meta(lambda: Transformer(tied=False), folder=tmp_path / "swap", **options)
    load = te.offloading.load_safetensors
    assert load(model, tmp_path, rename=lambda key: key.removeprefix("body.")) == ["extra0", "extra1"]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert steps(model, optimizer, 2) == steps(plain, adam(plain.parameters()), 2)
    with pytest.raises(ValueError, match=r"has no 'embedding\.weight', "):
        load(model, tmp_path)
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        load(model, tmp_path / "swap")


@pytest.mark.parametrize("splits", ["rows", "columns"])
def test_safetensors_load_into_layers_that_were_tiled(tmp_path, splits):
    torch.manual_seed(0)
    whole = (
        nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 4))
        if splits == "rows"
        else nn.Sequential(nn.Linear(70_000, 3))
    )
    path, budget = tmp_path / "model.safetensors", "128KiB" if splits == "rows" else "1MiB"
    save(path, whole.state_dict())
    sizes = [(layer.in_features, layer.out_features) for layer in whole]
    for checkpoint in (None, path):
        init = (lambda module: None) if checkpoint is None else None
        options = {"params": "host", "budget": budget, "init": init, "checkpoint": checkpoint}
        model, _ = offload_on_meta(lambda: nn.Sequential(*starmap(nn.Linear, sizes)), **options)
        assert isinstance(model[0], te.nn.TiledLinear)
        if checkpoint is None:
            assert te.offloading.load_safetensors(model, path) == []
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name])
    save(path, {"0.weight": whole[0].weight[:-1]})
    with pytest.raises(ValueError, match=r"'0.weight' has shape"):
        te.offloading.load_safetensors(model, path)
    save(path, {"0.weight": whole[0].weight})
    with pytest.raises(ValueError, match=r"has no '0\.bias'"):
        te.offloading.load_safetensors(model, path)


MEMORY = """
import json, resource, sys, torch, tritonemb as te
from pathlib import Path
folder = Path(sys.argv[1])
torch.set_num_threads(1)
dim, layers = 1024, 192

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def make():
    with torch.device("meta"):
        return torch.nn.Sequential(*[torch.nn.Linear(dim, dim, False, dtype=torch.bfloat16) for _ in range(layers)])

total = 2 * layers * dim * dim
entries = {
    f"{number}.weight": {"dtype": "BF16", "shape": [dim, dim], "data_offsets": [begin, begin + 2 * dim * dim]}
    for number, begin in enumerate(range(0, total, 2 * dim * dim))
}
header = json.dumps(entries).encode()
with open(folder / "model.safetensors", "wb") as file:  # one file, of zeros but for the last row
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + total)
    file.seek(-2 * dim, 2)
    file.write(torch.full((dim,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy())
options = {"params": "disk", "states": "disk", "path": folder, "device": "cpu"}
small = torch.nn.Linear(8, 8)  # what is imported at the first use
te.offloading.close(te.offload(small, torch.optim.SGD(small.parameters(), 0.1), **options, budget="1MiB")[0])
allowed = total // 6
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + allowed, resource.RLIM_INFINITY))
resident, model = status("VmRSS"), make()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if sys.argv[2] == "checkpoint":
    model, _ = te.offload(model, optimizer, **options, budget=allowed // 4, checkpoint=folder)
else:
    from safetensors.torch import load_file
    model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
with te.gather_parameters(model[-1]) as last:
    assert last.weight[-1].eq(3).all() and not last.weight[:-1].any()
print((status("VmHWM") - resident) / allowed, te.offloading.report(model).moved["disk"][1] / total)
"""


@pytest.mark.more
def test_a_file_six_times_larger_than_the_memory_limit_is_loaded(tmp_path):
    def run(mode: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MEMORY, str(tmp_path), mode]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    loaded = run("checkpoint")
    assert loaded.returncode == 0, loaded.stderr
    share, written = map(float, loaded.stdout.split())
    assert share <= 1, "the resident set has grown by more than the limit"
    assert written <= 1.01, "each parameter is written once"
    pytest.importorskip("safetensors")
    assert run("package").returncode != 0
