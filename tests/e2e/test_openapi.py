"""What /openapi.json says is so: schemathesis asks a real server as it says, and as it says not to."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from server.gate.identity import create_key
from tests.e2e.conftest import API_KEY
from tests.e2e.raw_http import ask
from tests.e2e.server_process import ServerProcess

# A 503, 504 or 529 is no fault where deadlines cannot be held
CHECKS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", 503, 504, 529]
negative_data_rejection.expected-statuses = ["4xx", "5xx"]
positive_data_acceptance.enabled = false
use_after_free.enabled = false
ensure_resource_availability.enabled = false
"""


@pytest.mark.slow
def test_no_answer_is_a_fault_or_not_told_of(spawn: Callable[..., ServerProcess], tmp_path: Path) -> None:
    kept = ("--files", str(tmp_path / "files"), "--ledger", str(tmp_path / "ledger.db"), "--store-responses", "1d")
    keys = ("--api-key", API_KEY, "--keys-file", str(tmp_path / "keys"))
    create_key(tmp_path / "keys", datetime.now(UTC), "default")
    server = spawn("--max-model-len", "64", *kept, *keys)
    server.wait_ready()
    (config := tmp_path / "schemathesis.toml").write_text(CHECKS)
    paths = json.loads(ask(server.port, "GET", "/openapi.json").body)["paths"]
    left_out = [path for path, methods in paths.items() if any("x-alias-of" in one for one in methods.values())]
    without = "|".join(map(re.escape, [*left_out, "/admin/drain"]))  # after a drain nobody would be there
    asked = ("run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {API_KEY}", "--seed", "7", "--no-color")
    how = ("--phases", "examples,fuzzing", "--max-examples", "5")
    command = (sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), *asked, *how)
    left_out_too = ("--exclude-path-regex", f"^({without})$")
    done = subprocess.run([*command, *left_out_too], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    (num_tested,) = re.findall(r"Tested: (\d+)", done.stdout)
    assert int(num_tested) >= len(paths.keys() - left_out) - 1
    assert "Traceback" not in server.log
