"""What must not be shown of the way to the Hub: the access token, and passwords of endpoint and proxies.

Whoever sends text to a person sends it through `scrubbed`. Nothing here loads huggingface_hub.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator
from urllib.parse import quote, unquote, urlsplit

ADDRESSES = ("HF_ENDPOINT", "HF_INFERENCE_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY")
"""Environment variables, in capital or small letters, whose address may hold USER:PASSWORD@."""

SHORTEST = 4
"""Characters: a shorter password is taken out only beside its user, or half of every text would go."""

HIDDEN = "***"


def scrubbed(text: str) -> str:
    """A text without any secret, in whatever form a server or a library writes it.

    >>> os.environ["ALL_PROXY"] = "http://ann:p%40ss@proxy:8080"
    >>> scrubbed("by http://ann:p%40ss@proxy:8080 with Basic YW5uOnBAc3M=, that is p@ss")
    'by http://***@proxy:8080 with Basic ***, that is ***'
    >>> del os.environ["ALL_PROXY"]
    """
    for secret in sorted(set(_secrets()), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _secrets() -> Iterator[str]:
    yield from _token()
    for name in ADDRESSES:
        for value in (os.environ.get(name, ""), os.environ.get(name.lower(), "")):
            yield from _of_address(value)


def _token() -> Iterator[str]:
    """The access token, where huggingface_hub has been loaded: before that nobody can have sent it."""
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import get_token

        if token := get_token():
            yield token


def _of_address(address: str) -> Iterator[str]:
    """The forms of user and password of an address: as they are, percent-encoded or not, and in base64.

    A name without a password counts as one: services take tokens in its place.
    """
    try:
        netloc = urlsplit(address if "//" in address else f"//{address}").netloc
    except ValueError:  # no address, and so nothing that was sent
        return
    both, at, _ = netloc.rpartition("@")
    if not at:
        return
    user, _, password = both.partition(":")
    plain_user, plain_password = unquote(user), unquote(password)
    wholes = {both, f"{plain_user}:{plain_password}", f"{quote(plain_user, '')}:{quote(plain_password, '')}"}
    parts = {password, plain_password} if password else {user, plain_user}
    parts |= {quote(part, "") for part in parts} | {quote(part, "").lower() for part in parts}
    yield from (whole for whole in wholes if whole.strip(":"))
    yield from (part for part in parts if len(part) >= SHORTEST)
    for whole in wholes:
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            coded = encode(whole.encode()).decode("ascii")
            yield from (coded, coded.rstrip("="), quote(coded, ""))
