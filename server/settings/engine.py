"""What computes, and how much at once. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field

from core.config import INTER_TOKEN_TARGET, QUANTIZE_SCHEMES
from server.settings.option import GiB, MiB, Setting
from server.values import choice_of, count_between, factor_or_none, format_size, size_between, yes_or_no


@dataclass(frozen=True)
class EngineSettings:
    """What computes, and how much at once."""

    device: str = field(
        default="auto",
        metadata=Setting(
            name="device",
            parse=choice_of("auto", "cpu", "cuda"),
            metavar="NAME",
            help="auto, cpu or cuda",
            group="engine",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=Setting(
            name="dtype",
            parse=choice_of("auto", "bfloat16", "float16", "float32"),
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
            help="the layers' matrices to int8 or int4 while they load; embedding and head stay as they are. int4 is"
            " for few sequences at once; steploop doctor --quality says what it costs (default: as the model is)",
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
