"""What a step is made of before anything is computed: its layout, its tokens, and who attends together."""

from dataclasses import dataclass

import torch

from core.plan import StepPlan
from gpu.attention_groups import GroupBuilder
from gpu.rows import DeviceTables, RowOperators, StepInputs, StepTokens
from gpu.steps import BlockTables, Groups, StepLayout, inputs_in, lay_out, pack

SCRATCH = 100


@dataclass(frozen=True)
class Built:
    layout: StepLayout
    inputs: StepInputs
    tokens: StepTokens
    attending: Groups


class Builder:
    """Of a CPU's steps, where torch attends. are_own_alone: see lay_out."""

    def __init__(
        self,
        max_model_len: int = 4096,
        windows: tuple[int | None, ...] = (None,),
        are_own_alone: bool = True,
        scratch: int = SCRATCH,
    ) -> None:
        self.tables = BlockTables(8, max_model_len, scratch)
        self._windows, self._are_own_alone = windows, are_own_alone
        self._groups = GroupBuilder(self.tables.blocks, scratch, torch.float32, torch.device("cpu"))
        last_tokens = torch.arange(8) + 1000  # slot 3's is 1003
        tables = DeviceTables(torch.from_numpy(self.tables.blocks), last_tokens, scratch, scratch + 1)
        self._rows = RowOperators(tables, 0, 0)

    def build(self, plan: StepPlan) -> Built:
        self.tables.grow(plan)
        layout = lay_out(plan, self.tables.num_prompt_tokens, self._are_own_alone)
        num_asked = 0 if layout.asked is None else len(layout.asked)
        inputs = inputs_in(torch.from_numpy(pack(layout, layout.shape, num_asked)), layout.shape, num_asked)
        longest = int(layout.ends.max(initial=0))
        attending = self._groups.build(layout.own, layout.prompts, self._windows, longest)
        return Built(layout, inputs, self._rows.tokens_of(inputs), attending)
