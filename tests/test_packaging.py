"""A user installs a wheel, an editable checkout or a plain one; each imports and none shadows other packages."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import sage_hf
from tests.helpers.forks import Forks

ROOT = Path(__file__).parents[1]
USE = """
import sage_hf, sage_kernels, sage_kernels.formats, sage_hf.diffusers, sage_hf.transformers
sage_hf.SageConfig.from_name("cogvideox-2b")
print(sage_hf.__file__)
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked and new source files, so that builds leave nothing in the checkout."""
    target = tmp_path_factory.mktemp("source")
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, files):
        if name.startswith(("sage_hf/", "kernels/", "configs/")) or "/" not in name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                (target / name).write_bytes((ROOT / name).read_bytes())
    return target


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-c",
        "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])",
        target,
        cwd=source,
    )
    (built,) = target.glob("sage_hf-*.whl")
    return built


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh virtual environment that sees this one's libraries but not its sage_hf; returns its python."""
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    for library in map(Path, sys.path):
        if library.name == "site-packages":
            for entry in library.iterdir():
                if "sage_hf" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
                    (site / entry.name).symlink_to(entry)
    return tmp_path / "venv/bin/python"


def install(python: Path, *what: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation", *what)


def imports_from(python: Path, cwd: Path) -> str:
    """Import everything and read a shipped config; return where sage_hf comes from in that environment."""
    return run(python, "-c", USE, cwd=cwd, PYTHONPATH="").strip()


def test_the_wheel_holds_both_packages_the_configs_and_nothing_else_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sage_hf", "sage_kernels"}
    assert "sage_kernels/formats/nvfp4.py" in names
    assert "sage_hf/configs/cogvideox-2b.json" in names
    assert "sage_hf/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_every_source_file_of_the_two_packages(wheel: Path, source: Path) -> None:
    """A package missing from pyproject.toml's list would be missing from the wheel, and so would CUDA C++."""
    shipped = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(source)) for path in source.glob("sage_hf/**/*.py")}
    for suffix in ("py", "cu", "cuh"):
        files = source.glob(f"kernels/sage_kernels/**/*.{suffix}")
        expected |= {str(path.relative_to(source / "kernels")) for path in files}
    assert expected <= shipped


def test_the_version_is_that_of_sage_hf_and_building_imports_no_torch() -> None:
    read = (
        "import sys; from setuptools.config.pyprojecttoml import read_configuration; "
        "print(read_configuration('pyproject.toml')['project']['version']); assert 'torch' not in sys.modules"
    )
    assert run(sys.executable, "-W", "ignore", "-c", read).strip() == sage_hf.__version__


def test_the_folder_kernels_is_no_package() -> None:
    """It would shadow Hugging Face's package of that name and make `import transformers` crash."""
    assert not (ROOT / "kernels/__init__.py").exists()


@pytest.mark.audit
def test_an_installed_wheel_imports(wheel: Path, environment: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", environment, "install", "-q", "--no-deps", wheel)
    assert str(tmp_path) in imports_from(environment, tmp_path)


EXTRAS = ("matplotlib", "imageio", "sentencepiece", "peft", "pytest", "hypothesis")
EXAMPLES_HELP = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    for arguments in ([], ["--help"]):
        sys.argv, sys.path[0] = [script, *arguments], str(script).rpartition("/")[0]
        errors, output = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
                runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code
        # Without arguments a script says how it is used.
        assert code == 0 or (not arguments and code == 2 and "usage:" in errors.getvalue()), (script, errors.getvalue())
"""


@pytest.mark.audit
def test_a_plain_install_runs_the_examples_without_the_extras(source: Path, environment: Path, tmp_path: Path) -> None:
    """The training scripts, from another folder than the checkout."""
    install(environment, source)
    for entry in next((tmp_path / "venv").glob("lib/python*/site-packages")).iterdir():
        if entry.name.startswith(EXTRAS):
            entry.unlink()
    scripts = [ROOT / "examples" / f"{name}.py" for name in ("train_language_model", "finetune_tiny_video")]
    run(environment, "-c", EXAMPLES_HELP, *scripts, cwd=tmp_path, PYTHONPATH="")
    assert "usage: sage-hf" in run(environment.with_name("sage-hf"), "--help", cwd=tmp_path, PYTHONPATH="")


@pytest.mark.audit
def test_a_plain_install_from_source_imports(source: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, source)
    assert str(tmp_path) in imports_from(environment, tmp_path)


@pytest.mark.audit
def test_an_editable_install_imports_from_the_source(source: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, "-e", source)
    assert imports_from(environment, tmp_path) == str(source / "sage_hf/__init__.py")


def test_importing_sage_hf_imports_no_diffusers_and_does_not_initialise_cuda(forks: Forks) -> None:
    forks.run(
        "import sys, torch, sage_hf; assert 'diffusers' not in sys.modules; assert not torch.cuda.is_initialized()"
    )


def test_the_kernel_backend_imports_none_of_the_libraries_above_it(forks: Forks) -> None:
    forks.run("import sys, sage_kernels.ops; assert not {'diffusers', 'transformers', 'sage_hf'} & set(sys.modules)")


def test_the_lower_bounds_are_the_versions_the_oldest_suite_runs_on() -> None:
    pins = dict(re.findall(r"^([a-z]+)==(\S+)$", (ROOT / "tests/oldest.txt").read_text(), re.MULTILINE))
    dependencies = re.search(
        r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    assert dependencies
    bounds = dict(re.findall(r'"([a-z]+)>=([0-9.]+)', dependencies.group(1)))
    assert bounds == pins


def test_linters_before_a_commit_match_the_tests() -> None:
    pins = dict(re.findall(r'"(ruff|clang-format)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    hooks = dict(
        re.findall(r"/\S*?(ruff|clang-format)\S*\n +rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    )
    assert hooks == pins


def test_both_integrations_run_the_same_commands() -> None:
    targets = " ".join(re.findall(r"^make (.*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)).split()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert targets and all(f"- run: make {target}\n" in workflow for target in targets)


def test_named_python_versions_match_the_workflow() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (run_on,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert named == re.findall(r"3\.\d+", run_on)
    assert f'requires-python = ">={named[0]}"' in project
