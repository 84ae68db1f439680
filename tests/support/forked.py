"""Commands in processes of their own that need not import torch and transformers: they are forked.

A server imports the libraries once and forks for each command. A fork takes milliseconds, where the imports
take 3 CPU seconds in each process. What is forked runs `neuzip.cli.run` as the installed command does, in its
own folder and environment; torchrun's own agent starts several ranks. Variables that libraries read when they
are imported (HF_*, OMP_NUM_THREADS) have no effect here. Tests of the start itself use a new process.

    server = forked.Server()
    process = server.start("neuzip", "train", "run.toml", cwd=folder)             one process
    process = server.start("neuzip", "train", "run.toml", cwd=folder, ranks=2)    under torchrun
    stdout, stderr = process.communicate(timeout=600)

The first word is `neuzip`, or the path of a script. `Server(forked.FILES)` has imported what commands need
that work on files, without torch and huggingface_hub, so HF_* have an effect there. `Server(forked.COMPILER)`
has imported what scripts need that compile kernels, `Server(forked.TORCH)` torch alone, both without neuzip.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

NO_COLLECTOR = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)\n"
"""First line of a program that is short and imports torch: the collector would take a third of its time."""

TICK = 0.01
"""Seconds between two looks at a process that runs."""


class Forked:
    """A process that the server has forked, as far as tests need subprocess.Popen."""

    def __init__(self, server: Server, pid: int, files: tuple[Path, Path]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server, self._files = server, files
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._server.ask({"poll": self.pid})["code"]
            return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended. Raises TimeoutError."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                os.kill(self.pid, 9)
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            time.sleep(TICK)
        return code

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has written to stdout and stderr, once it has ended."""
        self.wait(timeout)
        stdout, stderr = (file.read_text() for file in self._files)
        return stdout, stderr

    def rank(self, rank: int) -> int:
        """The process of a rank under torchrun, or of none with that number: LookupError."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == _name(rank):
                    return int(pid)
        raise LookupError(f"there is no rank {rank}")


COMMANDS, FILES, COMPILER, TORCH = "commands", "files", "compiler", "torch"
"""What a server imports."""


class Server:
    """The process that forks. Its output is that of the protocol; it ends with its input."""

    def __init__(self, imports: str = COMMANDS, environment: dict[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="neuzip-forked-"))
        self._count = 0
        self._lock = threading.Lock()
        self.cpu_seconds = 0.0  # of the server, and of what it forked and has ended
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, imports],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def start(
        self, *command: object, cwd: Path, ranks: int | None = None, environment: dict[str, str] | None = None
    ) -> Forked:
        """Fork a process for a command."""
        self._count += 1
        files = self._folder / f"{self._count}.out", self._folder / f"{self._count}.err"
        answer = self.ask(
            {
                "command": [str(word) for word in command], "cwd": str(cwd), "ranks": ranks,
                "files": [str(file) for file in files],
                "environment": dict(os.environ) if environment is None else environment,
            }
        )  # fmt: skip
        return Forked(self, answer["pid"], files)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            self.cpu_seconds = answer["cpu_seconds"]
            return answer

    def close(self) -> None:
        """End the server."""
        self._process.communicate()
        for file in self._folder.iterdir():
            file.unlink()
        self._folder.rmdir()


SERVERS: list[Server] = []
"""The servers of this process, for those who count CPU seconds."""


def _name(rank: int) -> str:
    return f"neuzip-rank-{rank}"


def _import_compiler() -> None:
    import torch  # noqa: F401
    import triton.experimental.gluon  # noqa: F401
    from triton.backends.nvidia import compiler, driver  # noqa: F401


def _import_torch() -> None:
    import torch  # noqa: F401


def _import_files() -> None:
    _load_loops()
    assert not {"torch", "huggingface_hub"} & {*sys.modules}


def _load_loops() -> None:
    """Import what works on files, and all that numba needs to load a loop."""
    import numpy as np
    import typer._adapters  # noqa: F401

    from neuzip.cli import main
    from neuzip.cli.large_imports import import_large

    import_large("neuzip.compress.container_job")
    from neuzip.kernels.rans import vector_form

    main.program()
    for prove in (vector_form.encodes, vector_form.decodes):
        prove(2, np.dtype(np.uint8))


def _import_commands() -> None:
    from torch.distributed.launcher import api  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from neuzip.cli.large_imports import import_large

    for module in (
        "neuzip.train.trainer", "neuzip.train.loop", "neuzip.train.compressed_array",
        "neuzip.eval.measures.perplexity",
    ):  # fmt: skip
        import_large(module)
    _load_loops()


def _serve(imports: str) -> None:
    import threading

    {
        COMMANDS: _import_commands, FILES: _import_files, COMPILER: _import_compiler, TORCH: _import_torch,
    }[imports]()  # fmt: skip
    assert threading.active_count() == 1, "a fork would have one of these threads"
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if not pid:
                _run_and_exit(request)
            answer = {"pid": pid}
        print(json.dumps({**answer, "cpu_seconds": sum(os.times()[:4])}), flush=True)


def _run_and_exit(request: dict[str, Any]) -> NoReturn:
    """Be the process of a command."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for number, name in enumerate([os.devnull, *request["files"]]):
            opened = os.open(
                name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
            )
            os.dup2(opened, number)
            os.close(opened)
        command, ranks = request["command"], request["ranks"]
        code = _code_of(command) if ranks is None else _torchrun(ranks, command)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _code_of(command: list[str]) -> int:
    """The exit code of `neuzip ...`, or of a script."""
    import runpy

    sys.argv = command
    try:
        if command[0] == "neuzip":
            from neuzip.cli import run

            return run()
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return 0


def _rank(command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's handlers are not those of its ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path("/proc/self/comm").write_text(_name(int(os.environ["RANK"])))
    code = _code_of(command)
    if code:
        sys.exit(code)


def _torchrun(ranks: int, command: list[str]) -> int:
    """What `torchrun --standalone --nproc-per-node RANKS` does, with ranks that are forked."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=f"neuzip-{os.getpid()}", max_restarts=0, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, _rank)(command)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
