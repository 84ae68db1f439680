"""What all tests share: a clean import path, marks, the command line as a function, golden pages."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from filelock import FileLock

# Of what imports and the collection of tests make, hardly anything is garbage, and the collector would look
# through it again and again: see pytest_collection_finish.
gc.disable()

ROOT = Path(__file__).resolve().parent.parent
GIGABYTE = 10**9

# `make test-engines` runs these, without this file.
collect_ignore = ["engines"]

# On the path the root would offer `kernels`, `eval` and the others under their bare names, and hide others.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# A shell's background jobs ignore Ctrl-C, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For what test files share: the modules of tests/support, and what lies in tests/golden and tests/fuzz.
sys.path[len(sys.path) :] = [str(ROOT / "tests" / "support"), str(ROOT / "tests")]
pytest.register_assert_rewrite("loopback_hub")

import forked  # noqa: E402
from json_schema import problems  # noqa: E402
from worker_threads import usable_cores, worker_threads  # noqa: E402

from neuzip.cli.document import SCHEMA  # noqa: E402
from neuzip.cli.schema import COMMANDS  # noqa: E402

# The same examples at home and in CI, and no time limit on an example: the first one may compile a kernel.
hypothesis.settings.register_profile("neuzip", deadline=None, derandomize=True)
hypothesis.settings.load_profile("neuzip")

# Without a CUDA device Triton's interpreter runs the kernels, on CPU tensors. It has to be told before
# anything imports triton; torch alone does not. Models are small then, and each worker has one core: a second
# thread costs more than it brings, here and in the processes that tests start. With a device the workers of
# xdist share the cores: a thread per core in each of them would slow all of them down.
if "OMP_NUM_THREADS" not in os.environ:
    threads = worker_threads(os.environ, usable_cores(), has_gpu=torch.cuda.is_available())
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # More than one, and torch.compile starts processes that would compile Triton kernels, here and in tests'.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    import interpreter

    interpreter.quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write golden pages, do not compare")
    parser.addoption("--one-case", action="store_true", help="run one case of each test, not the whole grid")
    parser.addoption("--costs", metavar="FILE", help="write CPU seconds of files and tests, dearest first")


KERNELS = "kernels"
"""Folder of compiled kernels in pytest's cache."""

KERNELS_BYTES = 1 << 29
"""Size of that folder from which it is made anew: Triton never removes what changed sources have replaced."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # a worker of xdist, while others use the folder
        return
    if not hasattr(session.config, "cache"):  # -p no:cacheprovider
        return
    folder = session.config.cache.mkdir(KERNELS)
    if sum(path.stat().st_size for path in folder.rglob("*")) > KERNELS_BYTES:
        shutil.rmtree(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if config.getoption("--one-case"):
        tests: dict[str, pytest.Item] = {}
        for item in items:
            test = item.nodeid.partition("[")[0]
            if test not in tests or (is_left_out(tests[test]) and not is_left_out(item)):
                tests[test] = item
        config.hook.pytest_deselected(items=[i for i in items if tests[i.nodeid.partition("[")[0]] is not i])
        items[:] = tests.values()


def pytest_collection_finish() -> None:
    """From here on garbage is collected, among what is made from here on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # by Python's 700 the collector takes 2 to 6 % of the time of tests
    gc.enable()


def is_left_out(item: pytest.Item) -> bool:
    """Whether a test is skipped here, or is not part of a bare `pytest`."""
    if any(item.get_closest_marker(mark) for mark in ("slow", "weekly", "network")):
        return True
    return item.get_closest_marker("skip") is not None


# What the suite costs, in CPU seconds: a wall clock tells how busy the machine is.

CPU = "CPU seconds"
SHOWN = 10.0
"""CPU seconds from which a test is named at the end of a run."""


def cpu_seconds() -> float:
    """CPU seconds of this process, of processes that it has waited for, and of what `forks` forked."""
    return sum(os.times()[:4]) + sum(server.cpu_seconds for server in forked.SERVERS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.user_properties.append((CPU, -cpu_seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        item.user_properties[:] = [(k, v + cpu_seconds() if k == CPU else v) for k, v in item.user_properties]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    costs = {
        report.nodeid: value
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for key, value in report.user_properties
        if key == CPU
    }
    if costs:
        terminalreporter.write_line(f"{sum(costs.values()) / 60:.1f} CPU minutes of {len(costs)} tests")
    for line in cost_lines({name: seconds for name, seconds in costs.items() if seconds >= SHOWN}):
        terminalreporter.write_line(line)
    if config.getoption("--costs"):
        files: dict[str, float] = {}
        for name, seconds in costs.items():
            file = name.partition("::")[0]
            files[file] = files.get(file, 0.0) + seconds
        text = "\n".join([*cost_lines(files), "", *cost_lines(costs)]) + "\n"
        Path(config.getoption("--costs")).write_text(text, encoding="utf-8")


def cost_lines(costs: Mapping[str, float]) -> list[str]:
    """A line for each file or test, the dearest first."""
    ordered = sorted(costs.items(), key=lambda pair: -pair[1])
    return [f"{seconds:7.2f} CPU seconds  {name}" for name, seconds in ordered]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run: a GPU, or else its interpreter, which takes CPU tensors and its time."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def most_of_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Wait until no other worker runs a test that takes gigabytes of a GPU's memory."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "most-of-a-gpu.lock"):
        yield


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Return to the GPU what a test took: torch keeps freed memory, which other workers then lack."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > GIGABYTE:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _commands_as_they_are() -> Iterator[None]:
    """Have the commands made again after a test that has exchanged them."""
    yield
    make_exchanged_commands_again()


def make_exchanged_commands_again() -> None:
    """Making all commands takes 30 milliseconds: those made are kept while they are those of the modules."""
    main = sys.modules.get("neuzip.cli.main")
    if main is None or not main.program.cache_info().currsize:
        return
    made = {verb: command.callback.__wrapped__ for verb, command in main.program().commands.items()}
    modules = {
        verb: sys.modules.get(f"neuzip.cli.commands.{verb.replace('-', '_')}") for verb in main.commands.VERBS
    }
    if made != {verb: getattr(module, "command", None) for verb, module in modules.items()}:
        main.program.cache_clear()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels that are slow to compile are kept from one run of pytest to the next, if any."""
    if not hasattr(request.config, "cache"):
        return tmp_path_factory.mktemp(KERNELS)
    return request.config.cache.mkdir(KERNELS)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def forks() -> Iterator[forked.Server]:
    """Commands in processes of their own, without the seconds of imports: see tests/support/forked.py."""
    server = forked.Server()
    forked.SERVERS.append(server)
    yield server
    forked.SERVERS.remove(server)
    server.close()


@pytest.fixture(scope="session")
def file_forks() -> Iterator[forked.Server]:
    """Commands that work on files, in processes of their own that have not imported huggingface_hub."""
    server = forked.Server(forked.FILES)
    forked.SERVERS.append(server)
    yield server
    forked.SERVERS.remove(server)
    server.close()


RunAlone = Callable[..., str]


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[forked.Server]:
    """Processes that have imported torch, and neither neuzip nor anything else that is large."""
    server = forked.Server(forked.TORCH, {**os.environ, "NEUZIP_AUTOLOAD": "0"})
    forked.SERVERS.append(server)
    yield server
    forked.SERVERS.remove(server)
    server.close()


def program_runner(server: forked.Server, folder: Path) -> RunAlone:
    """Runs a program in a process that the server forks: `run(code, argument)` is what it prints."""

    def run(code: str, *arguments: object) -> str:
        script = folder / "alone" / "program.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(code, encoding="utf-8")
        stdout, stderr = (process := server.start(script, *arguments, cwd=folder)).communicate(300)
        assert process.returncode == 0, stderr
        return stdout

    return run


@pytest.fixture
def run_alone(torch_forks: forked.Server, tmp_path: Path) -> RunAlone:
    """Run a program in a process where torch alone has been imported."""
    return program_runner(torch_forks, tmp_path)


@pytest.fixture
def run_without_torch(file_forks: forked.Server, tmp_path: Path) -> RunAlone:
    """Run a program in a process that has imported what works on files, and not torch."""
    return program_runner(file_forks, tmp_path)


@pytest.fixture(scope="session")
def neuzip_data() -> Path:
    """The folder of larger checkpoints and texts that `NEUZIP_DATA` names."""
    folder = os.environ.get("NEUZIP_DATA")
    if not folder:
        pytest.skip("NEUZIP_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in checkpoint, compressed: to read, not to change."""
    from neuzip.compress import compress
    from neuzip.eval.demo import CHECKPOINT

    folder = tmp_path_factory.mktemp("demo") / "small"
    compress(CHECKPOINT, folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One narrow layer of random weights, with the built-in checkpoint's tokenizer: to read, not to change.

    For tests of commands whose figures do not matter: it takes a fraction of the built-in checkpoint's time.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from neuzip.eval.demo import CHECKPOINT

    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = AutoConfig.from_pretrained(
        CHECKPOINT, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=8
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    for path in CHECKPOINT.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second one, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Said:
    """What one run of the command line left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on stdout."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        assert value["command"] not in COMMANDS or problems(value) == []
        return value


Speak = Callable[..., Said]


@pytest.fixture
def neuzip(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Speak:
    """Run `neuzip ARGS...` in this process: `said = neuzip("diff", a, b, "--json")`."""
    from neuzip.cli import run

    for name in ("NEUZIP_DEBUG", "NEUZIP_NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def speak(*arguments: object) -> Said:
        capsys.readouterr()
        make_exchanged_commands_again()
        exit_code = run([str(argument) for argument in arguments])
        return Said(exit_code, *capsys.readouterr())

    return speak


@pytest.fixture
def in_all_modes(neuzip: Speak) -> Callable[..., dict[str, Said]]:
    """Run one command in the three modes and check what holds for every command.

    `prepare` is called before each run, for commands that change what they are given.
    """

    def speak(*arguments: object, prepare: Callable[[], object] = lambda: None) -> dict[str, Said]:
        said = {}
        for mode, flags in {"human": [], "json": ["--json"], "quiet": ["--quiet"]}.items():
            prepare()
            said[mode] = neuzip(*arguments, *flags)
        assert len({one.exit_code for one in said.values()}) == 1, said
        assert said["human"].stdout.strip(), "a person is told nothing"
        assert said["json"].json["schema"] == SCHEMA
        assert "  " not in said["quiet"].stdout, "quiet prints one path or number a line"
        return said

    return speak


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that name in tests/golden, or write it with --regenerate-golden."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--regenerate-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; pytest --regenerate-golden writes it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; is that wanted?"

    return compare


@pytest.fixture(scope="session")
def save() -> Callable[..., Path]:
    """Write a safetensors file by hand: `save(path, {"name": ("BF16", (2, 3), array)}, metadata, padding)`.

    Tensors lie in the order given: the safetensors library would order them otherwise.
    """

    def write(
        path: Path,
        tensors: dict[str, tuple[str, tuple[int, ...], Any]],
        metadata: dict[str, str] | None = None,
        padding: int = 0,
    ) -> Path:
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        at = 0
        for name, (dtype, shape, array) in tensors.items():
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(header).encode() + b" " * padding
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(array.tobytes() for _, _, array in tensors.values())
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    return write


@pytest.fixture(params=[0xFF], ids=["ones"])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that nobody has written to: what a kernel forgets to write cannot look right.

    Ones are NaN in every float and -1 in every integer. Zeros would hide each zero that is forgotten.
    """
    empty: Callable[..., torch.Tensor] = torch.empty

    def filled(*arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor = empty(*arguments, **keywords)
        tensor.view(torch.uint8).fill_(request.param)
        return tensor

    monkeypatch.setattr(torch, "empty", filled)
