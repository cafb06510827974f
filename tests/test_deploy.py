"""The manifests of deploy/: Kubernetes, KubeRay and our own commands know what they say, and they agree."""

from __future__ import annotations

import copy
import itertools
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml

pytest.importorskip("pyarrow")
pytest.importorskip("tyro")

from torch.distributed.run import get_args_parser

import tritonemb as te
from tests.docs.launch import check_fields
from tools.containerfile import instructions
from tritonemb import cli
from tritonemb.serving.http import App
from tritonemb.sharding import Constraint

pytestmark = pytest.mark.more

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.33"  # what docs/deploy.md asks for
PAGE = (ROOT / "docs" / "deploy.md").read_text()
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
DOCUMENTS = {
    f"{path.parent.name}/{path.name}: {document['kind']} {document.get('metadata', {}).get('name', '')}": document
    for path in sorted(DEPLOY.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}

# The fields of ray.io/v1 in KubeRay 1.5 and newer; pod templates are checked as Kubernetes' own.
GROUP = dict.fromkeys(("replicas", "minReplicas", "maxReplicas", "groupName", "rayStartParams", "template", "suspend"))
GROUP |= dict.fromkeys(("idleTimeoutSeconds", "numOfHosts", "scaleStrategy"))
RAY_CLUSTER = {
    "authOptions": {"mode": "token", "secretName": None},
    "headGroupSpec": dict.fromkeys(("template", "headService", "enableIngress", "rayStartParams", "serviceType")),
    "workerGroupSpecs": [GROUP],
    **dict.fromkeys(("rayVersion", "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations")),
    **dict.fromkeys(("enableInTreeAutoscaling", "gcsFaultToleranceOptions")),
}
RAY_JOB = {
    "rayClusterSpec": RAY_CLUSTER,
    "submitterConfig": {"backoffLimit": None},
    **dict.fromkeys(("entrypoint", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "submissionMode")),
    **dict.fromkeys(("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes")),
    **dict.fromkeys(("suspend", "managedBy", "clusterSelector", "deletionStrategy", "jobId", "metadata")),
    **dict.fromkeys(("runtimeEnvYAML", "submitterPodTemplate")),
}
ISSUER = {"name": None, "kind": "Issuer", "group": "cert-manager.io"}
PRIVATE_KEY = dict.fromkeys(("algorithm", "size", "encoding", "rotationPolicy"))
NAMES = dict.fromkeys(("commonName", "dnsNames", "ipAddresses", "uris", "secretName", "secretTemplate", "subject"))
TIMES = dict.fromkeys(("duration", "renewBefore", "revisionHistoryLimit"))
CERTIFICATE = {**NAMES, **TIMES, "issuerRef": ISSUER, "privateKey": PRIVATE_KEY, "isCA": None, "usages": None}
OBJECT = {"apiVersion": None, "kind": None, "metadata": {"name": None, "labels": None}}
CUSTOM = {
    "ray.io/v1 RayJob": OBJECT | {"spec": RAY_JOB},
    "cert-manager.io/v1 Issuer": OBJECT | {"spec": {"selfSigned": {}, "ca": {"secretName": None}}},
    "cert-manager.io/v1 Certificate": OBJECT | {"spec": CERTIFICATE},
}


def get(folder: str, kind: str, name: str) -> Any:
    """The object, without the name of its file."""
    (result,) = (item for key, item in DOCUMENTS.items() if re.fullmatch(rf"{folder}/[\w.-]+: {kind} {name}", key))
    return result


ROWS = get("kubernetes", "StatefulSet", "rows")["spec"]
JOB = get("kubernetes", "Job", "trainers")["spec"]
READERS = get("kubernetes", "StatefulSet", "readers")["spec"]
SCORER = get("serving", "Deployment", "scorer")["spec"]
RAY = get("kuberay", "RayJob", "train")["spec"]
GROUPS = {group["groupName"]: group for group in RAY["rayClusterSpec"]["workerGroupSpecs"]}
RAY_ROWS = {name: group["template"] for name, group in GROUPS.items() if name != "trainers"}
TEMPLATES = {
    "servers": ROWS["template"],
    "readers": READERS["template"],
    "trainers": JOB["template"],
    "scorers": SCORER["template"],
    "Ray's head": RAY["rayClusterSpec"]["headGroupSpec"]["template"],
    **{f"Ray's {name}": group["template"] for name, group in GROUPS.items()},
}
CONTAINERS = [
    (template, container)
    for template in TEMPLATES.values()
    for container in template["spec"]["containers"] + template["spec"].get("initContainers", [])
]


def container(template: dict[str, Any], name: str) -> Any:
    (result,) = (item for item in template["spec"]["containers"] if item["name"] == name)
    return result


def words_of(container: dict[str, Any]) -> list[str]:
    """Its command, with the variable that Kubernetes puts into it."""
    words = container.get("command", ["tritonemb"]) + container.get("args", [])
    return [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in words]


def option(words: list[str], name: str) -> str:
    (result,) = (word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}="))
    return result


SERVER = words_of(container(ROWS["template"], "rows"))
TRAINER = words_of(container(JOB["template"], "trainer"))
READER = words_of(container(READERS["template"], "readers"))
ADDRESSES = [f"rows-{number}.{ROWS['serviceName']}" for number in range(ROWS["replicas"])]
READER_ADDRESSES = [f"readers-{number}.readers" for number in range(READERS["replicas"])]


def check(document: dict[str, Any]) -> None:
    if allowed := CUSTOM.get(f"{document['apiVersion']} {document['kind']}"):
        check_fields(document, allowed, document["kind"])
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_manifests_are_those_of_the_example(tmp_path, monkeypatch):
    (command,) = re.findall(r"^#   (tritonemb plan .*)$", (DEPLOY / "tables.toml").read_text(), re.MULTILINE)
    assert f"    {command}\n" in PAGE
    monkeypatch.chdir(ROOT)
    assert cli.main([*shlex.split(command)[1:-1], str(tmp_path)]) == 0
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.yaml")}
    assert written == {str(path.relative_to(DEPLOY)): path.read_text() for path in DEPLOY.glob("kube*/*.yaml")}


@pytest.mark.parametrize("servers", [0, 2, 9])
@pytest.mark.parametrize("readers", [0, 1])
def test_manifests_of_other_plans(servers, readers):
    """Tables beside servers or without any, more servers than a RayJob may have, odd settings."""
    tables = [te.TableConfig("big", 50_000_000, 64), te.TableConfig("small", 1_000, 16)]
    constraints = {"big": Constraint("server" if servers else "device"), "small": Constraint("device")}
    topology = te.Topology(4, 2, servers=servers, server_memory=30e9 * bool(servers), readers=readers)
    plan = te.plan(tables, topology, batch_size=64, constraints=constraints)
    files = plan.to_manifests(prefix="a-", zone="no", queue="", train="--name 'a: ${zone} $item #b'", image="x:1")
    documents = {path: list(yaml.safe_load_all(text)) for path, text in files.items()}
    for document in itertools.chain(*documents.values()):
        check(document)
        assert document["metadata"]["name"].startswith("a-") or document["metadata"]["name"].startswith("folder-a-")
    assert ("kubernetes/rows.yaml" in files, "kubernetes/readers.yaml" in files) == (bool(servers), bool(readers))
    assert ("kubernetes/tls.yaml" in files, "kuberay/rows.yaml" in files) == (bool(servers or readers), servers == 2)
    config, service, job = documents["kubernetes/trainers.yaml"]
    assert te.sharding.ShardingPlan.from_json(config["data"]["plan.json"]) == plan
    assert (service["kind"], job["spec"]["suspend"], "labels" in job["metadata"]) == ("Service", False, False)
    words = words_of(container(job["spec"]["template"], "trainer"))
    assert {"a: ${zone} $item #b", "--plan=/plan/plan.json", "--nproc-per-node=2", "--batch-size=64"} <= set(words)
    assert words[-2:] == (["--server-tables", "big"] if servers else words[-2:])
    assert ("initContainers" in job["spec"]["template"]["spec"]) == bool(servers or readers)
    groups = documents["kuberay/rayjob.yaml"][1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert len(groups) == (3 if servers == 2 else 1)
    assert shlex.split(documents["kuberay/rayjob.yaml"][1]["spec"]["entrypoint"])[4:] == words[words.index("train") :]
    zones = yaml.safe_dump(job["spec"]["template"]["spec"]["affinity"])
    assert "- 'no'" in zones


@pytest.mark.parametrize("name", DOCUMENTS)
def test_there_are_such_fields(name):
    check(DOCUMENTS[name])


@pytest.mark.parametrize("name", TEMPLATES)
def test_there_are_such_fields_of_pods(name):
    wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": TEMPLATES[name]}
    kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)
    misspelt = copy.deepcopy(wrapped)
    misspelt["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, KUBERNETES, strict=True)


def test_a_field_that_kuberay_lacks_is_found():
    document = copy.deepcopy(get("kuberay", "RayJob", "train"))
    document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(AssertionError, match="replica"):
        check_fields(document, CUSTOM["ray.io/v1 RayJob"], "RayJob")


def test_ray_groups_have_what_kuberay_requires():
    for group in (RAY["rayClusterSpec"]["headGroupSpec"], *GROUPS.values()):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in GROUPS.values():
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert len(GROUPS) <= 7  # that Kueue admits


def test_every_server_is_named_in_all_places():
    addresses = [f"grpc+tls://{address}:9000" for address in ADDRESSES]
    assert option(TRAINER, "--servers").split(",") == addresses
    assert option(shlex.split(RAY["entrypoint"]), "--servers").split(",") == addresses
    assert get("kubernetes", "Certificate", "tritonemb")["spec"]["dnsNames"] == ADDRESSES + READER_ADDRESSES
    readers = [f"grpc+tls://{address}:8815" for address in READER_ADDRESSES]
    assert option(TRAINER, "--data").split(",") == readers
    assert option(shlex.split(RAY["entrypoint"]), "--data").split(",") == readers
    assert [f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}" for pod in RAY_ROWS.values()] == ADDRESSES
    assert [f"{name}.rows" for name in RAY_ROWS] == ADDRESSES


def test_ports_and_labels_agree():
    for folder, name, templates in (
        ("kubernetes", "rows", [ROWS["template"]]), ("kuberay", "rows", list(RAY_ROWS.values())),
        ("kubernetes", "readers", [READERS["template"]]),
    ):  # fmt: skip
        service = get(folder, "Service", name)["spec"]
        (port,) = service["ports"]
        for template in templates:
            server = container(template, name)
            (listens,) = server["ports"]
            assert option(words_of(server), "--address") == f"grpc+tls://0.0.0.0:{listens['containerPort']}"
            assert (port["port"], port["targetPort"]) == (listens["containerPort"], listens["name"])
            assert server["readinessProbe"]["tcpSocket"]["port"] == listens["name"]
            assert template["metadata"]["labels"] == service["selector"]
        assert service["clusterIP"] == "None"
    assert (ROWS["serviceName"], READERS["serviceName"]) == ("rows", "readers")
    assert READERS["selector"]["matchLabels"] == READERS["template"]["metadata"]["labels"]
    for selects in (ROWS, get("kubernetes", "PodDisruptionBudget", "rows")["spec"]):
        assert selects["selector"]["matchLabels"] == ROWS["template"]["metadata"]["labels"]


def test_both_ways_have_the_same_servers_and_volumes():
    server = container(ROWS["template"], "rows")
    (claim,) = ROWS["volumeClaimTemplates"]
    for name, template in RAY_ROWS.items():
        fused = container(template, "rows")
        assert (words_of(fused), fused["resources"], fused["env"]) == (SERVER, server["resources"], server["env"])
        (folder,) = (item for item in template["spec"]["volumes"] if item["name"] == claim["metadata"]["name"])
        disk = get("kuberay", "PersistentVolumeClaim", folder["persistentVolumeClaim"]["claimName"])
        assert disk["metadata"]["name"] == f"{claim['metadata']['name']}-{name}"
        assert disk["spec"] == claim["spec"]


def test_a_server_has_enough_memory_and_disk():
    rows = float(option(SERVER, "--memory"))
    values = tomllib.loads((DEPLOY / "tables.toml").read_text())
    needed = sum(table["capacity"] * (table["embedding_dim"] * 4 + 4 + 26) for table in values["table"])
    assert 1.04 * needed <= rows * ROWS["replicas"] <= 1.08 * needed
    resources = container(ROWS["template"], "rows")["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert num_bytes(resources["limits"]["memory"]) >= 1.25 * rows
    assert num_bytes(ROWS["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]) >= 3 * rows


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) << {"Gi": 30, "Ti": 40}[quantity[-2:]]


def test_servers_and_trainers_are_in_one_zone_and_servers_apart():
    zones = []
    for template in (template for name, template in TEMPLATES.items() if name != "scorers"):
        required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        ((term,),) = (item["matchExpressions"] for item in required["nodeSelectorTerms"])
        assert (term["key"], term["operator"]) == ("topology.kubernetes.io/zone", "In")
        zones.append(term["values"])
    assert zones == [zones[0]] * len(zones)
    assert len(zones[0]) == 1
    for template in (ROWS["template"], READERS["template"], *RAY_ROWS.values()):
        (separate,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert separate["topologyKey"] == "kubernetes.io/hostname"
        assert separate["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


def test_secrets_and_files_are_there():
    signed = {item["spec"]["secretName"] for item in DOCUMENTS.values() if item["kind"] == "Certificate"}
    for template, entry in CONTAINERS:
        variables = entry.get("env", [])
        for secret in (variable.get("valueFrom", {}).get("secretKeyRef") for variable in variables):
            if secret:
                assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in PAGE
        secrets = {
            volume["name"]: volume["secret"] for volume in template["spec"].get("volumes", []) if "secret" in volume
        }
        files = set()
        for mount in entry.get("volumeMounts", []):
            if secret := secrets.get(mount["name"]):
                assert secret["secretName"] in signed
                assert f"kubectl create secret generic {secret['secretName']} --from-file" in PAGE
                files |= {f"{mount['mountPath']}/{item['path']}" for item in secret["items"]}
        named = words_of(entry) + [variable["value"] for variable in variables if "value" in variable]
        assert set(re.findall(r"/tls/[\w.]+", " ".join(named))) == files, entry["name"]  # no more than it needs
    assert {option(SERVER, "--certificate"), option(SERVER, "--key")} == {"/tls/tls.crt", "/tls/tls.key"}


def test_pods_are_restricted_as_the_pod_security_standards_say():
    for template in TEMPLATES.values():
        pod = template["spec"]["securityContext"]
        assert f"\nUSER {pod['runAsUser']}:{pod['runAsGroup']}\n" in CONTAINERFILE
        assert pod["runAsNonRoot"] is True
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert template["spec"]["automountServiceAccountToken"] is False
    for _, item in CONTAINERS:
        assert item["image"] in ("registry.example.com/tritonemb:1", "registry.example.com/tritonemb-ray:1")
        assert item["securityContext"]["allowPrivilegeEscalation"] is False
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert item["resources"]["requests"].keys() >= {"cpu", "memory"}


def test_trainers_start_as_one_job():
    options = get_args_parser().parse_args(TRAINER[1:])
    service = get("kubernetes", "Service", JOB["template"]["spec"]["subdomain"])["spec"]
    assert int(options.nnodes) == JOB["completions"] == JOB["parallelism"] == GROUPS["trainers"]["replicas"]
    assert (options.node_rank, options.rdzv_backend) == (0, "static")
    assert options.rdzv_endpoint == f"trainers-0.trainers:{service['ports'][0]['port']}"
    assert service["selector"] == JOB["template"]["metadata"]["labels"]
    assert service["publishNotReadyAddresses"] is True
    limits = container(JOB["template"], "trainer")["resources"]["limits"]
    assert int(options.nproc_per_node) == limits["nvidia.com/gpu"]
    assert (JOB["completionMode"], JOB["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    for job in (get("kubernetes", "Job", "trainers"), get("kuberay", "RayJob", "train")):
        assert job["spec"]["suspend"] is True
        assert job["metadata"]["labels"].keys() == {"kueue.x-k8s.io/queue-name"}


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options of a `tritonemb` command by its own parser; what it would do is not done."""
    name, *arguments = words
    module, _, function = {"train": ("tritonemb.training.job", None, "train"), **cli._SIMPLE}[name]
    results = []
    monkeypatch.setattr(f"{module}.{function}", lambda options, *_: results.append(options))
    assert cli.main([name, *arguments]) == 0
    return results[0]


def test_trainers_have_options_that_there_are(monkeypatch):
    options = get_args_parser().parse_args(TRAINER[1:])
    assert (TRAINER[0], options.module, options.training_script) == ("torchrun", True, "tritonemb")
    config = parsed(options.training_script_args, monkeypatch)
    mounts = [mount["mountPath"] for mount in container(JOB["template"], "trainer")["volumeMounts"]]
    assert f"/{Path(config.output.out).parts[1]}" in mounts
    assert (config.batch_size, config.embedding_optimizer) == (4_096, "row_wise_adagrad")


def test_servers_have_options_that_there_are(monkeypatch):
    assert SERVER[0] == READER[0] == "tritonemb"
    parsed(SERVER[1:], monkeypatch)
    options = parsed(READER[1:], monkeypatch)
    mounts = [mount["mountPath"] for mount in container(READERS["template"], "readers")["volumeMounts"]]
    assert f"/{Path(options.data).parts[1]}" in mounts


def test_scorers_have_options_probes_and_a_certificate(monkeypatch):
    server, (service,) = container(SCORER["template"], "scorer"), get("serving", "Service", "scorer")["spec"]["ports"]
    options = parsed(words_of(server)[1:], monkeypatch)
    (port,) = server["ports"]
    assert options.address == f"https://0.0.0.0:{port['containerPort']}"
    assert service["targetPort"] == port["name"]
    assert f"/{options.checkpoint.parts[1]}" in [mount["mountPath"] for mount in server["volumeMounts"]]
    probes = [server[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {(probe["port"], probe["scheme"]) for probe in probes} == {(port["name"], "HTTPS")}
    paths = App(SimpleNamespace(), "", 1, 1.0)._routes  # type: ignore[arg-type]
    assert {("GET", probe["path"]) for probe in probes} <= paths.keys()
    certificate = get("serving", "Certificate", "scorer")
    assert certificate["spec"]["dnsNames"] == [get("serving", "Service", "scorer")["metadata"]["name"]]
    assert SCORER["template"]["spec"]["terminationGracePeriodSeconds"] > 30
    for selects in (SCORER["selector"]["matchLabels"], get("serving", "Service", "scorer")["spec"]["selector"]):
        assert selects == SCORER["template"]["metadata"]["labels"]


@pytest.fixture
def ray(monkeypatch) -> list[list[str]]:
    """A Ray that does at once what it is asked for; the commands that its machines start."""
    group = SimpleNamespace(ready=lambda: None)
    remote = lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=function))  # noqa: E731
    fake = {
        "ray": {"init": lambda: None, "get": lambda value: value, "wait": lambda left: (left[:1], left[1:])},
        "ray.util": {"get_node_ip_address": lambda: "10.0.0.1"},
        "ray.util.placement_group": {"placement_group": lambda bundles, strategy: group},
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: None},
    }
    for name, members in fake.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["ray"]).update(remote=remote, util=sys.modules["ray.util"])
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: started.append(command))
    return started


def test_ray_starts_torchrun_with_options_that_there_are(ray, monkeypatch):
    python, script, *arguments = shlex.split(RAY["entrypoint"])
    assert python == "python"
    assert f"\nCOPY deploy/kuberay/launch.py {script}\n" in CONTAINERFILE
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(DEPLOY / "kuberay" / "launch.py"), run_name="__main__")
    options = [get_args_parser().parse_args(command[1:]) for command in ray]
    assert [int(option.nnodes) for option in options] == [GROUPS["trainers"]["replicas"]] * len(options)
    assert [option.node_rank for option in options] == list(range(GROUPS["trainers"]["replicas"]))
    limits = container(TEMPLATES["Ray's trainers"], "ray-worker")["resources"]["limits"]
    assert {int(option.nproc_per_node) for option in options} == {limits["nvidia.com/gpu"]}
    assert {option.rdzv_endpoint for option in options} == {"10.0.0.1:29500"}
    in_job = get_args_parser().parse_args(TRAINER[1:]).training_script_args
    assert options[0].training_script_args == in_job
    parsed(options[0].training_script_args, monkeypatch)


def test_trainers_wait_for_servers(monkeypatch, capsys):
    (wait,) = JOB["template"]["spec"]["initContainers"]
    python, flag, script = words_of(wait)
    assert (python, flag) == ("python", "-c")
    (variable,) = wait["env"]
    hosts = [f"grpc+tls://{address}:9000" for address in ADDRESSES]
    hosts += [f"grpc+tls://{address}:8815" for address in READER_ADDRESSES]
    assert (variable["name"], variable["value"].split(",")) == ("ADDRESSES", hosts)
    with socket.socket() as first, socket.socket() as second:
        for server in (first, second):
            server.bind(("127.0.0.1", 0))
        addresses = [f"grpc+tls://127.0.0.1:{server.getsockname()[1]}" for server in (first, second)]
        first.listen()
        monkeypatch.setenv("ADDRESSES", ",".join(addresses))
        monkeypatch.setattr(time, "sleep", lambda _: second.listen())
        exec(script, {})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(addresses[1])


def test_the_image_has_the_versions_of_ci_and_of_the_manifests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S*)$", CONTAINERFILE, re.MULTILINE))
    assert arguments["TORCH"] in (ROOT / "constraints.txt").read_text().splitlines()
    assert arguments["RAY"] == f"ray[default]=={RAY['rayClusterSpec']['rayVersion']}"
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim AS plain$", CONTAINERFILE, re.MULTILINE)
    assert any(item.endswith(f":: {python}") for item in project["classifiers"])
    for sources in re.findall(r"^COPY (.*) \S+$", CONTAINERFILE, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split()), sources
    assert CONTAINERFILE.rstrip().endswith("\nFROM plain")
    assert '\nENTRYPOINT ["tritonemb"]\n' in CONTAINERFILE


def test_instructions_are_those_of_the_last_stage_and_of_its_base():
    text = "FROM a AS b\n# no\nRUN c \\\n  # no\n  d\nFROM b AS e\nRUN f\n\nFROM b\nUSER 1\n"
    assert instructions(text) == [["RUN", "c   d"], ["USER", "1"]]
    assert instructions(CONTAINERFILE)[-1] == ["ENTRYPOINT", '["tritonemb"]']


def test_the_page_names_what_there_is():
    assert all((ROOT / path.rstrip(".")).exists() for path in re.findall(r"\bdeploy/[\w./-]+", PAGE))
    assert f"Kubernetes {KUBERNETES} or newer" in PAGE
    stages = re.findall(r"^FROM \S+ AS (\w+)$", CONTAINERFILE, re.MULTILINE)
    assert set(re.findall(r"--target (\w+)", PAGE)) <= set(stages)
