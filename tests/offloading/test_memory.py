"""A model whose parameters, gradients and states need three times the memory that a process may have."""

import subprocess
import sys

import pytest

# 16 bytes a parameter: 2 of the weight, 2 of the gradient, 12 of states and master weights. `RLIMIT_DATA` is enforced
# by the kernel; the peak of the resident set is what it has counted (`VmHWM`).
PROGRAM = """
import resource, sys, torch, tritonemb as te
offloads, folder = sys.argv[1] == "offloads", sys.argv[2]
torch.set_num_threads(1)
dim, layers = 1024, 40
total = 16 * layers * (dim * dim + dim)

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(dim, dim, dtype=torch.bfloat16) for _ in range(layers)])
def train(model, optimizer):
    loss = model(torch.ones(16, model[0].in_features, dtype=torch.bfloat16)).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

warm = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16))  # what is imported at the first use
warm = te.offload(warm, torch.optim.Adam(warm.parameters()), params="disk", states="disk", path=folder + "/warm")
train(*warm)
te.offloading.close(warm[0])
allowed = total // 3
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + allowed, resource.RLIM_INFINITY))
resident = status("VmRSS")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
if offloads:
    model, optimizer = te.offload(model, optimizer, params="disk", states="disk", path=folder, budget=allowed // 8)
else:
    model = model.to_empty(device="cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
losses = [train(model, optimizer) for _ in range(3)]
print((status("VmHWM") - resident) / allowed, losses[-1])
"""


@pytest.mark.more
def test_it_trains_within_the_limit_and_does_not_fit_without(tmp_path):
    def run(mode):
        command = [sys.executable, "-c", PROGRAM, mode, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=240)

    fits = run("offloads")
    assert fits.returncode == 0, fits.stderr
    share, loss = map(float, fits.stdout.split())
    assert share <= 1.0, "the resident set has grown by more than is allowed"
    assert 0 < loss < 10
    plain = run("plain")
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr or "MemoryError" in plain.stderr or "alloc" in plain.stderr
