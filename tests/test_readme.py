"""Check that what README.md and the pages of docs/ say is so."""

import ast
import json
import re
from pathlib import Path
from statistics import geometric_mean

import pages
import pytest

import sage_hf
from sage_hf.app import cli
from sage_kernels.spec.recipe import RECIPES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [*pages.PAGES, *sorted(ROOT.glob("examples/*/README.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
# What the examples of docs/adding.md make.
MADE_BY_EXAMPLES = {"tests/kernels/test_plain.py"}


PLACES = ROOT, ROOT / "kernels", ROOT / "kernels/sage_kernels"
"""Folders that a page's paths begin in."""


def fragments(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub writes them behind #."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_has_at_most_120_lines():
    assert len(README.splitlines()) <= 120


@each_page
def test_generated_sections_match_results_and_code(page):
    assert page.read_text() == pages.render(page), "run `python docs/pages.py`"


def test_every_generated_section_is_on_a_page():
    found = {name for page in PAGES for name in re.findall(r"<!-- generated: ([\w-]+) -->", page.read_text())}
    assert found == set(pages.SECTIONS)


@each_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, fragment = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not fragment or fragment in fragments(linked), target


@each_page
def test_every_name_file_and_command_it_mentions_exists(page):
    text = page.read_text()
    for name in re.findall(r"sage_hf\.([a-z_]+)\(", text) + re.findall(r"from sage_hf import (\w+)", text):
        assert hasattr(sage_hf, name), name
    for path in re.findall(
        r"(?<![\w/.])(?:benchmarks|configs|docs|examples|kernels|sage_hf|studies|tests)/[\w./-]*\w", text
    ):
        assert "NAME" in path or path in MADE_BY_EXAMPLES or (ROOT / path).exists(), path
    code = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    for target in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
    for command in re.findall(r"^sage-hf ([a-z]+)", code, re.MULTILINE):
        assert command in cli.COMMANDS, command


def named_in(text: str) -> list[tuple[str, str]]:
    """Return the pairs (name, path) of a text's "`name` in `path`", "of" for "in", and several names of a path."""
    lists = re.findall(r"((?:`[\w.]+`(?:,? and |, | ))+)(?:in|of)\s`([\w/]+\.py)`", " ".join(text.split()))
    return [(name, path) for names, path in lists for name in re.findall(r"`([\w.]+)`", names)]


def defines(path: Path, name: str) -> bool:
    """Return whether a file's top level defines a name; "Class.name" is looked for in the class."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    *outer, last = name.split(".")
    for part in outer:
        found = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        body = found[0] if found else []
    assigned = [x for node in body if isinstance(node, ast.Assign | ast.AnnAssign) for x in ast.walk(node)]
    names = {x.id for x in assigned if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return last in names | {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@each_page
def test_a_file_defines_each_name_that_a_page_says_is_in_it(page):
    for name, path in named_in(page.read_text()):
        files = [folder / path for folder in PLACES if (folder / path).exists()]
        assert files and any(defines(file, name) for file in files), f"`{name}` in `{path}`"


def test_names_are_looked_for_in_the_file_that_a_text_names():
    assert named_in("`A`, `b` and `C.d` in\n`x/y.py`; `e` of `z.py`") == [
        *(("A", "x/y.py"), ("b", "x/y.py"), ("C.d", "x/y.py"), ("e", "z.py"))
    ]
    names = ("ROOT", "defines", "defines.path", "missing", "PLACES.x")
    assert [defines(Path(__file__), name) for name in names] == [True, True, False, False, False]


def test_the_recipes_of_the_readme_exist_and_every_recipe_is_explained():
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) <= set(RECIPES)
    assert set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/usage.md").read_text(), re.MULTILINE)) >= set(RECIPES)


def test_every_configuration_that_ships_is_named():
    usage = (ROOT / "docs/usage.md").read_text()
    assert all(f"`{name}`" in usage for name in sage_hf.SageConfig.names())


def test_sage3_has_at_most_four_fifths_of_the_published_error():
    """Geometric mean ≤ 0.80, no model above 0.90."""
    ratios = list(pages.read_result("cpu-output_errors")["sage3_over_paper"].values())
    assert len(ratios) >= 2 and max(ratios) <= 0.90 and geometric_mean(ratios) <= 0.80


def test_the_tiny_model_draws_held_out_captions_exactly_and_in_four_bits():
    scores = json.loads((ROOT / "examples/tiny_video/scores.json").read_text())
    for recipe, fewest in (("exact", 48), ("sage3", 47)):
        assert scores[recipe]["prompts"] == 48
        for found in (scores[recipe], scores[recipe]["pairs"]):
            assert min(found[attribute] for attribute in ("colour", "shape", "direction")) >= fewest
