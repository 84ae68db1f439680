"""SGLang in this process, on a CPU: its model runner without its scheduler, as its benchmark starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FLAGS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
    "--disable-radix-cache", "--max-total-tokens", "512", "--max-running-requests", "4",
    "--mem-fraction-static", "0.1", "--log-level", "warning", "--dtype", "bfloat16",
]  # fmt: skip
"""What SGLang needs to run on a CPU that lacks AMX, and to take little memory."""

PROMPTS = ("The history of", "In 1998 the", "The album was released", "= Valkyria =")


class Runner:
    """The model runner of one start of SGLang. Other models of its shapes can take the place of its model."""

    def __init__(self, folder: Path) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, prepare_server_args

        load_plugins()
        arguments = prepare_server_args(["--model-path", str(folder), *FLAGS])
        arguments.resolve_once()
        one_batch._set_envs_and_config(arguments)
        ranks = one_batch.SpawnRanks(
            world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
        )
        one_batch.publish(arguments, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        self._bench = one_batch
        self._runner, self.tokenizer = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)

    def stop(self) -> None:
        """End the process group that SGLang has made."""
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()

    @property
    def model(self) -> torch.nn.Module:
        """The model of the folder with which SGLang was started."""
        return self._runner.torch_runner.model

    def load(self, folder: Path, quantization: str | None = None, overrides: str = "{}") -> Any:
        """Another model, loaded by SGLang as it loads the first one."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader import get_model

        config = ModelConfig(
            str(folder), dtype="bfloat16", quantization=quantization, model_override_args=overrides
        )
        return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))

    @torch.no_grad()
    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        """SGLang's logits after all but the last token of PROMPTS, [prompts, vocabulary]."""
        runner = self._runner.torch_runner
        own, runner.model = runner.model, model
        try:
            self._runner.clear()
            reqs = [self._request(number, prompt) for number, prompt in enumerate(PROMPTS)]
            return self._bench.extend(reqs, runner)[1]
        finally:
            runner.model = own

    def _request(self, number: int, prompt: str) -> Any:
        from types import SimpleNamespace

        arguments = SimpleNamespace(batch_size=[1], cut_len=-1, output_len=[1])
        return self._bench.prepare_inputs_for_correctness_test(arguments, self.tokenizer, [prompt])[1][0]


def new_checkpoint(folder: Path, vocabulary: int, tied: bool) -> Path:
    """A Llama of two layers and 256 channels with random weights, in one file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(vocabulary)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
