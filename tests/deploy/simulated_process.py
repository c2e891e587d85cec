"""`steploop serve` as it is, but for its model: python -m tests.deploy.simulated_process GATES [FLAG...].

The engine's thread stops at a FIFO in the directory GATES: `load` before it is ready, `step` in each step. It takes a
step for each byte that is written into it, and goes on once whoever has opened it for writing closes it. In a directory
called `hasty` its silence is soon noticed, and in one called `fatal` it is then soon given up.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from core.plan import StepOutput, StepPlan
from core.simulation import SimulatedRunner
from core.types import StepDelivery
from server import cli, engine_loader, supervision
from server.__main__ import end_process
from server.engine_thread import Inbox
from server.loaded_engine import LoadedEngine
from tests.server.running_server import load_with


class Gate:
    """The other end of tests.deploy.conftest.Gate; without a FIFO it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def pass_through(self) -> None:
        """Wait for a byte, or for the end of the file: from then on the gate is open."""
        if self._path.exists():
            self._file = self._file or self._path.open("rb", buffering=0)
            if not self._file.read(1):
                self._file.close()
                self._path.unlink()


def main(gates: Path, flags: list[str]) -> int:
    step_gate = Gate(gates / "step")

    class Gated(SimulatedRunner):
        def collect(self, ticket: StepPlan) -> StepOutput:
            step_gate.pass_through()
            return super().collect(ticket)

    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        report_stage("waiting at\nthe gate")
        Gate(gates / "load").pass_through()
        return load_with(Gated)(inbox, deliver, report_stage)

    if gates.name in ("hasty", "fatal"):
        supervision.MIN_SILENCE_S = supervision.FIRST_STEP_S = 0.1
        supervision.NUM_SILENCES_TO_DEATH = 3 if gates.name == "fatal" else 10**6
    engine_loader.engine_loader = lambda config: load
    return cli.main(["serve", *flags])


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1]), sys.argv[2:]))
