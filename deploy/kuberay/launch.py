"""Start torchrun on several machines of a Ray cluster: launch.py MACHINES GPUS TRITONEMB-ARGUMENTS...

Returns when all have ended; fails as soon as one fails. Then the cluster is deleted, with the remaining processes.
"""

import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PORT = 29500


def address() -> str:
    return ray.util.get_node_ip_address()


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def launch(num_machines: int, num_gpus: int, arguments: list[str]) -> None:
    """Reserve all GPUs of `num_machines` machines, waiting until they are available; then train on them."""
    ray.init()
    group = placement_group([{"GPU": num_gpus}] * num_machines, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(machine: int, function, *values):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=machine)
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "scheduling_strategy": strategy}
        return ray.remote(function).options(**options).remote(*values)

    first = ray.get(on(0, address))
    torchrun = ["torchrun", f"--nnodes={num_machines}", f"--nproc-per-node={num_gpus}", "--max-restarts=3"]
    torchrun.append(f"--rdzv-endpoint={first}:{PORT}")
    command = ["-m", "tritonemb", *arguments]
    pending = [on(rank, run, [*torchrun, f"--node-rank={rank}", *command]) for rank in range(num_machines)]
    while pending:
        done, pending = ray.wait(pending)
        ray.get(done)


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
