"""What transformers and diffusers make of compressed folders: neuzip imported, only installed, or not there.

    python benchmarks/without_import.py [--save] PYTHON ...

Each PYTHON is an interpreter of an environment with torch and transformers, such as .venv/bin/python. Those
where neuzip is installed run three times: with `import neuzip`, without, and with NEUZIP_AUTOLOAD=0. This
interpreter makes the folders; diffusers is tried where it is installed, here too. Nothing needs the network.

Each cell is one way to load a folder. "right": the weights are the original's, bit for bit. "refused": an
error that names neuzip. "refused, unnamed": another error. "RANDOM": a model with other weights, which must
not happen; the exit code is then 1. "-": cannot be tried there. The last three rows show what nothing stops
in some environments without neuzip: a config from elsewhere, and what was compressed before 2026-11-26.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATES = {
    "imported": (["--import"], {}),
    "installed": ([], {}),
    "switched off": ([], {"NEUZIP_AUTOLOAD": "0"}),
}
ABSENT = "not installed"
UNSTOPPED = ("config of the original", "beside a plain config.json", "compressed before 2026-11-26")
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip


# Folders, made where neuzip is


def make_folders(root: Path) -> None:
    """Small checkpoints in `root`/plain, and what neuzip makes of them, by the same names in `root`/small."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        CLIPTextConfig,
        CLIPTextModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    import neuzip
    from neuzip.compress import Rule, Scheme, compress, decompress
    from neuzip.compress.delta_job import compress_delta

    plain, small = root / "plain", root / "small"
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(plain / "single")
    save_tokenizer(plain / "single")
    model.save_pretrained(plain / "sharded", max_shard_size="20KB")
    model.save_pretrained(plain / "variant", variant="fp16")
    model.save_pretrained(plain / "tree" / "llama")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    CLIPTextModel(CLIPTextConfig(**sizes, num_attention_heads=2)).save_pretrained(
        plain / "tree" / "text_encoder"
    )
    name_as_published(plain / "tree" / "text_encoder" / "model.safetensors")
    for vae in vaes():
        vae.to(torch.bfloat16).save_pretrained(plain / "tree" / "vae")
    for name in ("single", "sharded", "variant", "tree"):
        compress(plain / name, small / name)

    rules = {"k=3": Scheme("truncated", 3), "ternary": Scheme("ternary")}
    for name, scheme in rules.items():
        activations = "b1.58" if name == "ternary" else None
        compress(plain / "single", small / name, [Rule("*proj*", scheme), Rule("*", Scheme())],
                 activations=activations, allow_destructive=True)  # fmt: skip
        decompress(small / name, plain / name)

    packed = AutoModelForCausalLM.from_pretrained(
        plain / "single", dtype="auto", quantization_config=neuzip.NeuzipConfig("packed")
    )
    packed.save_pretrained(small / "packed")
    shutil.copytree(plain / "single", plain / "packed")

    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(plain / "delta")
    compress_delta(plain / "delta", plain / "single", small / "delta", "single")

    shutil.copytree(plain / "single", plain / "quantised")
    edit_config(plain / "quantised", quantization_config={"quant_method": "bitnet"})
    compress(plain / "quantised", small / "quantised")

    for name in ("foreign", "old"):
        shutil.copytree(plain / "single", plain / name)
        shutil.copytree(small / "single", small / name)
    shutil.copy(plain / "single" / "config.json", small / "foreign")
    edit_config(small / "old", transformers_weights=None)
    make_old(small / "old" / "model.safetensors")


def vaes() -> list[Any]:
    """A model of diffusers' own, where diffusers is."""
    try:
        from diffusers import AutoencoderTiny
    except ImportError:
        return []
    return [AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                            num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))]  # fmt: skip


def name_as_published(path: Path) -> None:
    """Give tensors of a CLIP encoder the prefix of published ones: 4.57 does not read those of version 5."""
    from safetensors.torch import load_file, save_file

    prefix = "text_model."
    tensors = {prefix + name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of 96 words, for pipelines."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(96)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # where version 5 has a class that 4.57 does not know
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def edit_config(folder: Path, **changes: object) -> None:
    """Set entries of a config.json; None takes one away."""
    document = json.loads((folder / "config.json").read_text())
    document = {name: value for name, value in (document | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(document))


def make_old(container: Path) -> None:
    """Give a container the metadata that neuzip wrote before 2026-11-26."""
    data = container.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    old = header.replace(b'"format":"neuzip"', b'"format":"pt"    ', 1)
    assert old != header
    container.write_bytes(old + data[len(header) :])


# Loading, in a process of whichever interpreter


def attempts(root: Path) -> dict[str, Callable[[Path], Any]]:
    """Ways to load a model from a folder of checkpoints: `root`/small, or `root`/plain to compare with."""
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    causal = AutoModelForCausalLM.from_pretrained
    ways: dict[str, Callable[[Path], Any]] = {
        "AutoModelForCausalLM": lambda at: causal(at / "single"),
        "AutoModelForCausalLM, sharded": lambda at: causal(at / "sharded"),
        "LlamaForCausalLM": lambda at: transformers.LlamaForCausalLM.from_pretrained(at / "single"),
        "LlamaForCausalLM, sharded": lambda at: transformers.LlamaForCausalLM.from_pretrained(at / "sharded"),
        "AutoModel": lambda at: AutoModel.from_pretrained(at / "single"),
        "AutoModelForSequenceClassification": lambda at: (
            AutoModelForSequenceClassification.from_pretrained(at / "single").base_model
        ),
        "pipeline": lambda at: transformers.pipeline("text-generation", model=str(at / "single")).model,
        "config of the folder": lambda at: causal(
            at / "single", config=AutoConfig.from_pretrained(at / "single")
        ),
        "use_safetensors": lambda at: causal(at / "single", use_safetensors=True),
        "variant": lambda at: causal(at / "variant", variant="fp16"),
        "subfolder": lambda at: causal(at / "tree", subfolder="llama"),
        "text_encoder of a pipeline's folder": lambda at: transformers.CLIPTextModel.from_pretrained(
            at / "tree", subfolder="text_encoder"
        ),
        "vae of a pipeline's folder, diffusers": lambda at: vae_of(at / "tree"),
        "3 mantissa bits": lambda at: causal(at / "k=3"),
        "ternary, with activations": lambda at: causal(at / "ternary"),
        "saved by a packed model": lambda at: causal(at / "packed"),
        "a delta": lambda at: causal(at / "delta"),
        "of weights quantised before": lambda at: LlamaOf(at / "quantised"),
        "config of the original": lambda at: causal(
            at / "single", config=AutoConfig.from_pretrained(root / "plain" / "single")
        ),
        "beside a plain config.json": lambda at: causal(at / "foreign"),
        "compressed before 2026-11-26": lambda at: causal(at / "old"),
    }
    return ways


def LlamaOf(folder: Path) -> Any:  # noqa: N802
    """A model of a folder whose quantization_config is not to be looked at, if it is the plain one."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if folder.parent.name == "plain":
        del config.quantization_config
    return transformers.LlamaForCausalLM.from_pretrained(folder, config=config)


def vae_of(folder: Path) -> Any:
    """The autoencoder of a diffusers folder. Raises Untried without diffusers."""
    try:
        from diffusers import AutoencoderTiny
    except ImportError as reason:
        raise Untried from reason
    return AutoencoderTiny.from_pretrained(folder, subfolder="vae")


class Untried(Exception):
    """What this environment cannot try."""


def outcome(load: Callable[[Path], Any], root: Path) -> dict[str, str]:
    """What came of loading a compressed folder, and the error if there was one."""
    try:
        expected, again = (load(root / "plain").state_dict() for _ in range(2))
    except Untried:
        return {"outcome": "-"}
    assert same(again, expected), "the original itself does not load"
    try:
        found = load(root / "small").state_dict()
    except Exception as error:
        told = f"{type(error).__module__}.{type(error).__name__}: {error}"  # as a traceback ends
        lines = [line for line in told.splitlines() if "neuzip" in line]
        return {"outcome": "refused" if lines else "refused, unnamed", "error": (lines or [told])[-1]}
    return {"outcome": "right" if same(found, expected) else "RANDOM"}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two models have the same weights."""
    import torch

    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def try_all(root: Path, only: list[str]) -> dict[str, Any]:
    """The outcomes in this process, and the version of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    return {
        "transformers": transformers.__version__,
        "outcomes": {
            name: outcome(load, root) for name, load in attempts(root).items() if not only or name in only
        },
    }


# All interpreters


def run(python: str, root: Path, state: str, only: list[str] | None = None) -> dict[str, Any]:
    """What `try_all` says in a process of an interpreter. A process that fails raises CalledProcessError."""
    arguments, more = STATES.get(state, ([], {}))
    command = [python, __file__, "--try", str(root), *arguments, *(["--only", *only] if only else [])]
    environment = {k: v for k, v in os.environ.items() if k not in ("NEUZIP_AUTOLOAD", "PYTHONPATH")}
    done = subprocess.run(
        command, env=environment | more | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def has_neuzip(python: str) -> bool:
    """Whether an environment has it."""
    asked = "import importlib.util, sys; sys.exit(importlib.util.find_spec('neuzip') is None)"
    return subprocess.run([python, "-c", asked], cwd="/").returncode == 0


def table(columns: list[dict[str, Any]]) -> str:
    """Markdown: a row for each way to load, a column for each version and state."""
    titles = [f"{c['transformers']}, {c['neuzip']}" for c in columns]
    lines = [" | ".join(["", "way to load", *titles, ""]).strip(), "|" + "---|" * (1 + len(titles))]
    for name in columns[0]["outcomes"]:
        cells = [c["outcomes"][name]["outcome"] for c in columns]
        lines.append(" | ".join(["", name, *cells, ""]).strip())
    return "\n".join(lines)


def main() -> int:
    """Try everything everywhere, and print the table; 1 if weights were random where that is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="*", help="interpreters to try it with", default=[sys.executable])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/without_import.json")
    parser.add_argument("--try", dest="root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--import", dest="imported", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.root:
        if given.imported:
            import neuzip  # noqa: F401
        print(json.dumps(try_all(given.root, given.only)))
        return 0

    from record import Environment, Measurement, save

    columns = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_folders(root)
        for python in given.python:
            for state in STATES if has_neuzip(python) else [ABSENT]:
                print(f"{python}: {state}", file=sys.stderr)
                columns.append({"neuzip": state, **run(python, root, state)})
    for column in columns:
        for found in column["outcomes"].values():
            found.update({"error": found["error"].replace(folder, "...")} if "error" in found else {})
    print(table(columns))
    if given.save:
        measurement = Measurement(Environment.here("torch", "safetensors"), columns)
        save("without_import", __doc__.splitlines()[0], measurement)
    return int(any(
        found["outcome"] == "RANDOM" and name not in UNSTOPPED
        for column in columns for name, found in column["outcomes"].items()
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
