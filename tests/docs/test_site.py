"""The site can be built, without a network and without a warning, and its reference has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib

import pytest

from tests.docs.blocks import ROOT

MODULES = ("compiler", "data", "interop", "models", "nn", "offloading", "optim", "server", "serving", "sharding")


def public_names() -> list[str]:
    """The full names of what users are meant to use."""
    for package in ("pyarrow", "rich", "filelock"):
        pytest.importorskip(package)
    import tritonemb
    import tritonemb.compiler
    import tritonemb.data
    import tritonemb.interop
    import tritonemb.models
    import tritonemb.offloading
    import tritonemb.server
    import tritonemb.serving
    import tritonemb.sharding
    import tritonemb.training

    names = [f"tritonemb.{name}" for name in tritonemb.__all__ if name not in MODULES]
    modules = tritonemb.nn, tritonemb.models, tritonemb.compiler, tritonemb.data, tritonemb.interop, tritonemb.sharding
    for module in (*modules, tritonemb.server, tritonemb.training):
        names += [f"{module.__name__}.{name}" for name in module.__all__]
    names += [f"tritonemb.optim.{name}" for name in tritonemb.optim.__all__ if name != "OPTIMIZERS"]
    top = set(tritonemb.__all__)
    for module in (tritonemb.offloading, tritonemb.serving):
        names += [f"{module.__name__}.{name}" for name in module.__all__ if name not in top]
    return [*names, "tritonemb.nn.fuse.FuseReport"]


def test_every_codec_is_listed():
    from tritonemb.sharding import ExchangePrecision
    from tritonemb.types import CODECS

    page, reference = (ROOT / "docs/parallel.md").read_text(), ExchangePrecision.__doc__ or ""
    assert [name for name in CODECS if f"`{name}`" not in page or f'"{name}"' not in reference] == []


@pytest.mark.more
def test_the_site_is_built_without_a_warning_and_has_every_public_name(tmp_path):
    """And its pages load nothing from elsewhere: links may lead there; scripts, styles, fonts and pictures are files of
    the site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'tritonemb[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'tritonemb[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "WARNING" not in output, output
    pages = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert {"index.html", "training.html", "from-torch.html"} <= pages <= {path.name for path in tmp_path.iterdir()}

    listed = zlib.decompress((tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    missing = set(public_names()) - {line.split(" ")[0] for line in listed}
    assert not missing

    loads = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc="?https?:|<link\b[^>]*\bhref="?https?:|url\("?https?:""")
    texts = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    result = {path.name: loads.findall(path.read_text(encoding="utf-8")) for path in texts}
    assert texts
    assert not {name: addresses for name, addresses in result.items() if addresses}


def test_the_pages_ask_for_every_public_name():
    """As the test of the built reference, where mkdocs is not installed."""
    requests = {
        line.removeprefix("::: ").strip()
        for page in (ROOT / "docs" / "api").glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith("::: ")
    }
    missing = set(public_names()) - requests
    assert not missing
