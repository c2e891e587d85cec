"""A completion with a suffix, through the whole server: the model's own marks around both texts, and its own ends."""

from dataclasses import replace

from core.tokenizer import Tokenizer
from tests.core.small_tokenizers import byte_level
from tests.server.simulated_server import SimulatedServer, completion, refusal_of


def test_a_suffix_is_put_behind_the_models_marks(server: SimulatedServer) -> None:
    refused = server.ask(completion(prompt="a", suffix="b"))
    assert (refusal_of(refused)[0], refused.json["error"]["param"]) == (400, "suffix")
    marked = byte_level()
    marked.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|fim_pad|>"])
    own = server.generations.known_own
    server.generations.own = own._replace(reader=replace(own.reader, tokenizer=Tokenizer(marked.to_str())))
    plain = server.ask(completion(prompt="a", max_tokens=2)).json
    filled = server.ask(completion(prompt="a", suffix="b", max_tokens=2)).json
    assert filled["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 4  # three marks, and b
