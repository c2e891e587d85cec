"""Train, export and examine the demonstration model: `python -m gpu.demo.train`, one seeded command.

Owns the schedule and the checkpoints. One process of `--threads` CPU threads; the gate's questions are read for
evaluation alone.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from gpu.demo.examine import ask, evaluate, report, with_entries
from gpu.demo.export import MODEL, Run, export, load_exported, write_card
from gpu.demo.glossary import Corpus, Gate, load_corpus, load_gate
from gpu.demo.llama import Llama, Shape
from gpu.demo.muon import Muon
from gpu.demo.prompts import EARLY, LATE, Mix, Prompter
from gpu.demo.tokens import Encoder, Sample, train_tokenizer

PADDED = 1.35  # times as long as its shortest sample a batch may be
LOSS_MEMORY = 0.98  # of the running mean of the loss, from step to step
RIGHT_TOKENS = 24  # of an answer hold the characters that the gate compares
CHECKPOINT_EVERY_S = 600.0


@dataclass(frozen=True)
class Plan:
    """The schedule; it alone and the corpus decide the model."""

    seed: int = 1
    num_steps: int = 1100
    samples_per_step: int = 128
    micro_batch_tokens: int = 8192  # with padding
    warmup_steps: int = 60
    decay_share: float = 0.5  # of the steps, at the end
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    momentum: float = 0.95
    weight_decay: float = 0.05

    def lr_scale(self, step: int) -> float:
        """Linear warm-up, a plateau, then linear to almost nothing."""
        decay_steps = self.num_steps * self.decay_share
        return min(1.0, (step + 1) / self.warmup_steps, max(0.01, (self.num_steps - step) / decay_steps))

    def mix(self, step: int) -> Mix:
        return EARLY if step < self.num_steps * (1 - self.decay_share) else LATE


@dataclass(frozen=True)
class Batch:
    """ids [samples, length], padded on the right; the weights of predicting targets at flat positions `where`."""

    ids: Tensor
    where: Tensor
    targets: Tensor
    weights: Tensor


class Trainer:
    def __init__(self, plan: Plan, corpus: Corpus, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self.encoder = Encoder(tokenizer, corpus)
        self.prompter = Prompter(corpus, plan.seed)
        self.model = Llama(Shape(vocab_size=tokenizer.get_vocab_size()), plan.seed)
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        is_matrix = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in is_matrix]
        self.muon = Muon(matrices, plan.matrix_lr, plan.momentum, plan.weight_decay)
        self.adamw = torch.optim.AdamW(others, plan.other_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0
        self.loss = 0.0  # running mean
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def train_step(self) -> None:
        """One update, on conversations drawn for it."""
        wall_start, cpu_start = time.monotonic(), time.process_time()
        self.prompter.mix = self.plan.mix(self.step)
        samples = [self.encoder.sample(self.prompter.draw()) for _ in range(self.plan.samples_per_step)]
        total_weight = sum(sum(sample.weights) for sample in samples)
        loss = sum(self._backward(batch, total_weight) for batch in batches(samples, self.plan.micro_batch_tokens))
        self._update(self.plan.lr_scale(self.step))
        self.loss = loss if self.step == 0 else LOSS_MEMORY * self.loss + (1 - LOSS_MEMORY) * loss
        self.step += 1
        self.wall_s += time.monotonic() - wall_start
        self.cpu_s += time.process_time() - cpu_start

    def _update(self, lr_scale: float) -> None:
        optimizers: tuple[tuple[Optimizer, float], ...] = (
            (self.muon, self.plan.matrix_lr),
            (self.adamw, self.plan.other_lr),
        )
        for optimizer, lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_scale
            optimizer.step()
            optimizer.zero_grad()

    def _backward(self, batch: Batch, total_weight: float) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.hidden(batch.ids).flatten(0, 1)[batch.where]
            logits = self.model.logits(hidden)
        losses = F.cross_entropy(logits.float(), batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / total_weight
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "rng": self.prompter.rng.getstate(),
            "step": self.step,
            "loss": self.loss,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.prompter.rng.setstate(state["rng"])
        self.step, self.loss = state["step"], state["loss"]
        self.wall_s, self.cpu_s = state["wall_s"], state["cpu_s"]

    def progress(self) -> str:
        return f"step {self.step} loss {self.loss:.4f} minutes {self.wall_s / 60:.1f} cpu {self.cpu_s / 60:.1f}"

    def run(self) -> Run:
        return Run(
            num_steps=self.step,
            num_conversations=self.step * self.plan.samples_per_step,
            loss=round(self.loss, 4),
            wall_minutes=round(self.wall_s / 60, 1),
            cpu_minutes=round(self.cpu_s / 60, 1),
        )


def batches(samples: list[Sample], max_tokens: int) -> Iterator[Batch]:
    """Samples of like length together: at most max_tokens with padding, none longer than PADDED times the shortest."""
    waiting: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        length = len(sample.ids)
        if waiting and (length * (len(waiting) + 1) > max_tokens or length > PADDED * len(waiting[0].ids)):
            yield _batch(waiting)
            waiting = []
        waiting.append(sample)
    if waiting:
        yield _batch(waiting)


def _batch(samples: list[Sample]) -> Batch:
    length = max(len(sample.ids) for sample in samples)
    ids = torch.tensor([sample.ids + [0] * (length - len(sample.ids)) for sample in samples])
    weights = torch.tensor([sample.weights + [0.0] * (length - len(sample.ids)) for sample in samples])
    row, column = torch.nonzero(weights, as_tuple=True)
    return Batch(ids, row * length + column - 1, ids[row, column], weights[row, column])


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    corpus, gate = load_corpus(), load_gate()
    run = None if args.evaluate else _train_and_export(args, corpus, gate)
    model, tokenizer = load_exported(MODEL)
    scores = evaluate(model, tokenizer, corpus, gate)
    print(report(scores))
    if run is not None:
        write_card(run, corpus, scores, MODEL)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu.demo.train", description=__doc__)
    parser.add_argument("--evaluate", action="store_true", help="examine the exported model, train nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="end early, keeping the schedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/demo.pt"))
    return parser.parse_args()


def _train_and_export(args: argparse.Namespace, corpus: Corpus, gate: Gate) -> Run:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would wait for the same cores
    plan = Plan()
    trainer = Trainer(plan, corpus, train_tokenizer(corpus, Shape.vocab_size))
    if args.resume:
        trainer.load(args.checkpoint)
    saved = time.monotonic()
    while trainer.step < min(plan.num_steps, args.stop_after or plan.num_steps):
        trainer.train_step()
        if trainer.step % 20 == 0:
            print(trainer.progress(), flush=True)
        if time.monotonic() - saved > CHECKPOINT_EVERY_S:
            saved = time.monotonic()
            trainer.save(args.checkpoint)
            questions = with_entries(gate.named, corpus)
            quick = ask(trainer.model, trainer.encoder.tokenizer, questions, max_new=RIGHT_TOKENS)
            print(f"named, by the first tokens: {quick.num_right} of {quick.num_asked}", flush=True)
    trainer.save(args.checkpoint)
    export(trainer.model, trainer.encoder.tokenizer, MODEL)
    return trainer.run()


if __name__ == "__main__":
    main()
