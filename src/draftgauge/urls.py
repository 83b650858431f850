"""Checkpoints that lie elsewhere: an address is fetched once into a cache folder, and what it pointed to is noted.

`hf://` goes through huggingface_hub with its own cache and tokens, every other address through `remotefiles`.
Nothing is written into the working folder. Knows of a drafter's folder only the names in it, so that an optimizer
beside the weights is not fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from draftgauge.errors import CheckpointError, first_line
from draftgauge.progress import Progress, silent
from draftgauge.store import cache_folder, publish_directory, publish_file

_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_HUB = re.compile(
    r"hf://(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?"
)
_SHA = re.compile(r"[0-9a-f]{40}")
_WANTED = ("*.safetensors", "*.json", "*.pt", "*.pth", "*.bin", "*.distcp", ".metadata")
_UNWANTED = ("optim*", "scheduler*", "scaler*", "rng_state*", "random_states*", "training_args*", "*.tmp")


@dataclass(frozen=True)
class Localised:
    """Where a checkpoint lies on this machine, and where it came from.

    `url` is the address without what is secret in it, None for a local path; `revision` is what it pointed to
    (a commit, or what the server says of the file); `pinned` is whether the address can only ever mean that.

    Example:
        `Localised(Path("..."), "hf://z-lab/drafter@main", revision="0123...", pinned=False)`
    """

    path: Path
    url: str | None = None
    revision: str | None = None
    pinned: bool = True


@runtime_checkable  # for the tests, which check every annotation at every call
class Hub(Protocol):
    """What is asked of the Hugging Face hub; tests bring their own."""

    def files(self, repo: str, *, kind: str, revision: str | None) -> tuple[str, Sequence[str]]:
        """The commit that the revision means, and the names of its files."""

    def fetch(self, repo: str, *, kind: str, commit: str, names: Sequence[str]) -> Path:
        """The folder in which these files of that commit lie now."""


def localise(
    source: str | Path,
    *,
    progress: Progress = silent,
    cache: Path | None = None,
    hub: Hub | None = None,
    wait_s: float = 1.0,
) -> Localised:
    """The checkpoint on this machine; a path is passed through, an address is fetched where it is not here yet.

    Args:
        source: A path, or `hf://owner/repo@revision/path`, `https://...`, `s3://...` or what else fsspec knows.
        progress: Shows the download.
        cache: Where downloads are kept; `downloads` in draftgauge's cache folder if None. The hub has its own.
        hub: The Hugging Face hub.
        wait_s: How long to wait after the first broken connection; doubled from try to try.

    Raises:
        CheckpointError: There is no such file, it may not be read, or its protocol needs a package.
        ConnectionLostError: The connection broke again and again.
        StoreError: The disk is full or cannot be written.
    """
    match = _PROTOCOL.match(source) if isinstance(source, str) else None
    if match is None:
        return Localised(Path(source))
    url, protocol = str(source), match[1].lower()
    if protocol == "file":
        return Localised(Path(unquote(urlsplit(url).path)))
    if protocol == "hf":
        return _from_hub(url, hub or _OnlineHub())
    from draftgauge.remotefiles import names_version, opened, receive, shown  # noqa: PLC0415 - most lie here already

    downloads = cache or cache_folder() / "downloads"
    with opened(url, wanted=_is_wanted, wait_s=wait_s) as remote:
        place = hashlib.sha256(f"{shown(url)}\n{remote.revision}".encode()).hexdigest()
        path = downloads / place / remote.name
        if not path.exists():
            with (publish_directory if remote.is_folder else publish_file)(path) as partial:
                receive(remote, partial, url=url, progress=progress)
    return Localised(path, shown(url), remote.revision, pinned=names_version(url))


# --- the hub -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OnlineHub:
    """huggingface_hub, with its own cache, tokens and endpoint."""

    def files(self, repo: str, *, kind: str, revision: str | None) -> tuple[str, Sequence[str]]:
        from huggingface_hub import HfApi  # noqa: PLC0415 - takes a while, and most checkpoints are local

        with _hub_explained(repo, revision):
            info = HfApi().repo_info(repo, repo_type=kind, revision=revision)
        return str(info.sha), HfApi().list_repo_files(repo, repo_type=kind, revision=info.sha)

    def fetch(self, repo: str, *, kind: str, commit: str, names: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download  # noqa: PLC0415

        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in names]
        with _hub_explained(repo, commit):
            folder = snapshot_download(repo, repo_type=kind, revision=commit, allow_patterns=patterns)
        return Path(str(folder))


@contextlib.contextmanager
def _hub_explained(repo: str, revision: str | None) -> Iterator[None]:
    import httpx2  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"hf://{repo}" + (f"@{revision}" if revision else "")
    try:
        yield
    except RevisionNotFoundError as exc:
        raise CheckpointError(
            f"{what}: {repo} has no such revision. Give a branch, a tag or a commit"
        ) from exc
    except RepositoryNotFoundError as exc:
        raise CheckpointError(
            f"{what} does not exist, or may not be read. Check the name; for a private or gated one log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from exc
    except (HFValidationError, OSError, httpx2.HTTPError) as exc:
        raise CheckpointError(
            f"{what} cannot be fetched: {first_line(exc)}. Check the connection (HF_ENDPOINT, HF_HUB_OFFLINE) and "
            "try again: what has arrived is kept"
        ) from exc


def _from_hub(source: str, hub: Hub) -> Localised:
    match = _HUB.fullmatch(source)
    if match is None:
        raise CheckpointError(
            f"{source} names no repository of the hub; expected hf://OWNER/REPO, hf://OWNER/REPO@REVISION or "
            "hf://OWNER/REPO@REVISION/PATH"
        )
    kind, repo, revision, inside = match[1] or "models", match[2], match[3], (match[4] or "").strip("/")
    revision = unquote(revision) if revision else None
    kind = kind.removesuffix("s")
    commit, there = hub.files(repo, kind=kind, revision=revision)
    names = _names_of(inside, there, source)
    folder = hub.fetch(repo, kind=kind, commit=commit, names=names)
    return Localised(folder / inside, source, commit, pinned=_SHA.fullmatch(revision or "") is not None)


def _names_of(inside: str, there: Sequence[str], source: str) -> list[str]:
    """Of a file, it and what is read beside it; of a folder, what a drafter's folder has."""
    if inside in there:
        beside = PurePosixPath(inside).parent
        names = {inside, str(beside / "config.json")}
        if inside.endswith(".index.json"):
            names |= {name for name in there if PurePosixPath(name).match(str(beside / "*.safetensors"))}
            names = {name for name in names if PurePosixPath(name).parent == beside}
        return [name for name in there if name in names]
    direct = [name for name in there if str(PurePosixPath("/", name).parent).strip("/") == inside]
    names = {name for name in direct if _is_wanted(PurePosixPath(name).name)}
    if not any(not name.endswith(".json") for name in names):
        raise CheckpointError(
            f"{source} holds no weights at {inside or 'its top'}; it holds {', '.join(there[:8]) or 'nothing'}. "
            "Give the path of a checkpoint in it"
        )
    return [name for name in direct if name in names]


def _is_wanted(name: str) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return matches(_WANTED) and not matches(_UNWANTED)
