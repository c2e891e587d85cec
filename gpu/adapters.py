"""LoRA adapters (arXiv:2106.09685): low-rank products beside a model's matrices, each row by its own adapter.

An adapter comes from a directory that PEFT has written: adapter_config.json and adapter_model.safetensors, nothing
else is read. It never changes, and requests hold it while they run: it can be unloaded at any time, and its memory goes
with the last of them. What would change more than the layers' matrices is refused by name.

A step's rows are grouped by adapter, so a row's product is rounded the same in any company where linear.py's matmuls
are. On a CPU with AVX2 one call of cpu_kernels/low_rank.py adds the products of all. Thread: engine;
load_adapter() any.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from core.config import ModelConfig, RecurrentConfig
from core.errors import BadAdapter
from core.plan import SequenceStart
from core.types import Adapter
from gpu.attention import IntArray
from gpu.checkpoint import text_name
from gpu.linear import Linear, can_pack, make_linear
from gpu.parameters import EMBEDDING, HEAD, MIXER_MATRICES, Target, empty_weights, layer_of, parts_first

if TYPE_CHECKING:
    from gpu.cpu_kernels.low_rank import LowRankKernel, PackedLowRank, PackedRowGroups

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before the model's own names
MIXER_SITES = (*MIXER_MATRICES, "steps")
SITES = (*MIXER_SITES, "gate_up", "down")  # a layer's matrices that adapters may add to
MOST_CONFIG_BYTES = 1024**2
MOST_HEADER_BYTES = 16 * 1024**2  # of the weights' file, beside float64 numbers
RANKS_STEP = 16  # a matrix's ranks are padded to a multiple of it where the kernel serves

# Of adapter_config.json: fields that do not change what an adapter computes, or that the tensors' names show ...
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_type"),
        *("peft_version", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "qalora_group_size", "eva_config", "loftq_config", "corda_config", "ensure_weight_tying"),
        "runtime_config",
    }
)
# ... and those that are read. Any other that is set asks for something that is not computed here.
_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"})
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base's own weights
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REFUSED_TENSORS = {
    ".lora_embedding_": "an adapter of the embedding",
    ".lora_magnitude_vector": "DoRA's magnitudes",
    ".bias": "a bias",
    ".modules_to_save.": "a whole matrix (modules_to_save)",
}

# GGUF files have these in several matrices, or under another name
_APART = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
    "shared_mlp.output_linear": ("mlp.down_proj",),
}

_Pairs = dict[str, tuple[Tensor, Tensor]]
"""A [rank, in] and B [out, rank], scaled, by the checkpoint's name of the matrix"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds at one matrix: up(down(x)). Where several of PEFT's matrices are fused in ours, `up` has
    zeros between them.
    """

    down: Linear  # in -> the ranks of all that are fused
    up: Linear  # these -> out, scaled


@dataclass(frozen=True, eq=False)
class LoadedAdapter(Adapter):
    """
    Args:
        products: by layer and site; those that torch computes.
        packed: likewise; those that the kernel computes.
    """

    products: dict[tuple[int, str], LowRank] = field(default_factory=dict)
    packed: "dict[tuple[int, str], PackedLowRank]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """How adapter_config.json scales a module's product."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def of(self, module: str) -> tuple[int, float]:
        """(rank, factor). Rank-stabilised: arXiv:2312.03732."""
        rank = _by_pattern(self.ranks, module, self.rank)
        root = math.sqrt(rank) if self.is_rank_stabilized else rank
        return rank, _by_pattern(self.alphas, module, self.alpha) / root


def _by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The first pattern's value that names the end of the module's path, or with ^ all of it; as PEFT does."""
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            return value
    return usual


def load_adapter(
    directory: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    most_rank: int,
    kernel: "LowRankKernel | None" = None,
) -> LoadedAdapter:
    """Read an adapter of this model. Takes memory for `most_rank` in every matrix at most: see adapter_bytes.

    Args:
        dtype, device: that the model is served in.
        kernel: computes the products of the shapes that it takes; None: torch computes all.

    Raises:
        BadAdapter: a file is missing or malformed, is of another model, or asks for what is not computed here.
    """
    settings, told = _read(directory / CONFIG_FILE, MOST_CONFIG_BYTES)
    scaling, base = _parse(directory / CONFIG_FILE, settings)
    size_limit = MOST_HEADER_BYTES + 8 * adapter_bytes(model, torch.int8, most_rank)
    file = directory / WEIGHTS_FILE
    content, told = _read(file, size_limit, told)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadAdapter(f"{file} is not a whole safetensors file ({error}).") from error
    _, targets = empty_weights(model, torch.float32, torch.device("meta"))
    by_layer: dict[int, _Pairs] = {}
    for module, (down, up) in _pairs(file, tensors).items():
        names = _stored_names(f"{text_name(module)}.weight", targets)
        found = [_target(file, module, name, targets, model, base) for name in names]
        rank, factor = scaling.of(module)
        wanted = {"lora_A": (rank, found[0].shape[1]), "lora_B": (sum(target.shape[0] for target in found), rank)}
        for part, tensor in (("lora_A", down), ("lora_B", up)):
            if tensor.shape != wanted[part]:
                raise BadAdapter(
                    f"{file}: {PREFIX}{module}.{part}.weight has the shape {list(tensor.shape)}; this server's model"
                    f" and rank {rank} of {CONFIG_FILE} ask for {list(wanted[part])}.{_made_for(base)}"
                )
        if rank > most_rank:
            raise BadAdapter(f"{file}: {module} has rank {rank}; --max-lora-rank {most_rank} is too low for it.")
        layer = by_layer.setdefault(int(names[0].split(".")[2]), {})
        up = up.float().mul_(factor) if up.dtype != torch.float64 else up * factor
        down, up = _in_order(module, down, up, model.recurrence)
        for name, rows in zip(names, up.split_with_sizes([target.shape[0] for target in found]), strict=True):
            layer[name] = (down, rows)
    if not by_layer:
        raise BadAdapter(f"{file} contains no lora_A and lora_B.")
    return _loaded(told.hexdigest(), model, by_layer, dtype, device, kernel)


def _loaded(
    digest: str,
    model: ModelConfig,
    by_layer: Mapping[int, _Pairs],
    dtype: torch.dtype,
    device: torch.device,
    kernel: "LowRankKernel | None",
) -> LoadedAdapter:
    """by_layer: checked."""
    products: dict[tuple[int, str], LowRank] = {}
    packed: dict[tuple[int, str], PackedLowRank] = {}
    size_bytes = 0
    with torch.inference_mode():
        for index, pairs in by_layer.items():
            for site, (down, up) in _fused(model, index, pairs, dtype).items():
                found = None if kernel is None else kernel.pack(down, up)
                if found is not None:
                    packed[index, site] = found
                    size_bytes += found.nbytes
                    continue
                linears = (make_linear(part.to(device), None, is_packed=can_pack(dtype, device)) for part in (down, up))
                products[index, site] = LowRank(*linears)
                size_bytes += down.nbytes + up.nbytes
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the engine's streams may use it at once
    return LoadedAdapter(digest, size_bytes, products, packed)


def adapter_bytes(model: ModelConfig, dtype: torch.dtype, rank: int) -> int:
    """An adapter of such a rank in every matrix that it may add to."""
    _, targets = empty_weights(model, torch.float32, torch.device("meta"))
    inputs: dict[tuple[str, str], list[int]] = {}
    outputs: dict[tuple[str, str], int] = {}
    for name, target in targets.items():
        if _is_site(name, target, model):
            assert target.matrix is not None
            at = name.split(".")[2], target.matrix
            inputs.setdefault(at, []).append(target.shape[1])
            outputs[at] = outputs.get(at, 0) + target.shape[0]
    ranks = {at: rank * len(widths) for at, widths in inputs.items()}
    padded = {at: -(-num // RANKS_STEP) * RANKS_STEP for at, num in ranks.items()}
    return sum(padded[at] * widths[0] + ranks[at] * outputs[at] for at, widths in inputs.items()) * dtype.itemsize


def _read(file: Path, most_bytes: int, told: Any = None) -> tuple[bytes, Any]:
    """A file's content, and the SHA-256 of what was read so far."""
    told = hashlib.sha256() if told is None else told
    try:
        with file.open("rb") as reader:
            content = reader.read(most_bytes + 1)
    except OSError as error:
        beside = " Pickled weights (.bin) are not read." if file.name == WEIGHTS_FILE else ""
        raise BadAdapter(f"{file} cannot be read: {error.strerror or error}.{beside}") from error
    if len(content) > most_bytes:
        raise BadAdapter(f"{file} is larger than {most_bytes} bytes, the most for this --max-lora-rank.")
    told.update(len(content).to_bytes(8, "little"))
    told.update(content)
    return content, told


def _parse(file: Path, content: bytes) -> tuple[_Scaling, str]:
    """How products are scaled, and the name of the model that the adapter was made for."""
    try:
        settings = json.loads(content)
        if not isinstance(settings, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"{file} is not JSON: {error}.") from error

    def refuse(name: str, why: str) -> BadAdapter:
        return BadAdapter(f"{file}: {name} is {json.dumps(settings[name])[:100]}: {why}.")

    if str(settings.get("peft_type", "LORA")).upper() != "LORA":
        raise refuse("peft_type", "only LORA is supported")
    if settings.get("bias", "none") != "none":
        raise refuse("bias", "adapters with biases are not supported")
    if settings.get("use_dora"):
        raise refuse("use_dora", "DoRA is not supported")
    if settings.get("modules_to_save"):
        raise refuse("modules_to_save", "whole matrices, such as embeddings and lm_head, are not supported")
    start = settings.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise refuse("init_lora_weights", "it changes the base's weights. Convert the adapter to plain LoRA with PEFT")
    for name, value in settings.items():
        if value and name not in _HARMLESS and name not in _READ:
            raise refuse(name, "this is not served")
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    for name, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(patterns, dict):
            raise refuse(name, "it must be an object")
        for pattern in patterns:
            if not pattern.removeprefix("^").replace(".", "").replace("_", "").isalnum():
                raise refuse(name, f"{pattern!r} is not a module name; other patterns are not supported")
    try:
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        ranks = {name: int(value) for name, value in ranks.items()}
        alphas = {name: float(value) for name, value in alphas.items()}
        if min([rank, *ranks.values()]) < 1 or not all(map(math.isfinite, [alpha, *alphas.values()])):
            raise ValueError("a rank below 1, or an alpha that is no number")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadAdapter(f"{file}: r, lora_alpha or their patterns cannot be read ({error}).") from error
    base = settings.get("base_model_name_or_path")
    return _Scaling(rank, alpha, bool(settings.get("use_rslora")), ranks, alphas), base if isinstance(base, str) else ""


def _pairs(file: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module, by its path in the model."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, part, rest = name.removeprefix(PREFIX).rpartition(".lora_")
        if not name.startswith(PREFIX) or part == "" or rest not in ("A.weight", "B.weight"):
            what = next((what for sign, what in _REFUSED_TENSORS.items() if sign in name), "no lora_A or lora_B")
            raise BadAdapter(f"{file}: {name} is {what}, which is not supported.")
        if tensor.dtype not in _FLOATS:
            raise BadAdapter(f"{file}: {name} is stored as {tensor.dtype}; floats of 16, 32 and 64 bits are read.")
        found.setdefault(module, {})[rest] = tensor
    for module, parts in found.items():
        if len(parts) < 2:
            raise BadAdapter(
                f"{file}: {PREFIX}{module} has lora_{next(iter(parts))} alone; lora_A and lora_B belong together."
            )
    return {module: (parts["A.weight"], parts["B.weight"]) for module, parts in found.items()}


def _stored_names(name: str, targets: Mapping[str, Target]) -> list[str]:
    """Of the matrices that hold what is one to PEFT."""
    whole = next((one for one in _APART if one in name and name not in targets), "")
    return [name.replace(whole, part) for part in _APART[whole]] if whole else [name]


def _in_order(module: str, down: Tensor, up: Tensor, own: RecurrentConfig | None) -> tuple[Tensor, Tensor]:
    """A pair with B's rows and A's columns in the order of the base's matrix, which a GGUF file may have changed.

    down, up: of the shapes that the base asks for.
    """
    kind = module.partition(".linear_attn.")[2]
    if own is None or not kind:
        return down, up
    per_key = own.num_heads // own.num_key_heads
    if kind == "in_proj_qkvz" and own.is_split:
        return down, parts_first(up, own.num_key_heads, [own.key_dim] * 2 + [per_key * own.value_dim] * 2)
    if not own.is_tiled:
        return down, up
    if kind == "out_proj":
        return parts_first(down.T, own.num_key_heads, [own.value_dim] * per_key).T, up
    first = own.channels - own.output_size if kind == "in_proj_qkv" else 0  # queries and keys are not shared
    dim = 1 if kind in ("in_proj_a", "in_proj_b") else own.value_dim
    return down, torch.cat([up[:first], parts_first(up[first:], own.num_key_heads, [dim] * per_key)])


def _target(file: Path, module: str, name: str, targets: Mapping[str, Target], model: ModelConfig, base: str) -> Target:
    """The matrix that a module's product is added to, without memory."""
    target = targets.get(name)
    if target is not None and _is_site(name, target, model):
        return target
    if name in (HEAD, EMBEDDING):
        why = "adapters of embeddings and lm_head are not supported"
    elif target is not None:
        why = "adapters of this matrix are not supported: only those of attention, recurrences and MLPs, not of experts"
    else:
        why = f"this server's model has no such matrix.{_made_for(base)}"
    raise BadAdapter(f"{file}: {PREFIX}{module}: {why.removesuffix('.')}.")


def _is_site(name: str, target: Target, model: ModelConfig) -> bool:
    if target.matrix not in SITES:
        return False
    return target.matrix in MIXER_SITES or not model.layer(int(name.split(".")[2])).is_sparse


def _made_for(base: str) -> str:
    return f" The adapter was made for {base[:200]}." if base else ""


def _fused(model: ModelConfig, index: int, pairs: _Pairs, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """(down [ranks, in], up [out, ranks]) of a layer's matrices, fused and reordered as the model's own.

    Args:
        pairs: by the checkpoint's name of the matrix.
    """
    width = sum(len(down) for down, _ in pairs.values())

    def empty(shape: tuple[int, ...]) -> Tensor:  # zeros that take no memory until they are written
        return torch.zeros((*shape[:-1], width) if len(shape) > 1 else shape, dtype=dtype)

    layer, targets = layer_of(model, index, empty, partial(torch.empty, dtype=dtype))
    prefix = f"model.layers.{index}."
    downs: dict[str, list[Tensor]] = {}
    used = dict.fromkeys(SITES, 0)
    for name, (down, up) in pairs.items():
        target = targets[f"{prefix}{name.removeprefix(prefix)}"]
        site = target.matrix
        assert site is not None, "_target has looked"
        first, used[site] = used[site], used[site] + len(down)
        target.into[:, first : used[site]] = up
        target.finish()
        downs.setdefault(site, []).append(down.to(dtype))
    owners = {site: layer if site in MIXER_SITES else layer.mlp for site in downs}
    return {
        site: (torch.cat(parts), getattr(owners[site], site)[:, : used[site]].contiguous())
        for site, parts in downs.items()
    }


# At each step.


class RowGroups:
    """Rows of a step, by their adapters.

    Args:
        rows: each adapter's, in ascending order, at least one.
        num_rows: of all, with those that have none.
    """

    def __init__(self, rows: Mapping[LoadedAdapter, IntArray], num_rows: int, device: torch.device) -> None:
        self.adapters = tuple(rows)
        self._rows, self._num_rows, self._device = tuple(rows.values()), num_rows, device

    @cached_property
    def packed(self) -> "PackedRowGroups":
        from gpu.cpu_kernels.low_rank import PackedRowGroups

        return PackedRowGroups(self._rows)

    @cached_property
    def indexes(self) -> list[tuple[Tensor, Tensor] | None]:
        """Each adapter's rows, as they are written and as they are read; None: all rows.

        On a CPU a row that is alone is read twice, as its matmuls would make it.
        """
        found = list[tuple[Tensor, Tensor] | None]()
        for rows in self._rows:
            written = torch.from_numpy(rows).to(self._device)
            is_twice = len(rows) == 1 and self._device.type == "cpu"
            is_all = len(rows) == self._num_rows
            found.append(None if is_all else (written, written.repeat(2) if is_twice else written))
        return found


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a step that have adapters.

    Args:
        asked: of the tokens that Batch.asked names.
    """

    groups: RowGroups
    asked: RowGroups


class SlotAdapters:
    """Which adapter the sequence in each slot of the runner has. Holds none: those that requests hold are enough."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_slot = WeakValueDictionary[int, LoadedAdapter]()

    def start(self, starts: Iterable[SequenceStart]) -> None:
        for start in starts:
            if start.adapter is not None:
                assert isinstance(start.adapter, LoadedAdapter), "load_adapter made it"
                self._by_slot[start.slot] = start.adapter
            else:
                self._by_slot.pop(start.slot, None)

    def rows_of(self, slots: IntArray, asked: IntArray | None) -> AdaptedRows | None:
        """
        Args:
            slots: [tokens]
            asked: indexes of tokens; None: all, in order.
        """
        if not self._by_slot:
            return None
        numbers: dict[LoadedAdapter, int] = {}
        of_slots = np.full(slots.max(initial=0) + 1, -1)
        for slot in np.unique(slots).tolist():
            adapter = self._by_slot.get(slot)
            if adapter is not None:
                of_slots[slot] = numbers.setdefault(adapter, len(numbers))
        if not numbers:
            return None
        of_rows = of_slots[slots]
        groups = self._groups(numbers, of_rows)
        return AdaptedRows(groups, groups if asked is None else self._groups(numbers, of_rows[asked]))

    def _groups(self, numbers: Mapping[LoadedAdapter, int], of_rows: IntArray) -> RowGroups:
        rows = {adapter: np.flatnonzero(of_rows == number) for adapter, number in numbers.items()}
        return RowGroups({adapter: own for adapter, own in rows.items() if len(own)}, len(of_rows), self._device)


@dataclass(slots=True)
class StepAdapters:
    """What a model's matmuls add to the rows that are computed now.

    Args:
        kernel: see load_adapter.
        groups: None: no row has an adapter.
    """

    kernel: "LowRankKernel | None" = None
    groups: RowGroups | None = None


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A layer's matmul, and the product of each row's adapter. site: one of SITES."""

    linear: Linear
    layer: int
    site: str
    step: StepAdapters

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        y, groups = self.linear(x), self.step.groups
        if groups is not None:
            self._add(y, x, groups)
        return y

    def _add(self, y: Tensor, x: Tensor, groups: RowGroups) -> None:
        at, kernel = (self.layer, self.site), self.step.kernel
        if kernel is not None:
            packed = [adapter.packed.get(at) for adapter in groups.adapters]
            if any(packed):  # then all that have a product here: it depends on the shape
                kernel.add(y, x, packed, groups.packed)
                return
        for adapter, indexes in zip(groups.adapters, groups.indexes, strict=True):
            found = adapter.products.get(at)
            if found is None:
                continue
            if indexes is None:
                y.add_(found.up(found.down(x)))
            else:
                written, read = indexes
                added = found.up(found.down(x.index_select(0, read)))
                y.index_add_(0, written, added if written is read else added[:1])
