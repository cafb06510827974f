"""Launchers of jobs, tested on one machine: with two processes for any number, CPUs for GPUs, and stubs of Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT
from tests.programs import start_ranks
from tests.ranks import free_port

MOST_PROCESSES = 4  # of a script, which may be about several groups of ranks
SECONDS = 1200.0  # until a job that hangs is ended; each process imports torch, on a busy machine in a minute

# What a TrainJob may have: of trainer.kubeflow.org/v1alpha1 since Kubeflow Trainer 2.2, as far as the pages use it.
CONTAINER = {"name": None, "volumeMounts": [{"name": None, "mountPath": None}]}
POD = {"volumes": [{"name": None, "persistentVolumeClaim": {"claimName": None}}], "containers": [CONTAINER]}
TRAIN_JOB = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": None},
    "spec": {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": None},
        "trainer": {
            "image": None,
            "numNodes": None,
            "numProcPerNode": None,
            "command": None,
            "env": [{"name": None, "value": None}],
            "resourcesPerNode": {"requests": None, "limits": None},
        },
        "runtimePatches": [
            {
                "manager": None,
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {
                            "replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": POD}}}}]
                        }
                    }
                },
            }
        ],
    },
}
SBATCH = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "signal",
    "requeue",
    "output",
}


def torchrun(words: list[str]) -> str:
    """Run on this machine what torchrun would start; its options must exist.

    The ranks are forked. Torchrun itself starts those of `sbatch`, and of `tests/training/test_torchrun.py`.

    Raises:
        AssertionError: it fails.
    """
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    number = min(int(options.nproc_per_node), 2 if options.module else MOST_PROCESSES)
    words = [options.training_script, *map(_on_cpu, options.training_script_args)]
    statuses, texts = zip(*[program.finish() for program in start_ranks(number, *words)], strict=True)
    assert not any(statuses), f"{' '.join(words)}\n{statuses}\n{''.join(texts)}"
    return "".join(texts)


def torchrun_options() -> set[str]:
    """Return the options of torchrun."""
    from torch.distributed.run import get_args_parser

    return {option for action in get_args_parser()._actions for option in action.option_strings}


def sbatch(text: str) -> str:
    """Run a batch script with an `srun` that starts every node's task here.

    Raises:
        AssertionError: it fails, or has an option that is not one of Slurm's.
    """
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            option = line.removeprefix("#SBATCH --").partition("=")[0].strip()
            assert option in SBATCH, line
    for real, local in (
        ("--device cuda", "--device cpu"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("29500", str(free_port())),
    ):
        assert real in text, real
        text = text.replace(real, local)
    stubs = Path("stubs").absolute()
    stubs.mkdir(exist_ok=True)
    for name, body in {
        "scontrol": "echo localhost; echo other",
        "srun": '"$@" & first=$!; "$@" && wait $first',
        "torchrun": f'exec {" ".join(_launcher())} "$@"',
    }.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    Path("job.sbatch").write_text(text)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}
    return _run(["bash", "-eu", "job.sbatch"], slurm | {"PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"})


def train_job(manifest: dict[str, Any]) -> str:
    """Run the commands of a TrainJob's nodes here, with this folder as its volume.

    Raises:
        AssertionError: a command fails, or the manifest has an unknown field.
    """
    check_fields(manifest, TRAIN_JOB, "")
    spec = manifest["spec"]
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = patch["template"]["spec"]["template"]["spec"]
    (mount,), (volume,) = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    command = [word.replace(mount["mountPath"], str(Path.cwd())) for word in spec["trainer"]["command"]]
    assert command[0] == "torchrun"
    # Kubeflow's variables say how many there are.
    return torchrun(["--nproc-per-node", str(spec["trainer"]["numProcPerNode"]), *command[1:]])


def check_fields(value: Any, allowed: Any, where: str) -> None:
    """AssertionError if a manifest has a field that `allowed` lacks; None allows any value, a list any number."""
    if isinstance(allowed, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            assert key in allowed, f"{where}.{key} is none of {sorted(allowed)}"
            check_fields(inner, allowed[key], f"{where}.{key}")
    elif isinstance(allowed, list):
        assert isinstance(value, list), where
        for inner in value:
            check_fields(inner, allowed[0], where)
    elif allowed is not None:
        assert value == allowed, f"{where} is {value!r}, expected {allowed!r}"


def _launcher() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run"]


def _on_cpu(word: str) -> str:
    return re.sub(r"^(--device=)?cuda$", r"\g<1>cpu", word)


def _run(command: list[str], more: dict[str, str] | None = None) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    quiet = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        command, env=os.environ | quiet | (more or {}), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
