"""The drawn tree: its nodes against the run's own tree positions, its drawing read back, hostile texts."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from draftgauge.acceptance import Policy
from draftgauge.errors import InputError, RunError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.report.drawn_tree import (
    ANCHOR,
    BONUS,
    DRAFT,
    MAX_NODES,
    UNKNOWN,
    DrawnTree,
    Node,
    drawn_tree,
    tree_svg,
)
from draftgauge.report.tokens import token_view
from draftgauge.runs import Run
from tests import tiny

BUDGETS = (4, 8, 16, 64, 100)
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(1)</script>\"'&amp;"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    policies = (Policy("chain"), *(Policy("ddtree", budget) for budget in BUDGETS))
    root = tmp_path_factory.mktemp("trees")
    return evaluate_checkpoint(
        tiny.workshop() / "drafter", tiny.recording().path, Options(policies=policies), root=root
    )


def rows_of(run: Run, prompt: str) -> dict[int, dict[str, list[int]]]:
    return {row["anchor"]: row for row in run.blocks().to_pylist() if row["prompt"] == prompt}


def rounds(run: Run, prompt: str, budget: int) -> dict[int, int]:
    """The accepted tokens of each round by its anchor, out of the text view."""
    tokens = token_view(run, prompt, policy=f"ddtree{budget}").tokens
    found: dict[int, list[bool]] = {}
    for token in tokens:
        if token.round is not None:
            found.setdefault(token.round, []).append(token.kind == "accepted")
    starts = [next(t.position for t in tokens if t.round == number) - 1 for number in found]
    return dict(zip(starts, (sum(some) for some in found.values()), strict=True))


def path_of(nodes: tuple[Node, ...]) -> list[int]:
    """The accepted nodes below the anchor, each of which must hang from the one before."""
    path = [i for i, node in enumerate(nodes) if node.accepted]
    assert path[0] == 0
    assert [nodes[i].parent for i in path[1:]] == path[:-1]
    assert [nodes[i].depth for i in path] == list(range(len(path)))
    return path[1:]


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_accepted_path_is_what_the_walk_accepted(run: Run, budget: int) -> None:
    longest = 0
    for prompt in tiny.PROMPTS:
        accepted = rounds(run, prompt, budget)
        chosen = drawn_tree(run, prompt, budget=budget)
        assert accepted[chosen.anchor or 0] == max(accepted.values())
        for anchor, streak in accepted.items():
            tree = drawn_tree(run, prompt, budget=budget, anchor=anchor)
            assert len(path_of(tree.rows)) == streak
            assert f"draft tokens accepted (thick, with a tick): {streak}." in tree.description
            longest = max(longest, streak)
    assert longest >= 2


@pytest.mark.parametrize("budget", [4, 8])
def test_a_tree_no_wider_than_what_is_kept_is_the_runs_own(run: Run, budget: int) -> None:
    """The node of every reference prefix is at the place that the run says, or in no tree of this size."""
    found = 0
    for prompt in tiny.PROMPTS:
        for anchor, row in rows_of(run, prompt).items():
            if anchor not in rounds(run, prompt, budget):
                continue
            tree = drawn_tree(run, prompt, budget=budget, anchor=anchor)
            drafts = [node for node in tree.rows if node.kind == DRAFT]
            assert len(drafts) == budget
            assert "The run keeps" not in tree.description
            places = [place for place in row["tree_position"] if place <= budget]
            assert path_of(tree.rows) == places
            found += len(places)
    assert found > 10


def test_nodes_are_the_drafters_choices_the_most_probable_paths_first(run: Run) -> None:
    tree = drawn_tree(run, "long", budget=16)
    row = rows_of(run, "long")[tree.anchor or 0]
    scores = []
    for node in tree.rows[1:17]:
        kept = row["top_id"][8 * (node.depth - 1) : 8 * node.depth]
        given = np.exp(row["top_log_prob"][8 * (node.depth - 1) : 8 * node.depth])
        place = [f"⟨{token}⟩" for token in kept].index(node.token)
        assert node.probability == pytest.approx(given[place])
        score, above = np.log(node.probability or 0.0), node.parent or 0
        while above:
            score += np.log(tree.rows[above].probability or 0.0)
            above = tree.rows[above].parent or 0
        scores.append(score)
    assert all(first >= second - 1e-6 for first, second in pairwise(scores))


def test_what_eight_choices_cannot_say_is_said(run: Run) -> None:
    said = set()
    for prompt in tiny.PROMPTS:
        tree = drawn_tree(run, prompt, budget=64)
        row = rows_of(run, prompt)[tree.anchor or 0]
        eighth = [
            place
            for place, node in enumerate(tree.rows[:64])  # the last one has nothing behind it
            if node.kind == DRAFT and node.token == f"⟨{row['top_id'][8 * node.depth - 1]}⟩"
        ]
        found = re.search(r"keeps the 8 first choices of each depth: after node (\d+) ", tree.description)
        assert (found and int(found[1])) == (min(eighth) if eighth else None)
        said.add(bool(found))
    assert True in said
    large = drawn_tree(run, "long", budget=100)
    assert f"Of 100 nodes only the first {MAX_NODES} are drawn." in large.description
    assert sum(node.kind == DRAFT for node in large.rows) >= MAX_NODES


def test_the_targets_token_follows_the_accepted_ones(run: Run) -> None:
    item = tiny.recording().item("long")
    ids = np.frombuffer(b"".join(tiny.recording().tensors(item).tokens.blocks()), "<i4")
    for anchor, streak in rounds(run, "long", 16).items():
        tree = drawn_tree(run, "long", budget=16, anchor=anchor)
        assert tree.rows[0] == Node(0, f"⟨{ids[anchor]}⟩", None, accepted=True, parent=None, kind=ANCHOR)
        added = [node for node in tree.rows if node.kind == BONUS]
        if anchor + streak + 1 == item.length:
            assert not added
            continue
        assert [(n.token, n.depth) for n in added] == [(f"⟨{ids[anchor + streak + 1]}⟩", streak + 1)]
        assert f"The target added “{added[0].token}”" in tree.description


def test_without_the_recording_the_tree_is_drawn_of_ids(run: Run, tmp_path: Path) -> None:
    gone = replace(run, manifest={**run.manifest, "recording": {"path": str(tmp_path / "gone")}})
    tree, known = drawn_tree(gone, "long", budget=16), drawn_tree(run, "long", budget=16)
    assert tree.rows[0].token == UNKNOWN
    assert tree.anchor == known.anchor
    assert tree.rows[1:17] == known.rows[1:17]


def test_what_there_is_no_tree_of_is_said(run: Run, tmp_path: Path) -> None:
    larger = drawn_tree(run, "one", budget=128)
    assert (larger.svg, larger.anchor, larger.rows) == ("", None, ())
    assert "evaluate again with ddtree128" in larger.description
    chain = replace(run, manifest={**run.manifest, "plan": {**run.manifest["plan"], "policies": ["chain"]}})
    assert "evaluate again with ddtree16" in drawn_tree(chain, "one").description
    with pytest.raises(InputError, match=r"DDTree\(16\) has no round at anchor 0 of prompt one"):
        drawn_tree(run, "one", anchor=0)
    with pytest.raises(InputError, match="ddtree0"):
        drawn_tree(run, "one", budget=0)
    with pytest.raises(RunError, match="no prompt 'zero'"):
        drawn_tree(run, "zero")


def boxes(svg: ET.Element) -> list[tuple[float, float, float, float]]:
    found = []
    for rect in svg.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_overlaps_and_nothing_is_cut(run: Run, budget: int) -> None:
    tree = drawn_tree(run, "long", budget=budget)
    svg = ET.fromstring(tree.svg)
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    found = boxes(svg)
    assert len(found) == len(tree.rows)
    for x1, y1, x2, y2 in found:
        assert 0 <= x1 < x2 <= width
        assert 20 <= y1 < y2 <= height
    for (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) in combinations(found, 2):
        assert ax2 < bx1 or bx2 < ax1 or ay2 < by1 or by2 < ay1
    depths = sorted(
        {(x1, node.depth) for (x1, *_), node in zip(sorted(found), sorted_by_depth(tree), strict=True)}
    )
    assert [depth for _, depth in depths] == list(range(len(depths)))


def sorted_by_depth(tree: DrawnTree) -> list[Node]:
    return sorted(tree.rows, key=lambda node: node.depth)


def test_texts_fit_their_boxes() -> None:
    """By the width that a column of a monospaced font takes; what is not ASCII is held to it."""
    long = ("a" * 50, "界" * 50, "e\u0301" * 50, "﷽" * 20, "ab")
    nodes = (Node(0, "a", None, accepted=True, parent=None, kind=ANCHOR),)
    nodes += tuple(Node(1, text, 0.999, accepted=i == 0, parent=0) for i, text in enumerate(long))
    svg = ET.fromstring(tree_svg(nodes, title="t", description="d", name="n"))
    for group in svg.iter(f"{SVG}g"):
        rect, (label, share) = group.find(f"{SVG}rect"), group.findall(f"{SVG}text")
        assert rect is not None
        text = str(label.text)
        width = float(label.attrib["textLength"]) if not text.isascii() else len(text) * 7.25
        assert text.isascii() == ("textLength" not in label.attrib)
        starts = float(share.attrib["x"]) - len(share.text or "") * 7.25
        assert float(label.attrib["x"]) + width < starts
        assert starts < float(rect.attrib["x"]) + float(rect.attrib["width"])


def test_acceptance_does_not_rest_on_colour(run: Run) -> None:
    tree = drawn_tree(run, "long", budget=16)
    svg = ET.fromstring(tree.svg)
    groups = {
        kind: [g for g in svg.iter(f"{SVG}g") if kind in g.attrib["class"].split()]
        for kind in ("accepted", "missed")
    }
    accepted = len(path_of(tree.rows)) + 1
    assert len(groups["accepted"]) == accepted
    assert sum(str(t.text).startswith("✓ ") for t in svg.iter(f"{SVG}text")) == accepted - 1
    widths = {r.attrib["stroke-width"] for g in groups["accepted"] for r in g.iter(f"{SVG}rect")}
    assert widths == {"3"}
    edges = [p for p in svg.iter(f"{SVG}path") if "accepted" in p.attrib["class"].split()]
    assert [edge.attrib["stroke-width"] for edge in edges] == ["3"] * (accepted - 1)
    assert all("stroke-dasharray" in r.attrib for g in groups["missed"] for r in g.iter(f"{SVG}rect"))


def test_it_can_be_read_aloud(run: Run) -> None:
    tree = drawn_tree(run, "long", budget=16)
    svg = ET.fromstring(tree.svg)
    title, desc = svg.find(f"{SVG}title"), svg.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-labelledby"].split() == [title.attrib["id"], desc.attrib["id"]]
    assert title.text == f"DDTree(16) of prompt long, round at position {tree.anchor}"
    assert desc.text == tree.description
    told = [str(node.findtext(f"{SVG}title")) for node in svg.iter(f"{SVG}g")]
    assert sum(text.endswith(", accepted") for text in told) == len(path_of(tree.rows))
    assert sum(text.endswith(", not accepted") for text in told) == 16 - len(path_of(tree.rows))
    other = ET.fromstring(drawn_tree(run, "five", budget=16).svg)
    assert other.attrib["aria-labelledby"] != svg.attrib["aria-labelledby"]


def test_there_is_no_script_no_style_and_no_colour_of_its_own(run: Run) -> None:
    svg = ET.fromstring(drawn_tree(run, "long", budget=64).svg)
    for element in svg.iter():
        assert element.tag.removeprefix(SVG) in {"svg", "title", "desc", "text", "path", "g", "rect"}
        assert not {name for name in element.attrib if name.startswith("on") or name in ("style", "href")}
        for paint in ("fill", "stroke"):
            assert re.fullmatch(
                r"none|var\(--(ink|muted|accepted|missed|surface|line)\)", element.get(paint, "none")
            )


def test_hostile_texts_stay_texts() -> None:
    nodes = (
        Node(0, HOSTILE, None, accepted=True, parent=None, kind=ANCHOR),
        Node(1, HOSTILE, 1e-9, accepted=False, parent=0),
        Node(1, HOSTILE, 1.0, accepted=False, parent=0, kind=BONUS),
    )
    svg = tree_svg(nodes, title=HOSTILE, description=HOSTILE, name="n")
    assert "<script" not in svg
    read = ET.fromstring(svg)
    assert read.findtext(f"{SVG}title") == read.findtext(f"{SVG}desc") == HOSTILE
    assert all(HOSTILE in str(group.findtext(f"{SVG}title")) for group in read.iter(f"{SVG}g"))
    assert {"<1%", ">99%"} <= {text.text for text in read.iter(f"{SVG}text")}
