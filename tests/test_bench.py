"""The benches: what is kept of them and compared, the page that is made of it, and each of the cheap ones, tiny."""

import heapq
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import curves, history, real, run, stage, stages, start, tree, true_scale
from bench.page import bench_page
from bench.records import RATIOS, Record, found
from draftgauge.evaluate import Options, evaluate_checkpoint
from tests import tiny

HERE = {"cpu": "A CPU", "cores": 2, "memory_gib": 24, "threads": 2, "python": "3.11.7", "torch": "2.9.0"}
HERE |= {"draftgauge": "0.1.0", "commit": "abc1234"}
FASTER = HERE | {"cpu": "Another CPU"}
ROWS = {"tree-position": (50.0, {}), "help": (8.0, {})}


def line(rows: Mapping[str, tuple[float, Any]], on: Any = HERE, left_out: Any = None) -> dict[str, Any]:
    """A line of the history, as it is read again."""
    records = [found(name, value, **raw) for name, (value, raw) in rows.items()]
    entry = history.entry_of(records, left_out=left_out or {}, on=on)
    return json.loads(json.dumps(entry)) | {"date": "2026-01-02T03:04:05Z"}


def test_the_page_is_what_the_generator_makes_of_the_history() -> None:
    made = history.page(history.read_history())
    assert history.PAGE.read_text(encoding="utf-8") == made, "run `python bench/history.py`"


def test_the_page_of_an_empty_history_says_what_is_measured(tmp_path: Path) -> None:
    text = history.page(history.read_history(tmp_path / "none.jsonl"))
    assert "No run has been kept yet" in text
    assert all(f"| `{name}` |" in text for name in RATIOS)


def test_a_line_of_the_history_names_neither_host_nor_path(tmp_path: Path) -> None:
    records = [found("help", 8.0, help_s=0.08)]
    text = json.dumps(history.entry_of(records, left_out={"stage": "needs root"}, on=history.machine()))
    value = json.loads(text)
    assert value["records"] == [
        {
            "name": "help",
            "value": 8.0,
            "against": "`python -c pass`",
            "aim": None,
            "better": "lower",
            "raw": {"help_s": 0.08},
        }
    ]
    assert set(value["machine"]) == set(HERE)
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text
    path = tmp_path / "history.jsonl"
    path.write_text(text + "\n" + text + "\n")
    assert history.read_history(path) == [value, value]


def test_what_is_kept_is_added_to_the_history_and_the_page(tmp_path: Path) -> None:
    path, at = tmp_path / "history.jsonl", tmp_path / "page.md"
    for seconds in (8.0, 9.0):
        history.keep([found("help", seconds)], left_out={"stage": "needs root"}, path=path, page_path=at)
    kept = history.read_history(path)
    assert [entry["records"][0]["value"] for entry in kept] == [8.0, 9.0]
    assert at.read_text() == history.page(kept)


def test_a_run_is_compared_with_the_last_of_the_same_machine_that_has_the_ratio() -> None:
    before = [
        line({"tree-position": (10.0, {}), "help": (4.0, {})}),
        line({"tree-position": (60.0, {})}),  # has no `help`
        line({"tree-position": (90.0, {}), "help": (1.0, {})}, on=FASTER),
    ]
    now = line(ROWS)
    assert history.last_record(before, now, "tree-position")["value"] == 60.0  # type: ignore[index]
    assert history.last_record(before, now, "help")["value"] == 4.0  # type: ignore[index]
    assert history.last_record(before, now, "open") is None
    rows = [text.split() for text in history.comparison(now, before).splitlines()]
    assert rows[1][:5] == ["tree-position", "50", "50", "60", "-17%"]
    assert rows[2][:4] == ["help", "8", "4", "+100%"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tree-position", 79.0, "worse"),  # higher is better, and it was 100
        ("tree-position", 81.0, ""),
        ("tree-position", 200.0, ""),
        ("open", 1.19, ""),  # lower is better, and it was 1
        ("open", 1.21, "worse"),
        ("open", 0.5, ""),
    ],
)
def test_what_is_a_fifth_worse_is_said(name: str, value: float, said: str) -> None:
    before = [line({"tree-position": (100.0, {}), "open": (1.0, {})})]
    text = history.comparison(line({name: (value, {})}), before)
    assert (f"{name} is more than 20% worse than last" in text) == bool(said)


def test_missed_aims_and_what_was_left_out_are_said() -> None:
    now = line({"open": (1.25, {}), "tree-position": (56.0, {})}, left_out={"stage": "needs root"})
    text = history.comparison(now, [])
    assert "open is 1.25, its aim is 1.2" in text
    assert "tree-position is" not in text
    assert "left out: stage: needs root" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (0.00001234, "0.000012"),
        (1.2, "1.2"),
        (59.31, "59.3"),
        (1234.5, "1234"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert history._number(value) == text


def test_the_page_shows_every_machine_with_its_newest_values() -> None:
    curve = {"seconds_per_unit": {"1": 0.5, "1000": 0.025}}
    shares = {"shares": {"head": 0.75, "rest": 0.25}, "prompts": 3, "anchors": 500, "seconds": 4.0}
    entries = [
        line({"help": (4.0, {}), "curve-prompts": (1.0, curve)}),
        line({"help": (7.0, {})}, on=FASTER),
        line({"help": (5.0, {}), "stages": (0.75, shares)}, left_out={"stage": "needs root"}),
    ]
    text = history.page(entries)
    mine, other = text.partition("## Another CPU, 2 cores, 24 GiB")[::2]
    assert "| `help` | 5 |  |  | 2026-01-02 | abc1234 |" in mine
    assert "| `help` | 4 | 5 |" in mine  # the history: oldest first
    assert "| `curve-prompts` | 1 |  |" in mine
    assert "| `curve-prompts` | 1 | 1.5 | yes | 2026-01-02 | abc1234 |" in mine
    assert "| ms | 500 | 25 |" in mine
    assert "| head | 75.0% |" in mine
    assert "3 prompts, 500 anchors, 4 s in all" in mine
    assert "Not measured here: stage: needs root." in mine
    assert "| `help` | 7 |" in other
    assert "### " not in other  # one run: no history, no curves, no stages


# --- the benches themselves -------------------------------------------------------------------------------


def records_of(made: Any) -> dict[str, Record]:
    return {record.ratio.name: record for record in made}


def test_every_ratio_is_of_a_bench_or_said_to_be_elsewhere() -> None:
    apart = tuple(run.ELSEWHERE)
    here = {name for name in RATIOS if not name.startswith(tuple(f"{name}-" for name in apart))}
    assert {name.split("-")[0] for name in here} - {"help", "curve"} == set(run.benches(1)) - {"curves"}


def test_start_is_timed_against_python() -> None:
    assert ("recordings", "import") in set(start.commands())
    record = start._slowest("start-help", {"eval": 0.08, "train": 0.09}, 0.01)
    assert record.value == pytest.approx(9)
    assert record.raw["slowest"] == "train"


def test_the_heap_that_trees_are_held_against_is_best_first() -> None:
    rows = np.log(np.random.default_rng(1).dirichlet(np.ones(5), 3))
    rows = -np.sort(-rows, axis=1)
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(5), repeat=depth)]
    best = heapq.nlargest(40, paths, key=lambda path: sum(rows[d][r] for d, r in enumerate(path)))
    assert tree.plain_heap(rows, 40) == best


def test_trees_are_timed_against_the_heap() -> None:
    made = records_of(tree.bench_tree(anchors=3))
    raw = made["tree"].raw
    assert made["tree"].value == pytest.approx(raw["heap_s"] / raw["whole_s"])
    assert made["tree-position"].value == pytest.approx(raw["heap_s"] / raw["position_s"])


def test_curves_of_tiny_sizes() -> None:
    made = records_of(curves.bench_curves(prompts=(1, 3), runs=(1, 2), lengths=(128, 256)))
    assert set(made) == {name for name in RATIOS if name.startswith("curve-")} == set(history._CURVES)
    for record in made.values():
        small, large = record.raw["seconds_per_unit"].values()
        assert record.raw["against_smallest"] == pytest.approx(large / small)


def test_a_curve_is_held_against_its_cheapest_size() -> None:
    record = curves._growth("curve-prompts", {1: 8.0, 10: 2.0, 100: 3.0})
    assert record.value == pytest.approx(1.5)
    assert record.raw["against_smallest"] == pytest.approx(3 / 8)


def test_a_straight_line_grows_as_the_length() -> None:
    assert curves._straight("curve-length-all", {1: 1.0, 2: 2.0, 4: 4.0}).value == pytest.approx(1)
    assert curves._straight("curve-length-all", {1: 1.0, 2: 4.0, 4: 16.0}).value == pytest.approx(2)


def test_the_report_of_many_anchors_is_timed(tmp_path: Path) -> None:
    checkpoint, options = tiny.drafter_dir(tmp_path / "drafter"), Options(num_prompts=2)
    source = evaluate_checkpoint(checkpoint, tiny.recording().path, options, root=tmp_path / "runs")
    (record,) = bench_page(source.path, anchors=100)
    assert record.raw["anchors"] >= 100
    small, large = record.raw["seconds"]
    assert record.value == pytest.approx(large / small)


def test_staging_is_held_against_a_bare_cat() -> None:
    value = {"hop ours": [2.0, 9.0, 1.0], "hop bare": [1.0], "relay ours": [4.0], "relay bare": [3.0]}
    value["again bytes"] = [5_000_000.0]
    made = records_of(stage.ratios(value))
    assert {name: record.value for name, record in made.items()} == pytest.approx(
        {"stage-hop": 0.5, "stage-relay": 0.75, "stage-again": 0.005}
    )
    assert set(records_of(stage.ratios(value, rate="1gbit"))) == {"stage-hop-1gbit", "stage-relay-1gbit"}


def test_the_true_scale_at_another_scale(tmp_path: Path) -> None:
    least = true_scale.Sizes(2, 64, 128, 4, 2, 16, 500, (1, 3), 20, 90)
    true_scale.make(tmp_path / "case", least)
    rate = {"bfloat16 16 rows": 2.0, "bfloat16 48 rows": 4.0, "float32 16 rows": 8.0}
    made = {
        n: (v, raw)
        for n, v, raw in true_scale.measured(tmp_path / "case", rate, kinds=("walk",), sizes=least)
    }
    assert set(made) == {n for n in RATIOS if n.startswith("true-scale-") and n.endswith("-walk")}
    for dtype, width, fastest in (("bfloat16", 2, 4.0), ("float32", 4, 8.0)):
        memory, raw = made[f"true-scale-memory-{dtype}-walk"]
        assert memory == pytest.approx(raw["peak_bytes"] / least.held(width))
        time, raw = made[f"true-scale-time-{dtype}-walk"]
        assert time == pytest.approx(raw["eval_s"] / raw["blocks"] / (least.block_gflop / fastest))
        assert raw["blocks"] <= 3 * true_scale.ROUNDS


@pytest.mark.real
def test_the_benches_on_the_real_target(smollm_path: Path) -> None:
    assert smollm_path == real.TARGET
    made = records_of(itertools.chain(real.bench_record(1, rounds=1), real.bench_read(1, rounds=1)))
    assert set(made) == {"record", "read", "read-bfloat16"}
    raw = made["record"].raw
    assert raw["tokens"] == real.recording(1).items[0].length
    assert made["record"].value == pytest.approx(raw["bare_s"][0] / raw["record_s"][0])
    for name in ("read", "read-bfloat16"):
        raw = made[name].raw
        assert made[name].value == pytest.approx(raw["taps_gb_per_s"] / raw["bare_gb_per_s"])


# --- stages -----------------------------------------------------------------------------------------------


def test_every_function_that_is_timed_exists() -> None:
    assert set(stages.TIMED) | {"start", "rest"} == set(stages.WORDS)
    for name in (name for names in stages.TIMED.values() for name in names):
        owner, last = stages.place_of(name)
        assert callable(getattr(owner, last))
    with pytest.raises(AttributeError, match="draftgauge has no"):
        stages.place_of("nowhere.nothing")


def test_a_stage_has_its_own_time_only() -> None:
    time = [0.0]

    def passes(seconds: float) -> None:
        time[0] += seconds

    clock = stages.Clock(lambda: time[0])
    head = clock.around(passes, "head")

    def ranks() -> None:
        passes(1)
        head(2)
        passes(4)

    ranking = clock.around(ranks, "ranking")

    def items() -> Any:
        for seconds in (16, 32):
            passes(seconds)
            yield seconds

    def controls() -> None:
        passes(64)
        ranking()  # of a whole stage's inside nothing is anybody else's

    passes(8)
    ranking()
    for _ in clock.around(items, "read")():
        passes(128)
    clock.around(controls, "controls")()
    clock.enter("rest")
    assert clock.spent == {"rest": 8 + 256, "ranking": 5, "head": 2, "read": 48, "controls": 64 + 7}


def test_stages_of_a_tiny_evaluation_are_all_there(tmp_path: Path) -> None:
    words = [stages.__file__, tiny.workshop() / "drafter", tiny.recording().path, tmp_path / "runs"]
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=True)
    value = json.loads(done.stdout)
    assert set(value["spent"]) == set(stages.WORDS)
    assert all(seconds > 0 for seconds in value["spent"].values())
    assert value["prompts"] == len(tiny.recording().items)
    assert value["anchors"] == sum(item.completion_len - 1 for item in tiny.recording().items)
