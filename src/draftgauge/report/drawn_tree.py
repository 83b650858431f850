"""The draft tree of one round, drawn: nodes from left to right by depth, the accepted path emphasised.

The tree is expanded again from the first choices that a run keeps. What was accepted is the run's own count. The
drawing is one inline SVG without script or style; its colours are the page's variables (`--ink`, `--muted`,
`--surface`, `--line`, `--accepted`, `--missed`). Knows nothing of pages.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from draftgauge.acceptance import Policy, Walk, walk_blocks
from draftgauge.errors import InputError
from draftgauge.report.text import visible
from draftgauge.report.tokens import (
    DEPTH,
    END_OF_TEXT,
    NOT_COVERED,
    OUTSIDE,
    Drafts,
    Reference,
    drafts_of,
    ended,
    reference_of,
)
from draftgauge.runs import Run
from draftgauge.tree import Tree, expand

#: No more nodes than this are drawn.
MAX_NODES = 64
#: The kinds of node: the anchor, what the drafter proposed, and the token that the target added.
ANCHOR, DRAFT, BONUS = "anchor", "draft", "bonus"
#: What stands for the text of a token that is not at hand.
UNKNOWN = "?"

_LABEL = 14  # columns of a token's text in a node
_COLUMN = 7.3  # units that one column of the monospaced text takes, rounded up
_HEIGHT, _STEP, _GAP, _MARGIN, _HEAD = 22.0, 30.0, 38.0, 8.0, 26.0


@dataclass(frozen=True)
class Node:
    """One node of a drawn tree.

    `parent` is the place of the node that it hangs from in the sequence of all nodes, None for the anchor, which
    comes first and has depth 0. `probability` is what the drafter gave this token at its depth, None where nothing is
    kept of that.
    """

    depth: int
    token: str
    probability: float | None
    accepted: bool
    parent: int | None
    kind: str = DRAFT


@dataclass(frozen=True)
class DrawnTree:
    """A round's draft tree: `svg`, what it shows in words, the round's anchor, and the nodes as rows of a table.

    Without a tree to draw `svg` is empty, `anchor` None, and `description` says why.
    """

    svg: str
    description: str
    anchor: int | None
    rows: tuple[Node, ...]


def drawn_tree(run: Run, prompt: str, *, budget: int = 16, anchor: int | None = None) -> DrawnTree:
    """The DDTree of `budget` nodes of one of its own walk's rounds: that at `anchor`, or the one that accepted most.

    Raises:
        RunError: The run has no such prompt.
        InputError: The budget is below 1, or the walk has no round at that anchor.
    """
    drafts, policy = drafts_of(run, prompt), Policy.parse(f"ddtree{budget}")
    try:
        walk = walk_blocks(policy, drafts.blocks)
    except InputError as exc:  # measured without trees, with smaller ones, or only where other walks go
        return DrawnTree("", f"There is no tree to draw: {exc}", None, ())
    rounds = walk.anchors.tolist()
    if not rounds:
        return DrawnTree("", "There is no tree to draw: the completion has no round.", None, ())
    if anchor is not None and anchor not in rounds:
        raise InputError(f"The walk of {policy.label} has no round at anchor {anchor} of prompt {prompt}.")
    number = int(walk.streak.argmax()) if anchor is None else rounds.index(anchor)
    reference = reference_of(run, prompt)
    row = int(np.searchsorted(drafts.blocks.anchors, rounds[number]))
    lists = np.minimum(drafts.top_log_probs[row], np.float32(0.0))
    tree = expand(lists, budget=min(budget, MAX_NODES))
    nodes = _nodes(tree, drafts, walk, number=number, reference=reference)
    words = " ".join(_words(tree, walk, nodes, number=number, kept=lists.shape[1]))
    name = hashlib.sha256(
        f"{run.name} {prompt} {rounds[number]} {budget}".encode("utf-8", "surrogatepass")
    ).hexdigest()[:8]
    title = f"{policy.label} of prompt {visible(prompt)}, round at position {rounds[number]}"
    svg = tree_svg(nodes, title=title, description=words, name=f"tree-{name}")
    return DrawnTree(svg, words, rounds[number], nodes)


def _nodes(tree: Tree, drafts: Drafts, walk: Walk, *, number: int, reference: Reference) -> tuple[Node, ...]:
    """The anchor, the tree's nodes in the order of their expansion, and what follows of the reference.

    An accepted token that is none of the kept choices is not in the tree as it was expanded again: it comes behind.
    """
    anchor, streak = int(walk.anchors[number]), int(walk.streak[number])
    row = int(np.searchsorted(drafts.blocks.anchors, anchor))
    ranks = drafts.blocks.ranks[row].tolist()
    choices = [drafts.choices(row, depth + 1, texts=reference.texts) for depth in range(walk.depth)]

    def said(depth: int) -> str:
        if reference.tokens is not None:
            return reference.texts.label(int(reference.tokens[anchor + depth]))
        known = 0 < depth <= walk.depth and ranks[depth - 1] < len(choices[depth - 1])
        return choices[depth - 1][ranks[depth - 1]].text if known else UNKNOWN

    nodes, last = [Node(0, said(0), None, accepted=True, parent=None, kind=ANCHOR)], 0
    steps = zip(tree.ranks.tolist(), tree.depths.tolist(), tree.parents.tolist(), strict=True)
    for rank, depth, parent in steps:
        accepted = parent == last and depth <= streak and rank == ranks[depth - 1]
        choice = choices[depth - 1][rank]
        nodes.append(Node(depth, choice.text, choice.probability, accepted=accepted, parent=parent))
        last = len(nodes) - 1 if accepted else last
    for depth in range(nodes[last].depth + 1, min(streak + 1, int(walk.room[number])) + 1):
        accepted = depth <= streak
        kind, probability = (DRAFT if accepted else BONUS), drafts.probability(row, depth)
        nodes.append(Node(depth, said(depth), probability, accepted=accepted, parent=last, kind=kind))
        last = len(nodes) - 1
    return tuple(nodes)


def _words(tree: Tree, walk: Walk, nodes: Sequence[Node], *, number: int, kept: int) -> Iterator[str]:
    """What the drawing shows, and what it cannot show."""
    streak, budget, drawn = int(walk.streak[number]), walk.policy.n or 0, len(tree.ranks)
    yield (
        f"{drawn} nodes, the deepest at depth {max(tree.depths.tolist(), default=0)}; "
        f"draft tokens accepted (thick, with a tick): {streak}."
    )
    why = ended(walk, number)
    yield {
        DEPTH: "Every drafted depth was accepted.",
        END_OF_TEXT: "The text ends there.",
        NOT_COVERED: "The next token was not covered: the drafter had put it too low for a tree of this width.",
        OUTSIDE: "The next token is outside the drafter's vocabulary.",
    }.get(why, f"The next token was {why}: wide enough for the tree, and not selected into it.")
    if nodes[-1].kind == BONUS:
        yield f"The target added “{nodes[-1].token}” (dashed, with a plus)."
    if budget > MAX_NODES:
        yield f"Of {budget} nodes only the first {MAX_NODES} are drawn."
    if behind := sum(n.accepted and n.kind == DRAFT for n in nodes[drawn + 1 :]):
        yield f"Accepted tokens that are none of these nodes, and were added to them: {behind}."
    if kept - 1 in tree.ranks[:-1]:
        first = tree.ranks.tolist().index(kept - 1) + 1
        yield (
            f"The run keeps the {kept} first choices of each depth: after node {first} there may be others in the "
            "tree, in place of the last ones here."
        )


def tree_svg(nodes: Sequence[Node], *, title: str, description: str, name: str) -> str:
    """The nodes as one inline SVG of its own size; `name` is unique in the page and plain."""
    rows, columns = _rows(nodes), _columns(nodes)
    places = [
        _Place(columns[node.depth], _HEAD + _STEP * row, columns[node.depth + 1] - columns[node.depth] - _GAP)
        for node, row in zip(nodes, rows, strict=True)
    ]
    width = columns[-1] - _GAP + _MARGIN
    height = _HEAD + _STEP * max(rows) + _HEIGHT + _MARGIN
    heads = [
        f'<text class="tree-depth" x="{x:g}" y="14" fill="var(--muted)">{"depth " if depth > 0 else ""}'
        f"{depth or ANCHOR}</text>"
        for depth, x in enumerate(columns[:-1])
    ]
    # What is accepted comes last, so that it lies above the rest.
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].accepted)
    edges = [
        _edge(places[parent], places[i], nodes[i]) for i in order if (parent := nodes[i].parent) is not None
    ]
    return "".join(
        (
            f'<svg class="draft-tree" role="img" aria-labelledby="{name}-title {name}-desc" width="{width:g}" '
            f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-desc">{escape(description)}</desc>',
            *heads,
            *edges,
            *(_box(nodes[i], places[i]) for i in order),
            "</svg>",
        )
    )


@dataclass(frozen=True)
class _Place:
    """Where a node's box is: its upper left corner, and how wide it is."""

    x: float
    y: float
    width: float


def _rows(nodes: Sequence[Node]) -> list[int]:
    """The row of each node: a leaf has one of its own, any other node that of its first child."""
    children: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        if node.parent is not None:
            children[node.parent].append(i)
    rows, free, waiting = [0] * len(nodes), 0, [0]
    while waiting:
        i = waiting.pop()
        first = nodes[i].parent is None or children[nodes[i].parent or 0][0] == i
        rows[i] = free if first else free + 1
        free = rows[i]
        waiting += reversed(children[i])
    return rows


def _columns(nodes: Sequence[Node]) -> list[float]:
    """Where the column of each depth begins, and where the next one would."""
    edges = [float(_MARGIN)]
    for depth in range(max(node.depth for node in nodes) + 1):
        widest = max(_width(_label(n)) + _width(_share(n)) + 1 for n in nodes if n.depth == depth)
        edges.append(edges[-1] + max(widest, 8) * _COLUMN + 2 * _MARGIN + _GAP)
    return edges


def _edge(parent: _Place, child: _Place, node: Node) -> str:
    x1, y1, x2, y2 = parent.x + parent.width, parent.y + _HEIGHT / 2, child.x, child.y + _HEIGHT / 2
    middle = (x1 + x2) / 2
    return (
        f'<path class="tree-edge{_kind(node)}" d="M{x1:g} {y1:g} C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}" '
        f'fill="none" {_stroke(node)}/>'
    )


def _box(node: Node, place: _Place) -> str:
    label, share, base = _label(node), _share(node), place.y + 15
    squeezed = (
        ""
        if label.isascii()
        else f' textLength="{max(1, _width(label)) * 7.2:g}" lengthAdjust="spacingAndGlyphs"'
    )
    bold = ' font-weight="bold"' if node.accepted else ""
    return (
        f'<g class="tree-node{_kind(node)}"><title>{escape(_told(node))}</title>'
        f'<rect x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" height="{_HEIGHT:g}" rx="5" '
        f'fill="var(--surface)" {_stroke(node)}/>'
        f'<text x="{place.x + _MARGIN:g}" y="{base:g}" fill="var(--ink)"{bold}{squeezed}>{escape(label)}</text>'
        f'<text x="{place.x + place.width - _MARGIN:g}" y="{base:g}" fill="var(--muted)" text-anchor="end">'
        f"{escape(share)}</text></g>"
    )


def _kind(node: Node) -> str:
    return " accepted" if node.accepted else " missed" if node.kind == BONUS else ""


def _stroke(node: Node) -> str:
    if node.kind == BONUS:
        return 'stroke="var(--missed)" stroke-width="1.5" stroke-dasharray="4 3"'
    if node.accepted:
        return 'stroke="var(--accepted)" stroke-width="3"'
    return 'stroke="var(--muted)" stroke-width="1"'


def _told(node: Node) -> str:
    """What a node is, in words."""
    if node.kind == ANCHOR:
        return f"{node.token}: the last token before this round"
    given = "" if node.probability is None else f", probability {_share(node)}"
    what = "added by the target" if node.kind == BONUS else "accepted" if node.accepted else "not accepted"
    return f"{node.token}: depth {node.depth}{given}, {what}"


def _share(node: Node) -> str:
    """The probability in percent, never rounded to none or all; nothing where it is not known."""
    if node.probability is None:
        return ""
    percent = round(100 * node.probability)
    return {0: "<1%", 100: ">99%"}.get(percent, f"{percent}%")


def _label(node: Node) -> str:
    """The token's text, shortened to fit, behind the sign of what became of it."""
    sign = "+ " if node.kind == BONUS else "✓ " if node.accepted and node.kind == DRAFT else ""
    if _width(node.token) <= _LABEL:
        return sign + node.token
    cut = node.token
    while _width(cut) > _LABEL - 1:
        cut = cut[:-1]
    return f"{sign}{cut}…"


def _width(text: str) -> int:
    """Columns of a monospaced text: two for wide characters, none for what stands above another one."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
