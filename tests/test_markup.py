"""Markdown of what is not trusted: read by a parser of Markdown, nothing of it is anything but text."""

import re

import pytest
from markdown_it import MarkdownIt

from draftgauge.report.markup import code, details, escaped, paragraph, table

RENDER = MarkdownIt("commonmark").enable("table").render
HOSTILE = [
    "a|b",
    "<script>alert(1)</script>",
    "`",
    "``a`b```",
    "a\\|b\\",
    "*b* _c_ **d** ~~e~~",
    "[a](http://x) ![i](j)",
    "# head",
    "- item",
    "12. item",
    "> quote",
    "---",
    "~~~ sh",
    "&lt; &amp;",
    "<!--",
    "\\",
]


def text_of(html: str) -> str:
    """What a browser shows of it: tags away, entities resolved."""
    plain = re.sub(r"<[^>]+>", "", html)
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        plain = plain.replace(entity, character)
    return plain.strip()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_is_shown_as_it_is_in_a_cell_of_a_table(text: str) -> None:
    html = RENDER(table(("name", "tau"), [(code(text), "1.0")]))
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)
    assert len(cells) == 4, html
    assert re.fullmatch(r"<code>.*</code>", cells[2])
    assert text_of(cells[2]) == text
    assert cells[3] == "1.0"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_sentence_is_shown_as_it_is(text: str) -> None:
    html = RENDER(paragraph(escaped(text)))
    assert re.fullmatch(r"<p>[^<]*</p>\n", html), html
    assert text_of(html) == text
    item = RENDER(paragraph(escaped(text), first="- ", indent="  "))
    assert re.fullmatch(r"<ul>\n<li>[^<]*</li>\n</ul>\n", item), item


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("shown", [code, escaped])
def test_no_broken_line_begins_a_block(text: str, shown: object) -> None:
    """Every length of what stands before makes the line break at another place of the text."""
    assert callable(shown)
    for before in range(60, 80):
        html = RENDER(paragraph(f"{'x' * before} {shown(f'a {text} {text} b')} end"))
        assert html.count("<p>") == 1, html
        inside = re.sub(r"</?(p|code)>", "", html)
        assert "<" not in inside, html


def test_lines_are_those_of_a_terminal() -> None:
    lines = paragraph(escaped("word " * 60), first="- ", indent="  ").splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:2] for line in lines] == ["- ", *["  "] * (len(lines) - 1)]
    assert paragraph("of 3.541 it", first="") == "of 3.541 it"
    assert paragraph("3.541 it") == "3.541 it"


def test_what_acts_unseen_is_spelled_out() -> None:
    assert code("a\u202eb\x1b[0m\nc") == "`a\\u202eb\\u001b[0m c`"
    assert escaped("a\u202eb") == "a\\\\u202eb"
    assert text_of(RENDER(escaped("a\u202eb"))) == "a\\u202eb"


def test_nobody_is_mentioned_and_addresses_stay() -> None:
    assert escaped("@all of a@b, coverage@4") == "@\u200ball of a@b, coverage@4"


def test_long_text_is_cut_and_says_so() -> None:
    assert code("x" * 2_000_000, longest=8) == "`xxxxxxx…`"
    assert len(escaped("x" * 2_000_000)) == 2000


def test_a_table_is_one_in_plain_text_too() -> None:
    assert table(("a", "tau"), [("`long`", "1.5"), ("b", "10.25")]) == (
        "| a      |   tau |\n| ------ | ----: |\n| `long` |   1.5 |\n| b      | 10.25 |"
    )


def test_a_folded_part_holds_markdown() -> None:
    assert "<table>" in RENDER(details("Per depth", table(("a", "b"), [("1", "2")])))
