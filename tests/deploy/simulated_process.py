"""`steploop serve` as it is, but for its model: python -m tests.deploy.simulated_process GATES [FLAG...].

The engine's thread stops at a FIFO in the directory GATES: `load` before it is ready, `step` in its first step. It
goes on when whoever has opened the FIFO for writing closes it. In a directory called `hasty` its silence is soon
noticed, and in one called `fatal` it is then soon given up.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from core.plan import StepOutput, StepPlan
from core.simulation import SimulatedRunner
from core.types import StepDelivery
from server import engine_watch
from server.command_line import build_parsers, flags_given
from server.config_sources import load_config
from server.engine_thread import Inbox
from server.logs import configure_logging
from server.process import LoadedEngine, serve
from tests.server.test_process import load_with


def pass_gate(gate: Path) -> None:
    """Wait where there is a FIFO."""
    if gate.exists():
        gate.read_bytes()
        gate.unlink()


def main(gates: Path, flags: list[str]) -> int:
    class Gated(SimulatedRunner):
        def collect(self, ticket: StepPlan) -> StepOutput:
            pass_gate(gates / "step")
            return super().collect(ticket)

    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        report_stage("waiting at\nthe gate")
        pass_gate(gates / "load")
        return load_with(Gated)(inbox, deliver, report_stage)

    if gates.name in ("hasty", "fatal"):
        engine_watch.MIN_SILENCE_S = engine_watch.FIRST_STEP_S = 0.1
        engine_watch.NUM_SILENCES_TO_DEATH = 3 if gates.name == "fatal" else 10**6
    parser, _ = build_parsers()
    config = load_config(flags_given(parser.parse_args(["serve", "--port", "0", *flags])), {})
    configure_logging(config.log_level, config.log_format)
    return uvloop.run(serve(config, load))


if __name__ == "__main__":
    from server.__main__ import end_process

    end_process(main(Path(sys.argv[1]), sys.argv[2:]))
