"""How long a report takes, and how large it is, for a run of the demo and for one of 500 prompts and 100,000 anchors.

The large run is the given one with its prompts repeated under other names.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.records import Record, found

ANCHORS = 100_000


def repeated(source: Path, folder: Path, *, anchors: int) -> Path:
    """A run whose prompts are those of `source`, so often that it has as many anchors."""
    from draftgauge.runs import BLOCKS, MANIFEST, SUMMARY

    table = pq.read_table(source / BLOCKS)
    copies = -(-anchors // table.num_rows)
    shutil.copytree(source, folder)
    names = table.column("prompt").combine_chunks()
    parts = [
        table.set_column(0, "prompt", pc.binary_join_element_wise(names, pa.scalar(str(i)), "-"))
        for i in range(copies)
    ]
    assert table.column_names[0] == "prompt"
    pq.write_table(pa.concat_tables(parts), folder / BLOCKS)
    summary = json.loads((folder / SUMMARY).read_text())
    summary["prompts"] = {
        f"{name}-{i}": copy.deepcopy(prompt)
        for i in range(copies)
        for name, prompt in summary["prompts"].items()
    }
    (folder / SUMMARY).write_text(json.dumps(summary))
    assert (folder / MANIFEST).is_file()
    return folder


def bench_page(source: Path, *, anchors: int = ANCHORS) -> Iterator[Record]:
    """The report of a run, and of one that has so many anchors: seconds and bytes of both."""
    from draftgauge.report.page import page
    from draftgauge.runs import BLOCKS, open_run

    page([open_run(source)])  # what is loaded once
    seconds, sizes = [], []
    with tempfile.TemporaryDirectory() as folder:
        large = repeated(source, Path(folder) / "large", anchors=anchors)
        for path in (source, large):
            run = open_run(path)
            began = time.perf_counter()
            text = page([run])
            seconds.append(time.perf_counter() - began)
            sizes.append(len(text.encode()))
        rows = pq.read_metadata(large / BLOCKS).num_rows
    yield found(
        "page",
        seconds[1] / seconds[0],
        anchors=rows,
        seconds=seconds,
        bytes=sizes,
    )
