"""Computes encoders (BERT, RoBERTa, ModernBERT): the Runner of models that embed and score. Thread: engine.

A prompt is computed whole, in one step, beside others of any lengths: the tokens of all lie end to end, and only
attention, where prompts of like lengths go together, pads the shorter ones. What blocks add up to stays in float32.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig
from core.encoders import EncoderConfig
from core.errors import ExitCode, StartupError
from core.plan import Int32Array, RunnerLimits, StepOutput, StepPlan
from gpu.checkpoint import Checkpoint, Progress, TensorSource, bad_checkpoint, is_buffer, named_tensors, open_checkpoint
from gpu.device import DeviceChoice, apply_threads, choose_device, free_memory_bytes, trim_heap
from gpu.linear import Linear, has_onednn, make_linear
from gpu.pooling import Pooled, Pooler, pooled_tokens
from gpu.runner import NOT_FINITE

HEADS = ("cls.", "lm_head.", "pooler.", "classifier.", "head.", "decoder.")  # left out where they are not computed
HEAD_NAMES = {  # of the classification head's two matrices
    "bert": ("pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "modernbert": ("head.dense", "classifier"),
}
LIKE_LENGTHS = 0.75  # of the longest of the prompts that attend together
SCRATCH_FACTOR = 4  # of a step's widest activations, in float32
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """What an encoder needs of a device: as MemoryPlan, without KV."""

    config: EncoderConfig
    checkpoint: Checkpoint
    device: DeviceChoice
    num_parameters: int
    weights_bytes: int
    activation_bytes: int
    free_bytes: int
    max_model_len: int
    max_batch_tokens: int
    kv_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes


def plan_encoder(directory: Path, config: EncoderConfig, engine: EngineConfig) -> EncoderPlan:
    """Read the headers of an encoder's files. Allocates nothing.

    Raises:
        StartupError: the device is missing, tensors are missing or unknown, settings are not for encoders, or it does
            not fit.
    """
    for name, is_set in (("quantize", engine.quantize), ("deterministic", engine.deterministic)):
        if is_set:
            raise StartupError(f"--{name} is not for encoders", "leave it out", ExitCode.CONFIGURATION)
    if engine.tensor_parallel > 1:
        cause = "--tensor-parallel is not for encoders: one device computes them"
        raise StartupError(cause, "leave it out", ExitCode.CONFIGURATION)
    choice, checkpoint = choose_device(engine), open_checkpoint(directory)
    if engine.dtype == "auto" and choice.device.type == "cpu":  # in bfloat16 cosines to float32 fall below 0.9999
        choice = replace(choice, dtype=torch.float32, dtype_reason="for embeddings")
    parameters = _Parameters(checkpoint, choice.dtype, choice.device)
    Encoder(config, parameters)
    parameters.check()
    num_parameters = sum(math.prod(shape) for shape in parameters.shapes.values())
    length = min(config.max_position, engine.max_model_len or config.max_position)
    num_tokens = max(engine.max_batch_tokens, length)
    width = 3 * config.hidden_size + 2 * config.intermediate_size
    plan = EncoderPlan(
        config=config,
        checkpoint=checkpoint,
        device=choice,
        num_parameters=num_parameters,
        weights_bytes=num_parameters * choice.dtype.itemsize,
        activation_bytes=SCRATCH_FACTOR * 4 * num_tokens * width,
        free_bytes=free_memory_bytes(choice.device),
        max_model_len=length,
        max_batch_tokens=num_tokens,
    )
    if plan.needed_bytes > plan.free_bytes:
        cause = f"{directory} needs {plan.needed_bytes} bytes, and {plan.free_bytes} are free"
        raise StartupError(cause, "lower --max-model-len or --max-batch-tokens, or a smaller model", ExitCode.MEMORY)
    return plan


def load_encoder(directory: Path, config: EncoderConfig, engine: EngineConfig, progress: Progress) -> "EncoderRunner":
    """Load an encoder and get ready to step. Sets torch's threads.

    Raises:
        StartupError: as plan_encoder.
    """
    plan = plan_encoder(directory, config, engine)
    apply_threads(plan.device)
    dtype, device = plan.device.dtype, plan.device.device
    with torch.inference_mode(), TensorSource(plan.checkpoint, dtype, progress) as source:
        encoder = Encoder(config, _Parameters(plan.checkpoint, dtype, device, source))
        source.finish()
        return EncoderRunner(plan, engine, encoder)


class _Parameters:
    """An encoder's tensors, by names without the prefix.

    Args:
        source: None: nothing is read, tensors are shapes alone (of torch's device meta).

    Attributes:
        shapes: that were asked for, by stored names.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, source: TensorSource | None = None
    ) -> None:
        self._checkpoint, self._source, self.dtype = checkpoint, source, dtype
        self.device = torch.device("meta") if source is None else device
        self.shapes: dict[str, tuple[int, ...]] = {}
        is_first = re.compile(r"(bert\.|roberta\.|model\.)embeddings\.(tok|word)_embeddings\.weight").fullmatch
        self._prefix = next((found[1] for name in checkpoint.tensors if (found := is_first(name))), "")

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._checkpoint.tensors

    def _stored(self, name: str) -> str:
        """Heads lie beside the encoder, BERT's pooler within."""
        is_outside = name.startswith(("classifier.", "head."))
        stored = name if is_outside else self._prefix + name
        if stored not in self._checkpoint.tensors:  # old names of norms
            old = stored.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            return old if old in self._checkpoint.tensors else stored
        return stored

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        stored, dtype = self._stored(name), dtype or self.dtype
        self.shapes[stored] = shape
        if self._source is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._source.tensor(stored).to(self.device, dtype, copy=True)

    def linear(
        self, out_size: int, in_size: int, *names: str, has_bias: bool = True, dtype: torch.dtype | None = None
    ) -> Linear:
        """Of several matrices [out_size, in_size], one after the other."""
        dtype = dtype or self.dtype
        weight = torch.cat([self.tensor(f"{name}.weight", out_size, in_size, dtype=dtype) for name in names])
        bias = torch.cat([self.tensor(f"{name}.bias", out_size, dtype=dtype) for name in names]) if has_bias else None
        is_packed = dtype == torch.bfloat16 and has_onednn(dtype, self.device)
        return make_linear(weight, bias, is_packed=is_packed)

    def norm(self, config: EncoderConfig, name: str) -> Norm:
        size, eps = config.hidden_size, config.norm_eps
        weight = self.tensor(f"{name}.weight", size, dtype=torch.float32)
        bias = self.tensor(f"{name}.bias", size, dtype=torch.float32) if config.has_norm_bias else None
        return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)

    def check(self) -> None:
        """
        Raises:
            BadCheckpoint: tensors are missing, unknown, or of another shape than was asked for.
        """
        stored, where = self._checkpoint.tensors, self._checkpoint.path
        if missing := sorted(self.shapes.keys() - stored.keys()):
            raise bad_checkpoint(f"{where}: {len(missing)} tensors are missing: {named_tensors(missing)}.")
        for name, shape in self.shapes.items():
            if stored[name].shape != shape:
                asked = f"the configuration asks for {list(shape)}"
                raise bad_checkpoint(f"{where}: {name} has the shape {list(stored[name].shape)}, {asked}.")
        unknown = sorted(
            name
            for name in stored.keys() - self.shapes.keys()
            if not name.removeprefix(self._prefix).startswith(HEADS)
            and not is_buffer(name, stored[name].shape)
            and not name.endswith("position_ids")
        )
        if unknown:
            raise bad_checkpoint(f"{where}: {len(unknown)} tensors are not this model's: {named_tensors(unknown)}.")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer; norms before the blocks (ModernBERT) or behind them (BERT). None: no norm."""

    qkv: Linear
    output: Linear
    up: Linear
    down: Linear
    attention_norm: Norm | None
    mlp_norm: Norm
    window: int | None
    theta: float


@dataclass(frozen=True, slots=True)
class _Group:
    """Prompts that attend together.

    Args:
        index: [prompts, most]: of their tokens; of padding, token 0.
        kept: [tokens]: places of the prompts' own tokens in [prompts * most]; None: all are.
        tokens: [tokens]: these, among all.
        mask: [prompts, 1, 1 or most, most], by window: what each may see; None: all.
    """

    index: Tensor
    kept: Tensor | None
    tokens: Tensor
    masks: Mapping[int | None, Tensor | None]


def _modern_layer(config: EncoderConfig, parameters: _Parameters, index: int) -> _Layer:
    size, inner, layer = config.hidden_size, config.intermediate_size, f"layers.{index}"
    attention = partial(parameters.linear, has_bias=config.has_attention_bias)
    mlp, norm = partial(parameters.linear, has_bias=config.has_mlp_bias), partial(parameters.norm, config)
    return _Layer(
        qkv=attention(3 * size, size, f"{layer}.attn.Wqkv"),
        output=attention(size, size, f"{layer}.attn.Wo"),
        up=mlp(2 * inner, size, f"{layer}.mlp.Wi"),
        down=mlp(size, inner, f"{layer}.mlp.Wo"),
        attention_norm=norm(f"{layer}.attn_norm") if index else None,
        mlp_norm=norm(f"{layer}.mlp_norm"),
        window=config.windows[index],
        theta=config.thetas[index],
    )


def _bert_layer(config: EncoderConfig, parameters: _Parameters, index: int) -> _Layer:
    size, inner, layer = config.hidden_size, config.intermediate_size, f"encoder.layer.{index}"
    return _Layer(
        qkv=parameters.linear(size, size, *(f"{layer}.attention.self.{one}" for one in ("query", "key", "value"))),
        output=parameters.linear(size, size, f"{layer}.attention.output.dense"),
        up=parameters.linear(inner, size, f"{layer}.intermediate.dense"),
        down=parameters.linear(size, inner, f"{layer}.output.dense"),
        attention_norm=parameters.norm(config, f"{layer}.attention.output.LayerNorm"),
        mlp_norm=parameters.norm(config, f"{layer}.output.LayerNorm"),
        window=None,
        theta=0.0,
    )


def _make_head(config: EncoderConfig, parameters: _Parameters) -> Linear:
    """[prompts, hidden] to [prompts, scores], in float32."""
    dense_name, last_name = HEAD_NAMES[config.family]
    make, size = partial(parameters.linear, dtype=torch.float32), config.hidden_size
    has_bias = not config.is_modern or f"{dense_name}.bias" in parameters
    dense, last = make(size, size, dense_name, has_bias=has_bias), make(config.num_scores, size, last_name)
    if not config.is_modern:
        return lambda x: last(torch.tanh(dense(x.float())))
    norm, activate = parameters.norm(config, "head.norm"), ACTIVATIONS[config.head_activation]
    return lambda x: last(norm(activate(dense(x.float()))))


class Encoder:
    """The model: token ids to last hidden states."""

    def __init__(self, config: EncoderConfig, parameters: _Parameters) -> None:
        self.config, self._dtype, self._device = config, parameters.dtype, parameters.device
        size, table = config.hidden_size, "tok" if config.is_modern else "word"
        tensor, norm = parameters.tensor, partial(parameters.norm, config)
        self._tokens = tensor(f"embeddings.{table}_embeddings.weight", config.vocab_size, size)  # [vocab, hidden]
        self._norm = norm("embeddings.norm" if config.is_modern else "embeddings.LayerNorm")
        self._final_norm: Norm | None = None
        if config.is_modern:
            self._final_norm = norm("final_norm")
        else:
            first = config.first_position
            positions = tensor("embeddings.position_embeddings.weight", first + config.max_position, size)
            self._positions = positions[first:]  # [positions, hidden]
            self._types = tensor("embeddings.token_type_embeddings.weight", config.num_types, size)  # [types, hidden]
        make = _modern_layer if config.is_modern else _bert_layer
        self._layers = [make(config, parameters, index) for index in range(config.num_layers)]
        self.head = _make_head(config, parameters) if config.num_scores else None
        self._activation = ACTIVATIONS[config.activation]
        dims = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        self._frequencies = {theta: (1.0 / theta**dims).to(self._device) for theta in config.thetas}

    def forward(self, token_ids: Tensor, lengths: list[int], seconds_from: list[int]) -> Tensor:
        """Last hidden states: [tokens, hidden], float32.

        Args:
            token_ids: [tokens], of all prompts, end to end.
            lengths: of the prompts, in tokens; seconds_from: see Pooling.second_from.
        """
        config, counts = self.config, torch.tensor(lengths, device=self._device)
        starts = counts.cumsum(0) - counts
        positions = torch.arange(len(token_ids), device=self._device) - starts.repeat_interleave(counts)
        x = F.embedding(token_ids, self._tokens).float()
        rotations: dict[float, tuple[Tensor, Tensor]] = {}
        if config.is_modern:
            for theta, frequencies in self._frequencies.items():
                angles = torch.outer(positions.float(), frequencies).repeat(1, 2)  # [tokens, head_dim]
                rotations[theta] = angles.cos()[:, None, None], angles.sin()[:, None, None]
        else:
            seconds = torch.tensor(seconds_from, device=self._device).repeat_interleave(counts)
            types = ((seconds > 0) & (positions >= seconds)).long()
            x = x + F.embedding(positions, self._positions) + F.embedding(types, self._types)
        x = self._norm(x)
        groups = _groups(lengths, starts.tolist(), set(config.windows) or {None}, self._device)
        for layer in self._layers:
            x = self._modern(layer, x, groups, rotations) if config.is_modern else self._post_norm(layer, x, groups)
        return x if self._final_norm is None else self._final_norm(x)

    def _post_norm(self, layer: _Layer, x: Tensor, groups: list[_Group]) -> Tensor:
        """BERT's order: each block, what it adds to, a norm. x: [tokens, hidden], float32; also returned so."""
        dtype, norm = self._dtype, layer.attention_norm
        assert norm is not None, "each of BERT's layers has one"
        qkv = layer.qkv(x.to(dtype)).view(len(x), 3, self.config.num_heads, -1)
        x = norm(x + layer.output(self._attend(layer, qkv, groups)))
        return layer.mlp_norm(x + layer.down(self._activation(layer.up(x.to(dtype)))))

    def _modern(
        self, layer: _Layer, x: Tensor, groups: list[_Group], rotations: Mapping[float, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """A norm, a block, what it adds to. x: [tokens, hidden], float32; also returned so."""
        dtype, norm = self._dtype, layer.attention_norm
        qkv = layer.qkv((x if norm is None else norm(x)).to(dtype)).view(len(x), 3, self.config.num_heads, -1)
        turning, (cos, sin) = qkv[:, :2].float(), rotations[layer.theta]
        first, second = turning.chunk(2, -1)
        qkv[:, :2] = turning * cos + torch.cat([-second, first], -1) * sin
        x = x + layer.output(self._attend(layer, qkv, groups))
        up, gate = layer.up(layer.mlp_norm(x).to(dtype)).chunk(2, -1)
        return x + layer.down(self._activation(up) * gate)

    def _attend(self, layer: _Layer, qkv: Tensor, groups: list[_Group]) -> Tensor:
        """qkv: [tokens, 3, heads, head_dim]; returns [tokens, hidden]."""
        out = torch.empty((len(qkv), self.config.hidden_size), dtype=qkv.dtype, device=qkv.device)
        for group in groups:
            query, key, value = qkv[group.index].permute(2, 0, 3, 1, 4)  # each [prompts, heads, most, head_dim]
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=group.masks[layer.window])
            rows = found.transpose(1, 2).reshape(-1, out.shape[1])  # [prompts * most, hidden]
            out[group.tokens] = rows if group.kept is None else rows[group.kept]
        return out


def _groups(lengths: list[int], starts: list[int], windows: set[int | None], device: torch.device) -> list[_Group]:
    """Prompts of like lengths, the longest first."""
    order = sorted(range(len(lengths)), key=lambda one: -lengths[one])
    groups: list[_Group] = []
    while order:
        most = lengths[order[0]]
        count = next((n for n, one in enumerate(order) if lengths[one] < LIKE_LENGTHS * most), len(order))
        members, order = order[:count], order[count:]
        counts = torch.tensor([lengths[one] for one in members], device=device)
        firsts = torch.tensor([starts[one] for one in members], device=device)
        places = torch.arange(most, device=device)
        is_own = places < counts[:, None]  # [prompts, most]
        index = torch.where(is_own, firsts[:, None] + places, 0)
        is_full = lengths[members[-1]] == most
        masks: dict[int | None, Tensor | None] = {}
        for window in windows:
            mask = None if is_full else is_own[:, None, None]
            if window is not None and most > window + 1:
                is_near = (places[:, None] - places).abs() <= window  # [most, most]
                mask = is_near if mask is None else mask & is_near | ~is_own[:, None, :, None]
            masks[window] = mask
        kept = None if is_full else is_own.flatten().nonzero().squeeze(1)
        groups.append(_Group(index, kept, index[is_own], masks))
    return groups


@dataclass(slots=True)
class _Ticket:
    pooled: Pooled


class EncoderRunner:
    """Steps of whole prompts: implements core.plan.Runner. It has no KV: blocks are counted, and hold nothing."""

    offload = None

    def __init__(self, plan: EncoderPlan, engine: EngineConfig, encoder: Encoder) -> None:
        self.memory, self._encoder = plan, encoder
        self._pooler = Pooler(lambda x: x, lambda x: x, encoder.head)
        self.limits = RunnerLimits(
            num_blocks=engine.max_sequences * -(-plan.max_model_len // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_sequences=engine.max_sequences,
            max_batch_tokens=plan.max_batch_tokens,
            max_model_len=plan.max_model_len,
            vocab_size=plan.config.vocab_size,
            takes_whole_prompts=True,
        )

    def idle_work(self) -> Generator[None]:
        """Engine's idle work: return memory that a busy phase has freed."""
        trim_heap()
        yield

    def forward(self, plan: StepPlan) -> _Ticket:
        device = self.memory.device.device
        lengths, firsts = plan.lengths.tolist(), np.cumsum(plan.lengths) - plan.lengths
        seconds = [one.pooling.second_from for one in plan.pooled_rows]
        with torch.inference_mode():
            states = self._encoder.forward(
                torch.from_numpy(plan.token_ids.astype(np.int64)).to(device), lengths, seconds
            )
            wanted = torch.from_numpy(pooled_tokens(plan, firsts.astype(np.int32)).astype(np.int64)).to(device)
            return _Ticket(self._pooler.pool(states[wanted], plan))

    def sample(self, ticket: _Ticket, masks: Int32Array | None = None) -> None:
        """Nothing is sampled."""

    def collect(self, ticket: _Ticket) -> StepOutput:
        none = np.empty(0, np.int32)
        output = StepOutput(none, none)
        for row, _, vector in ticket.pooled.entries():
            if vector is None:
                output.failed_rows[row] = NOT_FINITE
            else:
                output.pooled[row] = vector
        return output
