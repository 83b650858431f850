"""The report as a page: its numbers are the summary's, it needs nothing from elsewhere, and text stays text."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftgauge.errors import RunError
from draftgauge.evaluate import Options, evaluate_checkpoint
from draftgauge.report.page import page, write_plots
from draftgauge.report.speedup import Costs
from draftgauge.runs import Run
from draftgauge.stated import Stated
from tests import tiny

HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 5000 + "'\"&{{ 7 * 7 }}"


class Reader(HTMLParser):
    """What a browser would see: tags, addresses, and the numbers by their names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.numbers = set[str](), list[str](), dict[str, float]()
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.addresses += [str(v) for k, v in attrs if k in ("href", "src", "xlink:href", "action", "data")]
        self.ids += [str(found["id"])] if "id" in found else []
        assert not [name for name in found if name.startswith("on")]
        if tag == "data":
            self.numbers[str(found["data-name"])] = float(str(found["value"]))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    root, shop = tmp_path_factory.mktemp("runs"), tiny.workshop()
    other = tiny.trainer_pt(
        root / "step_7" / "checkpoint.pt",
        {name: tensor.flip(0) if name == "fc.weight" else tensor for name, tensor in tiny.weights().items()},
        step=7,
        config=tiny.drafter_config(),
    )
    ours = evaluate_checkpoint(shop / "drafter", tiny.recording().path, root=root)
    return ours, evaluate_checkpoint(other, tiny.recording().path, root=root)


@pytest.fixture(scope="module")
def text(runs: tuple[Run, Run]) -> str:
    return page([runs[0]], baseline=runs[1])


def test_the_numbers_on_the_page_are_the_summarys(text: str, runs: tuple[Run, Run]) -> None:
    found, summary = Reader(text).numbers, runs[0].summary
    chain = summary["policies"]["chain"]
    for kind in ("tau_response", "tau_pooled"):
        for part in ("value", "low", "high"):
            assert found[f"headline/chain.{kind}/{part}"] == chain[kind][part]
    for slug, policy in summary["policies"].items():
        assert found[f"budgets/{policy['label']}/tau by response"] == policy["tau_response"]["value"]
        assert found[f"ends/{policy['label']}/not covered"] == policy["counts"]["ended_not_covered"]
        assert found[f"comparison/{slug}/run"] == policy["tau_response"]["value"]
        assert (
            found[f"comparison/{slug}/baseline"] == runs[1].summary["policies"][slug]["tau_response"]["value"]
        )
    for d, value in enumerate(summary["per_depth"]["survival"], start=1):
        assert found[f"depth/{d}/survival"] == value
    for name, prompt in summary["prompts"].items():
        assert found[f"prompts/{name}/tau, chain"] == prompt["policies"]["chain"]["tau"]
    for name, value in chain["conventions"].items():
        assert found[f"conventions/{name}/chain"] == value


def test_it_needs_nothing_from_elsewhere_and_runs_nothing(text: str) -> None:
    seen = Reader(text)
    assert not seen.tags & {"script", "iframe", "object", "embed", "form", "link", "img", "base"}
    assert all(address.startswith("#") for address in seen.addresses)
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert len(seen.ids) == len(set(seen.ids))


def test_it_says_all_that_an_engineer_decides_from(text: str, runs: tuple[Run, Run]) -> None:
    said = " ".join(Reader(text).text)
    for caveat in runs[0].summary["caveats"]:
        assert caveat["text"][:60] in said
    for part in (
        "Trusted." if runs[0].summary["trust"]["trusted"] else "Not trusted",
        "Projected speed-up",
        "A model",
    ):
        assert part in said
    for value in (
        runs[0].plan.checkpoint_digest[:16],
        runs[0].manifest["recording"]["path"],
        "rope theta",
        "command",
    ):
        assert value in said or value.replace(" ", "_") in said


def test_a_prompt_cannot_be_more_than_text(runs: tuple[Run, Run]) -> None:
    prompts = {HOSTILE: runs[0].summary["prompts"]["one"]}
    caveat = {"slug": "template", "severity": "note", "text": HOSTILE}
    summary = {**runs[0].summary, "caveats": [caveat], "prompts": {**runs[0].summary["prompts"], **prompts}}
    hostile = dataclasses.replace(runs[0], summary=summary)
    text = page([hostile], prompts=["five"])
    seen = Reader(text)
    assert "script" not in seen.tags
    assert "\u202e" not in text
    assert "49" not in [part.strip() for part in seen.text]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_several_runs_are_a_series_and_the_last_by_step_stands_in_full(runs: tuple[Run, Run]) -> None:
    def at(step: int) -> Run:
        checkpoint = {**runs[0].manifest["checkpoint"], "step": step}
        return dataclasses.replace(runs[0], manifest={**runs[0].manifest, "checkpoint": checkpoint})

    text = page([at(300), runs[1], at(20)])
    assert "Tau over step" in text
    assert f"From here on: <bdi>{runs[0].name}" in text
    assert "step 300" in text


def test_chosen_prompts_are_shown_and_unknown_ones_refused(runs: tuple[Run, Run]) -> None:
    text = page([runs[0]], prompts=["five"])
    articles = re.findall(r'<article class="text"><h3><bdi>([^<]+)', text)
    assert articles == ["five"]
    with pytest.raises(RunError, match="has no prompt 'six'; expected one of one, five"):
        page([runs[0]], prompts=["six"])
    with pytest.raises(RunError, match="no run to report"):
        page([])


def test_what_is_not_comparable_is_said_and_the_rest_is_shown(runs: tuple[Run, Run], tmp_path: Path) -> None:
    options = Options(Stated(block_size=4))
    short = evaluate_checkpoint(tiny.workshop() / "drafter", tiny.recording().path, options, root=tmp_path)
    text = page([runs[0]], baseline=short)
    assert "block size" in text
    assert "headline/chain.tau_response/value" in text


def test_a_run_that_is_not_trusted_says_so_first(runs: tuple[Run, Run]) -> None:
    trust = dict(runs[0].summary["trust"])
    failed = {**trust["controls"][0], "verdict": "failed", "advice": "record it again"}
    trust |= {"trusted": False, "failed": [failed["slug"]], "controls": [failed]}
    doubted = dataclasses.replace(runs[0], summary={**runs[0].summary, "trust": trust})
    text = page([doubted])
    assert text.index("Not trusted: do not use these numbers.") < text.index('data-name="headline')
    assert "record it again" in text


def test_plots_are_written_as_files(runs: tuple[Run, Run], tmp_path: Path) -> None:
    written = write_plots([runs[0]], tmp_path / "plots", costs=Costs())
    assert {path.suffix for path in written} == {".svg", ".png"}
    assert {path.stem for path in written} >= {"depth", "budgets", "lengths", "prompts", "speed"}
    assert all(path.stat().st_size > 1000 for path in written)


def test_the_command(runs: tuple[Run, Run], tmp_path: Path) -> None:
    words: tuple[Any, ...] = ("report", runs[0].path, "--baseline", runs[1].path, "--out", "sub/a.html")
    done = tiny.draftgauge(*words, "--plots", "plots", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (tmp_path / value["page"]).stat().st_size == value["bytes"] < 3_000_000
    assert all((tmp_path / plot).is_file() for plot in value["plots"])
    printed = tiny.draftgauge("report", runs[0].path, "--md", cwd=tmp_path)
    assert printed.stdout.startswith("## ")
    assert not list(tmp_path.glob("*.html"))
