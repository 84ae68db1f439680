"""The frame around the commands: modes, errors, exit codes, and a start that loads nothing heavy."""

from __future__ import annotations

import inspect
import io
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from safetensors import SafetensorError

from neuzip.cli import commands, flags, progress
from neuzip.cli.document import plain
from neuzip.cli.main import program
from neuzip.cli.options import JsonOption, QuietOption, SourceArgument
from neuzip.cli.output import Output
from neuzip.cli.table import render_table
from neuzip.cli.text import printable
from neuzip.errors import DiskFull, FormatError, NeuzipError, UsageError

HEAVY = ("torch", "numpy", "numba", "transformers", "matplotlib", "triton", "safetensors", "huggingface_hub")
PAGES = ("", *commands.VERBS)


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that does not see the working directory."""
    return subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        **options,
    )


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Output], None]], None]:
    """Make `neuzip probe SRC` do what a test says."""
    flags.options()  # they are kept, and have to be those of all commands whatever test runs first

    def install(act: Callable[[Output], None]) -> None:
        def command(src: SourceArgument, json: JsonOption = False, quiet: QuietOption = False) -> None:
            """Do what a test says"""
            act(Output(json=json, quiet=quiet))

        module = ModuleType("neuzip.cli.commands.probe")
        module.command = command  # type: ignore[attr-defined]
        module.EXAMPLES = ["neuzip probe ./llama", "neuzip probe ./llama --json"]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(commands, "VERBS", ("probe",))
        program.cache_clear()  # which flags.options() has made

    return install


def fail_with(exception: BaseException) -> Callable[[Output], None]:
    def act(out: Output) -> None:
        raise exception

    return act


# What --help costs


def test_help_imports_nothing_heavy():
    """Each page is printed by a process of its own, which one that has imported the command line forks."""
    done = python(f"""
        import os, sys
        from neuzip.cli import run

        for verb in {PAGES!r}:
            if not os.fork():
                code = run([verb, "--help"] if verb else ["--help"])
                loaded = [name for name in {HEAVY!r} if name in sys.modules]
                print("loaded:", verb or "neuzip", code, loaded, len(sys.modules), flush=True)
                os._exit(0)
            os.wait()
    """)
    pages = re.findall(r"^loaded: ([\w-]+) (\d+) (\[.*\]) (\d+)$", done.stdout, re.MULTILINE)
    assert [page for page, *_ in pages] == [verb or "neuzip" for verb in PAGES], done.stdout + done.stderr
    for page, code, loaded, count in pages:
        assert (code, loaded) == ("0", "[]"), page
        assert int(count) < 500, f"{page}: importing is most of the time of help, see benchmarks/startup.py"


def test_import_neuzip_imports_nothing_heavy():
    done = python(f"""
        import sys, neuzip
        neuzip.__version__, dir(neuzip)
        print([name for name in {HEAVY!r} if name in sys.modules])
    """)
    assert done.stdout == "[]\n", done.stderr


# Pages


def test_the_list_of_verbs_is_the_folder_of_commands(root: Path):
    files = {path.stem for path in (root / "cli" / "commands").glob("*.py")} - {"__init__"}
    assert {verb.replace("-", "_") for verb in commands.VERBS} == files
    assert len(set(commands.VERBS)) == len(commands.VERBS)


@pytest.mark.parametrize("verb", PAGES, ids=lambda verb: verb or "neuzip")
def test_help_page(verb: str, neuzip, golden):
    said = neuzip(*([verb] if verb else []), "--help")
    assert (said.exit_code, said.stderr) == (0, "")
    golden(f"help/{verb or 'neuzip'}.txt", said.stdout)


@pytest.mark.parametrize("verb", PAGES, ids=lambda verb: verb or "neuzip")
def test_help_page_fits_80_columns_and_has_no_escapes(verb: str, neuzip):
    said = neuzip(*([verb] if verb else []), "--help")
    assert "\x1b" not in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80


@pytest.mark.parametrize("verb", commands.VERBS)
def test_groups_of_a_help_page_name_options_that_there_are(verb: str):
    module = import_module(f"neuzip.cli.commands.{verb.replace('-', '_')}")
    grouped = [name for names in getattr(module, "GROUPS", {}).values() for name in names]
    assert set(grouped) <= set(inspect.signature(module.command).parameters)
    assert len(set(grouped)) == len(grouped)


def test_options_of_no_group_come_last(neuzip):
    lines = neuzip("compress", "--help").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "Arguments:" and titles[-1] == "Options:"
    assert titles[1] == "Lossy compression (default: lossless):"
    assert any(line.startswith("  --json") for line in lines[lines.index("Options:") :])


def test_help_shows_the_examples_line_by_line(probe, neuzip):
    probe(lambda out: None)
    page = neuzip("probe", "--help").stdout
    assert "  Examples:\n    neuzip probe ./llama\n    neuzip probe ./llama --json\n" in page
    assert "  probe  Do what a test says\n" in neuzip("--help").stdout


def test_no_arguments_is_help_on_stderr(neuzip):
    said = neuzip()
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith("Usage: neuzip ")


def test_version(neuzip, root: Path):
    said = neuzip("--version")
    assert (said.exit_code, said.stderr) == (0, "")
    number = said.stdout.removeprefix("neuzip ").strip()
    assert f'\nversion = "{number}"\n' in (root / "pyproject.toml").read_text(encoding="utf-8")


# Exit codes


def test_unknown_command_is_a_usage_error(probe, neuzip):
    probe(lambda out: None)
    said = neuzip("prob")
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr == "error: no such command 'prob'. Did you mean 'probe'?\nhint: try `neuzip --help`\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["probe"], "missing argument 'SRC'", id="missing argument"),
        pytest.param(["probe", "x", "--nope"], "no such option: --nope", id="unknown option"),
        pytest.param(["probe", "x", "y"], "got unexpected extra argument", id="argument too many"),
    ],
)
def test_wrong_use_names_the_help_page_of_the_command(arguments, message, probe, neuzip):
    probe(lambda out: None)
    said = neuzip(*arguments)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith(f"error: {message}")
    assert said.stderr.endswith("\nhint: try `neuzip probe --help`\n")


def test_json_and_quiet_exclude_each_other(probe, neuzip):
    probe(lambda out: None)
    said = neuzip("probe", "x", "--json", "--quiet")
    assert (said.exit_code, said.json["error"]["kind"]) == (2, "UsageError")
    assert said.stderr == "error: --json and --quiet exclude each other\nhint: leave one of them out\n"


@pytest.mark.parametrize("flags", [[], ["--json"], ["--quiet"]], ids=["human", "json", "quiet"])
@pytest.mark.parametrize(
    ("failure", "code", "stderr"),
    [
        pytest.param(
            FormatError("a.safetensors", "is cut short", tensor="w", field="shape", hint="download it again"),
            1,
            "error: a.safetensors, tensor 'w', field 'shape': is cut short\nhint: download it again\n",
            id="expected failure",
        ),
        pytest.param(NeuzipError("no"), 1, "error: no\n", id="no hint"),
        pytest.param(UsageError("--plan is empty"), 2, "error: --plan is empty\n", id="usage"),
        pytest.param(typer.Exit(1), 1, "", id="the answer is no"),
        pytest.param(typer.Exit(0), 0, "", id="left early"),
        pytest.param(
            OSError(28, "No space left on device", "/out/model.safetensors"),
            1,
            "error: /out/model.safetensors: No space left on device\n"
            "hint: free some space and repeat the command\n",
            id="full disk",
        ),
        pytest.param(
            DiskFull("/out"),
            1,
            "error: /out: no space left on the disk\nhint: free some space and repeat the command\n",
            id="full disk, named by the library",
        ),
        pytest.param(
            FileNotFoundError(2, "No such file or directory", "/in/a.json"),
            1,
            "error: /in/a.json: No such file or directory\n"
            "hint: was it moved or removed while neuzip ran? repeat the command\n",
            id="a file that vanishes",
        ),
        pytest.param(
            OSError(24, "Too many open files", "/in/b"),
            1,
            "error: /in/b: Too many open files\nhint: allow more open files: ulimit -n 4096\n",
            id="too many files",
        ),
        pytest.param(
            SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"),
            1,
            "error: Permission denied\n",
            id="safetensors without a right",
        ),
    ],
)
def test_failure_is_told_in_every_mode_and_leaves_no_result(failure, code, stderr, flags, probe, neuzip):
    probe(fail_with(failure))
    said = neuzip("probe", "x", *flags)
    assert (said.exit_code, said.stderr) == (code, stderr)
    if "--json" not in flags or not stderr:  # typer.Exit
        assert said.stdout == ""
        return
    told = said.json.pop("error")
    hint = f"hint: {told['hint']}\n" if told["hint"] else ""
    assert (f"error: {told['message']}\n{hint}", told["exit_code"]) == (stderr, code)
    assert said.json.keys() == {"schema", "neuzip", "command", "error"}


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


OF_TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 4500000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (RuntimeError(OF_TORCH), "neuzip probe: memory ran out, 4500000000 bytes at once were asked for"),
        (MemoryError(), "neuzip probe: memory ran out"),
        (MemoryError("Unable to allocate 8.00 EiB for an array"), "memory ran out, 8.00 EiB at once"),
        (OSError(12, "Cannot allocate memory"), "neuzip probe: memory ran out"),
        (
            OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ..."),
            "neuzip probe: the memory of the GPU ran out, 20.00 GiB at once were asked for",
        ),
        (SafetensorError("I/O error: Cannot allocate memory (os error 12)"), "neuzip probe: memory ran out"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "neuzip probe: memory ran out",
        ),
        (RuntimeError("can't start new thread"), "neuzip probe: the system gives neuzip no more threads"),
    ],
    ids=["torch", "python", "numpy", "system", "gpu", "safetensors", "library", "thread"],
)
def test_memory_that_ran_out_is_no_bug(failure, message, probe, neuzip):
    probe(fail_with(failure))
    said = neuzip("probe", "x")
    assert (said.exit_code, said.stdout) == (1, "")
    assert message in said.stderr and "hint: free some" in said.stderr
    assert "bug" not in said.stderr


@pytest.mark.parametrize(
    "bug",
    [ValueError("bad"), FileNotFoundError("x"), EOFError("early"), OSError(9, "Bad file descriptor"),
     SafetensorError("invalid (os error in words)"),
     ImportError("a.so: failed to map segment from shared object: Operation not permitted")],
    ids=repr,
)  # fmt: skip
def test_any_other_exception_is_a_bug(bug, probe, neuzip):
    probe(fail_with(bug))
    said = neuzip("probe", "x")
    assert (said.exit_code, said.stdout) == (3, "")
    assert f"error: unexpected {type(bug).__name__}: {bug}\n" in said.stderr
    assert "this is a bug in neuzip; please report it with the output of `neuzip env`" in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("failure", [NeuzipError("no"), ValueError("bad")], ids=["expected", "bug"])
@pytest.mark.parametrize(("setting", "shown"), [("1", True), ("0", False), ("", False)])
def test_debug_shows_the_traceback(failure, setting, shown, probe, neuzip, monkeypatch):
    probe(fail_with(failure))
    monkeypatch.setenv("NEUZIP_DEBUG", setting)
    assert ("Traceback (most recent call last)" in neuzip("probe", "x").stderr) is shown


def test_interrupt_in_a_command(probe, neuzip):
    probe(fail_with(KeyboardInterrupt()))
    said = neuzip("probe", "x")
    assert (said.exit_code, said.stdout, said.stderr) == (130, "", "error: interrupted\n")


def test_an_error_does_not_follow_ctrl_c_on_its_line(probe, neuzip, monkeypatch):
    probe(fail_with(KeyboardInterrupt()))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert neuzip("probe", "x").stderr == "\nerror: interrupted\n"


def test_interrupt_in_a_command_that_can_go_on(probe, neuzip, monkeypatch):
    probe(fail_with(KeyboardInterrupt()))
    monkeypatch.setattr(commands, "RESUMABLE", ("probe",))
    said = neuzip("probe", "x")
    assert said.stderr.splitlines()[1] == ("hint: finished work is kept; repeat the command to resume")


def test_a_full_disk_in_a_command_that_can_go_on(probe, neuzip, monkeypatch):
    probe(fail_with(DiskFull("/out")))
    monkeypatch.setattr(commands, "RESUMABLE", ("probe",))
    assert neuzip("probe", "x").stderr.splitlines()[1] == (
        "hint: free some space; finished work is kept; repeat the command to resume"
    )


def test_commands_that_can_go_on_exist():
    assert set(commands.RESUMABLE) <= set(commands.VERBS)


PROBE = """
    import signal, sys, time
    from types import ModuleType
    from neuzip.cli import commands, run
    from neuzip.cli.output import Output

    def command() -> None:
        out = Output()
        {body}

    module = sys.modules["neuzip.cli.commands.probe"] = ModuleType("probe")
    module.command, module.EXAMPLES = command, []
    commands.VERBS = ("probe",)
    sys.exit(run(["probe"]))
"""


def probe_program(body: str) -> list[str]:
    inside = textwrap.indent(textwrap.dedent(body).strip(), "    ").lstrip()
    return [sys.executable, "-I", "-c", textwrap.dedent(PROBE).replace("{body}", inside)]


def test_ctrl_c_ends_the_process_with_130():
    # A shell may start us with SIGINT ignored, so the program asks for Python's own handler.
    program = probe_program("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out.text("ready")
        sys.stdout.flush()
        time.sleep(60)
    """)
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert (process.returncode, stderr.splitlines()[0]) == (130, "error: interrupted")


def test_ctrl_c_that_does_not_wake_the_main_thread_ends_a_transfer():
    """It came a moment before that thread began to wait, or to another thread."""
    program = probe_program("""
        import _thread, threading
        from neuzip.cli.interrupt import leaving_at_once

        waiting = threading.Lock()
        waiting.acquire()
        with leaving_at_once():
            sys.setswitchinterval(60)  # no other thread runs before this one waits
            _thread.start_new_thread(lambda: signal.pthread_kill(_thread.get_ident(), signal.SIGINT), ())
            waiting.acquire()
    """)
    said = subprocess.run(program, check=False, capture_output=True, text=True, timeout=600)
    assert (said.returncode, said.stdout) == (130, "")
    assert said.stderr == ("error: interrupted\nhint: finished work is kept; repeat the command to resume\n")


def test_a_transfer_hears_of_other_signals_and_leaves_nothing_behind():
    program = probe_program("""
        import threading
        from neuzip.cli.interrupt import leaving_at_once

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR1, lambda *_: out.text("handled"))
        with leaving_at_once(), leaving_at_once():
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1
        assert threading.active_count() == 1
    """)
    said = subprocess.run(program, check=False, capture_output=True, text=True, timeout=600)
    assert (said.returncode, said.stdout, said.stderr) == (0, "handled\n", "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_bug(closed: str, tmp_path: Path):
    """Without stdout there is nowhere to put a result; what is printed does not get into a file instead."""
    body = f"out.status('said'); open({str(tmp_path / 'file')!r}, 'w').close(); out.text('result')"
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *probe_program(body)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    no_stdout, no_stderr = closed.startswith(">") or " >" in closed, "2>" in closed
    assert done.returncode == (1 if no_stdout else 0)
    assert done.stdout == ("" if no_stdout else "result\n")
    shown = "said\n"
    if no_stdout:
        shown = (
            "error: stdout is closed, and the result goes there\n"
            "hint: redirect it to a file, or to /dev/null\n"
        )
    assert done.stderr == ("" if no_stderr else shown)
    assert not (tmp_path / "file").exists() or (tmp_path / "file").read_text() == ""


def test_a_reader_that_leaves_is_no_bug():
    program = probe_program("[out.text('x' * 1000) for _ in range(1000)]")
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    _, stderr = process.communicate(timeout=600)
    assert (process.returncode, stderr) == (1, b"")


# What is said where


@dataclass(frozen=True)
class Size:
    name: str
    shape: tuple[int, ...]


def report(out: Output) -> None:
    out.status("reading")
    out.table(["tensor", "bits"], [["w", 10.5], ["lm_head.weight", 8]], right=["bits"], total=["all", 18.5])
    out.text("wrote ./small")
    out.hint("neuzip verify ./small")
    out.warning("one tensor is odd", "look at w")
    out.result({"path": Path("small"), "tensors": [Size("w", (2, 3))], "loss": float("nan")}, quiet=["small"])


def test_modes_keep_their_part(probe, in_all_modes):
    probe(report)
    said = in_all_modes("probe", "x")
    warning = "warning: one tensor is odd\nhint: look at w\n"
    assert said["human"].stdout.splitlines() == [
        "tensor          bits",
        "────────────────────",
        "w               10.5",
        "lm_head.weight     8",
        "────────────────────",
        "all             18.5",
        "wrote ./small",
    ]
    assert said["human"].stderr == "reading\nhint: neuzip verify ./small\n" + warning
    assert said["json"].json == {
        "schema": 2,
        "neuzip": version("neuzip-toolkit"),
        "command": "probe",
        "path": "small",
        "tensors": [{"name": "w", "shape": [2, 3]}],
        "loss": None,
    }
    assert said["json"].stderr == warning
    assert (said["quiet"].stdout, said["quiet"].stderr) == ("small\n", warning)


def test_a_command_has_one_result():
    out = Output(quiet=True)
    out.result({})
    with pytest.raises(RuntimeError, match="one result"):
        out.result({})


def test_a_table_in_a_pipe_is_as_wide_as_it_must_be(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "model.layers.0." * 20 + "[bold]weight"
    lines = render_table(["tensor", "bits"], [[name, 10.5]], right=["bits"])[0].splitlines()
    assert lines[-1] == f"{name}  10.5"


def test_an_empty_table_has_its_head():
    assert render_table(["tensor", "bits"], [])[0].splitlines()[0] == "tensor  bits"


class Window(io.StringIO):
    """A terminal of some columns, as far as a table asks."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "left_out", "first"),
    [
        (60, [], [["convention", "some", "more", "words", "0.0919", "±", "0.0027", "1.01", "±", "0.01"]]),
        (40, ["least"], [["convention", "some", "more", "0.0919", "±", "0.0027"], ["words"]]),
    ],
)
def test_a_narrow_window_costs_columns_and_folds_text_before_figures(width, left_out, first, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Window())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    text, found = render_table(
        ["name", "what", "figure", "least"],
        [["convention", "some more words", "0.0919 ± 0.0027", "1.01 ± 0.01"]],
        right=["figure", "least"],
        spare=["least"],
    )
    assert found == left_out
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert [line.split() for line in lines[2:]] == first


def test_a_pipe_has_room_for_everything():
    text, left_out = render_table(["a", "b"], [["x" * 300, "1"]], right=["b"], spare=["b"])
    assert left_out == [] and text.splitlines()[2] == f"{'x' * 300}  1"


def test_names_cannot_steer_the_terminal(probe, neuzip):
    name = "w\x1b]0;owned\x07\x9b2J\u202eabc\udcff"
    escaped = "w\\x1b]0;owned\\x07\\x9b2J\\u202eabc\\udcff"
    assert printable(name) == escaped

    def act(out: Output) -> None:
        out.text(name)
        out.table([name], [[name]], total=[name], title=name)
        out.status(name)
        raise NeuzipError(name, name)

    probe(act)
    said = neuzip("probe", "x")
    assert said.stdout.count(escaped) == 5
    assert said.stderr.count(escaped) == 3
    assert (said.stdout + said.stderr).replace("\n", "").isprintable()


def test_plain_refuses_what_json_cannot_say():
    with pytest.raises(TypeError, match="object has no JSON form"):
        plain({"x": object()})


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_encoding_can_show_a_report(encoding: str, tmp_path: Path):
    body = 'out.table(["größe", "名"], [["é", 1]]); out.text("→ 名")'
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    # Without -I, which would ignore PYTHONIOENCODING, and so in a folder without packages.
    program = [part for part in probe_program(body) if part != "-I"]
    done = subprocess.run(program, check=False, capture_output=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "größe" in done.stdout.decode(encoding) or encoding == "ascii"


# Progress


def stderr_on_a_terminal(body: str, **settings: str) -> str:
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "NEUZIP_NO_PROGRESS": ""}
    environment.pop("NO_COLOR", None)
    environment |= settings
    process = subprocess.Popen(probe_program(body), stdout=subprocess.PIPE, stderr=side, env=environment)
    os.close(side)
    seen = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # how Linux says that the last writer has closed a terminal
            break
        if not part:
            break
        seen += part
    os.close(main)
    stdout, _ = process.communicate(timeout=600)
    assert (process.returncode, stdout) == (0, b"")
    return seen.decode()


BAR = """
    with out.progress("compress", 4_000_000) as advance:
        for amount in (1_000_000, 1_000_000, -2_000_000, *4 * [1_000_000]):
            advance(amount)
            time.sleep(0.15)
        out.warning("odd")
"""
"""Work on a file that turns out to be damaged is taken back."""


@pytest.mark.slow
def test_a_person_sees_a_bar_with_bytes_per_second_and_time_left():
    seen = stderr_on_a_terminal(BAR)
    assert "compress" in seen
    assert "4.0/4.0 MB" in seen
    assert "MB/s" in seen
    assert not re.search(r"-[\d.,]+ (bytes|kB|MB)/s", seen)
    assert "under 10 s left" in seen, "estimated from the first step on"
    assert "-:--" not in seen and "finishing" in seen
    assert "warning: odd" in seen


LONG = """
    with out.progress("stage 3 of 4, trial 12: compare", 10_653, unit="tokens") as advance:
        for _ in range(4):
            advance(2_130)
            time.sleep(0.15)
"""


@pytest.mark.slow
def test_only_the_bar_gives_way_in_a_narrow_window():
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stderr_on_a_terminal(LONG, COLUMNS="80"))
    shown = [line for line in re.split(r"[\r\n]+", seen) if line.strip()]
    assert shown and all(line.startswith("stage 3 of 4, trial 12: compare ") for line in shown), shown
    assert shown[-1].rstrip().endswith(" 8520/10653 tokens under 10 s left")


WAIT = """
    with out.progress("load", None):
        time.sleep(0.3)
    with out.progress("tasks", None, unit="requests") as advance:
        advance(7)
        time.sleep(0.3)
"""


@pytest.mark.slow
def test_work_without_a_total_has_no_question_mark():
    seen = stderr_on_a_terminal(WAIT)
    assert "load" in seen and "?" not in seen.replace("\x1b[?", "") and "bytes" not in seen
    assert "0:00:0" in seen and "7 requests" in re.sub(r"\x1b\[[\d;]*m", "", seen)


def test_who_watches_is_told_that_libraries_are_loaded(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "torch")
    Output().loading()
    assert capsys.readouterr().err == "loading PyTorch ...\n"
    for out in (Output(json=True), Output(quiet=True)):
        out.loading()
    monkeypatch.setenv("NEUZIP_NO_PROGRESS", "1")
    Output().loading()
    assert capsys.readouterr().err == ""


def test_every_command_that_loads_torch_says_so_before(root):
    for path in sorted((root / "cli" / "commands").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "let_threads_sleep()\n" in text:
            assert re.search(r"let_threads_sleep\(\)\n +(out|Output\(.*\))\.loading\(\)", text), path


@pytest.mark.slow
def test_no_color_is_respected():
    assert "\x1b[38;" in stderr_on_a_terminal(BAR)
    assert "\x1b[38;" not in stderr_on_a_terminal(BAR, NO_COLOR="1")


@pytest.mark.parametrize("setting", ["NEUZIP_NO_PROGRESS=1", "TERM=dumb"])
@pytest.mark.slow
def test_no_bar_where_it_is_not_wanted(setting: str):
    name, value = setting.split("=")
    assert stderr_on_a_terminal(BAR, **{name: value}).replace("\r", "") == "warning: odd\n"


@pytest.mark.parametrize("flags", [{}, {"json": True}, {"quiet": True}], ids=str)
def test_no_bar_where_nobody_watches(flags: dict[str, bool], capsys):
    with Output(**flags).progress("compress", None) as advance:
        advance(5)
    assert capsys.readouterr() == ("", "")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(work: progress.WorkProgress, clock: Clock, steps: list[tuple[float, int]]) -> list[str]:
    """What is said after each step: the seconds it took, and what was done."""
    said = []
    for seconds, amount in steps:
        clock.now += seconds
        work.advance(amount)
        said.append(work.line)
    return said


def test_lines_of_a_log_say_how_far_it_is_and_how_long_the_rest_takes():
    """As soon as there is something to go by; and that a tail is left when all is counted."""
    clock = Clock()
    work = progress.WorkProgress("compress", 4_000_000, "bytes", clock)
    steps = [(30, 0), (30, 10_000), (30, 90_000), (210, 900_000), (60, 2_000_000), (0, 1_000_000), (60, 0)]
    assert lines_of(work, clock, steps) == [
        "compress: at work after 30.0 s",
        "compress: 10.0 kB of 4.00 MB after 1 min 0 s",
        "compress: 100 kB of 4.00 MB after 1 min 30 s, about 58 min left",
        "compress: 1.00 MB of 4.00 MB after 5 min 0 s, about 15 min left",
        "compress: 3.00 MB of 4.00 MB after 6 min 0 s, about 2 min left",
        "compress: 4.00 MB of 4.00 MB after 6 min 0 s, finishing",
        "compress: 4.00 MB of 4.00 MB after 7 min 0 s, finishing",
    ]


def test_lines_of_a_log_do_not_guess_without_a_total():
    clock = Clock()
    work = progress.WorkProgress("eval", None, "tokens", clock)
    assert lines_of(work, clock, [(30, 1234)]) == ["eval: 1,234 tokens after 30.0 s"]


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    """One piece of work speaks at a time, a line for each pause; and nothing is left running."""
    pauses: queue.Queue[bool] = queue.Queue()
    told = threading.Semaphore(0)

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == progress.EVERY
            told.release()
            return pauses.get()

        def set(self) -> None:
            pauses.put(True)

    monkeypatch.setattr(progress, "Event", Ended)
    monkeypatch.setattr(progress, "seconds_text", lambda seconds: "a while")
    monkeypatch.setattr(progress, "rough_text", lambda seconds: "a while")
    out = Output()

    def pause() -> None:
        pauses.put(False)
        told.acquire()  # the line was said, and the next pause begins

    with out.progress("compress", 4_000_000) as advance:
        told.acquire()
        pause()
        advance(1_000_000)
        with out.progress("verify", 10) as inner:
            inner(3)
        pause()
        pause()
    assert capsys.readouterr() == (
        "",
        "compress: at work after a while\n"
        + 2 * "compress: 1.00 MB of 4.00 MB after a while, under 10 s left\n",
    )
    assert not any(thread.name == "neuzip-progress" for thread in threading.enumerate())


def test_a_log_can_be_kept_free_of_it(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setenv("NEUZIP_NO_PROGRESS", "1")
    with Output().progress("compress", 4) as advance:
        advance(1)
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


# The other package called neuzip


def other_package(site: Path, folder: Path) -> None:
    info = site / "neuzip-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neuzip\nVersion: 1.2\n")
    (site / "neuzip").symlink_to(folder)


def test_start_refuses_to_share_a_folder_with_the_other_neuzip(tmp_path, root, neuzip, monkeypatch):
    other_package(tmp_path / "site", root / "neuzip")
    monkeypatch.syspath_prepend(tmp_path / "site")
    said = neuzip("--version")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("error: another package called neuzip (1.2) is mixed with this one in ")
    assert "hint: pip uninstall neuzip" in said.stderr


def test_start_names_the_remains_that_hide_an_editable_neuzip(tmp_path, neuzip, monkeypatch):
    import neuzip as package

    monkeypatch.setattr(package, "__file__", None)  # as in a folder without __init__.py
    remains = tmp_path / "site-packages" / "neuzip"
    monkeypatch.setattr(package, "__path__", [str(remains), *package.__path__])
    said = neuzip("--version")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == (
        f"error: {remains}: what is left of an earlier neuzip hides this one\nhint: rm -r {remains}\n"
    )


def test_start_does_not_tell_to_remove_a_clone_that_hides_neuzip(tmp_path, neuzip, monkeypatch):
    import neuzip as package

    monkeypatch.setattr(package, "__file__", None)
    monkeypatch.setattr(package, "__path__", [str(tmp_path), *package.__path__])
    said = neuzip("--version")
    assert said.stderr.startswith(f"error: {tmp_path}: this folder hides the package neuzip\nhint: start ")
    assert "rm " not in said.stderr


def test_make_removes_the_remains_that_hide_an_editable_neuzip(tmp_path: Path, root: Path):
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "neuzip" / "kernels" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".made").touch()

    def install(stamp: str) -> list[str]:
        made = ["make", f"VENV={tmp_path}", "PIP=echo pip", str(tmp_path / stamp)]
        said = subprocess.run(made, cwd=root, check=True, capture_output=True, text=True).stdout
        return [line for line in said.splitlines() if line.startswith("pip")]

    assert install(".installed") == ["pip install --constraint requirements-dev.txt ."]
    assert install(".developed")[-1].endswith(" --editable .")
    assert list(site.iterdir()) == []
    (tmp_path / ".developed").unlink()
    (site / "neuzip").mkdir()
    (site / "neuzip" / "__init__.py").touch()
    install(".developed")
    assert (site / "neuzip" / "__init__.py").exists()
    (tmp_path / ".installed").unlink()
    assert install(".installed") == [], "an editable installation stays"


def test_the_other_neuzip_elsewhere_does_not_matter(tmp_path: Path, neuzip, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other_package(tmp_path / "site", elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    assert neuzip("--version").exit_code == 0


# The public names


def test_public_names_are_found_where_they_are_said_to_be():
    import neuzip

    assert set(neuzip.__all__) == {"__version__", *neuzip._HOME}
    for name in neuzip.__all__:
        assert getattr(neuzip, name) is not None
        assert name in dir(neuzip)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(neuzip, "nothing")  # noqa: B009


def test_no_public_name_is_a_room(root: Path):
    import neuzip

    assert not [name for name in neuzip.__all__ if (root / name).exists()]


def test_json_of_a_failing_answer_is_still_one_object(probe, neuzip):
    def act(out: Output) -> None:
        out.result({"equal": False})
        raise typer.Exit(1)

    probe(act)
    said = neuzip("probe", "x", "--json")
    assert said.exit_code == 1
    assert said.json.keys() == {"schema", "neuzip", "command", "equal"}


# Lines that are longer than the window


def say_much(out: Output) -> None:
    out.text("peak    " + "word " * 12)
    out.status("so it is; " * 8)
    out.hint("to restore it: neuzip apply some/where/my-model.delta --base my-model my-model-tuned")
    raise NeuzipError(
        "a sentence that is longer than forty characters are", "and one more that is longer too"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_broken_between_words_where_a_person_reads(terminal, probe, neuzip, monkeypatch) -> None:
    probe(say_much)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    said = neuzip("probe", "x")
    lines = [*said.stdout.splitlines(), *said.stderr.splitlines()]
    if not terminal:
        assert len(lines) == 5
        return
    command = "  neuzip apply some/where/my-model.delta --base my-model my-model-tuned"
    assert command in lines, "a command stays in one piece, to be copied"
    assert max(len(line) for line in lines if line != command) <= 40
    assert said.stdout.splitlines() == [
        "peak    word word word word word word",
        "        word word word word word word",
    ]
    words = " ".join(lines).split()
    assert words.count("word") == 12 and words.count("longer") == 2
