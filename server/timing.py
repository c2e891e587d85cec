"""When a request passed each stage, on the loop's monotonic clock, and what that makes in headers. Thread: loop."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """Seconds on the monotonic clock; None until the stage is passed.

    Args:
        head_s: the request's head was parsed; of what never became a request: its first byte came.
        body_s: its body was complete.
        submitted_s: validated, tokenized, and handed to the engine.
        first_token_s: the first delta came.
        end_s: the terminal chunk came.
    """

    head_s: float
    body_s: float | None = None
    submitted_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.head_s

    @property
    def elapsed_s(self) -> float:
        """Until the latest stage passed."""
        passed = (self.end_s, self.first_token_s, self.submitted_s, self.body_s)
        return next((mark for mark in passed if mark is not None), self.head_s) - self.head_s

    def stages_ms(self) -> dict[str, float]:
        """Durations of the stages passed so far, in order, in milliseconds."""
        marks = [
            ("receive", self.head_s, self.body_s),
            ("prepare", self.body_s, self.submitted_s),
            ("first_token", self.submitted_s, self.first_token_s),
            ("generate", self.first_token_s, self.end_s),
            ("total", self.head_s, self.end_s),
        ]
        return {
            name: round((end - start) * 1e3, 3) for name, start, end in marks if start is not None and end is not None
        }

    def server_timing(self) -> bytes:
        """The Server-Timing header's value (W3C Server Timing, section 3)."""
        return ", ".join(f"{name};dur={ms}" for name, ms in self.stages_ms().items()).encode()
