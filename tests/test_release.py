"""Check what `make release-check` refuses to publish, and what people are asked for who report something."""

import runpy
import zipfile
from pathlib import Path

import pytest

import sage_hf

ROOT = Path(__file__).parents[1]
CHECK = runpy.run_path(str(ROOT / ".ci/release_check.py"))
WHEEL = "sage_hf-1.2.3-py3-none-any.whl"
CHANGELOG, CITATION = "\n## [1.2.3] - 2030-01-31\n", "\nversion: 1.2.3\n"


def make_dist(folder: Path, files: dict[str, str], wheel: str = WHEEL, size: int = 0) -> Path:
    (folder / "sage_hf-1.2.3.tar.gz").write_bytes(bytes(size))
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return folder


def content(version: str = "1.2.3", **others: str) -> dict[str, str]:
    files = {"sage_hf/__init__.py": "", "sage_kernels/__init__.py": "", "sage_hf/x.dist-info/METADATA": "Version: 9"}
    return files | {f"sage_hf-{version}.dist-info/METADATA": f"Name: sage-hf\nVersion: {version}\n"} | others


def faults(dist: Path, changelog: str = CHANGELOG, citation: str = CITATION) -> str:
    return "; ".join(CHECK["find_faults"](dist, "1.2.3", changelog, citation))


def test_a_good_release_has_no_fault(tmp_path):
    assert not faults(make_dist(tmp_path, content()))


@pytest.mark.parametrize(
    ("dist", "pages", "fault"),
    [
        ({"files": content(), "size": 6 * 2**20}, {}, "6.0 MB"),
        ({"files": content(), "wheel": "sage_hf-1.2.3-cp311-cp311-linux_x86_64.whl"}, {}, "holds"),
        ({"files": content() | {"kernels/__init__.py": ""}}, {}, "at its top"),
        ({"files": content() | {"sage_hf/tiny.safetensors": ""}}, {}, "weights"),
        ({"files": content("1.2.2")}, {}, "says version 1.2.2"),
        ({"files": content()}, {"changelog": "## [Unreleased]\n"}, "CHANGELOG.md"),
        ({"files": content()}, {"citation": "version: 1.2.2\n"}, "CITATION.cff"),
    ],
)
def test_a_fault_is_named(tmp_path, dist, pages, fault):
    assert fault in faults(make_dist(tmp_path, **dist), **pages)


def test_the_pages_of_this_version_name_it_with_its_date():
    assert CHECK["version_of_source"]() == sage_hf.__version__
    (date,) = [line.split()[-1] for line in (ROOT / "CITATION.cff").read_text().splitlines() if "released" in line]
    assert f"## [{sage_hf.__version__}] - {date}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("template", ["bug", "gpu"])
def test_a_report_comes_with_the_output_of_env_and_check(template):
    text = (ROOT / f".github/ISSUE_TEMPLATE/{template}.yml").read_text()
    assert "`sage-hf env`" in text and "`sage-hf check`" in text
