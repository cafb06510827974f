"""What holds for the package as a whole: what an import loads, what a wheel holds, what may name what."""

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "tritonemb").rglob("*.py"))
SHIPPED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "tritonemb/cli.py",
    "tests/test_package.py",
    "deploy/Containerfile",
)


def run_python(program: str) -> list[str]:
    """The words that a program prints, which must end well."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_help_needs_no_torch_and_training_neither_triton_nor_the_compiler_of_graphs():
    """Imports load only what every user needs; the trainer is loaded when it is first used."""
    program = """
import sys
sys.modules["triton"] = None
import tritonemb as te
assert "tritonemb.cli" not in sys.modules
from tritonemb import cli
assert cli.main(["--help"]) == 0
print()
print("torch" in sys.modules, te.TableConfig("a", 10, 4).name, te.nn.DLRM.__name__, "torch" in sys.modules)
import torch, tritonemb.storage
late = {"numba", "llvmlite", "pyarrow", "rich", "tyro", "ray", "tritonemb.data", "tritonemb.training"}
print(*sorted(late & set(sys.modules)))
tables = [te.TableConfig("a", 10, 4)]
module = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.SGD(lr=1.0))
before = module.state_dict()["a.weight"].clone()
batch = te.KeyedJaggedTensor.from_lengths(["a"], torch.tensor([3, 3]), torch.tensor([1, 1]))
module(batch).sum().backward()
for config in (te.TableConfig("a", None, 4, capacity=9), te.TableConfig("a", 10, 4, placement="host")):
    te.nn.EmbeddingBagCollection([config], optimizer=te.optim.SGD(lr=1.0))(batch).sum().backward()
print("torch._dynamo" in sys.modules)
print(*(before - module.state_dict()["a.weight"]).sum(1).round(decimals=3).tolist())
print("tritonemb.training" in sys.modules, te.Trainer.__name__, "tritonemb.training" in sys.modules)
"""
    words = run_python(program)
    assert words[-18:-13] == ["False", "a", "DLRM", "True", "False"]
    assert list(map(float, words[-13:-3])) == [0, 0, 0, 8, 0, 0, 0, 0, 0, 0]
    assert words[-3:] == ["False", "Trainer", "True"]


def test_what_is_public_can_be_listed():
    import tritonemb

    assert sorted(dir(tritonemb)) == sorted([*tritonemb.__all__, "__version__"])
    assert {"Trainer", "HybridParallel", "compiler", "sharding", "nn"} <= set(dir(tritonemb))
    assert all(getattr(tritonemb, name) is not None for name in dir(tritonemb))


def test_a_release_is_pure_and_typed(tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    pytest.importorskip("twine")
    build = ["build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    for command in (build, ["twine", "check", "--strict", f"{tmp_path}/*"]):
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert {f"{sdist.name.removesuffix('.tar.gz')}/{name}" for name in SHIPPED} <= set(archive.getnames())
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        scripts = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "tritonemb/py.typed" in names
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tritonemb"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "tritonemb = tritonemb.cli:main" in scripts
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(re.split(r"[ :;<>=!]+", line)[1] for line in required) == ["numba", "numpy", "torch", "triton"]
    assert all("linux" in line for line in required if "triton" in line)


@pytest.mark.more
def test_visits_of_a_batch():
    """Visits to the library's files by one batch stay below their ceilings."""
    command = [sys.executable, "tools/batch_trace.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "servers: " in done.stdout


def test_versions_agree():
    import tomllib

    import tritonemb

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == tritonemb.__version__


def test_only_ops_names_torch_library():
    """import-linter sees packages, not the parts of other packages, so this contract is held here."""
    texts = {path: path.read_text() for path in SOURCES if path.parent.name != "ops"}
    offenders = {
        path.relative_to(ROOT).as_posix(): lines
        for path, text in texts.items()
        if "library" in text
        and (lines := [node.lineno for node in ast.walk(ast.parse(text)) if _names_torch_library(node)])
    }
    assert len(texts) > 100
    assert not offenders, f"torch.library is named in these lines: {offenders}"


@pytest.mark.parametrize("line", ["import torch.library", "from torch import library", "torch.library.define('a')"])
def test_a_name_of_torch_library_is_seen(line):
    assert any(map(_names_torch_library, ast.walk(ast.parse(line))))


def _names_torch_library(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.library") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.startswith("torch.library") or (
            module == "torch" and any(a.name == "library" for a in node.names)
        )
    return isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.library")
