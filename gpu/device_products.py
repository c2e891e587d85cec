"""Products on a device that has kernels beside torch's: which of them serves, by a matrix's shape and a step's rows.

Measured at start on the model's own matrices, and kept per device and versions. A shape is served in one way for few
rows and in one for many, whatever their number: the two round differently. Thread: engine (choosing at start).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.linear import Linear
from gpu.measured_file import measured_file, read_kept, write_kept
from gpu.streams import NEVER_S, Timer, graph_seconds, seconds_or_never

PLAIN_NAMES = ("bfloat16", "float16", "float32")
MOST_FEW_ROWS = 16
MEASURED_FEW = (1, 4, 16)  # rows; on the geometric mean
MEASURED_MANY = (64, 512)
# Of one shape's matrices, in turn: more than a device's cache keeps (an H200 has 50 MB), so that they are read anew.
PROBE_BYTES = 256 * 1024**2


@dataclass(slots=True)
class Served:
    """Who multiplies the matrices of one shape: whether the kernel, or torch's."""

    few: bool
    many: bool

    def __str__(self) -> str:
        names = {True: "kernel", False: "torch"}
        return f"{names[self.few]} up to {MOST_FEW_ROWS} rows, {names[self.many]} beyond"


class ChosenProduct:
    """One matrix's. served: is shared by all of its shape."""

    def __init__(self, kernel: Linear, torchs: Linear, served: Served) -> None:
        self.kernel = kernel
        self.torchs = torchs
        self._served = served

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        is_kernel = self._served.few if x.shape[0] <= MOST_FEW_ROWS else self._served.many
        return self.kernel(x) if is_kernel else self.torchs(x)


@dataclass(slots=True)
class _Shape:
    served: Served
    num_in: int
    has_many: bool
    size_bytes: int  # of those in products
    products: list[ChosenProduct]


class DeviceProducts:
    """The products of a model, by shape.

    Args:
        device, dtype: of the rows.
        clock: what measures.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, clock: Timer | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._clock = clock or graph_seconds
        self._shapes: dict[str, _Shape] = {}

    def make(self, name: str, kernel: Linear, torchs: Linear, size: tuple[int, int], size_bytes: int) -> ChosenProduct:
        """One matrix's product.

        Args:
            name: of how it is stored: matrices of one name and size are served alike. Those that torch only knows
                dequantised are the kernel's until they are measured, others torch's; plain ones are torch's for many
                rows, always: there it is bound by arithmetic, and its own is the best there is.
            size: (out, in).
            size_bytes: of the matrix.
        """
        is_quantized = name not in PLAIN_NAMES
        key = f"{name} {size[0]} x {size[1]}"
        shape = self._shapes.setdefault(key, _Shape(Served(is_quantized, is_quantized), size[1], is_quantized, 0, []))
        product = ChosenProduct(kernel, torchs, shape.served)
        if not shape.products or shape.size_bytes < PROBE_BYTES:
            shape.products.append(product)
            shape.size_bytes += size_bytes
        return product

    def choose(self) -> dict[str, Served]:
        """As measured at an earlier start, or now."""
        path, machine = products_file(), machine_name(self._device)
        known = read_kept(path, _checked)
        here = known.setdefault(machine, {})
        new = {key: shape for key, shape in self._shapes.items() if key not in here}
        for key, shape in new.items():
            here[key] = self._measure(key, shape)
        if new:
            write_kept(
                path, {name: {key: asdict(found) for key, found in kept.items()} for name, kept in known.items()}
            )
        for key, shape in self._shapes.items():
            shape.served.few, shape.served.many = here[key].few, here[key].many and shape.has_many
            del shape.products[:]  # they were kept to be measured
        return {key: shape.served for key, shape in self._shapes.items()}

    def _measure(self, key: str, shape: _Shape) -> Served:
        few = self._is_kernel_faster(key, shape, MEASURED_FEW)
        return Served(few, shape.has_many and self._is_kernel_faster(key, shape, MEASURED_MANY))

    def _is_kernel_faster(self, key: str, shape: _Shape, rows: Sequence[int]) -> bool:
        """One that fails is the slower."""
        ratio, kernels, torchs = 1.0, [each.kernel for each in shape.products], [each.torchs for each in shape.products]
        for num_rows in rows:
            by_kernel = self._seconds(f"Triton's product of {num_rows} rows with {key}", kernels, shape, num_rows)
            if by_kernel == NEVER_S:
                return False
            by_torch = self._seconds(f"torch's product of {num_rows} rows with {key}", torchs, shape, num_rows)
            if by_torch == NEVER_S:
                return True
            ratio *= by_kernel / by_torch
        return ratio < 1

    def _seconds(self, name: str, products: Sequence[Linear], shape: _Shape, num_rows: int) -> float:
        x = torch.zeros(num_rows, shape.num_in, dtype=self._dtype, device=self._device)
        return seconds_or_never(self._clock, partial(_multiply_all, products, x), name, self._device)


def _multiply_all(products: Sequence[Linear], x: Tensor) -> None:
    for product in products:
        product(x)


def products_file() -> Path:
    return measured_file("products.json")


def products_here(device: torch.device) -> Mapping[str, Served]:
    """What is known of this device: by shape."""
    return read_kept(products_file(), _checked).get(machine_name(device), {})


def machine_name(device: torch.device) -> str:
    """What a measurement depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    triton = f"triton {version('triton')}" if find_spec("triton") is not None else "no triton"
    return f"{name}, torch {torch.__version__}, {triton}"


def _checked(found: Any) -> Served:
    """
    Raises:
        ValueError, TypeError, KeyError: it is not what Served holds.
    """
    few, many = found["few"], found["many"]
    if not isinstance(few, bool) or not isinstance(many, bool):
        raise ValueError("neither the kernel nor torch's")
    return Served(few, many)
