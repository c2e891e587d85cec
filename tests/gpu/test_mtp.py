"""The head that predicts later tokens: it drafts what its published code computes, and changes no token."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.config_json import parse_model_config
from core.drafter import DraftBudget
from core.drafts import DraftModel, DraftWish
from core.gguf_model import config_of
from core.plan import make_plan
from core.scheduler import Scheduler
from core.types import EngineStats, Request, SamplingParams
from gpu.checkpoint import open_checkpoint
from gpu.device import choose_device
from gpu.draft_model import DraftRunner
from gpu.loading import load_runner
from gpu.memory_plan import estimate, mtp_bytes
from gpu.mtp import MtpDrafts
from gpu.runner import ModelRunner
from tests import fp8_files, oracle
from tests.fakes import FakeClock, make_request
from tests.gguf_files import parsed, write_gguf
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.test_overlap import EOS, draw_workload
from tests.gpu.test_speculation import run, with_every_setting
from tests.oracle import Oracle, read_config, save_random_model
from tests.workload import Ending, Outcome, Workload, WorkloadRun

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3")
PROMPT = random.Random(5).choices(range(3, 300), k=37)


def save_with_head(family: str, directory: Path) -> tuple[Path, Path]:
    """A random model, whose last layer then becomes the head: as transformers has it, and as checkpoints have it."""
    model_class, config_class, fields = oracle.FAMILIES[family]
    if "text_config" in fields:  # without its tower
        model_class, config_class, fields = "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", fields["text_config"]
    num_layers = fields.get("num_hidden_layers", 2)
    deeper = {**fields, "num_hidden_layers": num_layers + 1}
    if "layer_types" in fields:
        deeper["layer_types"] = [*fields["layer_types"], "full_attention"]
    oracle.FAMILIES["deeper"] = model_class, config_class, deeper
    whole, split = directory / "whole", directory / "split"
    save_random_model("deeper", whole)
    del oracle.FAMILIES["deeper"]
    tensors, config, size = load_file(whole / "model.safetensors"), read_config(whole), 64
    last, names, norms = f"model.layers.{num_layers}.", ("eh_proj", "enorm", "hnorm", "shared_head.norm"), (0.5, 1.5)
    prefix = last
    if family.startswith("qwen"):
        prefix, names, norms = "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (-0.5, 0.5)
        tensors = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    tensors[f"{prefix}{names[0]}.weight"] = torch.randn(size, 2 * size) * 0.1
    for name in names[1:]:
        tensors[f"{prefix}{name}.weight"] = torch.empty(size).uniform_(*norms)
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:-1]
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:-1]
    split.mkdir()
    save_file(tensors, split / "model.safetensors", {"format": "pt"})
    (split / "config.json").write_text(json.dumps(config))
    return whole, split


@pytest.fixture(scope="session")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            made[family] = save_with_head(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


class Head:
    """The reference, in float32 and over whole sequences: transformers' layer, joined as vLLM's
    models/qwen3_next_mtp.py, qwen3_5_mtp.py and deepseek_mtp.py do it."""

    def __init__(self, whole: Path, split: Path) -> None:
        self.model, self.layer = Oracle(split)._model, Oracle(whole)._model.model.layers[-1]
        tensors = load_file(split / "model.safetensors")
        self.is_qwen = "mtp.fc.weight" in tensors
        names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        if not self.is_qwen:
            last = f"model.layers.{self.model.config.num_hidden_layers}."
            names = tuple(last + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
        self.join, *self.norms = (tensors[f"{name}.weight"] for name in names)

    def norm(self, x: Tensor, index: int) -> Tensor:
        return torch.nn.functional.rms_norm(
            x, x.shape[-1:], self.norms[index] + self.is_qwen, self.model.config.rms_norm_eps
        )

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """The likeliest tokens after these."""
        backbone, read, found = self.model.model, token_ids[1:], list[int]()
        before = backbone(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state  # normed
        for _ in range(num_drafts):
            embedded = backbone.embed_tokens(torch.tensor([read]))
            joined = torch.cat([self.norm(embedded, 0), self.norm(before, 1)], -1) @ self.join.T
            length = joined.shape[1]
            states = self.layer(
                joined,
                position_embeddings=backbone.rotary_emb(joined, torch.arange(length)[None]),
                attention_mask=torch.full((length, length), -torch.inf).triu(1)[None, None],
            )
            normed = self.norm(states, 2)
            found.append(int(self.model.lm_head(normed[0, -1]).argmax()))
            before = torch.cat([before, (normed if self.is_qwen else states)[:, -1:]], 1)
            read = [*read, found[-1]]
        return found


@dataclass(eq=False)
class Computed:
    """A sequence of slot 0, all but the newest of whose tokens are computed."""

    token_ids: list[int]
    slot: int = 0
    num_prompt_tokens: int = len(PROMPT)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=99, temperature=0.0))
    seed: int = 3
    stop_ids: tuple[int, ...] = ()

    @property
    def num_computed_tokens(self) -> int:
        return len(self.token_ids) - 1


def propose(drafts: MtpDrafts, sequence: Any, length: int) -> list[int]:
    (found,), *_ = drafts.propose([DraftWish(sequence, "domain", length)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_it_drafts_what_the_published_code_computes(family: str, with_head: Callable[[str], tuple[Path, Path]]) -> None:
    """After a prompt, after tokens that it was not asked about, and where the states of old ones are gone."""
    head, runner = Head(*with_head(family)), open_runner(with_head(family)[1])
    drafts = runner.drafts
    assert isinstance(drafts, MtpDrafts)
    sequence, tables = Computed([*PROMPT, 9]), [(0, index, index) for index in range(8)]
    runner.collect(sampled(runner, make_plan([(0, 0, PROMPT, True)], tables=tables)))
    assert drafts.num_behind(sequence, "domain") == len(PROMPT)  # type: ignore[arg-type]
    assert propose(drafts, sequence, 4) == head.drafts(sequence.token_ids, 4)
    for token_id in (40, 41, 42):
        newest, place = sequence.token_ids[-1], len(sequence.token_ids) - 1
        runner.collect(sampled(runner, make_plan([(0, place, [newest], True)])))
        sequence.token_ids.append(token_id)
    assert drafts.num_behind(sequence, "domain") == 3  # type: ignore[arg-type]
    assert propose(drafts, sequence, 3) == head.drafts(sequence.token_ids, 3)
    drafts._states._positions[0, :20] = -1
    drafts.clear()
    assert drafts.num_behind(sequence, "domain") == len(sequence.token_ids) - 21  # type: ignore[arg-type]
    assert len(propose(drafts, sequence, 3)) == 3
    sequence.token_ids.append(5)  # the token before it is not computed
    assert propose(drafts, sequence, 3) == []


def sampled(runner: ModelRunner, plan: Any) -> Any:
    ticket = runner.forward(plan)
    runner.sample(ticket)
    return ticket


class Agreeing(MtpDrafts):
    """The head computes; most of what it says is then what will be said."""

    answers: dict[tuple[str, int], list[int]]

    def propose(self, wishes: Sequence[DraftWish]) -> tuple[list[list[int]], float, float]:
        found, *took_s = super().propose(wishes)
        for wish, draft in zip(wishes, found, strict=True):
            one, rng = wish.sequence, random.Random(len(wish.sequence.token_ids))
            coming = self.answers[one.request_id, one.index][one.num_own_tokens :][: len(draft)]
            draft[: len(coming)] = [token if rng.random() < 0.7 else draft[i] for i, token in enumerate(coming)]
        return found, took_s[0], took_s[1]


def check(directory: Path, dtype: str, seeds: range) -> int:
    """Answers and logprobs are those without drafts; returns how many requests there were."""
    runner, num_requests, num_preempted = open_runner(directory, replace(ENGINE, dtype=dtype)), 0, 0
    assert isinstance(runner.drafts, MtpDrafts)
    model = runner.drafts
    model.__class__ = Agreeing
    assert isinstance(model, Agreeing)
    totals = {"drafted": 0, "accepted": 0}
    for seed in seeds:
        workload = with_every_setting(draw_workload(rng := random.Random(seed)), rng)
        expected, _ = run(runner, workload, None)
        said, _ = run(runner, replace(workload, stops_after={}, leaves_after={}, pauses={}), None)
        model.answers = {(name, i): one.token_ids for name, o in said.items() for i, one in enumerate(o.endings)}
        scheduler = Scheduler(runner.limits, (EOS,), seeds=lambda: 0, draft_model=model)
        found: dict[str, Outcome] = WorkloadRun(workload, scheduler, runner, FakeClock()).run()
        assert found == expected, f"seed {seed}"
        stats = scheduler.stats()
        totals["drafted"] += stats.draft_tokens["mtp"]
        totals["accepted"] += stats.accepted_tokens["mtp"]
        num_requests += len(workload.requests)
        num_preempted += stats.num_preemptions
        assert len(model._shifted) <= len(model._known) + 1
        model.clear()
        assert len(model._free_slots) == model.runner.limits.max_sequences
    assert num_preempted > 0
    assert 0 < totals["accepted"] < totals["drafted"]
    return num_requests


@pytest.fixture
def all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftBudget, "is_empty", False)
    monkeypatch.setattr(DraftBudget, "allows", lambda *_: True)


@pytest.mark.usefixtures("all_pay")
@pytest.mark.parametrize(("family", "dtype"), [("qwen3_5", "bfloat16"), ("glm4_moe", "float32")])
def test_it_changes_no_token(family: str, dtype: str, with_head: Callable[[str], tuple[Path, Path]]) -> None:
    check(with_head(family)[1], dtype, range(2))


def test_it_is_planned_and_left_out_where_it_is_not_asked_for(with_head: Callable[[str], tuple[Path, Path]]) -> None:
    directory = with_head("glm4_moe")[1]
    config, checkpoint = parse_model_config(read_config(directory)), open_checkpoint(directory)
    bytes_of = {
        (mtp, speculation): mtp_bytes(
            config, engine := replace(ENGINE, mtp=mtp, speculation=speculation), choose_device(engine), checkpoint
        )
        for mtp in (True, False)
        for speculation in ("auto", "off")
    }
    assert [asked for asked, size in bytes_of.items() if size] == [(True, "auto")]
    plans = [estimate(directory, config, replace(ENGINE, mtp=mtp)) for mtp in (True, False)]
    assert plans[0].weights_bytes - plans[1].weights_bytes == bytes_of[True, "auto"]
    assert open_runner(directory, replace(ENGINE, mtp=False)).drafts is None


def test_a_head_that_is_not_whole_is_left_out(
    tmp_path: Path, with_head: Callable[[str], tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    directory = with_head("glm4_moe")[1]
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert open_runner(tmp_path).drafts is None
    assert "it lacks model.layers.2.hnorm.weight" in caplog.text


def of_file(file: Path) -> ModelRunner:
    return load_runner(file, parse_model_config(config_of(parsed(file), {})), ENGINE, no_progress)


def test_the_first_of_two_heads_drafts_from_safetensors_and_gguf_and_the_second_is_named(
    tmp_path: Path, with_head: Callable[[str], tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    directory = with_head("glm4_moe")[1]
    tensors = load_file(directory / "model.safetensors")
    tensors |= {n.replace(".layers.2.", ".layers.3."): t.clone() for n, t in tensors.items() if ".layers.2." in n}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(read_config(directory) | {"num_nextn_predict_layers": 2}))
    found = []
    with caplog.at_level("INFO"):
        for runner in (
            open_runner(directory),
            open_runner(tmp_path),
            of_file(write_gguf(tmp_path, tmp_path / "m.gguf")),
        ):
            runner.collect(sampled(runner, make_plan([(0, 0, PROMPT, True)], tables=[(0, i, i) for i in range(4)])))
            assert isinstance(runner.drafts, MtpDrafts)
            found.append(propose(runner.drafts, Computed([*PROMPT, 9]), 4))
    assert found[0] == found[1] == found[2]
    assert caplog.text.count("left out: model.layers.3\n") == 2


def test_qwens_head_drafts_from_a_gguf_file_as_from_safetensors(
    tmp_path: Path, with_head: Callable[[str], tuple[Path, Path]]
) -> None:
    directory = with_head("qwen3_5_moe")[1]
    assert drafts_of(open_runner(directory)) == drafts_of(of_file(write_gguf(directory, tmp_path / "m.gguf")))


def test_qwens_head_drafts_from_8_bit_floats_what_these_stand_for(
    tmp_path: Path, with_head: Callable[[str], tuple[Path, Path]]
) -> None:
    stored, floats = fp8_files.save_pair(with_head("qwen3_next")[1], tmp_path, fp8_files.BLOCKS, "in_proj_ba")
    assert "mtp.layers.0.self_attn.q_proj.weight_scale_inv" in load_file(stored / "model.safetensors")
    assert drafts_of(open_runner(stored)) == drafts_of(open_runner(floats))


def drafts_of(runner: ModelRunner) -> list[int]:
    runner.collect(sampled(runner, make_plan([(0, 0, PROMPT, True)], tables=[(0, i, i) for i in range(4)])))
    assert isinstance(runner.drafts, MtpDrafts)
    return propose(runner.drafts, Computed([*PROMPT, 9]), 4)


def test_a_gguf_file_without_its_head_is_served(tmp_path: Path, with_head: Callable[[str], tuple[Path, Path]]) -> None:
    directory = with_head("glm4_moe")[1]
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    runner = of_file(write_gguf(tmp_path, tmp_path / "m.gguf"))
    assert runner.drafts is None
    assert (runner.config.num_layers, runner.config.num_draft_layers) == (2, 1)


def said_of(
    runner: ModelRunner, model: DraftModel | None, requests: list[Request], speculates: bool
) -> tuple[dict[str, list[Ending]], EngineStats]:
    """What they are answered together."""
    scheduler = Scheduler(runner.limits, (EOS,), seeds=lambda: 0, speculates=speculates, draft_model=model)
    found = WorkloadRun(Workload([(0, one) for one in requests]), scheduler, runner, FakeClock()).run()
    if model is not None:
        model.clear()
    return {name: one.endings for name, one in found.items()}, scheduler.stats()


@pytest.mark.slow
@pytest.mark.usefixtures("all_pay")
def test_requests_are_answered_alike_with_drafts_and_without(
    model_directory: Callable[[str], Path], with_head: Callable[[str], tuple[Path, Path]]
) -> None:
    """Greedy and sampled, alone and in company, in bf16 and float32; a random model's own head is seldom right."""
    drafted, accepted = Counter[str](), Counter[str]()
    for dtype in ("float32", "bfloat16"):
        for drafter, directory in (
            ("suffix", model_directory("llama3")),
            ("model", model_directory("llama3")),
            ("mtp", with_head("qwen3_5")[1]),
        ):
            runner = open_runner(directory, replace(ENGINE, dtype=dtype))
            runner.limits = replace(runner.limits, timed_rows=())
            model = runner.drafts if drafter == "mtp" else None
            if drafter == "model":
                own = open_runner(directory, replace(ENGINE, dtype=dtype, mtp=False))
                model = DraftRunner(own, runner.limits.vocab_size)
            rng = random.Random(f"{dtype} {drafter}")
            requests = [
                make_request(
                    str(number),
                    prompt_ids=tuple(rng.choices(range(3, 300), k=rng.randint(2, 30)) * rng.choice((1, 2))),
                    max_tokens=24,
                    seed=number,
                    temperature=(0.0, 0.9)[number % 2],
                    ignore_eos=True,
                )
                for number in range(21)
            ]
            wanted, _ = said_of(runner, None, requests, speculates=False)
            for some in (requests, *([request] for request in requests)):
                found, stats = said_of(runner, model, some, speculates=True)
                assert found == {one.request_id: wanted[one.request_id] for one in some}, (dtype, drafter)
                drafted.update(stats.draft_tokens)
                accepted.update(stats.accepted_tokens)
    assert min(drafted[name] for name in ("suffix", "model", "mtp")) > 50
    assert min(accepted[name] for name in ("suffix", "model")) > 25
