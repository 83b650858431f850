"""docs/messages.md has one paragraph for every message that the package can give, and none for another."""

import ast
import re
from collections import Counter
from pathlib import Path

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "messages.md"
#: Functions that make a message of the slug that they are given first.
MAKERS = {"Control": "_nowhere"}


def literals(node: ast.expr) -> list[str]:
    """The strings that an argument can be: a literal, or an f-string that says a direction."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
        return [str("".join(map(str, parts))).replace("*", way) for way in ("later", "earlier")]
    return []


def slugs(kind: str) -> set[str]:
    """Every slug that is given to `kind` somewhere in the package, by position or by name."""
    found = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in (kind, MAKERS.get(kind)) and node.args:
                found |= set(literals(node.args[0]))
            if kind == "Control":
                named = [k.value for k in node.keywords if k.arg == "slug"]
                found |= {text for value in named for text in literals(value)}
    return found


def test_every_message_has_one_paragraph_and_no_other_has() -> None:
    headings = re.findall(r"^### (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [slug for slug, count in Counter(headings).items() if count > 1] == []
    given = slugs("Caveat") | slugs("Control")
    assert len(given) > 40
    assert set(headings) == given


def test_every_paragraph_says_something() -> None:
    sections = re.split(r"^### \S+$", Path(PAGE).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert min(len(section.split("\n## ")[0].split()) for section in sections) >= 10
