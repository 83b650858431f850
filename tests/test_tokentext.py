"""Token ids as text: every way of writing vocabularies, what is unseen, and tokenizers that cannot be trusted."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from draftgauge.recording import Recording
from draftgauge.report.tokentext import MAX_CHARACTERS, Texts, id_text, texts_of
from tests import tiny


def words(*vocabulary: str) -> Texts:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="none"))
    return Texts(tokenizer, None)


def pieces(decoder: Any, *vocabulary: str) -> Texts:
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[]))
    tokenizer.decoder = decoder
    return Texts(tokenizer, None)


BYTES = pieces(decoders.ByteLevel(), "Ġthe", "Ċ", "ðŁ", "ĺĢ", "aÃ", "ðŁĺĢ", "ĉ", "ï¿½")
#: How Llama's and Gemma's first tokenizers decode.
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
SPACED = ("▁the", "▁▁▁", "<0xF0>", "<0x0A>", "▁", "s")


@pytest.mark.parametrize(
    ("token", "running", "label"),
    [
        (0, " the", "␣the"),
        (1, "↵\n", "↵"),
        (2, "⟨0xF0⟩⟨0x9F⟩", "⟨0xF0⟩⟨0x9F⟩"),
        (3, "⟨0x98⟩⟨0x80⟩", "⟨0x98⟩⟨0x80⟩"),
        (4, "a⟨0xC3⟩", "a⟨0xC3⟩"),
        (5, "😀", "😀"),
        (6, "⇥\t", "⇥"),
        (7, "\ufffd", "\ufffd"),
        (8, "⟨8⟩", "⟨8⟩"),
    ],
)
def test_pieces_of_bytes(token: int, running: str, label: str) -> None:
    assert (BYTES.running(token), BYTES.label(token)) == (running, label)


@pytest.mark.parametrize("decoder", [LLAMA, decoders.Metaspace()], ids=["Llama", "Metaspace"])
def test_pieces_with_marked_spaces_keep_them(decoder: Any) -> None:
    texts = pieces(decoder, *SPACED)
    assert [texts.running(i) for i in (0, 1, 4, 5)] == [" the", "   ", " ", "s"]
    assert [texts.label(i) for i in (0, 1, 4, 5)] == ["␣the", "␣␣␣", "␣", "s"]


def test_bytes_that_fell_back_are_bytes_or_characters() -> None:
    texts = pieces(LLAMA, *SPACED)
    assert [texts.running(i) for i in (2, 3)] == ["⟨0xF0⟩", "↵\n"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\u202eevil", "⟨U+202E⟩evil"),
        ("a\u200bb", "a⟨U+200B⟩b"),
        ("\x00\x1b[31m", "⟨U+0000⟩⟨U+001B⟩[31m"),
        ("\r", "⟨U+000D⟩"),
        ("a\u00a0b", "a⟨U+00A0⟩b"),
        ("\u2028", "⟨U+2028⟩"),
        ("\ufe0f", "⟨U+FE0F⟩"),
        ("\u3164", "⟨U+3164⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("שלום", "שלום"),
    ],
)
def test_what_acts_unseen_is_spelled_out(said: str, shown: str) -> None:
    assert words("none", said).running(1) == words("none", said).label(1) == shown


@pytest.mark.parametrize("character", ["x", "\n", "\u202e"])
def test_no_text_is_long(character: str) -> None:
    texts = words("none", character * 1_000_000)
    for said in (texts.running(1), texts.label(1)):
        assert len(said) == MAX_CHARACTERS
        assert said.endswith("…")


def with_tokenizer(folder: Path, content: bytes, *, recorded: bytes | None = None) -> Recording:
    """The tiny recording, as if its target had this tokenizer, and had had the `recorded` one."""
    (folder / "tokenizer.json").write_bytes(content)
    digest = hashlib.sha256(content if recorded is None else recorded).hexdigest()
    recording = tiny.recording()
    return replace(
        recording,
        target=replace(recording.target, path=str(folder)),
        produced={**recording.produced, "target_files": {"tokenizer.json": {"sha256": digest}}},
    )


def saved(texts: Texts) -> bytes:
    assert texts.tokenizer is not None
    return str(texts.tokenizer.to_str()).encode()


def test_the_targets_own_tokenizer_is_read(tmp_path: Path) -> None:
    texts = texts_of(with_tokenizer(tmp_path, saved(BYTES)))
    assert texts.reason is None
    assert texts.label(0) == "␣the"


def test_a_target_without_one_gives_ids() -> None:
    texts = texts_of(tiny.recording())
    assert texts.label(7) == texts.running(7) == id_text(7) == "⟨7⟩"
    assert texts.reason == f"the target's tokenizer.json is not at {tiny.workshop() / 'target'}"


def test_another_tokenizer_than_the_recorded_one_gives_ids(tmp_path: Path) -> None:
    texts = texts_of(with_tokenizer(tmp_path, saved(BYTES), recorded=b"another"))
    assert texts.label(0) == "⟨0⟩"
    assert "is not the one that the recording was made with" in str(texts.reason)


def test_a_recording_that_says_nothing_of_its_tokenizer_gives_ids(tmp_path: Path) -> None:
    recording = replace(with_tokenizer(tmp_path, saved(BYTES)), produced={})
    assert texts_of(recording).label(0) == "⟨0⟩"


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_gives_ids(tmp_path: Path, content: bytes) -> None:
    texts = texts_of(with_tokenizer(tmp_path, content))
    assert texts.label(0) == "⟨0⟩"
    assert "cannot be read" in str(texts.reason)
