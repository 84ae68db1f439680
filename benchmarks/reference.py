"""Writes the generated parts of docs/reference and CHANGELOG.md from the code: none is copied by hand.

python benchmarks/reference.py            # rewrite what is between the marks of every page
python benchmarks/reference.py --check    # exit 1 if a page differs, and name it

A page has `<!-- reference: NAME -->` and `<!-- end of reference -->` around what BLOCKS[NAME] gives. A
command, a key or a variable that has no words here stops the script, and so does one that has words and no
longer exists.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_origin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
CHANGELOG = ROOT / "CHANGELOG.md"
HELP = ROOT / "tests" / "golden" / "help"
CODE = ("cli", "compress", "eval", "formats", "kernels", "neuzip", "runtime", "train")
MARKED = re.compile(r"(<!-- reference: ([\w-]+) -->\n).*?(<!-- end of reference -->)", re.DOTALL)


def words(text: str) -> dict[str, str]:
    """Lines `key = meaning`; a line that begins with a space continues the meaning."""
    lines = re.sub(r"\n +", " ", text.strip()).splitlines()
    return dict(line.split(" = ", 1) for line in lines)


GROUPS = {
    "Files": ("compress", "decompress", "verify", "inspect", "diff", "apply"),
    "Hub": ("push", "pull"),
    "Run and measure": ("generate", "eval", "bench", "sweep", "layers", "experts"),
    "Change and train": ("ternarize", "recover", "export", "patch-attention", "train"),
    "Help": ("demo", "doctor", "env"),
}
"""The groups of the README, in its order."""

HOW_TO = {
    "compress": "compress", "decompress": "compress", "verify": "compress", "apply": "deltas",
    "diff": "measure", "inspect": "choose-a-mode", "eval": "measure", "sweep": "measure",
    "bench": "run", "layers": "layers", "experts": "compress", "generate": "run",
    "patch-attention": "cache-and-attention",
    "export": "ternary", "ternarize": "ternary",
    "recover": "ternary", "train": "train", "push": "hub", "pull": "hub", "env": "troubleshoot",
    "doctor": "troubleshoot",
    "demo": None,
}  # fmt: skip
"""The page of docs/how-to that shows each command at work."""

PLAN_KEYS = words("""
match = glob on the tensor's name, required
scheme = `"raw"`, `"lossless"`, `"truncated"`, `"ternary"` or `"quantized"`; `"truncated"` if
    `mantissa_bits` is given, else `"lossless"`
mantissa_bits = mantissa bits to keep, 0 to 51; for `truncated`
block_size = weights that share a per-block scale, a power of two from 8 to 16,384; for `truncated`
min_dimensions = the rule applies only to tensors with at least this many dimensions
quantizer = `"absmean"`, `"absmean-clamped"` or `"least-squares"`; for `ternary`
group = weights of a row that share a scale, or `"row"`; without it one scale per tensor; for
    `ternary`
packing = `"trits"` (1.6 bits per weight) or `"2bit"`; for `ternary`
scale_dtype = `"F32"` or `"F16"`; for `ternary`
step = distance between neighbouring values, a positive number; for `quantized`, required
row_factors = true: each row has a factor of the step, by the spread of its weights; for `quantized`
column_factors = true: each column has a factor of the step, by the spread of its weights; for `quantized`
""")

TRAIN_KEYS = words("""
model = folder or Hub id of the model to train; leave it out if you give `scratch` or `preset`
scratch = path of a config.json; training starts from random weights
preset = model and training of the BitNet a4.8 paper, from random weights: `"bitnet-a4.8-700m"`,
    `"bitnet-a4.8-1.3b"`, `"bitnet-a4.8-3b"` or `"bitnet-a4.8-7b"`. It sets `ternary`, `lr`, `cooldown_lr`,
    `weight_decay`, `warmup_steps`, `window` and `batch_size`; your own keys replace these
scale = factor on the width, feed-forward width, heads and layers of `preset`
tokenizer = folder with the tokenizer for `scratch` or `preset`
ternary = train ternary weights from random ones; the value is how activations are quantised in the end:
    `"b1.58"`, `"a4.8"` or `"a4.8-fp4"`
int8_fraction = share of the steps with 8-bit activations, before those of `ternary`
text = list of files (.txt, .jsonl, .jsonl.gz), folders, `hf://datasets/...` or `demo`
output = folder for the model, checkpoints, log.jsonl, loss.svg and run.json
steps = number of steps
lr = peak learning rate
window = tokens per window, with BOS if the tokenizer adds one; default: 512, or the model's maximum
    if that is smaller
batch_size = windows per step, over all processes
micro_batch_size = windows that pass through a layer at once; default: all windows of a process
optimizer = `"adamw8bit"`, `"adamw"`, `"sgd"` or `"sgd-stochastic"` (stochastic rounding)
optimizer_state = `"plain"`, or `"lossless"` to hold the optimizer state losslessly compressed, with
    the same bits
weight_decay = weight decay of matrices; default: the optimizer's own
schedule = learning rate schedule: `"cosine"`, `"linear"` or `"constant"`
warmup_steps = steps of linear warm-up
min_lr_ratio = final learning rate as a share of the peak
cooldown_lr = peak learning rate of the cooldown, which has no weight decay; default: no cooldown
cooldown_start = share of the steps before the cooldown
max_grad_norm = maximum global gradient norm; 0 disables clipping
clipping = `"two-pass"` clips by the exact norm with a second backward pass; `"running"` uses the
    norm of the step before
compressed = hold the weights compressed while training; false trains plain weights (as LOMO does)
dtype = dtype of a model from `scratch` or `preset`: `"bfloat16"`, `"float16"` or `"float32"`
compress = write the trained model as a compressed checkpoint
checkpoint_every = steps between checkpoints; 0 writes one at the end
budget_minutes = start no step after this time
eval_text = text on which the trained model's loss is measured, as `neuzip eval` does by default
seed = seed of window order, dropout, stochastic rounding and random weights
device = `"auto"`, `"cpu"` or `"cuda"`
filter_gradients = on a GPU, skip tiles of logits with negligible gradients, as Cut Cross-Entropy
    does; false computes all gradients of the head. Default: true with `model`, false from random
    weights
deterministic = on a GPU, use deterministic algorithms: runs repeat and resume bit by bit, but
    slower
""")

OWN = words("""
NEUZIP_AUTOLOAD = `0` stops `import torch` from importing neuzip; transformers then loads compressed
    folders only after `import neuzip`
NEUZIP_DEBUG = `1` shows the traceback of every error
NEUZIP_GPU_CHECK = `0` skips the check of a GPU at its first use in a process
NEUZIP_NO_PROGRESS = `1` switches off progress bars and progress lines
""")
"""neuzip's own variables."""

READ = words("""
ALL_PROXY = proxy; neuzip removes its password from messages
HTTP_PROXY = proxy; neuzip removes its password from messages
HTTPS_PROXY = proxy; neuzip removes its password from messages
CC = the C compiler that Triton uses; `neuzip doctor` looks for it
CUDA_VISIBLE_DEVICES = `neuzip doctor` says whether it hides the GPUs
COLUMNS = width of the output in characters; without it neuzip asks the terminal
FTP_PROXY = proxy; neuzip removes its password from messages
HF_ENDPOINT = address of the Hub, for a mirror; neuzip removes its password from messages
HF_INFERENCE_ENDPOINT = neuzip removes its password from messages
LOCAL_RANK = set by torchrun: the GPU of this process
LOCAL_WORLD_SIZE = set by torchrun: the number of processes on this machine
MASTER_ADDR = set by torchrun: the address at which the processes meet
MASTER_PORT = set by torchrun: the port at which the processes meet
RANK = set by torchrun: the number of this process
SGLANG_PLUGINS = plugins that SGLang loads; `neuzip doctor` looks for neuzip among them
TERM = `dumb` means that the terminal shows no progress bar
TORCHELASTIC_RESTART_COUNT = set by torchrun: keeps restarted runs apart
TORCH_DEVICE_BACKEND_AUTOLOAD = `0` stops `import torch` from importing neuzip, among others
TRITON_CACHE_DIR = folder of compiled GPU kernels; `neuzip doctor` looks whether it can be written
TRITON_HOME = folder in which Triton's cache is, if `TRITON_CACHE_DIR` is not set
VLLM_PLUGINS = plugins that vLLM loads; `neuzip doctor` looks for neuzip among them
WORLD_SIZE = set by torchrun: the number of processes
""")
"""Variables of other programs that neuzip reads."""

PRESET = words("""
CUBLAS_WORKSPACE_CONFIG = set to a fixed workspace if `deterministic` training needs one
HF_XET_CHUNK_CACHE_SIZE_BYTES = set to 0 by `compress --stream`, so that the cache of chunks does
    not fill the disk
OMP_WAIT_POLICY = set to `PASSIVE`, so that idle threads do not spin
TORCH_CPP_LOG_LEVEL = set to `FATAL` under torchrun, because neuzip reports a lost process itself
TQDM_DISABLE = set to 1 while `eval --tasks` runs, because neuzip shows the progress
""")
"""Variables that neuzip sets unless you do."""


def main() -> int:
    """Render every page, then write or compare."""
    pages = differing()
    if "--check" in sys.argv:
        print(*(page.name for page in pages), sep="\n", end="")
        return int(bool(pages))
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


def differing() -> dict[Path, str]:
    """The pages that are out of date, each with its text as it has to be."""
    pages = {page: page.read_text(encoding="utf-8") for page in (*sorted(PAGES.glob("*.md")), CHANGELOG)}
    made = {
        page: MARKED.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}\n{m[3]}", text) for page, text in pages.items()
    }
    return {page: text for page, text in made.items() if text != pages[page]}


def table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; `heads` are separated by bars."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return f"| {heads} |\n{'|---' * (heads.count('|') + 1)}|\n" + "\n".join(lines)


def require_same(what: str, told: Iterable[str], there: Iterable[str]) -> None:
    """Exit unless the words of this script are for what is there, and for nothing else."""
    told, there = set(told), set(there)
    if told != there:
        raise SystemExit(
            f"reference.py: {what}: no words for {there - told}, words too many for {told - there}"
        )


# Commands


def commands() -> str:
    """Every command's help page, in groups."""
    from neuzip.cli.commands import VERBS

    require_same("GROUPS", (verb for verbs in GROUPS.values() for verb in verbs), VERBS)
    require_same("HOW_TO", HOW_TO, VERBS)
    parts = []
    for title, verbs in GROUPS.items():
        parts.append(f"## {title}")
        parts += [command(verb) for verb in verbs]
    return "\n\n".join(parts)


def command(verb: str) -> str:
    """One command's help page, what it needs, and where it is shown at work."""
    page = (HELP / f"{verb}.txt").read_text(encoding="utf-8").rstrip("\n")
    page = re.sub(r"^[ \t]+$", "", page, flags=re.MULTILINE)
    parts = [f"### {verb}", f"```text\n{page}\n```"]
    module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")
    if needs := getattr(module, "NEEDS", {}):
        parts.append(
            table(
                "option | has no effect without",
                ((f"`{option}`", either(others)) for option, others in needs.items()),
            )
        )
    if packages := getattr(module, "PACKAGES", ()):
        parts.append(f"`{verb}` needs these packages: {', '.join(packages)}.")
    if HOW_TO[verb]:
        parts.append(f"Examples with explanations: [{HOW_TO[verb]}](../how-to/{HOW_TO[verb]}.md)")
    return "\n\n".join(parts)


def either(options: Iterable[str]) -> str:
    """Options of which one is needed."""
    return " or ".join(f"`{option}`" for option in options)


def overview() -> str:
    """What each command does, in one line, group by group."""
    text = (HELP / "neuzip.txt").read_text(encoding="utf-8")
    listed = text[text.index("Commands:") :].partition("\n\n")[0]
    found: dict[str, str] = {}
    for line in listed.splitlines()[1:]:
        name, words = line[:19].strip(), line[19:].strip()
        name = name or list(found)[-1]
        found[name] = f"{found.get(name, '')} {words}".strip()
    return table(
        "group | command | what it does",
        (
            (title if verb == verbs[0] else "", f"[`{verb}`](#{verb})", found[verb])
            for title, verbs in GROUPS.items()
            for verb in verbs
        ),
    )


# Python


def names() -> str:
    """Every public name of the package with its signature and its documentation."""
    return "\n\n".join(documented(name, thing) for name, thing in public().items())


def public() -> dict[str, Any]:
    """The public names of the package and what they are."""
    import neuzip

    return {name: getattr(neuzip, name) for name in neuzip.__all__ if name != "__version__"}


def delta_names() -> str:
    """Every public name of `neuzip.delta`, which is documented as the package is."""
    from neuzip import delta

    return "\n\n".join(documented(f"delta.{name}", getattr(delta, name)) for name in delta.__all__)


def results() -> str:
    """The classes that public functions return, with what is documented of them."""
    wanted = {annotation(inspect.signature(thing).return_annotation) for thing in public().values()}
    found = {name: class_called(name) for name in sorted(wanted - set(public())) if name.isidentifier()}
    return "\n\n".join(documented(name, thing) for name, thing in found.items() if thing is not None)


def class_called(name: str) -> Any:
    """The class of the library that has a name; None if there is none, as for what other packages have."""
    begins = re.compile(rf"^class {name}\b", re.MULTILINE)
    for path in code_files():
        if path.parts[len(ROOT.parts)] != "cli" and begins.search(path.read_text(encoding="utf-8")):
            inner = path.relative_to(ROOT).with_suffix("").parts
            parts = inner if inner[0] == "neuzip" else ("neuzip", *inner)
            return getattr(import_module(".".join(part for part in parts if part != "__init__")), name)
    return None


def code_files() -> list[Path]:
    """The package's files."""
    folders = (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))
    return [*folders, ROOT / "neuzip_autoload.py"]


def documented(name: str, thing: Any) -> str:
    """A section: the signature, the documentation, and of a class its public members."""
    lines = [f"### {name}", "", f"```text\n{signature(name, thing)}\n```", "", prose(thing)]
    for member, method in own_members(thing):
        written_as = f"{name}.{member}"
        if isinstance(method, property):
            shown = f"{written_as}: {annotation(inspect.signature(method.fget).return_annotation)}"
        else:
            shown = signature(written_as, method)
        lines += ["", f"```text\n{shown}\n```", "", prose(method)]
    return "\n".join(lines)


def own_members(thing: Any) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that are documented where they are written, in that order."""
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        shown = inspect.isfunction(member) or isinstance(member, property)
        if shown and member.__doc__ and not name.startswith("_"):
            yield name, member


def signature(name: str, thing: Any) -> str:
    """A call as it is written in code, over several lines if it is long."""
    try:
        found = inspect.signature(thing)
    except ValueError:  # a class whose constructor is written in C
        return name
    parameters, star = [], False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
        star |= parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        parameters.append(written(parameter))
    returned = "" if found.return_annotation is found.empty else f" -> {annotation(found.return_annotation)}"
    if inspect.isclass(thing):
        returned = ""
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) <= 90:
        return line
    return "\n".join([f"{name}(", *(f"    {p}," for p in parameters), f"){returned}"])


def written(parameter: inspect.Parameter) -> str:
    """A parameter with annotation and default."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        plain = isinstance(default, (str, int, float, bool, tuple, type(None)))
        text += f" = {default!r}" if plain else " = ..."
    return text


def annotation(value: Any) -> str:
    """An annotation as it was written, with the values of a choice in place of its name."""
    from neuzip import choices
    from neuzip.runtime import residencies

    text = value if isinstance(value, str) else inspect.formatannotation(value)
    known = {**vars(choices), "Residency": residencies.Residency}
    names = [name for name, choice in known.items() if get_origin(choice) is Literal]
    return re.sub(rf"\b({'|'.join(names)})\b", lambda m: repr(known[m[0]]).removeprefix("typing."), text)


def prose(thing: Any) -> str:
    """A docstring as Markdown: indented code, doctests, tables and lists of parameters become blocks."""
    text = inspect.getdoc(thing) or ""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith(("    ", ">>>", "| ")) or re.search(
            r"^[\w.`\"]+(?: {2,}|\n {4,})\S", paragraph
        ):
            paragraphs.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


# JSON


def json_frame() -> str:
    """The keys that every document begins with, and those of a failure."""
    from neuzip.cli.schema import ENVELOPE, FAILED

    return keys_table({**ENVELOPE, **FAILED})


def json_commands() -> str:
    """The keys of each command, in the groups of the commands."""
    from neuzip.cli.schema import COMMANDS

    require_same("json keys", COMMANDS, HOW_TO)
    verbs = [verb for group in GROUPS.values() for verb in group]
    return "\n\n".join(f"### {verb}\n\n{keys_table(COMMANDS[verb])}" for verb in verbs)


def json_objects() -> str:
    """The objects that are values of keys."""
    from neuzip.cli.schema import OBJECTS

    return "\n\n".join(f"### {name}\n\n{keys_table(OBJECTS[name])}" for name in sorted(OBJECTS))


def keys_table(keys: Any) -> str:
    """The keys of an object with type, unit and meaning."""
    from neuzip.cli.schema import OBJECTS

    def linked(kind: str) -> str:
        return re.sub(r"\w+", lambda m: f"[{m[0]}](#{m[0].lower()})" if m[0] in OBJECTS else m[0], kind)

    rows = (
        (f"`{name}`", linked(key.type), key.unit.replace("|", "\\|"), key.meaning.replace("|", "\\|"))
        for name, key in keys.items()
    )
    return table("key | type | unit | meaning", rows)


# Configuration


def deprecated() -> str:
    """Old names of options and keys, and what they are called now."""
    from neuzip.cli.deprecated import NAMES, VALUES
    from neuzip.train.configuration import OLD

    commands: dict[tuple[str, str], list[str]] = {}
    for verb, renamed in NAMES.items():
        for old, new in renamed.items():
            commands.setdefault((old, new), []).append(verb)
    for (verb, option, value), now in VALUES.items():
        commands[f"{option} {value}", " ".join(now)] = [verb]
    for old, new in OLD.items():
        commands[old, new] = ["train, in its TOML file"]
    rows = ((", ".join(verbs), f"`{old}`", f"`{new}`") for (old, new), verbs in commands.items())
    return table("command | old | new", rows)


def plan_keys() -> str:
    """The keys of a rule in a plan file."""
    from neuzip.compress.rules_file import rule_keys

    keys = rule_keys()
    require_same("PLAN_KEYS", PLAN_KEYS, keys)
    return table("key | meaning", ((f"`{key}`", PLAN_KEYS[key]) for key in keys))


def train_keys() -> str:
    """The keys of a training run with their defaults."""
    from neuzip.train.configuration import TrainingConfiguration

    fields = {field.name: field for field in dataclasses.fields(TrainingConfiguration)}
    require_same("TRAIN_KEYS", TRAIN_KEYS, fields)
    return table(
        "key | default | meaning",
        ((f"`{key}`", default(fields[key]), meaning) for key, meaning in TRAIN_KEYS.items()),
    )


def default(field: dataclasses.Field[Any]) -> str:
    """A default as TOML writes it."""
    if field.default is dataclasses.MISSING:
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def environment(words: dict[str, str]) -> Callable[[], str]:
    """A table of environment variables; together the tables have all that the code names."""

    def render() -> str:
        require_same("environment variables", OWN | READ | PRESET, variables_of_code())
        return table("variable | meaning", ((f"`{name}`", words[name]) for name in sorted(words)))

    return render


def variables_of_code() -> set[str]:
    """Every environment variable that the package reads or sets."""
    return {name for path in code_files() for name in variables(path)}


def variables(path: Path) -> Iterator[str]:
    """The names by which a file's code looks into os.environ."""
    text = path.read_text(encoding="utf-8")
    if "environ" not in text and "getenv" not in text:
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="get" | "setdefault" | "pop"), args=[key, *_]):
                keys = key if is_environ(owner) else None
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="getenv"), args=[key, *_]):
                keys = key
            case ast.Subscript(value=owner, slice=key):
                keys = key if is_environ(owner) else None
            case ast.Compare(left=key, comparators=[owner]):
                keys = key if is_environ(owner) else None
            case _:
                keys = None
        if keys is not None:
            yield from values(keys, tree, path)


def is_environ(node: ast.expr) -> bool:
    """Whether an expression is os.environ, or its keys."""
    return ast.unparse(node) in ("os.environ", "os.environ.keys()")


def values(node: ast.expr, tree: ast.Module, path: Path) -> set[str]:
    """The strings that an expression may have: a constant, or one of a collection that is gone through."""
    match node:
        case ast.Constant(value=str(name)):
            return {name}
        case ast.Set(elts=elements) | ast.Tuple(elts=elements) | ast.List(elts=elements):
            return {name for element in elements for name in values(element, tree, path)}
        case ast.Dict(keys=keys):
            return {name for key in keys if key is not None for name in values(key, tree, path)}
        case ast.Call(func=ast.Attribute(value=inner, attr="lower")):
            return values(inner, tree, path)
        case ast.Name(id=wanted):
            for other in ast.walk(tree):
                match other:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == wanted:
                        return values(value, tree, path)
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == wanted:
                        return values(value, tree, path)
                    case ast.For(target=ast.Name(id=name), iter=value) if name == wanted:
                        return values(value, tree, path)
                    case ast.comprehension(target=ast.Name(id=name), iter=value) if name == wanted:
                        return values(value, tree, path)
    raise SystemExit(f"reference.py: {path}, line {node.lineno}: which variable is {ast.unparse(node)}?")


# Support


def dtypes() -> str:
    """What each dtype of safetensors can be stored as, and run as."""
    import torch

    from neuzip.compress.schemes.ternary import TERNARY_DTYPES
    from neuzip.compress.schemes.truncated import normalisable
    from neuzip.kernels.float_fields import FORMATS
    from neuzip.runtime.residency import DTYPES

    torch_names = {torch.bfloat16: "BF16", torch.float16: "F16"}
    in_memory = {torch_names[dtype] for dtype in DTYPES}
    rows = []
    for name, form in FORMATS.items():
        marks = (True, True, normalisable(form), name in TERNARY_DTYPES, name in in_memory)
        kept = f"0 to {form.mantissa_bits - 1}"
        rows.append([f"`{name}`", *("yes" if mark else "no" for mark in marks)])
        rows[-1][2] = kept
    others = "integers, `BOOL`, 4-bit and 6-bit floats, `F8_E8M0`, complex, unknown dtypes"
    rows.append([others, "stored unchanged", "no", "no", "no", "no"])
    options = "`--mantissa-bits` | `--block-size` | `--ternary`"
    return table(f"dtype | lossless, delta | {options} | `packed`, `ans` in memory", rows)


def versions() -> str:
    """The ranges that pyproject.toml states."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = [("Python", project["requires-python"])]
    extras = [
        f"{requirement}; extra `{name}`"
        for name, wanted in project["optional-dependencies"].items()
        for requirement in wanted
    ]
    for requirement in [*project["dependencies"], *extras]:
        found = re.match(r"([\w.-]+)(?:\[[\w,]+\])?\s*([^;]*)", requirement)
        assert found, requirement
        condition = requirement.partition(";")[2].strip()
        rows.append((f"{found[1]}{f' ({condition})' if condition else ''}", found[2].strip() or "any"))
    return table(
        "package | version", ((name, f"`{wanted}`" if wanted != "any" else wanted) for name, wanted in rows)
    )


def memory_formats() -> str:
    """The in-memory weight formats, each with what it needs."""
    from neuzip.runtime.residencies import RESIDENCIES

    needs = {False: ("4.57 and 5", "any dtype that torch runs"), True: ("5", "bf16 and fp16")}
    heads = "`--residency` | NVIDIA GPU | CPU | transformers | weights"
    return table(
        heads,
        (
            (f"`{name}`", entry.gpu, entry.cpu or "no", *needs[bool(entry.weight)])
            for name, entry in RESIDENCIES.items()
        ),
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "overview": overview,
    "names": names,
    "delta-names": delta_names,
    "results": results,
    "json-frame": json_frame,
    "json-commands": json_commands,
    "json-objects": json_objects,
    "deprecated": deprecated,
    "plan-keys": plan_keys,
    "train-keys": train_keys,
    "own-variables": environment(OWN),
    "read-variables": environment(READ),
    "preset-variables": environment(PRESET),
    "dtypes": dtypes,
    "versions": versions,
    "memory-formats": memory_formats,
}

if __name__ == "__main__":
    sys.exit(main())
