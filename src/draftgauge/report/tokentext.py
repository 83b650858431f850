"""Token ids as text that can be read: by the target's own tokenizer, with everything unseen spelled out.

The texts are plain; whoever puts them into HTML escapes them. Knows nothing of runs, walks or pages.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from draftgauge.recording import Recording
from draftgauge.store import sha256_file

TOKENIZER = "tokenizer.json"
#: No text is longer than this, whatever the tokenizer holds.
MAX_CHARACTERS = 200

_CUT = "…"
_SPACE, _NEWLINE, _TAB = "␣", "↵", "⇥"
#: What `surrogateescape` makes of a byte that is no part of a character.
_BYTE = range(0xDC80, 0xDD00)
#: Characters without ink that Unicode does not count among its controls.
_BLANK = frozenset(
    chr(code)
    for first, last in (
        (0x034F, 0x034F),
        (0x115F, 0x1160),
        (0x17B4, 0x17B5),
        (0x180B, 0x180F),
        (0x2800, 0x2800),
        (0x3164, 0x3164),
        (0xFE00, 0xFE0F),
        (0xFFA0, 0xFFA0),
        (0xE0100, 0xE01EF),
    )
    for code in range(first, last + 1)
)


@dataclass(frozen=True)
class Texts:
    """What the ids of a target's tokens say; `reason` is why they are shown as ids, or None."""

    tokenizer: Tokenizer | None
    reason: str | None

    def running(self, token: int) -> str:
        """A token as a part of a text: its spaces stay, a line break is shown and kept."""
        return _short(_spelled(self._said(token), {"\n": f"{_NEWLINE}\n", "\t": f"{_TAB}\t"}))

    def label(self, token: int) -> str:
        """A token by itself, in one line, its outer spaces shown.

        Example:
            The token of `" the"` gives `"␣the"`, the one of a line break `"↵"`.
        """
        said = _short(_spelled(self._said(token), {"\n": _NEWLINE, "\t": _TAB}))
        inner = said.strip(" ")
        before = len(said) - len(said.lstrip(" "))
        return _SPACE * before + inner + _SPACE * (len(said) - before - len(inner))

    def _said(self, token: int) -> str:
        """The token's text; bytes that are no whole character come as lone surrogates."""
        raw = None if self.tokenizer is None else self.tokenizer.id_to_token(token)
        if self.tokenizer is None or raw is None:
            return id_text(token)
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text and (content := _bytes_of(raw)) is not None:
            return content.decode("utf-8", "surrogateescape")
        spaces = len(raw) - len(raw.lstrip("▁"))  # a first token loses one of these when it is decoded
        return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text or raw or id_text(token)


def id_text(token: int) -> str:
    """What stands for a token whose text is not known, as in `"⟨1234⟩"`."""
    return f"⟨{token}⟩"


def texts_of(recording: Recording) -> Texts:
    """The texts of the recorded target's tokens, where its tokenizer is at hand and is the one that was recorded."""
    file = Path(recording.target.path) / TOKENIZER
    said: Mapping[str, Any] = recording.produced.get("target_files") or {}
    if not file.is_file():
        return without_texts(f"the target's {TOKENIZER} is not at {file.parent}")
    try:
        if TOKENIZER not in said or sha256_file(file) != said[TOKENIZER]["sha256"]:
            return without_texts(f"{file} is not the one that the recording was made with")
        return Texts(Tokenizer.from_file(str(file)), None)
    except Exception as exc:  # the library raises nothing narrower
        return without_texts(f"{file} cannot be read: {exc}")


def without_texts(reason: str) -> Texts:
    """Texts of nothing but ids."""
    return Texts(None, reason)


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + _CUT


def _spelled(text: str, shown: Mapping[str, str]) -> str:
    """The text in which every character shows: U+202E becomes `⟨U+202E⟩`, a lone byte `⟨0xF0⟩`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(shown.get(character) or _visible(character) for character in text[: MAX_CHARACTERS + 1])


def _visible(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if code in _BYTE:
        return f"⟨0x{code - 0xDC00:02X}⟩"
    # Controls, marks of direction, half and private characters; spaces and breaks other than the plain one.
    unseen = category[0] == "C" or (category[0] == "Z" and character != " ") or character in _BLANK
    return f"⟨U+{code:04X}⟩" if unseen else character


def _bytes_of(raw: str) -> bytes | None:
    """The bytes that a piece of a vocabulary stands for; None where it is no piece of bytes.

    Two ways of writing them are in use: `<0xF0>`, and one printable character for each byte.
    """
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes.fromhex(found[1])
    found_bytes = [_BYTE_OF.get(character) for character in raw]
    return None if None in found_bytes else bytes(byte for byte in found_bytes if byte is not None)


def _byte_of_characters() -> dict[str, int]:
    """The character that stands for each byte in the vocabularies that GPT-2's goes back to."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_characters()
