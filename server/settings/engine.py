"""What computes, and how much at once. Thread: main, at start; frozen after that."""

from dataclasses import dataclass
from pathlib import Path

from core.config import INTER_TOKEN_TARGET, QUANTIZE_SCHEMES
from server.settings.option import GiB, Group, MiB
from server.values import choice_of, directory_value, factor_or_none

_ENGINE = Group("engine")


@dataclass(frozen=True)
class EngineSettings:
    """What computes, and how much at once."""

    device: str = _ENGINE.setting(
        "device", "auto", choice_of("auto", "cpu", "cuda", gpu="cuda", nvidia="cuda"), "NAME", "auto, cpu or cuda"
    )
    dtype: str = _ENGINE.setting(
        "dtype",
        "auto",
        choice_of("auto", "bfloat16", "float16", "float32", bf16="bfloat16", fp16="float16", half="float16"),
        "TYPE",
        "of weights and KV cache: auto, bfloat16, float16 or float32",
    )
    kv_memory_bytes: int | None = _ENGINE.size(
        "kv-memory", None, (MiB, 2**44), "memory for the KV cache, such as 2GiB (default: from what is free)"
    )
    kv_offload_bytes: int = _ENGINE.size(
        "kv-offload-memory",
        0,
        (0, 2**44),
        "host memory for cached prompts that give way in the KV cache, such as 8GiB: they are copied back"
        " where that is faster than to compute them again; 0 forgets them",
    )
    kv_offload_dir: Path | None = _ENGINE.setting(
        "kv-offload-dir",
        None,
        directory_value,
        "DIR",
        "a directory of this server's own that keeps the cached prompts over a restart, as files that their"
        " owner alone can read (default: nothing is kept)",
    )
    kv_offload_dir_bytes: int | None = _ENGINE.size(
        "kv-offload-dir-bytes",
        None,
        (MiB, 2**50),
        "of the files in it, at most (default: what --kv-offload-memory holds)",
    )
    max_batch_tokens: int = _ENGINE.count("max-batch-tokens", 512, (16, 1_000_000), "computed in one step", "TOKENS")
    max_sequences: int = _ENGINE.count("max-sequences", 64, (1, 65_536), "sequences that run at once")
    inter_token_target: float = _ENGINE.setting(
        "inter-token-target",
        INTER_TOKEN_TARGET,
        factor_or_none(1.05, 1000),
        "FACTOR",
        "a step with prompts in it takes at most so many times what its running streams alone would: smaller"
        " is smoother, larger has prompts done sooner; 0 for no bound",
    )
    overlap: str = _ENGINE.setting(
        "overlap",
        "auto",
        choice_of("auto", "on", "off"),
        "MODE",
        "send the next step before the tokens of this one are read: auto does so on a GPU. The tokens are the same",
    )
    tensor_parallel: int = _ENGINE.count(
        "tensor-parallel",
        1,
        (1, 64),
        "GPUs of this machine that share the model, a process for each (with --device cpu: processes)",
    )
    no_overlap: bool = _ENGINE.switch("no-overlap", "as --overlap off")
    graphs: str = _ENGINE.setting(
        "graphs",
        "auto",
        choice_of("auto", "on", "off", "lazy"),
        "MODE",
        "steps of decodes as CUDA graphs: auto captures them at start on a GPU, lazy when one is needed. The"
        " tokens are the same",
    )
    lazy_graphs: bool = _ENGINE.switch("lazy-graphs", "as --graphs lazy: ready sooner, and slower at first")
    threads: int | None = _ENGINE.count(
        "threads", None, (1, 4096), "compute threads on a CPU (default: measured, by the tokens of a step)"
    )
    quantize: str | None = _ENGINE.setting(
        "quantize",
        None,
        choice_of(*QUANTIZE_SCHEMES),
        "SCHEME",
        "the layers' matrices to int8, fp8 (for GPUs) or int4 while they load; embedding and head stay as they"
        " are. int4 is for few sequences at once; steploop doctor --quality says what it costs (default: as the"
        " model is)",
    )
    quantize_cache_bytes: int = _ENGINE.size(
        "quantize-cache",
        32 * GiB,
        (0, 2**50),
        "what was quantised is kept in ~/.cache/steploop, up to so much, last used longest; 0 keeps nothing",
    )
    no_prefix_cache: bool = _ENGINE.switch(
        "no-prefix-cache", "compute every prompt whole, even where an earlier one began the same"
    )
