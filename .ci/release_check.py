"""Check a release before it is published: the files in dist/, the changelog, and README's snippets from the wheel.

Usage: release_check.py DIST TORCH PYTHON…, where TORCH is how pip installs PyTorch and each PYTHON a command.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 5 * 2**20  # bytes
TOP_LEVEL = {"sage_hf", "sage_kernels"}
PIP_OPTIONS = ("--quiet", "--no-compile", "--disable-pip-version-check")
COPIED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "benchmarks", "configs", "docs")
COPIED += ("examples", "tests", "studies")
NEW_USER = """
import time
start = time.perf_counter()
import torch, sage_hf
from diffusers import CogVideoXPipeline
pipe = CogVideoXPipeline.from_pretrained("examples/tiny_video")
sage_hf.apply(pipe, "sage3")
frames = pipe("a red circle moves left", num_inference_steps=4).frames[0]
print(f"diffusers: {len(frames)} frames after {time.perf_counter() - start:.0f} s")
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="sage2")
tokens = model.generate(torch.arange(3, 40)[None], max_new_tokens=8)
print(f"transformers: {tokens.shape[1]} tokens after {time.perf_counter() - start:.0f} s")
with sage_hf.drop_in():
    from importlib.metadata import version
    from sageattention import sageattn
    assert version("sageattention") == "2.2.0"
    sageattn(*torch.randn(3, 1, 2, 80, 64))
seconds = time.perf_counter() - start
print(f"drop-in: after {seconds:.0f} s")
assert seconds <= 120
"""


def version_of_source() -> str:
    """Return the version that `sage_hf/__init__.py` says."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "sage_hf/__init__.py").read_text(), re.MULTILINE)
    return version


def find_faults(dist: Path, version: str, changelog: str, citation: str) -> list[str]:
    """Return the faults of the files in a folder, and of the pages that name the version, a sentence each."""
    faults = []
    files = sorted(path.name for path in dist.iterdir())
    wheel = f"sage_hf-{version}-py3-none-any.whl"
    expected = [wheel, f"sage_hf-{version}.tar.gz"]
    if files != sorted(expected):
        faults.append(f"{dist} holds {files}, not {expected}")
    faults += [
        f"{path.name} has {path.stat().st_size / 2**20:.1f} MB, more than {LARGEST >> 20}"
        for path in dist.iterdir()
        if path.stat().st_size > LARGEST
    ]
    if wheel in files:
        faults += find_faults_of_wheel(dist / wheel, version)
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        faults.append(f"CHANGELOG.md has no line '## [{version}] - date'")
    if f"\nversion: {version}\n" not in citation:
        faults.append(f"CITATION.cff does not say 'version: {version}'")
    return faults


def find_faults_of_wheel(wheel: Path, version: str) -> list[str]:
    """Return the faults of a wheel's content and metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        fields = Parser().parsestr(archive.read(metadata).decode())
    faults = []
    top = {name.split("/")[0] for name in names} - {metadata.split("/")[0]}
    if top != TOP_LEVEL:
        faults.append(f"the wheel holds {sorted(top)} at its top, not {sorted(TOP_LEVEL)}")
    if fields["Version"] != version:
        faults.append(f"the wheel says version {fields['Version']}, the source {version}")
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        faults.append(f"the wheel holds weights: {weights}")
    return faults


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command without this process's PYTHONPATH; raise CalledProcessError where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True)


def try_wheel(wheel: Path, torch: str, python: str) -> None:
    """Install the wheel in a fresh environment and run README's snippets and a new user's first calls from it."""
    with tempfile.TemporaryDirectory() as folder:
        work, start = Path(folder), time.perf_counter()
        run(python, "-m", "venv", work / "venv")
        own = work / "venv/bin/python"
        run(own, "-m", "pip", "install", *PIP_OPTIONS, *shlex.split(torch))
        run(
            own,
            "-m",
            "pip",
            "install",
            *PIP_OPTIONS,
            f"{wheel}[video]",
            "pytest>=8",
            "hypothesis",
            "peft",
            "matplotlib",
        )
        print(f"{python}: installed in {time.perf_counter() - start:.0f} s", flush=True)
        checkout = work / "checkout"
        checkout.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        run(own, "-c", NEW_USER, cwd=checkout)
        run(work / "venv/bin/sage-hf", "env", cwd=checkout)
        run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_snippets.py", "-k", "readme", cwd=checkout)


def main(dist: Path, torch: str, *pythons: str) -> int:
    """Run all checks; return 1 if one of the files or pages has a fault."""
    version = version_of_source()
    faults = find_faults(dist, version, (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text())
    for fault in faults:
        print(fault)
    if faults:
        return 1
    for python in pythons:
        try_wheel(dist.resolve() / f"sage_hf-{version}-py3-none-any.whl", torch, python)
    print(f"sage-hf {version} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
