"""neuzip train in several processes: the bits of one, one log, one checkpoint, and an end when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from neuzip import cli
from neuzip.compress.ranks import ALONE, Ranks
from neuzip.errors import UsageError
from neuzip.train.distributed import Team, team

pytestmark = pytest.mark.usefixtures("one_thread")

BIN = Path(sys.executable).parent
CPU = torch.device("cpu")
Write = Callable[..., Path]
TwoRanks = Callable[..., tuple[int, str, str]]


def run_file(folder: Path, model: Path, name: str, **changes: Any) -> Path:
    """NAME.toml, whose output is the folder NAME."""
    values = {
        "model": str(model), "text": "demo", "output": str(folder / name),
        "steps": 4, "lr": 1e-3, "window": 16, "batch_size": 4, "device": "cpu", **changes,
    }  # fmt: skip
    path = folder / f"{name}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


@pytest.fixture
def write(tmp_path: Path, tiny: Path) -> Write:
    """Write NAME.toml in the test's folder."""
    return partial(run_file, tmp_path, tiny)


def torchrun(folder: Path, *command: object) -> tuple[int, str, str]:
    """Exit code and output of two processes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *map(str, command)],
        capture_output=True, text=True, env=environment, cwd=folder, timeout=600,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def two_ranks(forks: forked.Server, tmp_path: Path) -> TwoRanks:
    """Exit code and output of a command in two processes of torchrun's agent, which see no GPU."""

    def run(*command: object) -> tuple[int, str, str]:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")
        }
        environment["CUDA_VISIBLE_DEVICES"] = ""
        process = forks.start(*command, cwd=tmp_path, ranks=2, environment=environment)
        stdout, stderr = process.communicate(timeout=600)
        assert process.returncode is not None
        return process.returncode, stdout, stderr

    return run


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error:")]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The results of one process with half a micro batch."""
    folder = tmp_path_factory.mktemp("one")
    assert cli.run(["train", str(run_file(folder, tiny, "one", micro_batch_size=2)), "--quiet"]) == 0
    return folder / "one"


@pytest.mark.slow
def test_two_processes_are_one_with_half_a_micro_batch(
    write: Write, two_ranks: TwoRanks, one: Path, tmp_path: Path
) -> None:
    code, stdout, stderr = two_ranks("neuzip", "train", write("two"), "--json")
    assert code == 0, stderr
    said = json.loads(stdout)  # one of them speaks
    assert (said["processes"], said["steps"]) == (2, 4)
    assert weights(tmp_path / "two") == weights(one)
    assert losses(tmp_path / "two") == pytest.approx(losses(one), rel=1e-6)
    tokens = [json.loads(line)["tokens"] for line in (tmp_path / "two/log.jsonl").read_text().splitlines()]
    assert tokens == [64] * 4
    names = {p.name for p in (tmp_path / "two").iterdir()}
    assert names == {"model", "checkpoint", "log.jsonl", "loss.svg", "run.json"}


@pytest.mark.gpu
def test_two_gpus_learn_what_one_does(write: Write, neuzip: Callable[..., Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    command = ("--no-python", "neuzip", "train", write("two", device="cuda", steps=20), "--json")
    code, stdout, stderr = torchrun(tmp_path, *command)
    assert code == 0, stderr
    assert json.loads(stdout)["processes"] == 2
    assert neuzip("train", write("one", device="cuda", steps=20, micro_batch_size=2)).exit_code == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-2)


def test_alone_a_team_does_everything() -> None:
    with team(ALONE, CPU, batch=3) as own:
        assert torch.equal(own.share(torch.arange(3)[:, None]), torch.arange(3)[:, None])
        assert own.largest(15) == 15
        own.require_same("texts", "a")


def test_a_batch_is_cut_into_equal_parts() -> None:
    batch = torch.arange(12).view(6, 2)
    parts = [Team(Ranks(rank, 3), CPU).share(batch) for rank in range(3)]
    assert torch.equal(torch.cat(parts), batch) and {len(part) for part in parts} == {2}
    with (
        pytest.raises(UsageError, match="batch is 8, which 3 processes cannot share"),
        team(Ranks(0, 3), CPU, 8),
    ):
        pass


_SCRIPT = """
import os, signal, sys, time
from neuzip.cli import run
from neuzip.train.trainer import Trainer
step = Trainer.step
def meddled(self, batch, lr, **options):
    found = step(self, batch, lr, **options)
    {what}
    return found
Trainer.step = meddled
sys.exit(run())
"""


def meddling(folder: Path, what: str) -> Path:
    path = folder / "script.py"
    path.write_text(_SCRIPT.format(what=what))
    return path


@pytest.mark.slow
def test_a_signal_to_one_stops_all_after_the_same_step_and_they_go_on(
    write: Write, two_ranks: TwoRanks, one: Path, tmp_path: Path
) -> None:
    what = "if os.environ['RANK'] == '1' and self.steps == 2: os.kill(os.getpid(), signal.SIGINT)"
    code, _, stderr = two_ranks(meddling(tmp_path, what), "train", write("two"))
    assert code != 0 and "stopped after step 2; resume with --resume" in stderr
    assert errors(stderr) == ["error: interrupted"]
    code, _, stderr = two_ranks("neuzip", "train", write("two"), "--resume")
    assert code == 0 and "resuming after step 2" in stderr
    assert weights(tmp_path / "two") == weights(one)
    assert len(losses(tmp_path / "two")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said", "victim"),
    [
        ("raise __import__('neuzip.errors').errors.NeuzipError('it is broken')", "error: it is broken", 1),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "error: another process has gone while all were training",
            0,
        ),
    ],
    ids=["an error", "death"],
)
def test_when_one_fails_all_end_with_one_message(
    what: str, said: str, victim: int, write: Write, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    script = meddling(tmp_path, f"if os.environ['RANK'] == '{victim}' and self.steps == 2: {what}")
    code, stdout, stderr = two_ranks(script, "train", write("two", steps=400))
    assert code != 0 and stdout == ""
    assert errors(stderr) == [said], stderr
    assert not (tmp_path / "two" / "model").exists()


@pytest.mark.slow
def test_texts_that_differ_between_processes_are_refused(
    write: Write, two_ranks: TwoRanks, tmp_path: Path
) -> None:
    texts = [tmp_path / f"{rank}.txt" for rank in range(2)]
    for rank, text in enumerate(texts):
        text.write_text(f"These are the words of process {rank}. " * 100)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from neuzip.cli import run\n"
        "from neuzip.cli.commands import train\n"
        "own = train._documents\n"
        "train._documents = lambda sources: own([os.environ['RANK'] + '.txt'])\n"
        "sys.exit(run())\n"
    )
    code, _, stderr = two_ranks(script, "train", write("two", text=[str(t) for t in texts]))
    assert code != 0 and not (tmp_path / "two").exists()
    assert errors(stderr) == ["error: the processes have different texts or tokenizers"]


def test_signals_have_larger_numbers_than_budgets() -> None:
    from neuzip.train.loop import OVER

    assert min(signal.SIGINT, signal.SIGTERM) > OVER
