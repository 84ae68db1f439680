"""docs/how-to/serve-with-vllm.md as a new user follows it: its commands serve the original's tokens.

A server listens on loopback, and a client of OpenAI's API reads the tokens as they come.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_engine import NEW, TEXTS, assert_chosen_or_tied, greedy, started

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "serve-with-vllm.md").read_text(encoding="utf-8")
PLAIN = "ORG/bf16-model"
"""What the page calls a folder that is not compressed."""

SERVERS = re.findall(r"^\$ (vllm serve .*)$", PAGE, re.MULTILINE)
HERE = ["--host", "127.0.0.1", "--max-model-len", "64", "--enforce-eager"]
"""Options of all servers, beside the port: a compiled model takes a minute longer."""

SECONDS = 300
"""Time that a server has to start. A start takes 30 s of an idle machine."""


def environment() -> dict[str, str]:
    """A shell's, in which the programs of this Python are found, and vLLM has its usual processes."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return os.environ | processes | {"PATH": programs}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader after the first commands of the page: it has my-model and my-model.nz."""
    clone = tmp_path_factory.mktemp("clone")
    (clone / "eval").symlink_to(ROOT / "eval")
    (block,) = re.findall(r"^```console\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    script = "\n".join(["set -e", *lines, "pwd"])
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert {path.name for path in folder.iterdir()} == {"my-model", "my-model.nz"}
    return folder


@contextmanager
def served(command: str, folder: Path, log: Path) -> Iterator[str]:
    """The address of the server that a command starts, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*shlex.split(command.replace(PLAIN, "my-model")), *HERE, "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            ["env", *words],
            cwd=folder,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
        )
        try:
            wait_for(process, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return as soon as the server answers. Fails if it ends before."""
    import httpx

    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-8000:]
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"no server after {SECONDS} s: {log.read_text()[-8000:]}")


def streamed(address: str, text: list[int]) -> tuple[list[int], int]:
    """The greedy tokens after a text, and in how many pieces they came."""
    from openai import OpenAI

    client = OpenAI(base_url=address, api_key="none")
    (model,) = client.models.list().data
    pieces = client.completions.create(
        model=model.id, prompt=text, temperature=0, max_tokens=NEW, stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    tokens = [piece.choices[0].token_ids or [] for piece in pieces if piece.choices]  # type: ignore[attr-defined]
    return [token for piece in tokens for token in piece], sum(map(bool, tokens))


def test_the_page_has_a_command_for_each_residency():
    assert len(SERVERS) == 3
    assert sum("packed" in command for command in SERVERS) == 1
    assert sum(PLAIN in command and "--quantization neuzip" in command for command in SERVERS) == 1


@pytest.mark.parametrize("command", SERVERS)
def test_a_server_streams_the_tokens_of_the_original(command: str, here: Path, tmp_path: Path, say: Any):
    say(command)
    with served(command, here, tmp_path / "log") as address:
        results = [streamed(address, text) for text in TEXTS]
    assert max(pieces for _, pieces in results) > 1  # vLLM sends at once what a busy client is behind
    tokens = [tokens for tokens, _ in results]
    with started(here / "my-model") as original:
        if command == "vllm serve my-model.nz":
            assert tokens == greedy(original)
        say(f"{assert_chosen_or_tied(original, tokens)} of {len(TEXTS) * NEW} tokens tied")


def test_the_program_of_the_page_prints_what_it_prints_of_the_original(here: Path, say: Any):
    say("the Python of the page")
    (code,) = re.findall(r"^```python engine\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)
    assert code.count("my-model.nz") == 1
    printed = []
    for program in (code, code.replace("my-model.nz", "my-model")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=here, env=os.environ, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        printed.append([line for line in lines if line.strip() and " WARNING " not in line])
    assert printed[0] == printed[1] and printed[0], printed
