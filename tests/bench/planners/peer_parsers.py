"""Read layouts with a trainer's own parser, in that trainer's environment: ``python peer_parsers.py TRAINER FILE...``.

It imports nothing of raypipe. A line of JSON for each file: what the parser found, or ``error``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def megatron(text: str, file: str) -> dict[str, Any]:
    """``parse_args`` and ``validate_args`` of pretrain_gpt.py, and the configuration that they make."""
    result = re.search(r"^# WORLD_SIZE=(\d+)$", text, re.MULTILINE)
    assert result is not None
    fsdp = "--use-megatron-fsdp" in text
    os.environ |= {"WORLD_SIZE": result[1], "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8" if fsdp else "1"}
    import torch
    from megatron.training import arguments

    arguments.get_device_arch_version = lambda: 9  # of an H100: there is no GPU here
    torch.cuda.get_device_capability = lambda: (9, 0)
    more = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000", "--transformer-impl", "local"]
    more += ["--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"]
    sys.argv = ["pretrain_gpt.py", *shlex.split(text, comments=True), *more]
    args = arguments.validate_args(arguments.parse_args())
    config = arguments.core_transformer_config_from_args(args)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        layout.validate_layer_layout(num_layers=args.num_layers, mtp_num_layers=None)
    context, strategy = args.context_parallel_size, args.data_parallel_sharding_strategy if fsdp else "optim"
    levels = {"optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
    return {
        "stages": args.pipeline_model_parallel_size, "replicas": args.data_parallel_size * context,
        "tensor": args.tensor_model_parallel_size, "microbatch": args.micro_batch_size,
        "batch": args.global_batch_size, "chunks": args.virtual_pipeline_model_parallel_size or 1,
        "experts": args.expert_model_parallel_size, "context": context,
        "shard": levels[strategy] if fsdp or args.use_distributed_optimizer else "none",
    }  # fmt: skip


def scheduled(name: str, csv: str | None) -> None:
    """PyTorch's class of that name, and its reader of actions."""
    from torch.distributed.pipelining.schedules import _Action, get_schedule_class

    get_schedule_class(name)
    for line in Path(csv).read_text().splitlines() if csv else ():
        assert all(_Action.from_str(cell) for cell in line.split(","))


def torchtitan(text: str, file: str) -> dict[str, Any]:
    """``ConfigManager``, the checks of the trainer's config, and those of its mesh."""
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    args = shlex.split(text, comments=True)
    config = ConfigManager().parse_args(
        ["--module", "llama3", "--config", "llama3_debugmodel"] * ("--module" not in args) + args
    )
    p, training = config.parallelism, config.training
    pipelined = p.pipeline_parallel_degree > 1
    degrees = {"dp_replicate": p.data_parallel_replicate_degree, "dp_shard": p.data_parallel_shard_degree}
    degrees |= {"cp": p.context_parallel_degree, "tp": p.tensor_parallel_degree, "pp": p.pipeline_parallel_degree}
    ParallelDims(**degrees, ep=p.expert_parallel_degree, world_size=prod(degrees.values()))
    apart = degrees["dp_replicate"] * degrees["dp_shard"]
    if pipelined:
        scheduled(p.pipeline_parallel_schedule, p.pipeline_parallel_schedule_csv)
    assert training.global_batch_size % (training.local_batch_size * apart) == 0
    divided = degrees["dp_shard"] * degrees["cp"] > 1
    return {
        "stages": degrees["pp"], "replicas": apart * degrees["cp"], "tensor": degrees["tp"],
        "experts": p.expert_parallel_degree, "context": degrees["cp"],
        "shard": {"never": "zero2", "always": "zero3"}[p.fsdp_reshard_after_forward] if divided else "none",
        "microbatch": p.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size,
        "batch": training.global_batch_size,
        "chunks": len(p.module_fqns_per_model_part) // degrees["pp"] if pipelined else 1,
    }  # fmt: skip


def automodel(text: str, file: str) -> dict[str, Any]:
    """The loader of recipes, and their ``distributed`` and ``step_scheduler`` sections."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    config = load_yaml_config(file)
    parsed = parse_distributed_section(config.distributed.to_dict())
    scheduler = config.step_scheduler.to_dict()
    local = scheduler.pop("local_batch_size")
    steps = StepSchedulerConfig(**scheduler)
    pipeline, sizes = parsed["pipeline_config"], parsed["parallelism_sizes"]
    replicate = sizes.dp_replicate_size or 1
    assert sizes.dp_size % replicate == 0
    assert replicate == 1 or replicate < sizes.dp_size
    assert steps.global_batch_size % (local * sizes.dp_size) == 0
    if pipeline is not None:
        scheduled(pipeline.pp_schedule, pipeline.pp_schedule_csv)
        assert local // pipeline.pp_microbatch_size >= sizes.pp_size
    context, ddp = sizes.cp_size or 1, type(parsed["strategy_config"]).__name__ == "DDPConfig"
    divided = not ddp and sizes.dp_size * context > 1
    return {
        "stages": sizes.pp_size, "replicas": sizes.dp_size * context, "tensor": sizes.tp_size,
        "experts": sizes.ep_size or 1, "context": context,
        "shard": ("zero3" if parsed["strategy_config"].reshard_after_forward else "zero2") if divided else "none",
        "microbatch": local if pipeline is None else pipeline.pp_microbatch_size, "batch": steps.global_batch_size,
        "chunks": 1 if pipeline is None else len(pipeline.module_fqns_per_model_part) // sizes.pp_size,
    }  # fmt: skip


def deepspeed(text: str, file: str) -> dict[str, Any]:
    """``DeepSpeedConfig``, in a group of as many data-parallel ranks as the batch says."""
    from deepspeed.runtime import config as module

    given = json.loads(text)
    each = given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
    module.dist = SimpleNamespace(get_rank=lambda: 0)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: given["train_batch_size"] // each)
    config = module.DeepSpeedConfig(file, mpu=ranks)
    pipelined = config.pipeline["stages"] != "auto"
    if pipelined:
        assert config.zero_optimization_stage < 2, "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"
    return {
        "stages": config.pipeline["stages"] if pipelined else 1, "replicas": ranks.get_data_parallel_world_size(),
        "tensor": config.tensor_parallel_config.autotp_size or 1, "microbatch": config.train_micro_batch_size_per_gpu,
        "batch": config.train_batch_size, "chunks": 1, "experts": 1, "context": 1,
        "shard": f"zero{config.zero_optimization_stage}" if config.zero_optimization_stage else "none",
    }  # fmt: skip


PARSERS = {"megatron": megatron, "torchtitan": torchtitan, "automodel": automodel, "deepspeed": deepspeed}


def main() -> None:
    trainer, *files = sys.argv[1:]
    results, sys.stdout = sys.stdout, sys.stderr  # libraries print notices
    for file in files:
        try:
            result = PARSERS[trainer](Path(file).read_text(), file)
        except (Exception, SystemExit) as error:  # whatever a parser refuses with
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=results, flush=True)


if __name__ == "__main__":
    main()
