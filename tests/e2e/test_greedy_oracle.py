"""What leaves the socket is what transformers' generate computes, from the template to the last token."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.e2e.conftest import MODEL
from tests.e2e.raw_http import post
from tests.e2e.server_process import ServerProcess

NUM_TOKENS = 64
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a KV cache? Größe, 日本語, 🙂"},
    {"role": "assistant", "content": "Keys and values."},
    {"role": "user", "content": "And a step?"},
]


@pytest.fixture(scope="module")
def expected(small_model: Path) -> tuple[int, list[int]]:
    """The prompt's length, and the greedy ids after it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(small_model)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, attention_mask=torch.ones_like(prompt))
    return prompt.shape[1], ids[0, prompt.shape[1] :].tolist()


def ask_greedily(port: int, content: object) -> tuple[int, list[bytes]]:
    """The prompt's length, and the bytes of each token drawn."""
    answer = post(
        port,
        "/v1/chat/completions",
        {"model": MODEL, "messages": content, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True},
    ).json
    entries = answer["choices"][0]["logprobs"]["content"]
    return answer["usage"]["prompt_tokens"], [bytes(entry["bytes"]) for entry in entries]


def token_bytes(small_model: Path, ids: list[int]) -> list[bytes]:
    """What transformers' tokenizer calls the ids, out of GPT-2's alphabet of 256 printable characters for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = PreTrainedTokenizerFast.from_pretrained(small_model).convert_ids_to_tokens(ids)
    return [bytes(byte_of[char] for char in token) for token in tokens]


def test_alone_and_beside_eight_others_the_greedy_tokens_are_those_of_generate(
    server: ServerProcess, small_model: Path, expected: tuple[int, list[int]]
) -> None:
    num_prompt_tokens, ids = expected
    assert len(set(ids)) > 16, "an answer that repeats itself proves little"
    wanted = num_prompt_tokens, token_bytes(small_model, ids)
    assert ask_greedily(server.port, MESSAGES) == wanted
    others = [[{"role": "user", "content": f"Something else {i} " * (i + 1)}] for i in range(8)]
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda content: ask_greedily(server.port, content), [*others, MESSAGES]))
    assert answers[-1] == wanted
    assert all(len(tokens) == NUM_TOKENS for _, tokens in answers)
