"""How long a report takes, and how large it is, for a run of the demo and for one of 500 prompts and 100,000 anchors.

The large run is the demo's with its prompts repeated under other names. `python bench/page.py RUN`.
"""

import argparse
import copy
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftgauge.report.page import page
from draftgauge.runs import BLOCKS, MANIFEST, SUMMARY, open_run

ANCHORS = 100_000


def repeated(source: Path, folder: Path, *, anchors: int) -> Path:
    """A run whose prompts are those of `source`, so often that it has as many anchors."""
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


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    source = parser.parse_args().run
    page([open_run(source)])  # what is loaded once
    with tempfile.TemporaryDirectory() as folder:
        large = repeated(source, Path(folder) / "large", anchors=ANCHORS)
        for path in (source, large):
            run = open_run(path)
            began = time.perf_counter()
            text = page([run])
            took = time.perf_counter() - began
            print(
                f"{len(run.summary['prompts'])} prompts, {pq.read_metadata(path / BLOCKS).num_rows} anchors: "
                f"{took:.2f} s, {len(text.encode()) / 1e6:.2f} MB"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
