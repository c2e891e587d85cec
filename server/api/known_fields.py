"""One table of the request fields of OpenAI and other servers that this one refuses, ignores or renames.

Each is refused, ignored, or another name of a field that is served (those are declared in fields.py and the surfaces'
bodies). Bodies are decoded by this table, and docs/api.md shows it. A field in no row is ignored, counted and logged.
Thread: any; frozen.
"""

import enum
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

Name = Literal[
    "chat", "completions", "responses", "messages", "ollama", "completion", "infill",  # these generate
    "embeddings", "embed", "rerank", "score",  # these pool
    "tokenize", "detokenize", "show", "adapters", "files", "batches",
]  # fmt: skip


class Does(enum.StrEnum):
    ALIAS = "served as"  # under another name
    REFUSED = "refused"  # unless its value asks for nothing
    CONTAINER = "refused, naming what is in it"  # an object of fields that belong at the top level
    IGNORED = "no effect"  # on the output, as on the server that it comes from


@dataclass(frozen=True, slots=True)
class Known:
    """One field.

    Args:
        name: dotted where it lies in another.
        surfaces: to which the row applies.
        target: the field that an alias stands for.
        neutral: values that ask for nothing, and are accepted. null always is.
        unless: (a field, its value) beside which this one asks for nothing.
    """

    name: str
    surfaces: frozenset[Name]
    does: Does
    target: str = ""
    neutral: tuple[Any, ...] = ()
    unless: tuple[str, Any] | None = None

    def is_neutral(self, value: Any) -> bool:
        """JSON's true is not 1."""
        return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in self.neutral)


CHAT, COMPLETIONS = frozenset[Name]({"chat"}), frozenset[Name]({"completions"})
RESPONSES, TOKENIZE = frozenset[Name]({"responses"}), frozenset[Name]({"tokenize"})
MESSAGES = frozenset[Name]({"messages"})
OLLAMA, LLAMA = frozenset[Name]({"ollama"}), frozenset[Name]({"completion", "infill"})
RAW = COMPLETIONS | LLAMA  # whose prompts are texts without turns
CHOICES = CHAT | RAW
GENERATION = CHOICES | RESPONSES | MESSAGES | OLLAMA
EMBEDDINGS, EMBED = frozenset[Name]({"embeddings"}), frozenset[Name]({"embed"})
SCORE, RANKED = frozenset[Name]({"score"}), frozenset[Name]({"rerank", "score"})
THINKING = CHAT | RESPONSES  # which have the fields of thoughts that several APIs define


def _rows(does: Does, surfaces: frozenset[Name], names: str, *neutral: Any, target: str = "") -> tuple[Known, ...]:
    return tuple(Known(name, surfaces, does, target, neutral) for name in names.split())


_refused, _ignored = (partial(_rows, does) for does in (Does.REFUSED, Does.IGNORED))


def _alias(surfaces: frozenset[Name], target: str, names: str, *neutral: Any) -> tuple[Known, ...]:
    return _rows(Does.ALIAS, surfaces, names, *neutral, target=target)


# By the API that defines it; the first of them where several do.
KNOWN: dict[str, tuple[Known, ...]] = {
    "OpenAI": (
        *_refused(GENERATION - CHAT - COMPLETIONS, "n", 1),
        *_alias(RESPONSES, "max_output_tokens", "max_tokens max_completion_tokens"),
        Known("tools", RAW, Does.REFUSED, neutral=([],), unless=("tool_choice", "none")),
        *_refused(RAW, "tool_choice", "none", "auto"),
        *_refused(GENERATION - CHAT, "function_call", "none", "auto"),
        *_refused(CHAT, "modalities", ["text"]),
        *_refused(CHAT, "audio web_search_options"),
        *_refused(RAW, "reasoning_effort", "none"),
        *_refused(GENERATION - CHAT - COMPLETIONS, "response_format", {"type": "text"}),
        *_refused(LLAMA, "logprobs", False),
        *_refused(LLAMA, "suffix", ""),
        *_refused(RESPONSES, "conversation prompt image"),
        *_refused(RESPONSES, "background", False),
        *_refused(CHOICES | RESPONSES, "context_management", []),
        *_ignored(CHOICES, "user metadata safety_identifier prompt_cache_key"),
        *_ignored(GENERATION, "service_tier prompt_cache_options prompt_cache_retention verbosity moderation"),
        *_ignored(GENERATION - RESPONSES, "store"),
        *_ignored(GENERATION, "include_obfuscation stream_options.include_obfuscation"),
        *_ignored(RAW, "parallel_tool_calls"),
        *_ignored(RESPONSES, "text.verbosity reasoning.summary access_programs"),
        *_ignored(EMBEDDINGS | RANKED, "user"),
    ),
    "Anthropic": (
        *_alias(GENERATION, "stop", "stop_sequences"),
        *_refused(RAW, "thinking", {"type": "disabled"}),
        *_refused(CHOICES | RESPONSES, "system output_config"),
        *_refused(GENERATION, "mcp_servers", []),
        *_refused(GENERATION, "container"),
        *_ignored(MESSAGES, "metadata context_management betas"),
        *_ignored(GENERATION, "cache_control inference_geo diagnostics speed user_profile_id workspace_id"),
    ),
    "vLLM": (
        *_refused(RESPONSES | LLAMA, "prompt_logprobs"),
        *_refused(LLAMA, "return_token_ids", False),
        *_refused(RESPONSES, "return_token_ids stream_options.continuous_usage_stats", False),
        *_refused(CHAT, "add_special_tokens", False),
        *_refused(LLAMA, "add_special_tokens", True),
        *_refused(GENERATION - COMPLETIONS, "best_of", 1),
        *_refused(GENERATION - COMPLETIONS, "echo", False),
        *_refused(CHAT | TOKENIZE, "chat_template"),
        *_refused(RAW, "prompt_embeds"),
        *_refused(GENERATION, "truncate_prompt_tokens"),
        *_refused(GENERATION, "allowed_token_ids bad_words logits_processors", []),
        *_refused(GENERATION, "include_stop_str_in_output return_tokens_as_token_ids", False),
        *_refused(GENERATION, "structural_tag repetition_detection"),
        *_refused(GENERATION - THINKING, "thinking_token_budget include_reasoning"),
        *_refused(GENERATION, "vllm_xargs", {}),
        *_refused(GENERATION, "logprob_token_ids", []),
        *_refused(RESPONSES, "previous_input_messages", []),
        *_refused(RESPONSES, "enable_response_messages", False),
        *_ignored(GENERATION, "guided_decoding_backend guided_whitespace_pattern request_id kv_transfer_params"),
        *_ignored(GENERATION, "spaces_between_special_tokens mm_processor_kwargs media_io_kwargs"),
        *_refused(EMBEDDINGS, "messages chat_template normalize use_activation"),
        *_refused(EMBEDDINGS, "embed_dtype", "float32"),
        *_refused(EMBEDDINGS, "endianness", "native", "little"),
        *_refused(RANKED, "use_activation activation"),
        *_alias(SCORE, "text_1", "data_1 queries"),
        *_alias(SCORE, "text_2", "data_2 items documents"),
    ),
    "SGLang": (
        *_alias(CHOICES, "max_tokens", "max_new_tokens"),
        *_alias(RESPONSES, "max_output_tokens", "max_new_tokens"),
        *_alias(GENERATION, "min_tokens", "min_new_tokens"),
        *_alias(GENERATION, "seed", "sampling_seed"),
        *_refused(GENERATION, "return_logprob", False),
        *_alias(GENERATION, "guided_regex", "regex"),
        *_alias(GENERATION, "guided_grammar", "ebnf"),
        *_alias(GENERATION, "guided_json", "json_schema"),
        *_refused(GENERATION, "stop_regex custom_logit_processor custom_params"),
        *_refused(GENERATION, "lora_path lora_id session_params session_id input_embeds input_ids"),
        *_refused(GENERATION, "no_stop_trim return_hidden_states return_routed_experts", False),
        *_refused(GENERATION, "separate_reasoning stream_reasoning", True),
        *_ignored(GENERATION, "rid extra_key bootstrap_host bootstrap_port"),
        *_ignored(GENERATION, "bootstrap_room data_parallel_rank no_logs"),
    ),
    "llama-server": (
        *_alias(GENERATION, "repetition_penalty", "repeat_penalty"),
        *_alias(CHOICES, "max_tokens", "n_predict", -1, -2),
        *_alias(RESPONSES, "max_output_tokens", "n_predict", -1, -2),
        *_alias(CHAT | COMPLETIONS, "n", "n_cmpl"),
        *_refused(RESPONSES | LLAMA, "n_cmpl", 1),
        *_refused(GENERATION, "mirostat dynatemp_range min_keep", 0),
        *_refused(GENERATION - LLAMA, "n_probs", 0),
        *_refused(GENERATION, "adaptive_target", 0, -1),
        *_refused(GENERATION - LLAMA, "t_max_predict_ms", 0, -1),
        *_ignored(LLAMA, "t_max_prompt_ms t_max_predict_ms samplers"),
        *_alias(GENERATION, "guided_grammar", "grammar", ""),
        *_refused(GENERATION, "grammar_lazy return_progress timings_per_token post_sampling_probs", False),
        *_refused(GENERATION, "grammar_triggers lora", []),
        *_refused(GENERATION - LLAMA, "samplers response_fields", []),
        *_alias(THINKING, "thinking_token_budget", "reasoning_budget", -1),
        *_refused(GENERATION - THINKING, "reasoning_budget", -1),
        *_refused(GENERATION - RAW, "reasoning_format", "auto", "deepseek"),
        *_refused(RAW, "reasoning_format", "none", "auto"),
        *_refused(GENERATION, "thinking_forced_open", False),
        *_refused(GENERATION - LLAMA, "return_tokens", False),
        *_ignored(GENERATION, "mirostat_tau mirostat_eta dynatemp_exponent adaptive_decay"),
        *_ignored(GENERATION, "cache_prompt id_slot n_keep n_discard n_indent parse_tool_calls"),
    ),
    "Cohere and Jina": (
        *_alias(EMBEDDINGS, "prompt_name", "input_type"),
        *_refused(RANKED, "rank_fields", [], ["text"]),
        *_refused(RANKED, "max_tokens_per_doc max_chunks_per_doc"),
        *_refused(RANKED, "return_embeddings", False),
    ),
    "ollama and others": (
        *_alias(CHOICES, "max_tokens", "max_output_tokens", -1),
        *_alias(CHOICES, "max_tokens", "num_predict", -1),
        *_alias(OLLAMA, "max_tokens", "num_predict", -1, -2, 0),
        *_ignored(OLLAMA, "num_ctx num_batch num_gpu num_thread main_gpu use_mmap use_mlock low_vram f16_kv numa"),
        *_ignored(OLLAMA, "penalize_newline truncate shift"),
        *_alias(OLLAMA, "guided_json", "format", ""),
        *_refused(OLLAMA, "template", ""),
        *_ignored(EMBED, "options"),
        *_alias(RESPONSES, "max_output_tokens", "num_predict", -1),
        *_refused(RAW, "reasoning", {}, {"effort": "none"}),
        *_alias(THINKING, "thinking_token_budget", "thinking_budget"),
        *_refused(GENERATION - THINKING, "enable_thinking thinking_budget"),
        *_refused(GENERATION - OLLAMA, "think format template num_ctx"),
        *_refused(GENERATION - OLLAMA, "raw", False),
        *_refused(GENERATION, "images", []),
        *_alias(GENERATION, "beam_width", "num_beams"),
        *_alias(GENERATION, "stop", "stop_words"),
        *_alias(GENERATION, "seed", "random_seed"),
        *_refused(GENERATION, "num_return_sequences encoder_repetition_penalty guidance_scale", 1),
        *_refused(GENERATION, "min_length epsilon_cutoff eta_cutoff penalty_alpha smoothing_factor", 0),
        *_refused(GENERATION, "bad_words_ids suppress_tokens begin_suppress_tokens transforms", []),
        *_refused(GENERATION - OLLAMA, "truncate"),
        *_refused(GENERATION, "max_length adapter_id prompt_mode forced_bos_token_id forced_eos_token_id"),
        *_refused(GENERATION, "safe_prompt return_full_text watermark decoder_input_details ban_eos_token", False),
        *_refused(GENERATION, "negative_prompt", ""),
        *_refused(GENERATION, "do_sample", True),
        *_refused(GENERATION, "no_repeat_ngram_size", 0),
        *_refused(GENERATION, "top_a tfs_z", 0, 1),
        *_rows(Does.CONTAINER, RAW, "chat_template_kwargs"),
        *_rows(Does.CONTAINER, GENERATION - OLLAMA, "options"),
        *_rows(Does.CONTAINER, GENERATION, "extra_body sampling_params parameters generation_config nvext"),
        *_ignored(GENERATION - OLLAMA, "keep_alive"),
    ),
}


@cache
def rules_of(surface: Name) -> dict[str, Known]:
    """The rows of one surface, by the field's name."""
    return {row.name: row for rows in KNOWN.values() for row in rows if surface in row.surfaces}
