"""`vllm serve` on loopback streams the tokens of the original folder to a client of OpenAI's API."""

from __future__ import annotations

import os
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
from vllm_models import DEMO, compressed

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]

SECONDS = 300
"""Time that a server has to start. A start takes 30 s of an idle machine."""


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a server, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", folder, "--host", "127.0.0.1", "--port", str(port), *options]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
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


FORMS = {
    "a compressed folder": [],
    "a plain folder, packed on arrival": ["--quantization", "neuzip"],
}


@pytest.mark.parametrize("form", FORMS)
def test_streamed_tokens_are_those_of_the_original(form: str, tmp_path: Path, say: Any):
    folder = DEMO if "plain" in form else compressed(DEMO, tmp_path / "my-model.nz")
    say(f"vllm serve starts: {form}")
    common = ["--dtype", "bfloat16", "--max-model-len", "64", "--enforce-eager"]
    with served(folder, tmp_path / "log", *common, *FORMS[form]) as address:
        results = [streamed(address, text) for text in TEXTS]
    assert all(pieces > NEW // 2 for _, pieces in results)  # they came one by one
    tokens = [tokens for tokens, _ in results]
    with started(DEMO) as original:
        if not FORMS[form]:
            assert tokens == greedy(original)
        say(f"{form}: {assert_chosen_or_tied(original, tokens)} tokens tied")
