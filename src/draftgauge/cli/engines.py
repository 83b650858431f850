"""The command that asks a serving engine: references."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from draftgauge.cli.options import EXIT_CODES, FOLDER, bar, counted, json_option, print_json
from draftgauge.errors import IncompleteError

_KEY = "DRAFTGAUGE_API_KEY"


@click.command(epilog=EXIT_CODES)
@click.option("--engine", "url", required=True, metavar="URL", help="Address of an SGLang or vLLM server.")
@click.option("--tokenizer", type=FOLDER, help="The target's directory; not needed for token ids.")
@click.option("--prompts", "source", required=True, help="JSON-lines file, or builtin:coding10.")
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file of references."
)
@counted("--max-new-tokens", default=256, show_default=True, help="Longest completion.")
@click.option(
    "--template", default="chat", show_default=True, help="chat, chat-thinking, chat-no-thinking, raw."
)
@counted("--concurrency", default=8, show_default=True, help="Requests at a time.")
@counted("--num-prompts", help="Only the first so many prompts.")
@click.option("--model", help="The model's name, where the server has several.")
@click.option("--states", type=FOLDER, help="Also fetch hidden states, into this folder.")
@counted("--state-layers", default=1, show_default=True, help="Layers side by side in a row of SGLang's.")
@json_option
def references(
    url: str,
    tokenizer: Path | None,
    source: str,
    out: Path,
    concurrency: int,
    num_prompts: int | None,
    model: str | None,
    states: Path | None,
    state_layers: int,
    as_json: bool,
    **how: Any,
) -> None:
    """Ask a serving engine for the target's completions.

    Writes JSON lines that `record --prompts` takes as references. Repeat the same
    command to resume. A key is read from DRAFTGAUGE_API_KEY. With --states the
    server computes hidden states of every sequence too (docs/engines.md).

    \b
    Examples:
      draftgauge references --engine http://localhost:8000 \\
          --tokenizer Qwen3-8B --prompts mine.jsonl --out refs.jsonl
      draftgauge references --engine http://localhost:30000 \\
          --prompts ids.jsonl --out refs.jsonl --states states
    """
    from draftgauge.engines.kinds import connected
    from draftgauge.engines.references import Wanted, fetch_references
    from draftgauge.engines.states import fetch_states
    from draftgauge.prompts import read_prompts

    prompts = read_prompts(source).first(num_prompts)
    loaded = None
    if tokenizer is not None:
        from draftgauge.target import load_tokenizer

        loaded = load_tokenizer(tokenizer)
    wanted = Wanted(concurrency=concurrency, **how)
    with connected(url, key=os.environ.get(_KEY) or None, model=model) as engine:
        asked = fetch_references(engine, prompts, out=out, tokenizer=loaded, wanted=wanted, progress=bar())
        seen = None
        if states is not None:
            seen = fetch_states(
                engine, out, folder=states, slots=state_layers, concurrency=concurrency, progress=bar()
            )
    results = (asked,) if seen is None else (asked, seen)
    if as_json:
        print_json({"references": asked.as_dict(), "states": None if seen is None else seen.as_dict()})
    else:
        for result in results:
            click.echo(f"{result.path}: {result.asked} asked for now, {result.there} there before")
    failed = {name: why for result in results for name, why in result.failed.items()}
    if failed:
        raise IncompleteError(
            "some answers cannot be used: " + "; ".join(f"{name}: {why}" for name, why in failed.items())
        )
