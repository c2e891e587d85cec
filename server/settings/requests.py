"""What one request may ask for. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field

from server.api.surface import RequestLimits
from server.settings.option import Setting
from server.values import count_between

_GROUP = "limits of a request"
_DEFAULTS = RequestLimits()


def _count(name: str, low: int, high: int, text: str) -> Setting:
    return Setting(
        name=name, parse=count_between(low, high), metavar="COUNT", help=f"{text}; more get 400", group=_GROUP
    )


@dataclass(frozen=True)
class RequestSettings:
    """What one request may ask for."""

    max_choices: int = field(
        default=_DEFAULTS.num_choices, metadata=_count("max-choices", 1, 1024, "answers to one prompt: n")
    )
    max_prompts: int = field(
        default=_DEFAULTS.num_prompts, metadata=_count("max-prompts", 1, 1024, "of one completion")
    )
    max_stops: int = field(default=_DEFAULTS.num_stops, metadata=_count("max-stops", 0, 256, "stop strings"))
    max_logit_biases: int = field(
        default=_DEFAULTS.num_logit_biases, metadata=_count("max-logit-biases", 0, 100_000, "entries of logit_bias")
    )
    max_top_logprobs: int = field(
        default=_DEFAULTS.num_top_logprobs, metadata=_count("max-top-logprobs", 0, 128, "alternatives to each token")
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
