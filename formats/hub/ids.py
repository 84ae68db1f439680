"""Hub ids: owner/name or owner/name@revision, and the one in the address of a page, which people paste."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
"""What has the form of a Hub id: owner/name or owner/name@revision."""

_PAGE = re.compile(
    r"(?:https?:/+)?(?:[^/@]*@)?(?P<host>[\w.:-]+)/(?:api/)?(?:models/)?(?P<repo>[\w.-]+/[\w.-]+?)(?:\.git)?"
    r"(?:/(?:tree|blob|resolve|commit|raw)/(?P<revision>[^/?#]+)[^?#]*)?/?(?:[?#].*)?",
    re.ASCII,
)
"""Address of a page. In a path, only one slash of https:// is left."""

_NO_MODELS = ("datasets", "spaces", "api", "collections", "papers", "docs")


def hub_id(src: str | os.PathLike[str]) -> re.Match[str] | None:
    """The parts of what `resolve_source` would download; None for a path."""
    match = HUB_ID.fullmatch(os.fspath(src))
    return None if Path(src).suffix == ".safetensors" or os.path.lexists(src) else match


def repository_name(src: str) -> str:
    """The name of a repository by its id: that of `owner/name@revision` is `name`."""
    return src.partition("@")[0].rpartition("/")[2]


def did_you_mean(text: str) -> str:
    """A hint that names the id in the address of a model's page; empty for everything else.

    >>> did_you_mean("https://huggingface.co/org/m/tree/v1"), did_you_mean("https://example.com/org/m")
    ('did you mean org/m@v1?', '')
    """
    match = _PAGE.fullmatch(text)
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.rpartition("@")[2]
    if match is None or match["host"] not in (*HOSTS, endpoint) or match["repo"].split("/")[0] in _NO_MODELS:
        return ""
    revision = match["revision"]
    return f"did you mean {match['repo']}{'' if revision in (None, 'main') else f'@{revision}'}?"
