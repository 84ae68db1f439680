"""SGLang as users start it: its HTTP server with a compressed folder, and two processes with one model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: run `make test-sglang`")

from sglang_engine import FLAGS, PROMPTS

pytestmark = pytest.mark.engines

START = 300
"""Seconds that a start may take."""


@contextmanager
def served(folder: Path, flags: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a server of SGLang, which a user would start with no flag but that of the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup", *FLAGS, *flags]
    with log.open("w") as output:
        environment = os.environ | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "--tp-size" in flags else None
        server = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):  # the server may have ended, with a reason in its log
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def post(url: str, body: dict[str, Any]) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        data: bytes = answer.read()
    return data


def greedy(address: str) -> list[list[int]]:
    """Eight tokens after each prompt."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"text": list(PROMPTS), "sampling_params": sampling}
    return [answer["output_ids"] for answer in json.loads(post(f"{address}/generate", body))]


@pytest.fixture(scope="module")
def tokens(plain: Path, say: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Token ids of the original folder, and the text of its streamed answer."""
    say("SGLang serves the original folder")
    with served(plain, (), tmp_path_factory.mktemp("logs") / "original") as address:
        return greedy(address), streamed(address, "model")


def streamed(address: str, model: str) -> str:
    """The text of a streamed answer to the OpenAI interface."""
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "stream": True}
    lines = post(f"{address}/v1/completions", body).decode().splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(parts) > 2
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def test_a_compressed_folder_is_served_without_an_option(
    compressed: Path, tokens: Any, say: Callable[[str], None], tmp_path: Path
) -> None:
    say("SGLang serves the compressed folder")
    with served(compressed, (), tmp_path / "log") as address:
        assert (greedy(address), streamed(address, "model")) == tokens
    assert "Decoding compressed weights" in (tmp_path / "log").read_text()


def test_two_ranks_pack_their_own_parts(
    compressed: Path, tokens: Any, say: Callable[[str], None], tmp_path: Path
) -> None:
    say("SGLang serves packed weights in two processes")
    flags = ("--tp-size", "2", "--quantization", "neuzip")
    with served(compressed, flags, tmp_path / "log") as address:
        assert greedy(address) == tokens[0]
