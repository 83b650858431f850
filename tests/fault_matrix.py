"""Runs the whole table of faults, in the tiny pair and in the demo's, and writes what was said.

python -m tests.fault_matrix             print the table, write docs/faults.json and docs/faults.md
python -m tests.fault_matrix --tiny      only the tiny pair; nothing is written
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftgauge.prompts import read_prompts
from draftgauge.record import Request, record_target
from draftgauge.recording import MANIFEST
from tests.faults import FAULTS, NOT_PLANTED, Fault, Finding, ask, demo_faults, find
from tests.planting import Site

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "faults.md", ROOT / "docs" / "faults.json"


def demo_site(fault: Fault, folder: Path, *, drafter: Path, right: Path, off_by_one: Path) -> Site:
    """The demo's pair with a fault planted: the recording is copied by links, and only its manifest is changed."""
    site = Site(folder, drafter, folder / "recording", {})
    shutil.copytree(off_by_one if fault.pair else right, site.recording, copy_function=os.link)
    manifest = site.recording / MANIFEST
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text)
    fault.plant(site)
    return site


def find_in_demo(fault: Fault, folder: Path, *, drafter: Path, right: Path, off_by_one: Path) -> Finding:
    """Plants a fault in the demo's pair and asks the part of draftgauge that must catch it."""
    site = demo_site(fault, folder, drafter=drafter, right=right, off_by_one=off_by_one)
    return ask(fault, site, planted_in="demo pair")


def demo_recordings(target: Path, root: Path) -> tuple[Path, Path]:
    """The target recorded at the drafter's taps, and one layer later, both with the layers around them."""
    prompts = read_prompts("builtin:coding10")
    paths = []
    for taps in ((1, 10, 19, 27), (2, 11, 20, 28)):
        request = Request(taps=taps, max_new_tokens=192, taps_around=True)
        paths.append(record_target(target, prompts, request=request, root=root).path)
    return paths[0], paths[1]


def page(findings: Sequence[Mapping[str, Any]]) -> str:
    """docs/faults.md from the findings."""
    lines = [
        "# What is caught",
        "",
        "<!-- Written by `make faults` from what draftgauge said: do not edit. -->",
        "",
        "Faults that stay silent elsewhere: everything loads, nothing crashes, only the acceptance is wrong. Each",
        "was planted in a pair that is known to be right, and the part of draftgauge that must catch it was asked.",
        "The tiny pair is built so that every field of the wiring matters (`tests/planted.py`); in the demo pair, a",
        "real drafter of a real target, faults are worth a few percent, as in production.",
        "",
    ]
    caught = sum(finding["caught_by"] is not None for finding in findings)
    named = [finding["cause_first"] for finding in findings if finding["cause_first"] is not None]
    lines += [
        f"{caught} of {len(findings)} planted faults were caught; of {len(named)} whose cause can be searched for or "
        f"pointed at, {sum(named)} had the right cause named first.",
        "",
    ]
    for kind in dict.fromkeys(finding["kind"] for finding in findings):
        head = "| planted | in | caught by | cause first | it said |"
        lines += [f"## {kind}", "", head, "| --- | --- | --- | --- | --- |"]
        for f in findings:
            if f["kind"] == kind:
                first = {True: "yes", False: "no", None: "-"}[f["cause_first"]]
                said = f["message"].replace("|", "\\|")
                lines.append(
                    f"| {f['what']} | {f['planted_in']} | {f['caught_by'] or '**not caught**'} | {first} | {said} |"
                )
        lines.append("")
    lines += ["## Not planted", ""]
    lines += [f"- *{kind}*: {why}" for kind, why in NOT_PLANTED.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the matrix; the exit code says whether every fault was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="only the tiny pair; nothing is written")
    parser.add_argument("--target", type=Path, default=ROOT / ".cache" / "SmolLM2-135M-Instruct")
    parser.add_argument(
        "--recordings", type=Path, help="where recordings are kept; a temporary folder if not given"
    )
    arguments = parser.parse_args()
    findings = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for i, fault in enumerate(FAULTS):
            findings.append(_told(find(fault, root / f"tiny{i}")))
        if not arguments.tiny:
            right, off = demo_recordings(arguments.target, arguments.recordings or root / "recordings")
            drafter = ROOT / "demo" / "drafter" / "step_4000"
            for i, fault in enumerate(demo_faults()):
                place = right.parent / f".faults{i}"
                found = find_in_demo(fault, place, drafter=drafter, right=right, off_by_one=off)
                shutil.rmtree(place)
                findings.append(_told(found))
    values = [finding.as_dict() for finding in findings]
    if not arguments.tiny:
        DATA.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page(values), encoding="utf-8")
    missed = [f for f in findings if f.caught_by is None]
    print(f"{len(findings) - len(missed)} of {len(findings)} caught")
    return 1 if missed else 0


def _told(finding: Finding) -> Finding:
    first = {True: "cause first", False: "cause NOT first", None: ""}[finding.cause_first]
    print(
        f"{finding.caught_by or 'NOT CAUGHT':34} {first:16} {finding.planted_in:9} {finding.kind}: {finding.what}"
    )
    print(f"{'':34} {finding.message}", flush=True)
    return finding


if __name__ == "__main__":
    sys.exit(main())
