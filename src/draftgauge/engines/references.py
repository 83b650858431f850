"""The target's completions of a prompt set, asked of an engine and kept as `record --prompts` reads them.

One JSON line a turn, appended as the answers come, and beside it who answered and how. A repeated command asks for
what is missing. Knows nothing of protocols.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from draftgauge.engines.answers import Answer, Engine, token_ids_in
from draftgauge.errors import AnswerError, PromptError, StoreError
from draftgauge.progress import Progress, silent
from draftgauge.prompts import Prompt, PromptSet
from draftgauge.rendering import render, require_template, turn_id, turns_of
from draftgauge.store import sha256_json, write_json

KIND, VERSION = "draftgauge references", 1
#: Settings by which two requests for the same prompt can get different tokens.
_IDENTITY = ("kind", "version", "url", "engine", "facts", "sampling", "request", "rendered")


@dataclass(frozen=True)
class Wanted:
    """How references are asked for: the template of `rendering`, the longest completion, requests at a time."""

    max_new_tokens: int = 256
    template: str = "chat"
    concurrency: int = 8


@dataclass(frozen=True)
class References:
    """A file of references: how many turns were asked for now, how many it had, and why the others are missing."""

    path: Path
    asked: int
    there: int
    failed: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "path": str(self.path), "engine": str(engine_file(self.path))}


def engine_file(out: Path) -> Path:
    """Where it is kept who answered the references in `out`."""
    return out.with_name(f"{out.name}.engine.json")


def fetch_references(
    engine: Engine,
    prompts: PromptSet,
    *,
    out: Path,
    tokenizer: Any = None,
    wanted: Wanted | None = None,
    progress: Progress = silent,
) -> References:
    """Asks an engine for the greedy completion of every prompt that `out` does not hold yet.

    The turns of a conversation are asked one after another, each with the server's own answers before it. Completions
    that prompts bring are not used: what this engine says is what is wanted.

    Args:
        engine: Who is asked.
        prompts: What is asked.
        out: The file of JSON lines; it is made, or gone on with where its settings are the same.
        tokenizer: The target's; None serves prompts that are token ids.
        wanted: The template, the longest completion and how many requests run at a time.
        progress: Told of every prompt.

    Returns:
        What was asked, and which turns failed and why; the others are in the file.

    Raises:
        PromptError: A prompt cannot be rendered.
        StoreError: `out` was made with other settings, is being written, or is not ours.
        EngineError: The server cannot be used.
        ConnectionLostError: The server does not answer; the same command goes on.
    """
    wanted = wanted or Wanted()
    require_template(wanted.template)
    rendered = {p.id: render(p, tokenizer, template=wanted.template) for p in prompts.prompts}
    settings = {
        "kind": KIND,
        "version": VERSION,
        "url": engine.url,
        "engine": engine.kind,
        "facts": dict(engine.facts),
        "sampling": dict(engine.sampling),
        "request": {"max_new_tokens": wanted.max_new_tokens, "template": wanted.template},
        "prompts": {"name": prompts.name, "digest": prompts.digest},
        "rendered": sha256_json(rendered),
    }
    with _journal(out, settings) as journal:
        there = len(journal.rows)
        talk = _Talk(engine, tokenizer, wanted, journal)
        failed = _ask_all(talk, prompts.prompts, progress)
        return References(out, asked=len(journal.rows) - there, there=there, failed=failed)


def read_references(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of references, as they were written.

    Example:
        `[{"id": "81", "category": "math", "conversation": None, "prompt_ids": [5], "completion_ids": [2],
        "finish_reason": "stop"}]`

    Raises:
        PromptError: The file does not exist, or a line in it is no row of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise PromptError(f"references {path} cannot be read: {exc}; give the file that --out named") from exc
    # Not splitlines: a string in JSON may hold the other line separators as they are.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise PromptError(f"{where} is not JSON: {exc}; remove the line and ask again") from exc
    ids = (
        [token_ids_in(row.get(key)) for key in ("prompt_ids", "completion_ids")]
        if isinstance(row, dict)
        else []
    )
    if not ids or not all(ids) or not isinstance(row.get("id"), str):
        raise PromptError(f"{where} is no reference: expected id, prompt_ids and completion_ids")
    return dict(row)


@dataclass(frozen=True)
class _Journal:
    """The open file of references, its rows by id, and the settings that it is written with."""

    file: BinaryIO
    path: Path
    rows: dict[str, dict[str, Any]]
    settings: Mapping[str, Any]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: dict[str, Any], answer: Answer) -> None:
        """Appends a row; before the first it is kept who answered, with what the server echoed of the sampling."""
        line = json.dumps(row, ensure_ascii=False) + "\n"
        with self.lock:
            if not engine_file(self.path).exists():
                write_json(engine_file(self.path), {**self.settings, "echoed": dict(answer.echoed)})
            self.file.write(line.encode())
            self.file.flush()
            self.rows[row["id"]] = row


@contextlib.contextmanager
def _journal(out: Path, settings: Mapping[str, Any]) -> Iterator[_Journal]:
    """The file opened for appending, and held: its rows are read, and a last line without an end is dropped."""
    _require_same(out, settings)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a+b")
    except OSError as exc:
        raise StoreError(f"{out} cannot be written: {exc.strerror}; check the path and its rights") from exc
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StoreError(
                f"{out} is being written by another process; wait for it or choose another"
            ) from exc
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        rows = {row["id"]: row for row in read_references(out)}
        yield _Journal(file, out, rows, settings)


def _require_same(out: Path, settings: Mapping[str, Any]) -> None:
    """Makes sure that what is there was asked in the same way."""
    kept = engine_file(out)
    if not kept.exists():
        if out.exists() and out.stat().st_size:
            raise StoreError(
                f"{out} exists without {kept.name}, which says who wrote it; choose another --out"
            )
        return
    try:
        before = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise StoreError(f"{kept} cannot be read: {exc}; choose another --out") from exc
    now = json.loads(json.dumps(settings))
    changed = [name for name in _IDENTITY if not isinstance(before, dict) or before.get(name) != now[name]]
    if changed:
        was = before.get(changed[0]) if isinstance(before, dict) else before
        raise StoreError(
            f"{out} was asked for in another way: {', '.join(changed)} differ ({changed[0]} was {_short(was)}, is "
            f"{_short(now[changed[0]])}); choose another --out"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


@dataclass(frozen=True)
class _Talk:
    """What one conversation needs to be had."""

    engine: Engine
    tokenizer: Any
    wanted: Wanted
    journal: _Journal
    ended: threading.Event = field(default_factory=threading.Event)

    def converse(self, prompt: Prompt) -> dict[str, str]:
        """Asks for the turns of a prompt that are missing; returns why one failed, with those after it."""
        answers: list[str] = []
        for turn in range(1, turns_of(prompt) + 1):
            if self.ended.is_set():
                break
            name = turn_id(prompt, turn)
            try:
                row = self.journal.rows.get(name) or self._asked(prompt, name, answers)
            except (AnswerError, PromptError) as exc:
                return {name: str(exc)} | {
                    turn_id(prompt, later): f"the turn before it failed ({name})"
                    for later in range(turn + 1, turns_of(prompt) + 1)
                }
            if turn < turns_of(prompt):
                answers.append(self.tokenizer.decode(row["completion_ids"], skip_special_tokens=True))
        return {}

    def _asked(self, prompt: Prompt, name: str, answers: Sequence[str]) -> dict[str, Any]:
        ids = render(prompt, self.tokenizer, template=self.wanted.template, answers=answers)
        answer = self.engine.complete(ids, max_new_tokens=self.wanted.max_new_tokens)
        row = {
            "id": name,
            "category": prompt.category,
            "conversation": prompt.id if prompt.follow_ups else prompt.conversation,
            "prompt_ids": ids,
            "completion_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
        }
        self.journal.add(row, answer)
        return row


def _ask_all(talk: _Talk, prompts: Sequence[Prompt], progress: Progress) -> dict[str, str]:
    """Has every conversation, some at a time; returns why turns failed. The first error of the server ends all."""
    pool = ThreadPoolExecutor(talk.wanted.concurrency, thread_name_prefix="draftgauge-engine")
    try:
        waiting = [pool.submit(talk.converse, prompt) for prompt in prompts]
        done = progress(as_completed(waiting), label="ask", total=len(waiting), unit="prompt")
        failed = {name: why for future in done for name, why in future.result().items()}
    finally:
        talk.ended.set()
        pool.shutdown(cancel_futures=True)
    order = [turn_id(prompt, turn) for prompt in prompts for turn in range(1, turns_of(prompt) + 1)]
    return {name: failed[name] for name in order if name in failed}
