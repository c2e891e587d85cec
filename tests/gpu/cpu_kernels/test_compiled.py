"""Kernels' code is kept when it is compiled, and computes the same in a process without numba."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.blocks import BlockWeight
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from tests.gguf_files import random_blocks

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.block_matmul import BlockMatmul, pack_blocks

FORMAT, NUM_OUT, NUM_IN = "Q8_0", 70, 320
WITHOUT_NUMBA = f"""
import sys
from pathlib import Path
from gpu import cache_files
cache_files._kept = Path(sys.argv[1])
import torch
from gpu.blocks import BlockWeight
from gpu.cpu_kernels.block_matmul import BlockMatmul, pack_blocks
from tests.gguf_files import random_blocks
x = torch.load(sys.argv[2])
packed = pack_blocks("{FORMAT}", random_blocks("{FORMAT}", {NUM_OUT}, {NUM_IN}))
matmul = BlockMatmul(BlockWeight(torch.float32, (packed,)), None)
torch.save([matmul(x[:1]), matmul(x), matmul.rows(torch.tensor([0, 69]))], sys.argv[2])
print("numba" in sys.modules)
"""


def run(*words: str) -> str:
    return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept") / "code"
    run("-m", "gpu.cpu_kernels", FORMAT, "--keep", str(directory))
    return directory


def test_kept_code_computes_the_same_without_numba(code: Path, tmp_path: Path) -> None:
    x, file = torch.randn(9, NUM_IN, generator=torch.Generator().manual_seed(0)), tmp_path / "x"
    weight = BlockWeight(torch.float32, (pack_blocks(FORMAT, random_blocks(FORMAT, NUM_OUT, NUM_IN)),))
    matmul = BlockMatmul(weight, None)
    wanted = [matmul(x[:1]), matmul(x), matmul.rows(torch.tensor([0, 69]))]
    torch.save(x, file)
    assert run("-c", WITHOUT_NUMBA, str(code), str(file)) == "False"
    assert all(map(torch.equal, torch.load(file), wanted))


def test_code_that_is_missing_or_damaged_is_compiled_apart(code: Path, tmp_path: Path) -> None:
    x, file = torch.zeros(1, NUM_IN), tmp_path / "x"
    torch.save(x, file)
    gone, cut, other = (code / f"block_matmul.{name}.o" for name in ("gather_rows", f"multiply.{FORMAT}", "pack"))
    whole = {path: path.read_bytes() for path in (gone, cut, other)}
    gone.unlink()
    cut.write_bytes(whole[cut][:5000])
    other.write_bytes(bytes(len(whole[other])))
    assert run("-c", WITHOUT_NUMBA, str(code), str(file)) == "False"
    assert {path: path.read_bytes() for path in whole} == whole


TINY = "from gpu.cpu_kernels.compiled import kernel\n@kernel()\ndef tiny(at):\n    pass\n"
KEEP_TINY = """
import resource, sys
from pathlib import Path
most_bytes = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
sys.path.append(sys.argv[1])
import tiny
from gpu.cpu_kernels.compiled import keep_compiled
try:
    keep_compiled(Path(sys.argv[1], "code"))
except OSError:
    print("not kept")
else:
    print(tiny.tiny.address != 0)
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path


def test_a_damaged_file_of_numbas_is_compiled_anew(tiny: Path) -> None:
    assert run("-c", KEEP_TINY, str(tiny), str(2**30)) == "True"
    (code,) = tiny.glob("code/*")
    for kind in ("nbc", "nbi"):
        (kept,) = tiny.glob(f"numba/**/*.{kind}")
        kept.write_bytes(kept.read_bytes()[:100])
        code.unlink()
        assert run("-c", KEEP_TINY, str(tiny), str(2**30)) == "True"
        assert code.exists()


def test_where_nothing_can_be_written_kernels_are_compiled_all_the_same(tiny: Path) -> None:
    """A limit of the size of files, as a full disk: nothing is kept."""
    assert run("-c", KEEP_TINY, str(tiny), "100") == "not kept"
    assert not [path for folder in ("code", "numba") for path in tiny.glob(f"{folder}/**/*.*")]


def test_a_kernel_of_what_no_process_can_find_is_not_kept() -> None:
    from gpu.cpu_kernels.compiled import _can_find

    assert all(map(_can_find, ("memset", "PyErr_Clear", "NRT_MemInfo_alloc_aligned", "numba_do_raise")))
    assert not _can_find("NRT_Reallocate")
    assert not _can_find("__svml_exp2f16")
