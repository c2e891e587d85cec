"""Kernels on a CPU, interpreted; on a device where TRITON_INTERPRET=0 is set. What nobody has written is NaN."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.kernels.sizes import FIXED_TILES, LARGE_TILES, SMALL_TILES
from tests.oracle import save_random_model

pytest.importorskip("triton", reason="needs triton: pip install triton")


IS_INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"
# The interpreter rounds float32 to bfloat16 towards zero, and its products of bfloat16 are wrong.
DTYPES = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for what is the step's, not the layers': kernels that are interpreted take as long as all else here."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1}
    return save_random_model("llama3", tmp_path_factory.mktemp("one_layer"), **sizes)


@pytest.fixture
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a program takes as long whatever its tile's size is (test_matmul.py has those that serve)."""
    for tiles in (SMALL_TILES, LARGE_TILES, FIXED_TILES):
        monkeypatch.setitem(tiles, 32, replace(tiles[32], outputs=128, inputs=64))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a device torch warns of each of its own operators that is not what poisoned() asks for."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))


class _Patched:
    """Stays until all tests here have run."""

    def restore(self) -> None:
        pass


@pytest.fixture(scope="package", autouse=True)
def patched_once() -> Iterator[None]:
    """The interpreter puts its operators in place of triton.language's anew at each call of a function in a kernel.

    That is most of its time: here it does so once for each module that has such functions.
    """
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    scopes: dict[int, Any] = {}

    def patch_once(fn: Any) -> _Patched:
        if id(fn.__globals__) not in scopes:
            scopes[id(fn.__globals__)] = patch(fn)
        return _Patched()

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch
    for scope in reversed(scopes.values()):
        scope.restore()


@pytest.fixture(scope="package", autouse=True)
def types_made_once() -> Iterator[None]:
    """The interpreter makes the shape and the format of every result anew: here, one of each."""
    from triton.language import core
    from triton.runtime import interpreter

    shapes: dict[Any, Any] = {}
    blocks: dict[Any, Any] = {}
    formats: dict[str, Any] = {}
    init, format_of = core.tensor.__init__, interpreter._get_np_dtype
    init_type = core.block_type.__init__

    def once(type: Any) -> Any:
        name = type.scalar.name
        if name not in formats:
            formats[name] = format_of(type)
        return formats[name]

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if sizes not in blocks:
            init_type(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, told = blocks[sizes]
            self.name = f"<{told}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            init(self, handle, type)
            shapes[shape] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[shape]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(core.tensor, "__init__", init_tensor)
        patched.setattr(core.block_type, "__init__", init_block_type)
        patched.setattr(interpreter, "_get_np_dtype", once)
        yield


@pytest.fixture(scope="package", autouse=True)
def overflows_uncomputed() -> Iterator[None]:
    """The interpreter computes of each sum whether it overflows, a fifth of its time, and tells nobody of it."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patched:
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patched.setattr(interpreter.interpreter_builder, "options", options)
        yield


@pytest.fixture(scope="package", autouse=True)
def sums_in_order() -> Iterator[None]:
    """What a kernel promises of its last bits is the kernel's own: no library's rounding is in it."""
    from tests.gpu.kernels.interpreted import dots_in_order

    with dots_in_order():
        yield


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty and its like give NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="package", autouse=True)
def captured_without_device() -> Iterator[None]:
    """Steps are captured without a device as well."""
    from tests.gpu.fake_cuda_graphs import open_recorder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.tune.CudaRecorder", open_recorder)
        yield
