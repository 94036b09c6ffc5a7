"""Docstrings open with a verb or a noun that names the thing, and pages keep clear of habits that stop readers."""

import ast
import re
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("sage_hf", "kernels", "examples", "benchmarks", "studies", "docs", "integrations", "tests")
FRAGMENTS = {"And", "As", "But", "For", "How", "Not", "Of", "That", "Those", "What", "Where", "Whether", "Why", "With"}
# Nouns name modules and classes; a function does something, also where ruff's D401 does not look: in a property. A test
# holds a promise, which its docstring may state.
ARTICLES = {"A", "An", "The"}
# "Return what fits" names nothing: "Return the tiles that fit".
NAMELESS = re.compile(r"Return (what|those|that|others)\b")

# Records of the past keep their words.
PAGES = [*pages.PAGES, *sorted(ROOT.glob("examples/*/README.md"))]
BANNED = {
    r"\bbesides?\b": 'say "with", "next to" or "also"',
    r"\bas it comes\b": 'say "baseline"',
    r"\b(mask|masks) of (keys|scores)\b": 'say "key-padding mask" or "attention bias"',
    r"\bbalanced?\b": 'say "equalise"',
    r"\bremed(y|ies)\b": 'say "outlier handling"',
    r"\b(runner|peer)s?\b": 'say "provider", or name it',
    r"\bmends?\b": 'say "fix" or "correct"',
    r"\b(split_forward|scattered_forward|exact_forward|delta_scores)\b": "the kernel has another name",
    r"\b(hangs on|that of|those of)\b": "repeat the noun",
    r"(?:^|[.:;] )(What|Those|Others|One that|That which) (?!a )[a-z]+": "open with the noun",
}
BANNED_IN_CODE = re.compile(
    r"(\b|_)(besides?|as[ _]it[ _]comes|masks?[ _]of[ _](keys|scores)|balanced?|remed(y|ies)|hangs[ _]on)(\b|_)|"
    r"\b(split_forward|scattered_forward|exact_forward|delta_scores)\b",
    re.IGNORECASE,
)
"""Banned words that no name, comment or docstring needs."""
BANNED_IN_CPP = re.compile(r"\b(those|what|others|that of|but for|of (which|whose))\b", re.IGNORECASE)
"""Words that stand for a noun in C++ comments and messages, where a reader has no other text to find it in."""
LONGEST_SENTENCE = 40
"""Words of a sentence."""
MOST_CONDITIONS = 2
CONDITION = re.compile(r"\b(if|where|when|unless|until|while|whose)\b", re.IGNORECASE)


def find_openings(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Return each module, class and function that has a docstring, with the docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = ((node, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, kinds))
    return [(node, text) for node, text in texts if text]


def find_faults(tree: ast.Module, articles: set[str] = ARTICLES) -> list[str]:
    """Return "name: opening" for each docstring that opens with a fragment, or a function's with one of `articles`."""
    return [
        f"{getattr(node, 'name', 'the module')}: {' '.join(text.split()[:3])}"
        for node, text in find_openings(tree)
        if (word := text.split()[0].rstrip(",.:;")) in FRAGMENTS
        or NAMELESS.match(text)
        or (word in articles and not isinstance(node, ast.Module | ast.ClassDef))
    ]


def find_indented(tree: ast.Module) -> list[str]:
    """Return the names of classes and functions whose docstring has prose that goes on with more indentation."""
    return [
        node.name
        for node, text in find_openings(tree)
        if not isinstance(node, ast.Module)
        if any(re.match(r"(?!\d+\.|- )(\S.*\n)*\S.*[^:\n]\n ", part) for part in text.split("\n\n"))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_paragraph_of_a_docstring_is_indented_as_one(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {path: find_indented(ast.parse(path.read_text(encoding="utf-8"))) for path in paths}
    assert not {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


def test_a_line_that_is_indented_after_prose_is_found():
    prose, section = (
        "Add.\n\n    A sum\n        goes on.\n    ",
        "Add.\n\n    Args:\n        x: a\n            sum.\n    ",
    )
    trees = [
        ast.parse(f'def add():\n    """{text}"""') for text in (prose, section, "Add.\n\n    1. one\n       step.")
    ]
    assert [find_indented(tree) for tree in trees] == [["add"], [], []]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_opens_with_a_fragment(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    articles = set() if folder == "tests" else ARTICLES
    faults = {path: find_faults(ast.parse(path.read_text(encoding="utf-8")), articles) for path in paths}
    assert not {str(path.relative_to(ROOT)): found for path, found in faults.items() if found}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ('"""What this is."""', ["the module: What this is."]),
        ('class Sum:\n    """Of all."""', ["Sum: Of all."]),
        ('class Sum:\n    @property\n    def of(self):\n        """The sum."""', ["of: The sum."]),
        ('async def add():\n    """Whether."""', ["add: Whether."]),
        ('def add():\n    """Return what is there."""', ["add: Return what is"]),
        ('"""The sum."""\nclass Sum:\n    """A sum."""\n    def add(self):\n        """Return whether it adds."""', []),
    ],
)
def test_fragments_are_found_in_modules_classes_and_functions(source, faults):
    assert find_faults(ast.parse(source)) == faults


def find_sources(folder: str, *extensions: str) -> list[Path]:
    """Return a folder's files with one of the extensions."""
    return sorted(path for extension in extensions for path in (ROOT / folder).rglob(f"*.{extension}"))


def read_cpp(text: str) -> list[str]:
    """Return the comments of C++ source, lines of a comment joined, and its strings; without names in backquotes."""
    parts = re.findall(r'//[^\n]*(?:\n *//[^\n]*)*|"[^"\n]*"', text)
    return [re.sub(r"`[^`]*`", "`code`", re.sub(r"\n *//", "", part)) for part in parts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_keeps_clear_of_banned_words(folder):
    paths = [path for path in find_sources(folder, "py", "cu", "cuh") if path != Path(__file__)]
    found = {str(path.relative_to(ROOT)): BANNED_IN_CODE.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert not {path: words for path, words in found.items() if words}


def test_comments_and_messages_of_cpp_name_their_nouns():
    paths = find_sources("kernels", "cu", "cuh")
    assert paths
    parts = {path.name: read_cpp(path.read_text(encoding="utf-8")) for path in paths}
    for banned in (BANNED_IN_CPP, BANNED_IN_CODE):
        assert not [(name, part) for name, comments in parts.items() for part in comments if banned.search(part)]


def test_read_cpp_joins_the_lines_of_a_comment_and_leaves_out_names():
    source = '// A,\n// `others` of\n  // which\nint others;  // what\nint x;\n// Others\nASSERT(A, "but for B");\n'
    assert read_cpp(source) == ["// A, `code` of which", "// what", "// Others", '"but for B"']
    assert [len(BANNED_IN_CPP.findall(part)) for part in read_cpp(source)] == [1, 1, 1, 1]


def test_banned_words_are_found_in_names_and_text():
    for text in ("a mask of keys", "def test_masks_of_scores(", "hangs_on", "// as it comes"):
        assert BANNED_IN_CODE.search(text), text


def read_prose(page: Path) -> str:
    """Return a page's paragraphs, list items and rows of tables, a line each: no code, headings, generated sections."""
    text = page.read_text(encoding="utf-8")
    for left_out in (r"```.*?```", r"<!-- generated: [\w-]+ -->.*?<!-- end -->", r"^#+ .*?$"):
        text = re.sub(left_out, "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"\n *(- |\d+\. |\|)", r"\n\n\1", text)
    return "\n".join(" ".join(part.split()).lstrip("-| ") for part in re.split(r"\n\s*\n", text) if part.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_keeps_clear_of_banned_words(page):
    prose = re.sub(r"`[^`\n]*`", "`code`", read_prose(page))
    found = [
        f"{prose[max(0, match.start() - 40) : match.end() + 40]!r}: {instead}"
        for pattern, instead in BANNED.items()
        for match in re.finditer(pattern, prose, re.MULTILINE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_of_a_page_is_short_and_has_few_conditions(page):
    found = []
    for line in read_prose(page).splitlines():
        for sentence in re.split(r"(?<=[.!?:;])\s", line.replace("|", ". ")):
            words, conditions = len(sentence.split()), len(CONDITION.findall(sentence))
            if words > LONGEST_SENTENCE or conditions > MOST_CONDITIONS:
                found.append(f"{words} words, {conditions} conditions: {sentence}")
    assert not found, "\n".join(found)


def test_read_prose_keeps_text_and_leaves_out_code_and_tables_of_results(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\nOne\ntwo.\n- b\n```\ncode\n```\n<!-- generated: x -->\n| 1 |\n<!-- end -->\n| [c](d) | e |\n"
    )
    assert read_prose(page) == "One two.\nb\n[c] | e |"
