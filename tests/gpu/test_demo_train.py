"""The demonstration model's trainer: seeded, gone on with exactly from a checkpoint; a few tiny steps, no model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from gpu.demo.glossary import load_corpus
from gpu.demo.llama import Shape
from gpu.demo.prompts import EARLY, LATE, Prompter
from gpu.demo.tokens import Encoder, train_tokenizer
from gpu.demo.train import PADDED, Plan, Trainer, batches

TINY = replace(Plan(), num_steps=6, samples_per_step=4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the command trains: several wait for each other wherever a core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(load_corpus(), Shape.vocab_size)


def trainer(tokenizer: Tokenizer, plan: Plan = TINY) -> Trainer:
    return Trainer(plan, load_corpus(), tokenizer)


def weights(trained: Trainer) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in trained.model.state_dict().values()])


def test_a_resumed_run_is_the_run_that_was_never_stopped_and_says_that_it_was(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole, stopped, resumed = trainer(tokenizer), trainer(tokenizer), trainer(tokenizer)
    whole.train_step()
    stopped.train_step()
    stopped.save(tmp_path / "half.pt")
    resumed.load(tmp_path / "half.pt")
    whole.train_step()
    resumed.train_step()
    assert torch.equal(weights(whole), weights(resumed))
    assert (whole.step, whole.loss) == (resumed.step, resumed.loss)
    assert (whole.run().num_resumes, resumed.run().num_resumes) == (0, 1)


def test_another_seed_is_another_model(tokenizer: Tokenizer) -> None:
    one, other = trainer(tokenizer), trainer(tokenizer, replace(TINY, seed=2))
    assert not torch.equal(weights(one), weights(other))


def test_the_schedule_warms_up_stays_and_falls_to_almost_nothing() -> None:
    plan = Plan()
    half = plan.num_steps // 2
    scales = [plan.lr_scale(step) for step in range(plan.num_steps)]
    assert scales[: plan.warmup_steps] == sorted(scales[: plan.warmup_steps])
    assert set(scales[plan.warmup_steps : half]) == {1.0}
    assert scales[half:] == sorted(scales[half:], reverse=True)
    assert scales[-1] == 0.01
    assert (plan.mix(half - 1), plan.mix(half)) == (EARLY, LATE)


def test_every_sample_is_in_one_batch_beside_those_of_its_length(tokenizer: Tokenizer) -> None:
    corpus = load_corpus()
    encoder, prompter = Encoder(tokenizer, corpus), Prompter(corpus, 5)
    samples = [encoder.sample(prompter.draw()) for _ in range(200)]
    made = list(batches(samples, 2048))
    assert sum(len(batch.ids) for batch in made) == 200
    assert sum(float(batch.weights.sum()) for batch in made) == pytest.approx(sum(sum(s.weights) for s in samples))
    lengths = sorted(len(sample.ids) for sample in samples)
    for batch in made:
        count, width = batch.ids.shape
        taken, lengths = lengths[:count], lengths[count:]
        assert (taken[-1], count * width <= 2048 or count == 1) == (width, True)
        assert width <= PADDED * taken[0]
