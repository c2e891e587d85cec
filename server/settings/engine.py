"""What computes, and how much at once. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field
from pathlib import Path

from core.config import INTER_TOKEN_TARGET, QUANTIZE_SCHEMES
from server.settings.option import GiB, MiB, Setting
from server.values import (
    choice_of,
    count_between,
    directory_value,
    factor_or_none,
    format_size,
    size_between,
    yes_or_no,
)


@dataclass(frozen=True)
class EngineSettings:
    """What computes, and how much at once."""

    device: str = field(
        default="auto",
        metadata=Setting(
            name="device",
            parse=choice_of("auto", "cpu", "cuda", gpu="cuda", nvidia="cuda"),
            metavar="NAME",
            help="auto, cpu or cuda",
            group="engine",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=Setting(
            name="dtype",
            parse=choice_of("auto", "bfloat16", "float16", "float32", bf16="bfloat16", fp16="float16", half="float16"),
            metavar="TYPE",
            help="of weights and KV cache: auto, bfloat16, float16 or float32",
            group="engine",
        ),
    )
    kv_memory_bytes: int | None = field(
        default=None,
        metadata=Setting(
            name="kv-memory",
            parse=size_between(MiB, 2**44),
            metavar="SIZE",
            help="memory for the KV cache, such as 2GiB (default: from what is free)",
            group="engine",
        ),
    )
    kv_offload_bytes: int = field(
        default=0,
        metadata=Setting(
            name="kv-offload-memory",
            parse=size_between(0, 2**44),
            metavar="SIZE",
            help="host memory for cached prompts that give way in the KV cache, such as 8GiB: they are copied back"
            " where that is faster than to compute them again; 0 forgets them",
            group="engine",
            show=format_size,
        ),
    )
    kv_offload_dir: Path | None = field(
        default=None,
        metadata=Setting(
            name="kv-offload-dir",
            parse=directory_value,
            metavar="DIR",
            help="a directory of this server's own that keeps the cached prompts over a restart, as files that their"
            " owner alone can read (default: nothing is kept)",
            group="engine",
        ),
    )
    kv_offload_dir_bytes: int | None = field(
        default=None,
        metadata=Setting(
            name="kv-offload-dir-bytes",
            parse=size_between(MiB, 2**50),
            metavar="SIZE",
            help="of the files in it, at most (default: what --kv-offload-memory holds)",
            group="engine",
        ),
    )
    max_batch_tokens: int = field(
        default=512,
        metadata=Setting(
            name="max-batch-tokens",
            parse=count_between(16, 1_000_000),
            metavar="TOKENS",
            help="computed in one step",
            group="engine",
        ),
    )
    max_sequences: int = field(
        default=64,
        metadata=Setting(
            name="max-sequences",
            parse=count_between(1, 65_536),
            metavar="COUNT",
            help="sequences that run at once",
            group="engine",
        ),
    )
    inter_token_target: float = field(
        default=INTER_TOKEN_TARGET,
        metadata=Setting(
            name="inter-token-target",
            parse=factor_or_none(1.05, 1000),
            metavar="FACTOR",
            help="a step with prompts in it takes at most so many times what its running streams alone would: smaller"
            " is smoother, larger has prompts done sooner; 0 for no bound",
            group="engine",
        ),
    )
    overlap: str = field(
        default="auto",
        metadata=Setting(
            name="overlap",
            parse=choice_of("auto", "on", "off"),
            metavar="MODE",
            help="send the next step before the tokens of this one are read: auto does so on a GPU. The tokens are the"
            " same",
            group="engine",
        ),
    )
    tensor_parallel: int = field(
        default=1,
        metadata=Setting(
            name="tensor-parallel",
            parse=count_between(1, 64),
            metavar="COUNT",
            help="GPUs of this machine that share the model, a process for each (with --device cpu: processes)",
            group="engine",
        ),
    )
    no_overlap: bool = field(
        default=False,
        metadata=Setting(
            name="no-overlap",
            parse=yes_or_no,
            metavar="BOOL",
            help="as --overlap off",
            group="engine",
            is_switch=True,
        ),
    )
    graphs: str = field(
        default="auto",
        metadata=Setting(
            name="graphs",
            parse=choice_of("auto", "on", "off", "lazy"),
            metavar="MODE",
            help="steps of decodes as CUDA graphs: auto captures them at start on a GPU, lazy when one is needed. The"
            " tokens are the same",
            group="engine",
        ),
    )
    lazy_graphs: bool = field(
        default=False,
        metadata=Setting(
            name="lazy-graphs",
            parse=yes_or_no,
            metavar="BOOL",
            help="as --graphs lazy: ready sooner, and slower at first",
            group="engine",
            is_switch=True,
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=Setting(
            name="threads",
            parse=count_between(1, 4096),
            metavar="COUNT",
            help="compute threads on a CPU (default: measured, by the tokens of a step)",
            group="engine",
        ),
    )
    quantize: str | None = field(
        default=None,
        metadata=Setting(
            name="quantize",
            parse=choice_of(*QUANTIZE_SCHEMES),
            metavar="SCHEME",
            help="the layers' matrices to int8, fp8 (for GPUs) or int4 while they load; embedding and head stay as they"
            " are. int4 is for few sequences at once; steploop doctor --quality says what it costs (default: as the"
            " model is)",
            group="engine",
        ),
    )
    quantize_cache_bytes: int = field(
        default=32 * GiB,
        metadata=Setting(
            name="quantize-cache",
            parse=size_between(0, 2**50),
            metavar="SIZE",
            help="what was quantised is kept in ~/.cache/steploop, up to so much, last used longest; 0 keeps nothing",
            group="engine",
            show=format_size,
        ),
    )
    no_prefix_cache: bool = field(
        default=False,
        metadata=Setting(
            name="no-prefix-cache",
            parse=yes_or_no,
            metavar="BOOL",
            help="compute every prompt whole, even where an earlier one began the same",
            group="engine",
            is_switch=True,
        ),
    )
