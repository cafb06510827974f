"""Arenas, spans of host memory and swap files; disks that fail, fill up or change what was written."""

import resource
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

import tritonemb as te
from tests.offloading.models import Transformer, adam, build, mlp, steps, train, weights_of
from tritonemb.offloading.tiers import Arena, DiskTier, HostTier, empty_host
from tritonemb.storage import StorageError

CPU = torch.device("cpu")


def test_blocks_of_an_arena_come_back_when_nobody_has_them():
    arena = Arena(5 * 4096, CPU)
    one, two = arena.allocate(4096), arena.allocate(8192)
    one.fill_(1)
    two.fill_(2)
    view = two[4096:].view(torch.int32)
    assert arena.allocate(12_288) is None
    del two
    assert arena.allocate(12_288) is None, "a view is left"
    assert torch.equal(view, torch.full_like(view, 0x02020202))
    del view
    remaining = arena.allocate(16_384)
    assert remaining.numel() == 16_384
    assert one.min() == one.max() == 1
    assert arena.used == arena.peak == arena.num_bytes == 20_480


def test_small_blocks_are_not_in_the_way_of_large_ones():
    arena = Arena(128 * 4096, CPU)
    small = [arena.allocate(1) for _ in range(4)]
    assert arena.allocate(120 * 4096) is not None
    del small


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("size", [1, 4096, 10_000, 9_000_001])
def test_a_span_has_what_was_written_last(disk, size, tmp_path):
    tier = DiskTier(tmp_path) if disk else HostTier(CPU)
    spans, buffers = [tier.reserve(size) for _ in range(3)], [empty_host(size, CPU) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        buffer.random_(0, 255, generator=torch.Generator().manual_seed(number))
    for span, buffer in zip(spans, buffers, strict=True):
        span.write(torch.zeros_like(buffer) if not disk else empty_host(size, CPU)).wait()
        span.write(buffer)
    outs = [empty_host(size, CPU).fill_(7) for _ in spans]
    for future in [span.read(out) for span, out in zip(spans, outs, strict=True)]:
        future.wait()
    assert all(torch.equal(a, b) for a, b in zip(outs, buffers, strict=True))
    tier.close()
    assert not list(tmp_path.iterdir())


def test_another_process_that_uses_the_folder_is_named(tmp_path):
    tier = DiskTier(tmp_path)
    with pytest.raises(StorageError, match=r"another process uses swap-0\.bin; give each run its own folder"):
        DiskTier(tmp_path)
    assert DiskTier(tmp_path, 1, 2).path.exists()
    tier.close()
    DiskTier(tmp_path).close()


def test_several_folders_are_used_in_turn(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    expected = train(mlp, tmp_path, 3)
    model, optimizer = build(folder=folders, params="disk", states="disk", budget=200_000)
    assert steps(model, optimizer, 3) == expected.losses
    sizes = [(folder / "swap-0.bin").stat().st_size for folder in folders]
    assert min(sizes) > 0.5 * max(sizes)
    te.offloading.close(model)
    assert not any(file for folder in folders for file in folder.iterdir())


def test_a_folder_that_is_named_twice_is_refused(tmp_path):
    model = mlp()
    initial = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="path= names a folder twice"):
        te.offload(model, adam(model.parameters()), states="disk", path=[tmp_path, tmp_path])
    # A second run in a folder harms neither.
    first = train(mlp, tmp_path / "used", 1, offload={"params": "disk", "states": "disk", "budget": 200_000})
    with pytest.raises(StorageError, match="give each run its own folder"):
        te.offload(model, adam(model.parameters()), params="disk", path=[tmp_path / "free", tmp_path / "used"])
    assert not list((tmp_path / "free").iterdir())
    assert all(map(torch.equal, initial, model.parameters()))
    steps(first.model, first.optimizer, 1)


KILLED = """
import os, sys, time, torch, tritonemb as te
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = te.offload(model, optimizer, params="disk", states="disk", path=sys.argv[1], budget=200_000)
print("ready", flush=True)
while True:
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.more
def test_the_file_of_a_killed_run_is_reclaimed(tmp_path):
    (tmp_path / "swap-7.bin").write_bytes(b"left by a run of eight ranks")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    assert [path.name for path in tmp_path.iterdir()] == ["swap-0.bin"]
    with pytest.raises(StorageError, match="another process uses"):
        DiskTier(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "swap-0.bin").stat().st_size > 0
    trained = train(mlp, tmp_path, 2, offload={"params": "disk", "states": "disk", "budget": 200_000})
    assert trained.losses == train(mlp, tmp_path, 2).losses
    te.offloading.close(trained.model)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    model = mlp()
    with pytest.raises(StorageError, match=r"offload folder .*file: cannot create swap-0\.bin"):
        te.offload(model, adam(model.parameters()), states="disk", path=file)
    steps(model, adam(model.parameters()), 1)


def limit_file_size(num_bytes: int) -> tuple[int, int]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    return limits


@pytest.mark.parametrize(
    ("tiers", "limit"), [({"params": "disk", "states": "disk"}, 150_000), ({"grads": "disk"}, 100_000)], ids=str
)
def test_a_disk_that_is_too_small_is_noticed_before_anything_is_changed(tiers, limit, tmp_path):
    model, optimizer = build()
    steps(model, optimizer, 1)
    limits = limit_file_size(limit)
    try:
        with pytest.raises(StorageError, match=r"cannot reserve [\d,]+ bytes"):
            te.offload(model, optimizer, **tiers, path=tmp_path, budget=200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    assert len(steps(model, optimizer, 2)) == 2


def damage(tmp_path, kind):
    path = tmp_path / "swap-0.bin"
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(0)
            return
        size = path.stat().st_size
        for at in range(100, size, 4096):
            file.seek(at)
            file.write(b"damaged")


@pytest.mark.parametrize("kind", ["cut", "changed"])
@pytest.mark.parametrize("option", ["params", "states"])
def test_a_damaged_swap_file_is_noticed(kind, option, tmp_path):
    trained = train(Transformer, tmp_path, 2, offload={option: "disk", "budget": 100_000})
    folder = tmp_path / "checkpoint"
    te.offloading.save_checkpoint(trained.model, trained.optimizer, folder)
    expected = steps(trained.model, trained.optimizer, 2, seed=3)
    damage(tmp_path, kind)
    with pytest.raises(StorageError, match="resume from a checkpoint"):
        steps(trained.model, trained.optimizer, 2)
    te.offloading.close(trained.model)
    new = train(Transformer, tmp_path, 0, offload={option: "disk", "budget": 100_000})
    te.offloading.load_checkpoint(new.model, new.optimizer, folder)
    assert steps(new.model, new.optimizer, 2, seed=3) == expected


def exchanged(content, one, other, size):
    first, second = bytes(content[one : one + size]), bytes(content[other : other + size])
    content[one : one + size], content[other : other + size] = second, first


@pytest.mark.parametrize("size", [5_000, 30_000, pytest.param(9_000_001, marks=pytest.mark.more)])
def test_bits_that_changed_and_words_that_were_exchanged_are_noticed(size, tmp_path):
    tier, random = DiskTier(tmp_path), np.random.default_rng(0)
    span, values = tier.reserve(size), empty_host(size, CPU)
    values.copy_(torch.from_numpy(random.integers(0, 256, values.numel(), dtype=np.uint8)))
    span.write(values).wait()
    whole, path = tier.path.read_bytes(), tier.path
    places = [8 * int(place) for place in random.integers(0, len(whole) // 8, 40)]
    damages = [partial(exchanged, one=one, other=other, size=8) for one, other in pairwise(places)]
    damages += [partial(exchanged, one=0, other=8, size=8), partial(exchanged, one=16, other=4096 + 16, size=8)]
    damages += [partial(exchanged, one=0, other=4096, size=4096), partial(exchanged, one=0, other=2048, size=2048)]
    for bit in random.integers(0, 8 * len(whole), 200).tolist():
        damages.append(lambda content, bit=bit: content.__setitem__(bit // 8, content[bit // 8] ^ 1 << bit % 8))
    for number, damage in enumerate(damages):
        content = bytearray(whole)
        damage(content)
        path.write_bytes(content)
        problem = None
        try:
            span.read(empty_host(size, CPU)).wait()
        except StorageError as error:
            problem = error
        assert "have another checksum than written" in str(problem), f"damage {number}"
    path.write_bytes(whole)
    span.read(empty_host(size, CPU)).wait()
    tier.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_the_disk_ends_the_step_for_good(call, tmp_path, failing_disk):
    trained = train(Transformer, tmp_path, 2, offload={"states": "disk", "budget": 60_000})
    saved = trained.optimizer.state_dict()
    named = pytest.raises(StorageError, match=r"Input/output error; check the disk, and resume from a checkpoint")
    with failing_disk(call), named:
        steps(trained.model, trained.optimizer, 3)
    with pytest.raises(RuntimeError, match="an earlier step or load has failed"):
        steps(trained.model, trained.optimizer, 1)
    trained.optimizer.load_state_dict(saved)
    steps(trained.model, trained.optimizer, 2)
    assert all(p.isfinite().all() for p in weights_of(trained.model))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_the_disk_outside_of_a_step_is_not_forgotten(call, tmp_path, failing_disk):
    trained = train(Transformer, tmp_path, 2, offload={"states": "disk", "budget": 60_000})
    saved = trained.optimizer.state_dict()
    steps(trained.model, trained.optimizer, 1)
    with failing_disk(call), pytest.raises(StorageError):
        trained.optimizer.state_dict()
    with pytest.raises((StorageError, RuntimeError)):
        steps(trained.model, trained.optimizer, 1)
    trained.optimizer.load_state_dict(saved)
    states = trained.optimizer.state_dict()["state"]
    for number, expected in saved["state"].items():
        assert all(torch.equal(value, states[number][name]) for name, value in expected.items())
