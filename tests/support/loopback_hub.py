"""A Hub of our own on loopback: as much of the Hub's API as huggingface_hub needs to push and to pull.

A test file has its fixtures with `pytest_plugins = ["loopback_hub"]`; other programs use `running_hub`.

It can fail as networks and Hubs do. `Hub.before` is called with every request and may raise a `Refusal` or an
`Answer`, or set what happens to the answer: after `handler.cut_after` bytes the connection ends, with a reset
if `handler.reset`; `handler.spoil` makes other bytes of those of a file. `Hub.arriving` is called before a
body is read: a `cut_after` set there cuts the upload. `Hub.on_bytes` is called with the handler and the
number of bytes after each piece of a file, in either direction: it may wait, or kill whoever is at the other
end.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from neuzip.compress import compress
from neuzip.formats.card.model_card import split_card

TOKEN = "hf_write0123456789"
READ_TOKEN = "hf_read0123456789"
LARGE = 4000  # bytes from which the Hub here stores a file with LFS
PIECE = 1 << 14  # bytes


@dataclass
class Repository:
    """Commits by their ids, each a whole tree, and branches."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)

    def commit(self, branch: str, tree: dict[str, bytes]) -> str:
        text = repr((len(self.commits), sorted(tree.items())))
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        return oid

    def tree(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(
        self, status: int, code: str = "", message: str = "", retry_after: int | None = None, **body: str
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.body = status, code, message, body
        self.retry_after = retry_after


class Answer(Exception):
    """A success with other JSON than the Hub's."""

    def __init__(self, body: object) -> None:
        super().__init__()
        self.body = body


class Hub(ThreadingHTTPServer):
    """As much of the Hub's API as huggingface_hub needs to push and to pull."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.empty()

    def empty(self) -> None:
        """Forget everything; no faults."""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.received: Counter[str] = Counter()
        """Bytes of bodies by path, of files to be stored; those that were cut off too."""
        self.sent: Counter[str] = Counter()
        """Bytes of files, by path."""
        self.token = TOKEN
        """The token that may write; another one expires every other."""
        self.heal()

    def heal(self) -> None:
        """No faults from now on."""
        self.before: Callable[[Handler], None] = lambda handler: None
        self.arriving: Callable[[Handler], None] = lambda handler: None
        self.on_bytes: Callable[[Handler, int], None] = lambda handler, count: None

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def add(self, repo_id: str, files: dict[str, bytes], **flags: bool) -> Repository:
        repository = self.repositories[repo_id] = Repository(**flags)
        repository.commit("main", files)
        return repository


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(data: bytes) -> bytes:
    """What git has of a file that LFS stores."""
    oid = hashlib.sha256(data).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()


def entries(repository: Repository, oid: str) -> list[dict[str, Any]]:
    """The files of a commit as the Hub lists them; git's id of a large one is that of its pointer."""
    found = []
    for path, data in repository.commits[oid].items():
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
        if path in repository.large:
            sha256, small = hashlib.sha256(data).hexdigest(), pointer(data)
            entry["oid"] = git_oid(small)
            entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": len(small)}
        found.append(entry)
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    server: Hub
    cut_after: int | None
    reset: bool
    spoil: Callable[[bytes], bytes] | None

    def log_message(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self) -> None:
        self.path = urlsplit(self.path).path
        self.cut_after, self.reset, self.spoil = None, False, None
        self.server.arriving(self)
        self.data = self.read_body()
        self.server.requests.append(f"{self.command} {self.path}")
        try:
            self.server.before(self)
            for pattern, action in ROUTES:
                match = re.fullmatch(pattern, f"{self.command} {self.path}")
                if match is not None:
                    action(self, *map(unquote, match.groups()))
                    return
            raise Refusal(404, message=f"the tests' Hub has no {self.command} {self.path}")
        except Answer as other:
            self.answer(other.body)
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            if refusal.retry_after is not None:
                headers["Retry-After"] = str(refusal.retry_after)
            self.answer(
                {"error": refusal.message, **refusal.body},
                {k: v for k, v in headers.items() if v},
                refusal.status,
            )

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.read_exactly(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.read_exactly(int(self.headers.get("Content-Length", 0)))

    def read_exactly(self, nbytes: int) -> bytes:
        """A body, piece by piece; ConnectionError if it ends too early or is to be cut."""
        data = bytearray()
        while len(data) < nbytes:
            allowed = nbytes if self.cut_after is None else min(nbytes, self.cut_after)
            piece = self.rfile.read(min(PIECE, allowed - len(data)))
            if not piece:
                self.hang_up()
            data += piece
            if self.command == "PUT":
                self.server.received[self.path] += len(piece)
                self.server.on_bytes(self, len(piece))
        return bytes(data)

    def hang_up(self) -> NoReturn:
        """End the connection, with a reset if so wanted."""
        self.close_connection = True
        if self.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            with suppress(OSError):  # the other end has gone
                self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        raise ConnectionError("cut")

    def answer(self, body: object, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(body, bytes):
            self.write_file(data)
        else:
            self.wfile.write(data)

    def write_file(self, data: bytes) -> None:
        """Send a file, piece by piece, up to where it is to be cut."""
        end = len(data) if self.cut_after is None else min(self.cut_after, len(data))
        for at in range(0, end, PIECE):
            piece = data[at : min(at + PIECE, end)]
            self.wfile.write(piece)
            self.server.sent[self.path] += len(piece)
            self.server.on_bytes(self, len(piece))
        if end < len(data):
            self.wfile.flush()
            self.hang_up()

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def repository(self, repo_id: str, write: bool = False) -> Repository:
        if self.token not in ("", self.server.token, READ_TOKEN):
            raise Refusal(401, message="Invalid credentials in Authorization header")
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and not self.token):
            raise Refusal(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if repository.gated:
            raise Refusal(403, "GatedRepo", f"Access to model {repo_id} is restricted")
        if write:
            self.require_write()
        return repository

    def require_write(self) -> None:
        if self.token != self.server.token:
            raise Refusal(
                403 if self.token == READ_TOKEN else 401, message=f"No write access with {self.token}"
            )

    def commit_of(self, repository: Repository, revision: str) -> str:
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid

    def create(self) -> None:
        self.require_write()
        asked = json.loads(self.data)
        repo_id = f"{asked['organization']}/{asked['name']}"
        url = f"{self.server.url}/{repo_id}"
        if repo_id in self.server.repositories:
            raise Refusal(409, message="You already created this model repo", url=url)
        private = asked.get("visibility") == "private" or asked.get("private", False)
        self.server.add(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        self.answer({"url": url})

    def branch(self, repo_id: str, name: str) -> None:
        repository = self.repository(repo_id, write=True)
        if name in repository.branches:
            raise Refusal(409, message="Reference already exists")
        repository.branches[name] = repository.branches["main"]
        self.answer({})

    def delete_branch(self, repo_id: str, name: str) -> None:
        del self.repository(repo_id, write=True).branches[name]
        self.answer({})

    def paths_info(self, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id)
        wanted = parse_qs(self.data.decode())["paths"]
        self.answer(
            [e for e in entries(repository, self.commit_of(repository, revision)) if e["path"] in wanted]
        )

    def refs(self, repo_id: str) -> None:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
            for name, oid in self.repository(repo_id).branches.items()
        ]
        self.answer({"branches": branches, "tags": [], "converts": []})

    def info(self, repo_id: str, revision: str = "main") -> None:
        repository = self.repository(repo_id)
        oid = self.commit_of(repository, revision)
        siblings = [
            {
                "rfilename": entry["path"],
                "size": entry["size"],
                "blobId": entry["oid"],
                "lfs": entry.get("lfs"),
            }
            for entry in entries(repository, oid)
        ]
        self.answer(
            {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": oid, "private": repository.private,
             "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
        )  # fmt: skip

    def list_tree(self, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id)
        self.answer(entries(repository, self.commit_of(repository, revision)))

    def preupload(self, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id, write=True)
        tree = repository.commits[self.commit_of(repository, revision)]
        asked = json.loads(self.data)
        ignored = asked.get("gitIgnore", tree.get(".gitignore", b"").decode()).split()
        self.answer(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                        "shouldIgnore": any(fnmatch.fnmatch(file["path"], glob) for glob in ignored),
                        "oid": git_oid(tree[file["path"]]) if file["path"] in tree else None,
                    }
                    for file in asked["files"]
                ]
            }
        )

    def batch(self, repo_id: str) -> None:
        self.repository(repo_id, write=True)
        objects = []
        for wanted in json.loads(self.data)["objects"]:
            actions = {
                "upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.server.url}/lfs-verify/{wanted['oid']}"},
            }
            objects.append(
                {**wanted, **({} if wanted["oid"] in self.server.objects else {"actions": actions})}
            )
        self.answer({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if hashlib.sha256(self.data).hexdigest() != oid:
            raise Refusal(400, message="these bytes have another checksum")
        self.server.objects[oid] = self.data
        self.answer({})

    def verify_upload(self, oid: str) -> None:
        if len(self.server.objects.get(oid, b"")) != json.loads(self.data)["size"]:
            raise Refusal(404, message="this object was not uploaded")
        self.answer({})

    def commit(self, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id, write=True)
        tree = dict(repository.tree(revision))
        for line in self.data.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                if value.get("parentCommit", repository.branches[revision]) != repository.branches[revision]:
                    raise Refusal(412, message="A commit has happened since")
            elif operation["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                tree[value["path"]] = self.server.objects[value["oid"]]
                repository.large.add(value["path"])
                if not value["path"].endswith(".safetensors"):  # the real Hub notes such files there, too
                    tree[".gitattributes"] += f"{value['path']} filter=lfs\n".encode()
            elif operation["key"] == "deletedFile":
                del tree[value["path"]]
            else:
                raise Refusal(400, message=f"unknown operation {operation['key']}")
        oid = repository.commit(revision, tree)
        self.answer({"commitUrl": f"{self.server.url}/{repo_id}/commit/{oid}", "commitOid": oid})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self.repository(repo_id)
        oid = self.commit_of(repository, revision)
        data = repository.commits[oid].get(path)
        if data is None:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha256(data).hexdigest() if path in repository.large else git_oid(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        if self.spoil is not None and self.command == "GET":
            data = self.spoil(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(data, headers)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.answer(data[first : last + 1], headers, 206)

    def validate_card(self) -> None:
        metadata, _ = split_card(json.loads(self.data)["content"])
        if metadata.get("license") == "none-such":
            raise Refusal(400, errors=[{"message": '"license" must be one of those'}])  # type: ignore[arg-type]
        self.answer({"errors": [], "warnings": []})


ID = "([^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    ("POST /api/repos/create", Handler.create),
    ("POST /api/validate-yaml", Handler.validate_card),
    (f"GET /api/models/{ID}", Handler.info),
    (f"GET /api/models/{ID}/revision/([^/]+)", Handler.info),
    (f"GET /api/models/{ID}/refs", Handler.refs),
    (f"GET /api/models/{ID}/tree/([^/]+)", Handler.list_tree),
    (f"POST /api/models/{ID}/branch/([^/]+)", Handler.branch),
    (f"DELETE /api/models/{ID}/branch/([^/]+)", Handler.delete_branch),
    (f"POST /api/models/{ID}/paths-info/([^/]+)", Handler.paths_info),
    (f"POST /api/models/{ID}/preupload/([^/]+)", Handler.preupload),
    (f"POST /api/models/{ID}/commit/([^/]+)", Handler.commit),
    (rf"POST /{ID}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT /lfs/([0-9a-f]+)", Handler.upload),
    ("POST /lfs-verify/([0-9a-f]+)", Handler.verify_upload),
    (f"(?:HEAD|GET) /{ID}/resolve/([^/]+)/(.+)", Handler.resolve),
]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """An empty Hub that answers until the block ends."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join(10)


def hub_environment(url: str, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    """The environment of a process for which this is the Hub; `home` holds its cache and nothing else."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return environment | {
        "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
        **({} if token is None else {"HF_TOKEN": token}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def hub_server() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(hub_server: Hub) -> Hub:
    """An empty Hub."""
    hub_server.empty()
    return hub_server


@pytest.fixture(scope="module")
def compressed(original: Path) -> Path:
    """The test file's own checkpoint `original`, compressed."""
    compress(original, original.with_name("small"))
    return original.with_name("small")


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub of this process, with a token that may write and an empty cache. No other can be reached."""
    from huggingface_hub import constants

    from neuzip.formats.hub import connection as hub_connection

    be_the_hub(hub.url, monkeypatch)
    monkeypatch.setattr(hub_connection, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    look_up = socket.getaddrinfo

    def look_up_here(host: object, *arguments: Any, **options: Any) -> Any:
        assert host in ("127.0.0.1", b"127.0.0.1"), f"a test asks {host}"
        return look_up(host, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    return hub


def be_the_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do to a running huggingface_hub what HF_ENDPOINT does to a new one."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
