"""`Deployment`: Kubernetes manifests that run a plan: embedding servers, reader hosts, and trainers as a Job or RayJob.

They are the YAML files of `templates/`: `${name}` is a value, and lines from `#for names` to `#end` are repeated for
each `$item`. `deploy/` has the manifests of an example.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tritonemb.sharding.plan import ShardingPlan
from tritonemb.types import checked_number

SERVER_MARGIN = 1.05  # of the predicted bytes of a server: capacities are rounded up to equal partitions
SERVER_MEMORY, SERVER_DISK = 1.25, 3.0  # of these bytes: with requests in progress; snapshots and log
MAX_RAY_SERVERS = 6  # each is a worker group, beside that of the trainers; Kueue admits seven
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Deployment:
    """Settings of a plan's manifests. The plan's topology has the numbers of machines, and of GPUs per trainer.

    Args:
        image, ray_image: built from `deploy/Containerfile`, and from its target `ray`.
        prefix: of the names of all objects.
        zone: of all machines, since each step exchanges data between them.
        claim: volume of the log, the runs and the servers' checkpoint files, which all pods mount at /data.
        queue: LocalQueue of Kueue, which starts all trainers together; empty without Kueue.
        data, read: log, and options to parse it: of the reader hosts, or of the trainers if there are none.
        train, out: further options of `tritonemb train`, and the run's folder.
        trainer_cpus, trainer_memory: per trainer; bytes, beside tables in host memory.
        server_cpus, reader_cpus, reader_memory: per embedding server and reader host.

    Raises:
        TypeError, ValueError: naming the field.
    """

    image: str = "registry.example.com/tritonemb:1"
    ray_image: str = "registry.example.com/tritonemb-ray:1"
    prefix: str = ""
    zone: str = "zone-a"
    claim: str = "clicks"
    queue: str = "training"
    data: str = "/data/train.txt"
    read: str = ""
    train: str = ""
    out: str = "/data/runs/train"
    trainer_cpus: int = 64
    trainer_memory: float = 500e9
    server_cpus: int = 16
    reader_cpus: int = 16
    reader_memory: float = 60e9

    def __post_init__(self) -> None:
        for member in fields(self):
            value = getattr(self, member.name)
            if not isinstance(member.default, str) and checked_number(member.name, value) <= 0:
                raise ValueError(f"{member.name} must be more than 0, got {value!r}")
            if isinstance(member.default, str) and not isinstance(value, str):
                raise TypeError(f"{member.name} must be a str, got {value!r}")
        if not re.fullmatch("([a-z][a-z0-9-]{0,30})?", self.prefix):
            raise ValueError(f"prefix must be at most 31 lower-case letters, digits and hyphens, got {self.prefix!r}")

    def manifests(self, plan: ShardingPlan) -> dict[str, str]:
        """Return the text of each file that the plan needs, by its path, such as "kubernetes/rows.yaml"."""
        # Machines.
        report, top, prefix = plan.report, plan.report.model.topology, self.prefix
        servers = [f"{prefix}rows-{n}" for n in range(report.machines["server"])]
        readers = [f"{prefix}readers-{n}.{prefix}readers" for n in range(report.machines["reader"])]
        hosts = [*(f"{name}.{prefix}rows" for name in servers), *readers]
        urls = [f"grpc+tls://{host}:{9000 if n < len(servers) else 8815}" for n, host in enumerate(hosts)]
        server_bytes = math.ceil(SERVER_MARGIN * report.prediction.server / max(1, len(servers)) / 1e9) * 10**9
        # Options of the commands. Trainers have the plan if it shards tables that are not on servers.
        on_servers = [name for name in plan.tables if plan.placement(name).placement == "server"]
        log, has_plan = [f"--data={self.data}", *shlex.split(self.read)], len(on_servers) < len(plan.tables)
        words = ["train", *([f"--data={','.join(urls[len(servers) :])}"] if readers else log), "--device=cuda"]
        words += [f"--batch-size={report.model.batch_size}", f"--embedding-optimizer={report.model.optimizer.name}"]
        words += [f"--out={self.out}", "--resume=auto", *shlex.split(self.train)]
        words += [f"--servers={','.join(urls[: len(servers)])}"] if servers else []
        words += ["--plan=/plan/plan.json"] if has_plan else []
        words += ["--server-tables", *on_servers] if has_plan and servers else []
        launch = ["python", "/opt/tritonemb/launch.py", str(top.nodes), str(top.local_world_size), *words]
        # Fill the templates.
        values = vars(self) | {
            "addresses": ",".join(urls), "entrypoint": shlex.join(launch), "suspend": bool(self.queue),
            "plan": replace(plan, report=None).to_json(), "gpus": top.local_world_size, "num_trainers": top.nodes,
            "num_servers": len(servers), "num_readers": len(readers), "server_bytes": server_bytes,
            "server_memory": _gib(SERVER_MEMORY * server_bytes), "server_disk": _gib(SERVER_DISK * server_bytes),
            "trainer_memory": _gib(self.trainer_memory + float(report.prediction.host.max())),
            "reader_memory": _gib(self.reader_memory),
        }  # fmt: skip
        ray_servers = servers if len(servers) <= MAX_RAY_SERVERS else []
        items = {"hosts": hosts, "waits": hosts[:1], "ray_servers": ray_servers, "words": [*map(json.dumps, words)]}
        items |= {"reader_words": [*map(json.dumps, log)], "plan": [""] * has_plan, "queue": [""] * bool(self.queue)}
        quoted = {name: json.dumps(value) for name, value in values.items()} | {"prefix": prefix}
        files = {
            "kubernetes/tls.yaml": hosts, "kubernetes/rows.yaml": servers, "kubernetes/readers.yaml": readers,
            "kubernetes/trainers.yaml": words, "kuberay/rows.yaml": ray_servers, "kuberay/rayjob.yaml": words,
        }  # fmt: skip
        return {path: _fill((TEMPLATES / path).read_text(), quoted, items) for path, needs in files.items() if needs}


def _fill(text: str, values: Mapping[str, str], items: Mapping[str, Sequence[str]]) -> str:
    """Fill a template with `values`, which are YAML already, and repeat its blocks by `items`."""

    def repeat(block: re.Match[str]) -> str:
        return "".join(block[2].replace("$item", item) for item in items[block[1]])

    text = re.sub(r"\$\{(\w+)\}", lambda name: values[name[1]], text)
    return re.sub(r"(?ms)^#for (\w+)\n(.*?)^#end\n", repeat, text)


def _gib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**30)}Gi"
