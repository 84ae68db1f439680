"""The Hub id in the address of a page, which people paste where an id is asked for."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")

_PAGE = re.compile(
    r"(?:https?:/+)?(?:[^/@]*@)?(?P<host>[\w.:-]+)/(?:api/)?(?:models/)?(?P<repo>[\w.-]+/[\w.-]+?)(?:\.git)?"
    r"(?:/(?:tree|blob|resolve|commit|raw)/(?P<revision>[^/?#]+)[^?#]*)?/?(?:[?#].*)?",
    re.ASCII,
)
"""Of https:// a path keeps one slash."""

_NO_MODELS = ("datasets", "spaces", "api", "collections", "papers", "docs")


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
