"""Exports: what other engines read of them is the ternary model, with the scale the right way round."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuzip.compress.export import ExportReport, Gguf, export
from neuzip.compress.sources.folder import weight_bytes
from neuzip.errors import NeuzipError, UsageError, WouldOverwrite
from neuzip.formats.export import gguf, gguf_model
from neuzip.formats.export.compressed_tensors import PackQuantized
from neuzip.formats.export.transformers_bitnet import TransformersBitnet, pack
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight, ternary_linear

pytestmark = pytest.mark.usefixtures("one_thread")

ZEROS = "model.layers.1.self_attn.v_proj.weight"
"""A matrix of zeros in every model here."""

TEXT = "It's 2 plus 2, and she'll say: nothing was lost.\n\nNaïve café — 東京 12345.  Two  spaces!"


def codes_of(out: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (out, width), generator=generator, dtype=torch.int8)


def scales_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).add(0.01).half().float()


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled() -> Iterator[None]:
    """transformers compiles its BitLinear: minutes, for nothing here."""
    before = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    yield
    torch._dynamo.config.disable = before


# Models


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    return {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](**{**sizes, **changes})


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def write_model(folder: Path, config: Any, dtype: torch.dtype, *, negative_zeros: bool = True) -> Path:
    """A random model whose projections are ternary, one scale a tensor, as a plain checkpoint."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data = quantizers.absmean(weight.data * 2).dequantize(dtype)
            if name == ZEROS:
                weight.data.zero_()
            if negative_zeros:  # what rounding a small negative number leaves
                weight.data[weight.data == 0] *= -1
        elif name.endswith("bias"):
            weight.data = torch.randn(weight.shape).to(dtype) / 4
        elif "norm" in name:
            weight.data = (1 + torch.randn(weight.shape) / 8).to(dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a model of a kind, made once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        key = f"{kind}-{dtype}-{sorted(changes)}".replace("'", "")
        if key not in made:
            made[key] = write_model(root / key, config_of(kind, **changes), dtype)
        return made[key]

    return get


class A8(torch.nn.Module):
    """A ternary layer in the integers of b1.58, as our runtime computes it: what every engine has to."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        found = quantizers.exact(weight.masked_fill(weight == 0, 0))
        assert found is not None
        self.weight, self.bias = TernaryWeight.of(found), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return ternary_linear(x, self.weight, self.bias, activation="int8", clamped=True)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def integers(model: Any) -> Any:
    for name, module in list(model.named_modules()):
        if name.endswith("_proj"):
            model.set_submodule(name, A8(module))
    return model


def logits(model: Any) -> Tensor:
    ids = torch.randint(1, 300, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out: Tensor = model(ids).logits.float()
    return out


def divergence(p: Tensor, q: Tensor) -> float:
    """Mean KL divergence of two sets of logits, in nats."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def exact_tokens(width: int) -> Tensor:
    """Activations that every quantiser with 127 steps gives back: no code lies near a half."""
    codes = torch.randint(-126, 127, (5, width), generator=torch.Generator().manual_seed(4))
    codes[:, 0] = 127
    return codes.float() / 64


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


# transformers


@pytest.mark.slow
def test_rows_are_packed_as_transformers_packs_them() -> None:
    from transformers.integrations.bitnet import pack_weights

    codes = codes_of(12, 5)
    packed = pack(codes)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, pack_weights(codes.clone()))
    assert [int(packed[1, 2] >> shift & 3) - 1 for shift in (0, 2, 4, 6)] == codes[1::3, 2].tolist()


BITNETS = [("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online")]


@pytest.mark.parametrize(("linear_class", "mode"), BITNETS)
def test_transformers_computes_the_same(models, tmp_path: Path, linear_class: str, mode: str) -> None:
    source, told = models(), [0]
    report = export(source, tmp_path / "out", TransformersBitnet(linear_class, mode), on_bytes=told.append)
    assert sum(told) == weight_bytes(source), "progress: each tensor once"
    assert report.ternary == 14
    assert report.scale_error < 2e-7
    plain, loaded = load(source), load(tmp_path / "out")
    x = exact_tokens(256)
    for name, module in loaded.named_modules():
        if name.endswith(("q_proj", "v_proj", "up_proj")):
            assert type(module).__name__.lower() == linear_class
            want = A8(plain.get_submodule(name))(x)
            with torch.no_grad():
                assert torch.allclose(module(x), want, rtol=1e-5, atol=1e-5), name
    want = logits(integers(plain))
    assert divergence(want, logits(loaded)) < 1e-5
    assert logits(loaded).isfinite().all()


def test_scale_of_each_class_has_its_direction(models, tmp_path: Path) -> None:
    source, name = models(), "model.layers.0.mlp.up_proj.weight"
    alpha = weights_of(source)[name].abs().max()
    for linear_class in ("bitlinear", "autobitlinear"):
        export(source, tmp_path / linear_class, TransformersBitnet(linear_class))
    one, other = (weights_of(tmp_path / c)[f"{name}_scale"] for c in ("bitlinear", "autobitlinear"))
    assert one.dtype == other.dtype == torch.float32
    assert one == 1 / alpha
    assert other == alpha


def test_zeros_have_a_finite_scale(models, tmp_path: Path) -> None:
    export(models(), tmp_path / "out", TransformersBitnet())
    written = weights_of(tmp_path / "out")
    assert written[f"{ZEROS}_scale"] == 1
    assert bool((written[ZEROS] == 0b01010101).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_online_weights_survive_another_absmean(models, tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers.integrations.bitnet import WeightQuant

    source = models(dtype=dtype)
    export(source, tmp_path / "out", TransformersBitnet("autobitlinear", "online"))
    before, after = weights_of(source), weights_of(tmp_path / "out")
    assert set(before) == set(after)
    for name, weight in after.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(weight.view(torch.uint8), before[name].view(torch.uint8))
            continue
        assert weight.dtype == dtype
        again = WeightQuant.apply(weight)
        assert torch.equal(again.sign(), before[name].sign())
        if name != ZEROS:
            naive = before[name].abs().mean() / before[name].abs().max()
            assert naive < 0.9, "this test needs zeros among the codes"
            step = 2**-8 if dtype == torch.bfloat16 else 2**-22
            assert (again.abs().max() / before[name].abs().max() - 1).abs() <= 2 * step
        else:
            assert not again.any()


@pytest.mark.parametrize("form", ["plain", "container"])
def test_online_checkpoints_are_exported(models, tmp_path: Path, form: str) -> None:
    """Their floats stand for an absmean, also where they are ternary numbers of another scale."""
    from neuzip.compress import Rule, Scheme, compress

    online = tmp_path / "online"
    export(models(), online, TransformersBitnet("autobitlinear", "online"))
    if form == "container":
        schemes = {"*_proj.weight": Scheme("ternary", quantizer="absmean-clamped"), "*": Scheme("lossless")}
        compress(online, tmp_path / "nz", [Rule(glob, scheme) for glob, scheme in schemes.items()])
    source = tmp_path / "nz" if form == "container" else online
    report = export(source, tmp_path / "out", TransformersBitnet("autobitlinear"))
    assert report.ternary == 14
    export(models(), tmp_path / "want", TransformersBitnet("autobitlinear"))
    got, want = weights_of(tmp_path / "out"), weights_of(tmp_path / "want")
    for name, weight in want.items():
        close = {"rtol": 1e-6, "atol": 0} if name.endswith("_scale") else {"rtol": 0, "atol": 0}
        assert torch.allclose(got[name].float(), weight.float(), **close), name


def test_modules_that_stay_dense_are_named(models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(models(), source)
    weights = weights_of(source)
    weights["model.layers.0.mlp.gate_proj.weight"] += torch.randn(512, 256) / 50
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    report = export(source, tmp_path / "out", TransformersBitnet())
    assert report.ternary == 13
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.0.mlp.gate_proj"} <= set(config["modules_to_not_convert"])
    loaded = load(tmp_path / "out")
    assert type(loaded.model.layers[0].mlp.gate_proj) is torch.nn.Linear
    assert type(loaded.model.layers[1].mlp.gate_proj).__name__ == "BitLinear"


def test_biases_are_kept(models, tmp_path: Path) -> None:
    source = models("qwen2")
    export(source, tmp_path / "out", TransformersBitnet())
    assert divergence(logits(integers(load(source))), logits(load(tmp_path / "out"))) < 1e-5


# compressed-tensors


@pytest.mark.parametrize("width", [16, 64, 100])
def test_words_are_packed_as_compressed_tensors_packs_them(width: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from neuzip.formats.export.compressed_tensors import pack as pack_words

    codes = codes_of(6, width)
    assert torch.equal(pack_words(codes), helpers.pack_to_int32(codes, 2))
    assert torch.equal(helpers.unpack_from_int32(pack_words(codes), 2, codes.shape), codes)


def grouped(source: Path, folder: Path, group: int) -> Path:
    """The model again, its projections with a scale for every `group` weights."""
    shutil.copytree(source, folder)
    weights = weights_of(folder)
    for i, (name, weight) in enumerate(weights.items()):
        if name.endswith("_proj.weight"):
            out, width = weight.shape
            scale = scales_of(out, width // group, seed=i) / 10
            weights[name] = Ternary(codes_of(out, width, i), scale, group).dequantize(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("group", [None, 64, 256])
def test_compressed_tensors_restores_the_weights(models, tmp_path: Path, group: int | None) -> None:
    pytest.importorskip("compressed_tensors")
    source = models() if group is None else grouped(models(), tmp_path / "source", group)
    report = export(source, tmp_path / "out", PackQuantized("none"))
    assert report.scale_error == 0
    loaded, plain = load(tmp_path / "out"), load(source)
    assert torch.equal(logits(loaded), logits(plain))
    for name, weight in plain.named_parameters():  # unpacked when first called
        assert torch.equal(loaded.get_parameter(name), weight), name


def test_compressed_tensors_quantises_activations(models, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = models()
    export(source, tmp_path / "out", PackQuantized())
    plain, loaded = load(source), load(tmp_path / "out")
    # Their scale is absmax / 127.5 and their rounding their own: close, and not what dense weights give.
    want, dense, got = logits(integers(load(source))), logits(plain), logits(loaded)
    assert divergence(want, got) < 1e-3
    assert not torch.equal(dense, got)


def test_other_activations_are_warned_of(models, tmp_path: Path) -> None:
    source = changed(models(), tmp_path / "source", neuzip={"activations": {"mode": "a4.8"}})
    for target, dst in ((PackQuantized(), "out"), (Gguf("q2_0"), "m.gguf")):
        (warning,) = export(source, tmp_path / dst, target).warnings
        assert "asks for the activations a4.8" in warning
    same = changed(models(), tmp_path / "same", neuzip={"activations": "b1.58"})
    assert not export(same, tmp_path / "out", PackQuantized(), overwrite=True).warnings


def test_mixed_groups_are_told_apart(models, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = tmp_path / "source"
    shutil.copytree(models(), source)
    weights = weights_of(source)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = Ternary(codes_of(512, 256), scales_of(512, 4) / 10, 64).dequantize()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    report = export(source, tmp_path / "out", PackQuantized("none"))
    assert {t.group for t in report.tensors if t.kind == "ternary"} == {None, 64}
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(source)))


# GGUF: blocks


def decode_q2_0(data: Any, out: int, width: int) -> Tensor:
    """Blocks of 64 weights, one by one, as ggml's header has them."""
    values = []
    for block in data.reshape(-1, 18):
        d = float(block[:2].view(np.float16)[0])
        values += [d * ((int(block[2 + j // 4]) >> 2 * (j % 4) & 3) - 1) for j in range(64)]
    return torch.tensor(values).view(out, width)


@pytest.mark.parametrize("group", [None, 1024, 256])
@pytest.mark.parametrize("kind", list(gguf.TERNARY))
def test_blocks_are_read_back(kind: str, group: int | None) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType as Type

    out, width = 7, 1024
    codes = codes_of(out, width)
    codes[3, :256] = 0
    codes[4] = 0
    scale = scales_of() if group is None else scales_of(out, width // group)
    data = gguf.blocks(gguf.TERNARY[kind], codes, scale, group)
    assert data.shape == (out, width // gguf.TERNARY[kind].weights * gguf.TERNARY[kind].nbytes)
    want = Ternary(codes, scale, group).dequantize()
    if kind == "q2_0":
        got = decode_q2_0(data, out, width)
    else:
        got = torch.from_numpy(quants.dequantize(data, Type[kind.upper()]))
    assert torch.equal(got, want)
    if kind in ("tq1_0", "tq2_0"):
        reference = quants.quantize(want.numpy(), Type[kind.upper()])
        full = want.view(-1, 256).any(1).numpy()
        assert np.array_equal(data.reshape(len(full), -1)[full], reference.reshape(len(full), -1)[full])


def test_scale_is_rounded_to_fp16_and_says_so(models, tmp_path: Path) -> None:
    report = export(models(), tmp_path / "m.gguf", Gguf("q2_0"))
    errors = {t.name: t.scale_error for t in report.tensors if t.kind == "ternary"}
    for name, weight in weights_of(models()).items():
        if name in errors:
            alpha = weight.abs().max()
            want = 0 if alpha == 0 else float((alpha.half().double() - alpha).abs() / alpha.double())
            assert errors[name] == pytest.approx(want, rel=1e-9)
    assert 0 < report.scale_error <= 2**-11


# GGUF: models


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of q_proj or k_proj from llama.cpp's order back to that of transformers."""
    out = weight.shape[0]
    return weight.reshape(heads, out // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
def test_gguf_is_read_back(models, tmp_path: Path, kind: str) -> None:
    reader = pytest.importorskip("gguf").GGUFReader
    source = models(dtype=torch.bfloat16)
    report = export(source, tmp_path / "m.gguf", Gguf(kind))
    assert report.scale_error == 0, "scales of bf16 are fp16 numbers here"
    read = reader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in read.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["general.file_type"] == {"tq1_0": 36, "tq2_0": 37}[kind]
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.freq_base"] == 10000
    assert len(fields["tokenizer.ggml.tokens"]) == 320
    assert fields["tokenizer.ggml.bos_token_id"] == 0
    found = {t.name: t for t in read.tensors}
    described = gguf_model.GgufModel.of(json.loads((source / "config.json").read_text()))
    for name, weight in weights_of(source).items():
        tensor = found.pop(described.tensor_name(name))
        got = torch.from_numpy(dequantized(tensor)).float()
        for module, heads in (("q_proj", 4), ("k_proj", 2)):
            got = unpermuted(got, heads) if module in name else got
        assert torch.equal(got, weight.float()), name
        assert (tensor.tensor_type.name == kind.upper()) == name.endswith("_proj.weight")
    assert not found


def dequantized(tensor: Any) -> Any:
    from gguf import quants

    return np.array(quants.dequantize(tensor.data, tensor.tensor_type))


def llama_cpp(path: Path, prompts: list[list[int]], vocabulary: int) -> Tensor:
    """llama.cpp's log-probabilities [prompt, token] of what follows each prompt."""
    xllamacpp = pytest.importorskip("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel = str(path), 128, 1
    parameters.warmup, parameters.verbosity, parameters.n_gpu_layers = False, 0, 0
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    rows = []
    for prompt in prompts:
        asked = {"prompt": prompt, "n_predict": 1, "n_probs": vocabulary, "temperature": 0.0}
        # "!" is forced: no end, no half of a character. The probabilities are those before that.
        said = server.handle_completions(asked | {"cache_prompt": False, "logit_bias": [[1, 1000.0]]})
        answer = json.loads(said) if isinstance(said, str) else said
        row = torch.full((vocabulary,), float("nan"))
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
        rows.append(row)
    return torch.stack(rows)


PROMPTS = [
    torch.randint(1, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (2, 9, 40)
]

LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("llama", {}, 0.03),
    "llama-biased": ("llama", {"attention_bias": True}, 0.006),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA_3_ROPE}, 0.03),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, 0.03),
    "qwen2": ("qwen2", {}, 0.015),
    "qwen3": ("qwen3", {}, 0.03),
}
"""Kinds, configs, and how far llama.cpp may be off: a wrong order of rows is 4 times as far and more."""


def distance(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference, in standard deviations."""
    return float((got - want).pow(2).mean().sqrt() / want.std())


def following(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([p])).logits[0, -1] for p in PROMPTS]).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_llama_cpp_computes_the_same(models, tmp_path: Path, model: str) -> None:
    """But for its own quantising of activations, to 8 bits in blocks."""
    kind, changes, tolerance = MODELS[model]
    source = models(kind, **changes)
    want = following(load(source))
    for packing in ("tq1_0", "tq2_0", "q2_0") if model == "llama" else ("q2_0",):
        export(source, tmp_path / f"{packing}.gguf", Gguf(packing))
        assert distance(llama_cpp(tmp_path / f"{packing}.gguf", PROMPTS, 320), want) < tolerance, packing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "left_out"),
    [("llama", "row_order"), ("llama-biased", "row_order"), ("llama-3.1", "rope_factors")],
)
def test_llama_cpp_would_notice(models, tmp_path: Path, monkeypatch, model: str, left_out: str) -> None:
    kind, changes, tolerance = MODELS[model]
    source = models(kind, **changes)
    monkeypatch.setattr(gguf_model.GgufModel, left_out, lambda *_: None)
    export(source, tmp_path / "m.gguf", Gguf("q2_0"))
    assert distance(llama_cpp(tmp_path / "m.gguf", PROMPTS, 320), following(load(source))) > 2.5 * tolerance


def write_pieces(folder: Path) -> None:
    """A tokenizer like Llama 2's: BPE on characters, spaces among them, bytes for what it does not know."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            pre_tokenizers.Split(Regex("▁"), "merged_with_next"),
        ]
    )
    trained.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    made = json.loads(trained.to_str())["model"]
    first = ["<unk>", "!", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens = [*first, *(t for t in made["vocab"] if t not in ("!", "東", "京"))][:320]
    merges = [m for m in made["merges"] if "".join(m) in tokens]
    tokenizer = Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(tokens)}, [tuple(m) for m in merges], unk_token="<unk>",
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte-level", "pieces"])
def test_llama_cpp_cuts_text_the_same(models, tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer

    source = changed(models(), tmp_path / "source")
    if kind == "pieces":
        write_pieces(source)
    export(source, tmp_path / "m.gguf", Gguf("q2_0"))
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    assert len(ids) < len(TEXT.encode()), "some tokens are longer than a byte"
    as_text, as_ids, other = llama_cpp(tmp_path / "m.gguf", [TEXT, ids, ids[:-1]], 320)  # type: ignore[list-item]
    assert torch.equal(as_text, as_ids)
    assert not torch.equal(as_ids, other)


@pytest.mark.slow
def test_demo_checkpoint_in_every_engine(tmp_path: Path) -> None:
    """Of a container of the demo checkpoint made ternary; bf16, as our runtime has it."""
    from neuzip.compress import Rule, Scheme, compress
    from neuzip.eval.demo import CHECKPOINT
    from neuzip.runtime.hf.load import load_model

    weights = load_file(CHECKPOINT / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            weights[name] = quantizers.absmean(weight).dequantize(weight.dtype)
    shutil.copytree(CHECKPOINT, tmp_path / "plain")
    save_file(weights, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    source = tmp_path / "demo"
    ternary = Rule("*_proj.weight", Scheme("ternary"))
    compress(tmp_path / "plain", source, [ternary, Rule("*", Scheme("lossless"))])

    own = load_model(source, residency="packed", activations="b1.58")
    want, found = logits(own), {}
    for linear_class, mode in BITNETS:
        export(source, tmp_path / "out", TransformersBitnet(linear_class, mode), overwrite=True)
        found[f"{linear_class} {mode}"] = divergence(want, logits(load(tmp_path / "out", torch.bfloat16)))
    export(source, tmp_path / "out", PackQuantized(), overwrite=True)
    found["compressed-tensors"] = divergence(want, logits(load(tmp_path / "out", torch.bfloat16)))
    export(source, tmp_path / "m.gguf", Gguf("q2_0"))
    found["llama.cpp q2_0"] = divergence(following(own), llama_cpp(tmp_path / "m.gguf", PROMPTS, 1024))
    assert max(found.values()) < 1e-3, found


def test_rows_that_fill_no_blocks(models, tmp_path: Path) -> None:
    source = models(intermediate_size=544)
    with pytest.raises(
        NeuzipError, match=r"down_proj.*rows of 544 weights are no whole blocks of 256"
    ) as refused:
        export(source, tmp_path / "m.gguf", Gguf("tq2_0"))
    assert "gguf_mixed" in refused.value.hint
    assert not list(tmp_path.iterdir())
    report = export(source, tmp_path / "m.gguf", Gguf("tq2_0", mixed=True))
    packings = {t.name.split(".")[-2]: t.packing for t in report.tensors if t.kind == "ternary"}
    assert packings["down_proj"] == "Q4_0"
    assert packings["up_proj"] == "TQ2_0"


# What cannot be exported


def changed(source: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(source, folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | config))
    return folder


@pytest.mark.parametrize("target", [TransformersBitnet(), TransformersBitnet("autobitlinear", "online")])
def test_one_scale_a_tensor_is_all_that_bitnet_holds(models, tmp_path: Path, target) -> None:
    source = grouped(models(), tmp_path / "source", 256)
    with pytest.raises(NeuzipError, match=r"has 512 scales, transformers' bitnet holds one"):
        export(source, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_groups_smaller_than_a_block(models, tmp_path: Path) -> None:
    source = grouped(models(), tmp_path / "source", 64)
    with pytest.raises(NeuzipError, match="64 weights share a scale, TQ2_0 has one for 256") as refused:
        export(source, tmp_path / "m.gguf", Gguf("tq2_0"))
    assert "gguf_mixed" in refused.value.hint
    assert export(source, tmp_path / "m.gguf", Gguf("q2_0")).ternary == 14


def test_refusals_of_tensors() -> None:
    def refused(target: Any, codes: Tensor, scale: Tensor, group: int | None, dtype: str = "F32") -> str:
        with pytest.raises(NeuzipError) as error:
            target.stored_scale("a.weight", dtype, codes, scale, group)
        return error.value.message

    one = torch.tensor(0.5)
    assert "has 6 rows" in refused(TransformersBitnet(), codes_of(6, 8), one, None)
    assert "out of the range" in refused(TransformersBitnet(), codes_of(4, 8), one * 1e-6, None, "F16")
    online = TransformersBitnet("autobitlinear", "online")
    assert "does not survive an absmean" in refused(online, codes_of(4, 8), one * 1e-6, None)
    assert "no whole groups of 48" in refused(PackQuantized(), codes_of(4, 64), scales_of(4, 2), 48)
    with pytest.raises(NeuzipError, match="out of the range of fp16"):
        gguf.stored_scale(gguf.TERNARY["q2_0"], "a.weight", codes_of(4, 64), one * 1e-6, None)


def test_equal_scales_count_as_one() -> None:
    codes = codes_of(4, 8)
    codes[1] = 0
    scale = torch.tensor([[0.5], [0.0], [0.5], [0.5]])
    written = TransformersBitnet("autobitlinear").tensors("a.weight", "F32", codes, scale, 8)
    assert written["a.weight_scale"].tolist() == [0.5]


def test_refusals_of_models(models, tmp_path: Path, neuzip) -> None:
    plain = changed(models(), tmp_path / "plain")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.randn(8, 64)}, plain / "model.safetensors")
    relu2 = changed(models(), tmp_path / "relu2", hidden_act="relu2")
    other = changed(models(), tmp_path / "other", architectures=["GPT2LMHeadModel"])
    quantised = changed(models(), tmp_path / "awq", quantization_config={"quant_method": "awq"})
    cases = [
        (plain, "has no ternary weights"),
        (models() / "model.safetensors", "has no config.json"),
        (relu2, "hidden_act is 'relu2'"),
        (other, "does not know the architecture GPT2LMHeadModel"),
        (quantised, "quantised as awq"),
    ]
    for source, message in cases:
        said = neuzip("export", source, tmp_path / "m.gguf", "--to", "gguf")
        assert (said.exit_code, said.stdout) == (1, "")
        assert message in said.stderr
        assert not (tmp_path / "m.gguf").exists()


DESCRIBED = gguf_model.GgufModel({"vocab_size": 320}, "llama")


def test_tokenizers_of_other_kinds_are_refused() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": gguf_model.LLAMA_3_SPLIT}}

    def pre(*steps: dict[str, Any]) -> str:
        return gguf_model.pre_tokenizer({"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}})

    assert pre(split, byte_level) == "llama-bpe"
    with pytest.raises(NeuzipError, match="no such way to cut text"):
        pre({"type": "Split", "pattern": {"Regex": r"\s+"}}, byte_level)
    with pytest.raises(NeuzipError, match="is Unigram"):
        gguf_model.tokenizer_metadata({"model": {"type": "Unigram"}}, {}, DESCRIBED, None)
    with pytest.raises(NeuzipError, match="is broken"):
        gguf_model.tokenizer_metadata({"model": {"type": "BPE", "vocab": 3}}, {}, DESCRIBED, None)
    large = {"model": {"type": "BPE", "vocab": {"a": 10**12}, "merges": []}, "pre_tokenizer": byte_level}
    large["pre_tokenizer"] = {**byte_level, "use_regex": True}
    with pytest.raises(NeuzipError, match="has a token 1000000000000, the model knows 320"):
        gguf_model.tokenizer_metadata(large, {}, DESCRIBED, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"vocab_size": 10**9}, r"embed_tokens.*config.json says 1000000000 rows"),
        ({"head_dim": 32}, r"[kq]_proj.*config.json says"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"architectures": 3}, "the architecture none"),
    ],
)
def test_configs_that_do_not_fit(models, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = changed(models(), tmp_path / "source", **changes)
    with pytest.raises(NeuzipError, match=message):
        export(source, tmp_path / "m.gguf", Gguf("q2_0"))


# Files and the command


def test_a_container_gives_the_same_export_as_its_original(models, tmp_path: Path) -> None:
    from neuzip.compress import Rule, Scheme, compress

    source = models(dtype=torch.bfloat16)
    compress(
        source, tmp_path / "nz", [Rule("*_proj.weight", Scheme("ternary")), Rule("*", Scheme("lossless"))]
    )
    for target in (TransformersBitnet(), PackQuantized()):
        for name, path in (("plain", source), ("packed", tmp_path / "nz")):
            export(path, tmp_path / name, target, overwrite=True)
        files = {p.name for p in (tmp_path / "plain").iterdir()}
        assert files == {p.name for p in (tmp_path / "packed").iterdir()}
        for file in files:
            assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "packed" / file).read_bytes(), file


@pytest.fixture
def container(models, tmp_path: Path) -> Path:
    """A compressed model whose embeddings are ternary too, and whose norms are raw."""
    from neuzip.compress import Rule, Scheme, compress

    schemes = {"*_proj.weight": "ternary", "*embed_tokens*": "ternary", "*norm*": "raw", "*": "lossless"}
    source = tmp_path / "nz"
    rules = [Rule(glob, Scheme(scheme)) for glob, scheme in schemes.items()]
    compress(models(dtype=torch.bfloat16), source, rules, allow_destructive=True)
    return source


def test_embeddings_are_written_dense(container, tmp_path: Path) -> None:
    from neuzip.compress import decompress

    report = export(container, tmp_path / "out", TransformersBitnet())
    (warning,) = report.warnings
    assert "embed_tokens.weight': is ternary in `source`, and written dense" in warning
    decompress(container, tmp_path / "plain")
    name = "model.embed_tokens.weight"
    assert torch.equal(weights_of(tmp_path / "out")[name], weights_of(tmp_path / "plain")[name])


def test_warnings_speak_of_arguments_under_json_too(container, tmp_path: Path, neuzip) -> None:
    said = neuzip("export", container, tmp_path / "out", "--to", "transformers-bitnet", "--json")
    (warning,) = said.json["warnings"]
    assert "is ternary in SRC, and written dense" in warning
    assert said.stderr == f"warning: {warning}\n"


@pytest.mark.parametrize("entry", ["model.layers.0.mlp.up_proj.weight#codes", "model.norm.weight"])
def test_damaged_containers_are_not_exported(container, tmp_path: Path, entry: str) -> None:
    from neuzip.errors import FormatError
    from neuzip.formats.safetensors_file import TensorFile

    path = container / "model.safetensors"
    with TensorFile(path) as file:
        (name,) = [n for n in file.header.tensors if n.startswith(entry.split("#")[0]) and "scale" not in n]
        at = file.data_start + file.header.tensors[name].start
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    for target, dst in ((PackQuantized(), "out"), (Gguf("q2_0"), "m.gguf")):
        with pytest.raises(FormatError, match="damaged"):
            export(container, tmp_path / dst, target)
        assert not (tmp_path / dst).exists()


def test_other_weights_are_left(models, tmp_path: Path) -> None:
    source = changed(models(), tmp_path / "source")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, source / "consolidated.safetensors")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    report = export(source, tmp_path / "out", TransformersBitnet())
    assert sorted(w.split(":")[0] for w in report.warnings) == [
        "consolidated.safetensors",
        "pytorch_model.bin",
    ]
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "tokenizer.json"} < names
    assert not names & {"consolidated.safetensors", "pytorch_model.bin"}


def test_no_export_is_more_open_than_its_source(models, tmp_path: Path) -> None:
    source = changed(models(), tmp_path / "source")
    for path in source.iterdir():
        path.chmod(0o600)
    source.chmod(0o700)
    export(source, tmp_path / "out", TransformersBitnet())
    export(source, tmp_path / "out.gguf", Gguf("q2_0"))
    made = [tmp_path / "out.gguf", *(tmp_path / "out").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_shards_stay_shards(models, tmp_path: Path) -> None:
    source = tmp_path / "source"
    load(models()).save_pretrained(source, max_shard_size="1MB")
    assert len(list(source.glob("*.safetensors"))) > 1
    export(source, tmp_path / "out", TransformersBitnet())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    export(models(), tmp_path / "whole", TransformersBitnet())
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "whole")))


def test_a_second_export_to_a_gguf_file_that_is_being_written_is_refused(
    models, tmp_path: Path, monkeypatch
) -> None:
    write, refused = gguf.GgufWriter.write, []

    def write_beside_another(*arguments: Any) -> None:
        if not refused:
            with pytest.raises(NeuzipError, match="another run is writing there") as error:
                export(models(), tmp_path / "m.gguf", Gguf("q2_0"))
            refused.append(error)
        write(*arguments)

    monkeypatch.setattr(gguf.GgufWriter, "write", write_beside_another)
    export(models(), tmp_path / "m.gguf", Gguf("q2_0"))
    assert refused
    export(models(), tmp_path / "alone.gguf", Gguf("q2_0"))
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"m.gguf", "alone.gguf"}


def test_a_gguf_file_that_cannot_be_finished_leaves_nothing(models, tmp_path: Path, monkeypatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GgufWriter, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            export(models(), tmp_path / "m.gguf", Gguf("q2_0"))
    assert not list(tmp_path.iterdir())
    left = tmp_path / "m.gguf.neuzip-partial"
    left.mkdir()
    (left / "m.gguf").write_bytes(b"half of an export that was killed")
    export(models(), tmp_path / "m.gguf", Gguf("q2_0"))
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_nothing_is_overwritten_or_left_half_done(models, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    first = export(models(), out, TransformersBitnet())
    with pytest.raises(WouldOverwrite):
        export(models(), out, PackQuantized())
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("neuzip.compress.export_folder.copy_file", killed)
        with pytest.raises(KeyboardInterrupt):
            export(models(), out, PackQuantized(), overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    again: ExportReport = export(models(), out, TransformersBitnet(), overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert again.tensors == first.tensors
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


@pytest.mark.slow
def test_command_in_all_modes(models, tmp_path: Path, in_all_modes) -> None:
    out = tmp_path / "m.gguf"
    said = in_all_modes(
        "export",
        models(),
        out,
        "--to",
        "gguf",
        "--gguf-type",
        "q2_0",
        prepare=lambda: out.unlink(missing_ok=True),
    )
    assert said["quiet"].stdout == f"{out}\n"
    answer = said["json"].json
    assert answer["to"] == "gguf"
    assert answer["ternary"] == 14
    assert answer["tensors"][0].keys() >= {"name", "kind", "group", "scale_error", "packing"}
    assert "14 of 21 tensors are ternary" in said["human"].stdout


def test_online_takes_the_one_class_that_can(models, tmp_path: Path, neuzip) -> None:
    said = neuzip("export", models(), tmp_path / "out", "--to", "transformers-bitnet", "--mode", "online")
    assert said.exit_code == 0, said.stderr
    how = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (how["linear_class"], how["quantization_mode"]) == ("autobitlinear", "online")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "gguf"], "one file"),
        (
            ["--to", "transformers-bitnet", "--mode", "online", "--linear-class", "bitlinear"],
            "--mode online needs autobitlinear",
        ),
        (["--to", "onnx"], "invalid value for '--to': 'onnx' is not one of"),
    ],
)
def test_options_that_do_not_fit(models, tmp_path: Path, neuzip, options: list[str], message: str) -> None:
    said = neuzip("export", models(), tmp_path / "out", *options)
    assert said.exit_code == UsageError.exit_code
    assert message in said.stderr
