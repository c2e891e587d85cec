"""What one request may ask for. Thread: main, at start; frozen after that."""

from dataclasses import dataclass

from server.api.surface import RequestLimits
from server.settings.option import Group

_REQUEST = Group("limits of a request")
_DEFAULTS = RequestLimits()


@dataclass(frozen=True)
class RequestSettings:
    """What one request may ask for."""

    max_choices: int = _REQUEST.count(
        "max-choices", _DEFAULTS.num_choices, (1, 1024), "answers to one prompt: n; more get 400"
    )
    max_prompts: int = _REQUEST.count(
        "max-prompts", _DEFAULTS.num_prompts, (1, 1024), "of one completion; more get 400"
    )
    max_stops: int = _REQUEST.count("max-stops", _DEFAULTS.num_stops, (0, 256), "stop strings; more get 400")
    max_logit_biases: int = _REQUEST.count(
        "max-logit-biases", _DEFAULTS.num_logit_biases, (0, 100_000), "entries of logit_bias; more get 400"
    )
    max_top_logprobs: int = _REQUEST.count(
        "max-top-logprobs", _DEFAULTS.num_top_logprobs, (0, 128), "alternatives to each token; more get 400"
    )

    @property
    def request_limits(self) -> RequestLimits:
        return RequestLimits(
            num_choices=self.max_choices,
            num_prompts=self.max_prompts,
            num_stops=self.max_stops,
            num_logit_biases=self.max_logit_biases,
            num_top_logprobs=self.max_top_logprobs,
        )
