"""The Python API as its users write it: obvious calls work, wrong ones name the parameter."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import neuzip
from neuzip.distribution import ENGINES
from neuzip.errors import FormatError
from neuzip.eval.demo import CHECKPOINT

pytest_plugins = ["loopback_hub"]
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("compress", "eval", "formats", "kernels", "neuzip", "runtime", "train")
OURS = ("neuzip.checkpoints", "neuzip.models")
FLOATS = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the tests of this file make once."""
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def lossless(folder: Path) -> Path:
    """The demo checkpoint, compressed without loss."""
    return neuzip.compress_checkpoint(CHECKPOINT, folder / "lossless.nz", device="cpu", jobs=1).dst


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Path:
    """The demo checkpoint, rounded to 3 mantissa bits."""
    return neuzip.compress_checkpoint(CHECKPOINT, str(folder / "rounded.nz"), mantissa_bits=3, jobs=1).dst


@pytest.fixture(scope="module")
def ternary(folder: Path) -> Path:
    """The demo checkpoint with ternary weights."""
    result = neuzip.compress_checkpoint(
        CHECKPOINT, folder / "ternary.nz", ternary=True, allow_destructive=True, jobs=1
    )
    return result.dst


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    """A short text to measure on."""
    path = folder / "text.txt"
    path.write_text("All happy families are alike; each unhappy family is unhappy in its own way. " * 12)
    return path


# The eleven obvious calls


def test_a_device_is_a_name(lossless: Path, folder: Path) -> None:
    assert neuzip.compress_checkpoint(CHECKPOINT, folder / "a", device="cpu").device == "cpu"
    assert neuzip.verify_checkpoint(lossless, device=torch.device("cpu"), jobs=1).device == "cpu"
    assert neuzip.decompress_checkpoint(lossless, folder / "b", device="cpu").lossless


def test_results_are_short_where_they_are_printed(folder: Path, lossless: Path) -> None:
    made = neuzip.compress_checkpoint(CHECKPOINT, folder / "printed", jobs=1)
    for result in (made, neuzip.verify_checkpoint(lossless, jobs=1)):
        assert len(result.tensors) == 56 and "tensors=" not in repr(result)


def test_mantissa_bits_are_a_keyword(rounded: Path) -> None:
    losses = [t for t in neuzip.verify_checkpoint(rounded, original=CHECKPOINT).tensors if not t.lossless]
    assert losses and all(t.scheme == "truncated" for t in losses)


def test_rules_are_schemes_by_name(folder: Path) -> None:
    rules = [neuzip.Rule("*down_proj*", neuzip.Scheme("raw")), neuzip.Rule("*", neuzip.Scheme("lossless"))]
    result = neuzip.compress_checkpoint(CHECKPOINT, folder / "by-rules", rules=rules)
    assert {t.scheme for t in result.tensors if "down_proj" in t.name} == {"raw"}
    assert "lossless" in {t.scheme for t in result.tensors}


@pytest.mark.slow
def test_a_source_may_be_a_hub_id(here: Any, lossless: Path, tmp_path: Path) -> None:
    files = {p.relative_to(CHECKPOINT).as_posix(): p.read_bytes() for p in CHECKPOINT.iterdir()}
    here.add("org/model", files)
    model = neuzip.load_model("org/model")
    assert model.config.name_or_path == "org/model"
    assert len(neuzip.generate(model, "import ", max_new_tokens=2).tokens) == 2
    assert neuzip.diff_checkpoints("org/model", lossless, jobs=1).identical
    result = neuzip.compress_checkpoint("org/model", tmp_path / "m.nz", exclude=["*"], jobs=1)
    assert neuzip.verify_checkpoint(result.dst, original="org/model", jobs=1).tensors


def test_a_gpu_has_a_number(lossless: Path) -> None:
    """Without GPUs the number is understood, and the error says what torch finds."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(neuzip.NeuzipError, match=rf"`device='cuda:{found}'`: torch finds"):
        neuzip.load_model(lossless, device=found)
    with pytest.raises(neuzip.NeuzipError, match=rf"`device='cuda:{found}'`"):
        neuzip.generate(lossless, "A", device=found)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_weights_are_loaded_where_a_device_says(lossless: Path, device: str | torch.device | None) -> None:
    path = next(lossless.glob("*.safetensors"))
    assert neuzip.load_file(path, device=device)[FLOATS].device == torch.device("cpu")
    with neuzip.safe_open(path, "pt", device=device) as file:
        assert FLOATS in file.keys()  # noqa: SIM118
    assert neuzip.load_model(lossless, device=device).device == torch.device("cpu")


def test_errors_are_of_one_family(tmp_path: Path) -> None:
    with pytest.raises(neuzip.NeuzipError, match="no such file or folder") as told:
        neuzip.verify_checkpoint(tmp_path / "nothing")
    assert told.value.hint


def test_a_checkpoint_or_a_model_generates(rounded: Path) -> None:
    pieces: list[str] = []
    made = neuzip.generate(
        rounded, "import ", max_new_tokens=6, device="cpu", kv_bits=8, on_text=pieces.append, graph=False
    )
    assert made.text == "".join(pieces) and len(made.tokens) == 6
    model = neuzip.load_model(rounded, device="cpu")
    drawn = [
        neuzip.generate(
            model, "import ", max_new_tokens=6, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=1
        )
        for _ in range(2)
    ]
    assert drawn[0].tokens == drawn[1].tokens
    assert neuzip.generate(model, "import ", stop=made.text[:1], max_new_tokens=6).text == ""


def test_a_cache_in_few_bits_is_a_cache_of_transformers(lossless: Path) -> None:
    model = neuzip.load_model(lossless)
    cache = neuzip.KVCache(model.config, 8)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 6


# The other public functions


def test_there_and_back_is_byte_for_byte(lossless: Path, folder: Path) -> None:
    done = neuzip.decompress_checkpoint(lossless, folder / "restored", jobs=1)
    assert done.lossless and done.restored_bytes > done.stored_bytes
    for path in CHECKPOINT.iterdir():
        assert (folder / "restored" / path.name).read_bytes() == path.read_bytes()


def test_a_delta_has_a_base(tmp_path: Path) -> None:
    old, new = (tmp_path / f"{name}.safetensors" for name in ("old", "new"))
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    save_file({"w": weights}, old)
    save_file({"w": weights * np.float32(1.01)}, new)
    delta = neuzip.compress_checkpoint(new, tmp_path / "delta.safetensors", base=old, jobs=1).dst
    assert not any(t.base_missing for t in neuzip.verify_checkpoint(delta, base=old).tensors)
    assert neuzip.verify_checkpoint(delta).tensors[0].base_missing
    restored = neuzip.decompress_checkpoint(delta, tmp_path / "back.safetensors", base=old).dst
    assert restored.read_bytes() == new.read_bytes()
    with pytest.raises(neuzip.NeuzipError, match="delta"):
        neuzip.inspect_checkpoint(delta)


def test_what_weights_are_made_of(rounded: Path) -> None:
    found = neuzip.inspect_checkpoint(rounded, tensor="*down_proj*", jobs=1)
    assert found.compressed and found.lossy and 0 < found.stored_bytes < found.nbytes
    assert len(neuzip.inspect_checkpoint(CHECKPOINT).tensors) > len(found.tensors)


def test_checkpoints_are_compared(rounded: Path) -> None:
    found = neuzip.diff_checkpoints(CHECKPOINT, rounded)
    assert not found.identical and found.different[0].relative_l2


def test_a_size_is_reached(folder: Path) -> None:
    result = neuzip.compress_checkpoint(
        CHECKPOINT,
        folder / "fits",
        bits=6.5,
        calibration="none",
        device="cpu",
        jobs=1,
    )
    assert result.target is not None and result.target.holds
    assert 6.4 < result.bits_per_weight <= 6.5


@pytest.mark.slow
def test_a_divergence_is_reached(folder: Path, text: Path) -> None:
    result = neuzip.compress_checkpoint(
        CHECKPOINT, folder / "close", max_kld=0.05, text=text, calibration="none", jobs=1
    )
    assert result.target is not None and result.target.holds and result.target.comparison is not None
    assert 0 < result.target.comparison.kld.mean.value <= 0.05


def test_a_model_is_measured(rounded: Path, text: Path) -> None:
    found = neuzip.evaluate(
        rounded, text=text, original=CHECKPOINT, conventions=["token"], window=64, max_tokens=64, device="cpu"
    )
    assert found.comparison is not None and found.comparison.kld.mean.value > 0
    assert found.by("token").scores[-1].token_perplexity.value > 1


def test_a_ternary_model_is_exported(ternary: Path, folder: Path) -> None:
    done = neuzip.export_checkpoint(ternary, folder / "hf", to="transformers-bitnet")
    assert done.ternary > 0 and (folder / "hf" / "config.json").is_file()
    packed = neuzip.export_checkpoint(ternary, folder / "ct", to="compressed-tensors", activations="none")
    assert packed.ternary == done.ternary


@pytest.mark.slow
def test_a_folder_goes_to_the_hub_and_back(here: Any, lossless: Path, tmp_path: Path) -> None:
    pushed = neuzip.push(lossless, "me/nz", private=True, message="there")
    assert pushed.url.endswith("/me/nz") and here.repositories["me/nz"].private
    pulled = neuzip.pull("me/nz", tmp_path / "nz")
    assert pulled.dst == tmp_path / "nz" and pulled.tensors
    assert neuzip.diff_checkpoints(pulled.dst, CHECKPOINT).identical


def test_a_model_is_trained_compressed() -> None:
    trainer = neuzip.train_compressed(neuzip.load_model(CHECKPOINT), "sgd", device="cpu")
    assert trainer.step(torch.arange(3, 19)[None], 1e-3) > 0


def test_attention_is_patched_and_back(lossless: Path) -> None:
    model = neuzip.load_model(lossless)
    neuzip.patch_attention(model, 8)
    neuzip.unpatch_attention(model)
    q = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    out = neuzip.sageattn(q, q, q)
    assert isinstance(out, torch.Tensor) and out.shape == q.shape


def test_transformers_takes_a_config(lossless: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        lossless, quantization_config=neuzip.NeuzipConfig(residency="packed")
    )
    assert model(torch.arange(3, 9)[None]).logits.shape[1] == 6


# Wrong calls


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "device": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, device="gpu"), "`device='gpu'`"),
    "before a download": (lambda p: neuzip.verify_checkpoint("org/nothing", device="gpu"), "`device='gpu'`"),
    "threads": (lambda p: neuzip.diff_checkpoints("org/nothing", "org/none", jobs=-1), "`jobs=-1`"),
    "a flag": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, device=True), "`device=True`"),
    "jobs": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, jobs=0), "`jobs=0`"),
    "bits": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, mantissa_bits=99), "99 mantissa bits"),
    "both": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, mantissa_bits=3, plan="plan.toml"),
        "`plan` excludes `mantissa_bits`",
    ),
    "rules and": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, rules=[], mantissa_bits=0),
        "`rules` excludes `mantissa_bits`",
    ),
    "two targets": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, max_kld=0.1, target_size="50%"),
        "`max_kld` and `target_size` exclude each other",
    ),
    "no target": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, text="demo"), "`text` has no effect"),
    "no layers": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, drop_layers=-1, max_kld=1),
        "`drop_layers=-1`",
    ),
    "size": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, target_size="half"), "`target_size='half'`"),
    "delta": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, base=CHECKPOINT, mantissa_bits=3),
        "`base` excludes `mantissa_bits`",
    ),
    "ternary": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, allow_destructive=True), "`allow_destructive`"
    ),
    "export": (
        lambda p: neuzip.export_checkpoint(CHECKPOINT, p, to="gguf", mode="online"), "`mode` has no effect"
    ),
    "loaded": (
        lambda p: neuzip.generate(neuzip.load_model(CHECKPOINT), "a", residency="packed"), "`residency` says"
    ),
    "dense": (
        lambda p: neuzip.evaluate(CHECKPOINT, text="demo", activations="a4.8"), "`activations='a4.8'`"
    ),
    "window": (lambda p: neuzip.evaluate(CHECKPOINT, text="demo", window=0), "`window=0`"),
    "stride": (lambda p: neuzip.evaluate(CHECKPOINT, text="demo", stride=0), "`stride=0`"),
    "new tokens": (lambda p: neuzip.generate(CHECKPOINT, "a", max_new_tokens=0), "`max_new_tokens=0`"),
    "no source": (lambda p: neuzip.verify_checkpoint(None), "`source=None`"),  # type: ignore[arg-type]
    "pull": (lambda p: neuzip.pull("no id", p), "`repo_id`"),
    "prompt": (lambda p: neuzip.generate(CHECKPOINT, "", device="cpu"), "`prompt`: is empty"),
    "no prompt": (lambda p: neuzip.generate(CHECKPOINT, b"a"), "`prompt=b'a'`"),  # type: ignore[arg-type]
    "no path": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, 5), "`destination=5`"),  # type: ignore[arg-type]
    "no folder": (lambda p: neuzip.push(5, "a/b"), "`folder=5`"),  # type: ignore[arg-type]
    "no id": (lambda p: neuzip.pull(5), "`repo_id=5`"),  # type: ignore[arg-type]
    "no globs": (
        lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, include=[5]), "`include=[5]`"  # type: ignore[list-item]
    ),
    "no rules": (lambda p: neuzip.compress_checkpoint(CHECKPOINT, p, rules=["x"]), "`rules=['x']`"),  # type: ignore[list-item]
    "no model": (lambda p: neuzip.generate(5, "a"), "`model`: is neither a model"),  # type: ignore[arg-type]
    "no path to load": (lambda p: neuzip.load_model(5), "`path=5`"),  # type: ignore[arg-type]
    "attention": (
        lambda p: neuzip.load_model(CHECKPOINT, attention="8bit"), "`attention='8bit'`"  # type: ignore[arg-type]
    ),
    "nothing to patch": (lambda p: neuzip.patch_attention(5, 8), "`model=5`"),  # type: ignore[arg-type]
    "nothing to train": (lambda p: neuzip.train_compressed(5, "sgd"), "`model=5`"),  # type: ignore[arg-type]
    "no text": (lambda p: neuzip.evaluate("org/nothing", text=str(p)), f"{os.sep}out: cannot be read"),
    "stop before a download": (lambda p: neuzip.generate("org/nothing", "a", stop=""), "`stop`: is empty"),
    "seed": (lambda p: neuzip.generate("org/nothing", "a", temperature=1, seed=1 << 64), "`seed=18446"),
    "temperature": (
        lambda p: neuzip.generate("org/nothing", "a", temperature=float("nan")), "`temperature=nan`"
    ),
    "too cold": (lambda p: neuzip.generate("org/nothing", "a", temperature=1e-40), "`temperature=1e-40`"),
    "half a token": (
        lambda p: neuzip.generate("org/nothing", "a", temperature=1, top_k=2.5), "`top_k=2.5`"  # type: ignore[arg-type]
    ),
}  # fmt: skip


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "conventions": lambda x: neuzip.evaluate(CHECKPOINT, text="demo", conventions=x),
    "dtype": lambda x: neuzip.evaluate(CHECKPOINT, text="demo", dtype=x),
    "attention": lambda x: neuzip.evaluate(CHECKPOINT, text="demo", attention=x),
    "device_map": lambda x: neuzip.evaluate(CHECKPOINT, text="demo", device_map=x),
    "kv_bits": lambda x: neuzip.generate(CHECKPOINT, "a", kv_bits=x),
    "bits_for": lambda x: neuzip.compress_checkpoint(CHECKPOINT, "x", bits_for=x),
    "mantissa_bits": lambda x: neuzip.compress_checkpoint(CHECKPOINT, "x", mantissa_bits=x),
    "activations": lambda x: neuzip.compress_checkpoint(CHECKPOINT, "x", ternary=True, activations=x),
    "sensitivity": lambda x: neuzip.compress_checkpoint(
        CHECKPOINT, "x", target_size=9, scheme="rounded", sensitivity=x
    ),
    "gguf_type": lambda x: neuzip.export_checkpoint(CHECKPOINT, "x.gguf", to="gguf", gguf_type=x),
    "to": lambda x: neuzip.export_checkpoint(CHECKPOINT, "x", to=x),
    "mode": lambda x: neuzip.export_checkpoint(CHECKPOINT, "x", to="transformers-bitnet", mode=x),
    "residency": lambda x: neuzip.generate(CHECKPOINT, "a", residency=x),
}


@pytest.mark.parametrize("parameter", UNKNOWN)
def test_a_value_that_there_is_not_is_named(parameter: str) -> None:
    with pytest.raises(neuzip.NeuzipError, match=f"`{parameter}='nonsense'`") as told:
        UNKNOWN[parameter]("nonsense")
    assert told.value.exit_code == 2 and (told.value.hint or parameter == "mantissa_bits")


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_names_the_parameter(case: str, tmp_path: Path) -> None:
    call, words = WRONG[case]
    with pytest.raises(neuzip.NeuzipError) as told:
        call(tmp_path / "out")
    assert words in told.value.message and not (tmp_path / "out").exists()
    assert not re.search(r"--[a-z]", f"{told.value.message} {told.value.hint}")


# What the names are


def test_names_stubs_and_homes_agree() -> None:
    tree = ast.parse(Path(neuzip.__file__).read_text())
    (typed,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    stubs = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    homes = {name: f"{module}.{name}" for name, module in neuzip._HOME.items()}
    assert stubs == homes | {name: f"neuzip.{name}" for name in neuzip._MODULES}
    assert sorted(neuzip.__all__) == sorted([*homes, "__version__"]) == dir(neuzip)
    for name, module in neuzip._HOME.items():
        assert getattr(neuzip, name) is getattr(importlib.import_module(module), name)


def test_a_type_checker_finds_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'compress_chekpoint'"):
        neuzip.compress_chekpoint("a", "b")  # type: ignore[attr-defined]  # of no use if it were not found
    tree = ast.parse(Path(neuzip.__file__).read_text())
    assert "__getattr__" not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def test_every_name_is_described() -> None:
    for name in neuzip._HOME:
        thing = getattr(neuzip, name)
        assert thing.__doc__ and thing.__doc__.partition("\n")[0].endswith("."), name
        if neuzip._HOME[name] in OURS:
            assert "Raises" in thing.__doc__, name


def test_parameters_are_named_as_options() -> None:
    from neuzip.cli.flags import ARGUMENTS, options

    known = {*options(), *ARGUMENTS}
    own = {"rules", "graph", "on_text", "model", "prompt", "a", "b", "folder"}
    for name, module in neuzip._HOME.items():
        if module in OURS:
            assert set(inspect.signature(getattr(neuzip, name)).parameters) <= known | own, name


def in_a_new_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_files_need_no_torch(tmp_path: Path, run_without_torch: Callable[..., str]) -> None:
    program = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises ImportError
import neuzip
from neuzip.errors import FormatError
small = neuzip.compress_checkpoint({str(CHECKPOINT)!r}, {str(tmp_path / "nz")!r}, mantissa_bits=3, jobs=1).dst
neuzip.verify_checkpoint(small, jobs=1)
neuzip.inspect_checkpoint(small, tensor="*norm*", jobs=1)
neuzip.decompress_checkpoint(small, {str(tmp_path / "back")!r}, jobs=1)
print(neuzip.diff_checkpoints(small, {str(tmp_path / "back")!r}).identical)
"""
    assert run_without_torch(program) == "True\n"


def test_importing_costs_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import neuzip; print(*sorted(set(sys.modules) - before))"
    )
    new = in_a_new_process(program).split()
    assert not {"torch", "transformers", "numpy", "neuzip.compress", "neuzip.checkpoints"} & set(new)


# What the library says


MODEL_CARD = Path("formats/card/text.py")
"""The text of a page that shows commands and their arguments."""

COMMAND = re.compile(r"neuzip [a-z-]+[^;,`]*")
PLUGINS = {ROOT / "runtime" / engine for engine in ENGINES}
"""Folders whose errors are read by users of an engine, such as vLLM, that has a command line of its own."""

NAME_OF_AN_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OUR_OPTIONS = {*NAME_OF_AN_OPTION.findall((ROOT / "docs/reference/commands.md").read_text(encoding="utf-8"))}
"""The options of all commands, as the reference lists them."""

OPTION = re.compile(r"(?<![\w-])--[a-z]|\b(SRC|DST|REPO_ID)\b")
"""An option, or an argument as help pages call it."""


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings of a module but for docstrings, and those of commands that are to be typed."""
    passed_over: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed_over.add(id(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shell":
            passed_over.update(id(argument) for argument in node.args)
        if isinstance(node, ast.JoinedStr):
            passed_over.update(id(part) for part in node.values)
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, COMMAND.sub("", "".join(map(str, parts)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_over:
            yield node.lineno, COMMAND.sub("", node.value)


@pytest.mark.parametrize("room", LIBRARY)
def test_the_library_speaks_of_parameters(room: str) -> None:
    """An option such as --jobs means nothing to a program: the command line turns parameters into options.

    The plugin of an engine may name options of the engine, but none that a command of neuzip has too.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.relative_to(ROOT) != MODEL_CARD and OPTION.search(content := path.read_text())
        for line, text in strings(ast.parse(content))
        if OPTION.search(without_options_of_an_engine(text) if path.parent in PLUGINS else text)
    ]
    assert not found


def without_options_of_an_engine(text: str) -> str:
    """A text without the options that no command of neuzip has."""
    return NAME_OF_AN_OPTION.sub(lambda match: match[0] if match[0] in OUR_OPTIONS else "", text)


def test_an_option_of_neuzip_is_found_in_a_plugin_too() -> None:
    assert {"--jobs", "--dtype", "--residency"} <= OUR_OPTIONS
    assert not OPTION.search(without_options_of_an_engine("leave out `--cpu-offload-gb`"))
    assert OPTION.search(without_options_of_an_engine("leave out `--load-format dummy`, and give `--jobs 1`"))


def test_the_command_line_speaks_of_options(tmp_path: Path, neuzip: Callable[..., Any]) -> None:
    said = neuzip("generate", CHECKPOINT, "--prompt", "a", "--temperature", "0", "--top-k", "3")
    assert said.exit_code == 2 and said.stderr.startswith("error: --top-k: has no effect at temperature 0")
    said = neuzip("compress", CHECKPOINT, tmp_path / "x", "--target-size", "half")
    assert "error: --target-size half: is no size" in said.stderr and "`" not in said.stderr


def test_a_name_from_a_file_stays_quoted() -> None:
    from neuzip.cli.flags import in_options

    hostile = "a'`b; rm -rf ~"
    assert in_options(f"give `base={hostile!r}`") == "give --base 'a'\"'\"'`b; rm -rf ~'"
    assert in_options("`config` says `neuzip compress --plan`") == "`config` says `neuzip compress --plan`"
    for text in ("a/`jobs`", "`jobs`/a", "'`jobs`'", "x`jobs`", "`jobs`s"):
        assert in_options(f"{text}: is no folder") == f"{text}: is no folder"


@pytest.mark.parametrize(
    "typed", ["`jobs`", "./`jobs`", "a/`jobs`", "--plan=`jobs`", "`device=cpu`", "`jobs`."]
)
def test_a_file_that_is_called_as_a_parameter_keeps_its_name(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neuzip: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [CHECKPOINT, "x", typed] if typed.startswith("--") else [typed, "x"]
    said = neuzip("compress", *arguments, "--overwrite", "--dry-run")
    assert said.exit_code != 0
    assert Path(typed.removeprefix("--plan=")).name in said.stderr, said.stderr


@pytest.mark.parametrize("failure", [FormatError("x", "holds `jobs` now"), ValueError("it holds `jobs` now")])
def test_what_files_and_other_libraries_say_is_no_option(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, neuzip: Callable[..., Any]
) -> None:
    def fail() -> str:
        raise failure

    monkeypatch.setattr("neuzip.compress.machine.processor", fail)
    assert "holds `jobs` now" in neuzip("env").stderr
