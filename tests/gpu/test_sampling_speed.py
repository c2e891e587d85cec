"""What is timed at start draws what a request would."""

import numpy as np

from gpu.sampling_speed import PROMPT, USUAL, likely_logits, seconds_of_drawing, started


def test_rows_stand_out_and_tokens_differ() -> None:
    logits = likely_logits(4, 3000)
    assert (logits.softmax(-1).amax(-1) > 0.05).all()
    sampler = started(None, 4, 3000, USUAL)
    drawn = sampler.sample(logits, np.arange(4), np.full(4, len(PROMPT)))
    assert drawn.is_finite.all()
    assert len(set(drawn.token_ids.tolist())) > 1


def test_a_vocabulary_smaller_than_the_prompt_is_measured() -> None:
    assert seconds_of_drawing(None, 2, 60) > 0
