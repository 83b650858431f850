"""The documents say what is: the commands' help, their examples, and what the README tells to type."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from draftgauge.cli import cli

ROOT = Path(__file__).parents[1]
NAMES = sorted(cli.commands)
#: Every command that does something: a group's own, not the group.
LEAVES = {
    f"{name} {inner}".rstrip(): command
    for name, found in cli.commands.items()
    for inner, command in (found.commands.items() if isinstance(found, click.Group) else [("", found)])
}
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def help_of(name: str) -> str:
    return CliRunner().invoke(cli, [name, "--help"], catch_exceptions=False).output


def blocks(text: str) -> str:
    """The fenced blocks of a Markdown text, with continued lines joined."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\\\n\s*", " ", "\n".join(fenced))


def called(words: list[str]) -> tuple[str, click.Command]:
    """The command that these words after `draftgauge` call, a group's own with its two names."""
    name, *rest = words
    command = cli.commands.get(name)
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, command = f"{name} {rest[0]}", command.commands.get(rest[0])
    assert command is not None, f"there is no `draftgauge {name}`"
    return name, command


def options_of(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}


def spoken(text: str) -> list[list[str]]:
    """The words after `draftgauge` in every line that calls it, without a shell's prompt."""
    calls = re.findall(r"^\s*(?:\$ )?draftgauge ([^\n|]+)", text, flags=re.MULTILINE)
    return [call.split() for call in calls]


def test_what_is_generated_is_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_how_it_is_called(name: str) -> None:
    text = help_of(name)
    assert re.search(rf"Examples?:\n(?s:.*)^\s+draftgauge {name} ", text, flags=re.MULTILINE), text
    assert "Exit codes:" in text


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_every_command_can_print_json(name: str) -> None:
    assert any("--json" in option.opts for option in LEAVES[name].params)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for words in spoken(blocks(text)):
        if words[0].startswith(("-", "[")) or words[1:2] == [
            "[OPTIONS]"
        ]:  # `draftgauge --help`, a usage line
            continue
        name, command = called(words)
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= options_of(command), f"{document.name}: `draftgauge {name}` has no such option"


def test_examples_in_help_use_options_that_exist() -> None:
    for name in NAMES:
        for words in spoken(re.sub(r"\\\n\s*", " ", help_of(name))):
            used = {word for word in words if word.startswith("--")}
            assert used <= options_of(called(words)[1]), f"{name} --help"


def test_the_readme_starts_with_the_two_commands() -> None:
    first_screen = README.read_text(encoding="utf-8").splitlines()[:40]
    assert "make demo" in "\n".join(first_screen)
    assert "make test" in "\n".join(first_screen)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_in_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    told = set(re.findall(r"`make ([a-z-]+)", document.read_text(encoding="utf-8")))
    told |= set(
        re.findall(r"^(?:\$ )?make ([a-z-]+)", blocks(document.read_text(encoding="utf-8")), re.MULTILINE)
    )
    assert told <= targets


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*DOCUMENTS, ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
