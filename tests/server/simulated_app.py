"""One request to the app, on a simulated server of its own; and engines that fail under it."""

from typing import Any

from core.plan import DeviceError, StepOutput, StepPlan
from core.simulation import SimulatedRunner
from tests.server.simulated_server import Answer, SimulatedServer


def ask(data: bytes, method: str = "POST", **server: Any) -> Answer:
    simulated = SimulatedServer(**server)
    answer = simulated.ask(data, method)
    simulated.close()
    return answer


def refusal_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


class MortalRunner(SimulatedRunner):
    """Its device is lost at the fifth step."""

    num_steps = 0

    def collect(self, ticket: StepPlan) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 5:
            raise DeviceError("fell off the bus")
        return super().collect(ticket)


class SickRunner(SimulatedRunner):
    """Every row that it samples is found broken."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        output.failed_rows.update((int(row), "The logits are not finite.") for row in output.rows)
        return output
