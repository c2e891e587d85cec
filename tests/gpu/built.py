"""What a step is made of before anything is computed: its layout, its tokens, and who attends together."""

from dataclasses import dataclass

import torch

from core.config import Sight
from core.plan import StepPlan
from gpu.attention import DecodeGroup, PromptGroup, RaggedRows, TorchAttention
from gpu.rows import DeviceTables, RowOperators, StepInputs, StepTokens
from gpu.steps import BlockTables, StepLayout, inputs_in, lay_out, pack, rows_by_sight

SCRATCH = 100
TORCH = TorchAttention(torch.float32, torch.device("cpu"))


@dataclass(frozen=True)
class Built:
    layout: StepLayout
    inputs: StepInputs
    tokens: StepTokens
    attending: dict[Sight, RaggedRows]

    def groups(self, window: int | None = None) -> list[DecodeGroup | PromptGroup]:
        """Who attends together, as torch's attention has it."""
        rows = self.attending[Sight(window)]
        assert rows.host is not None
        return TORCH.groups_of(rows.host, rows.num_decodes, rows.window)


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
        self._sights, self._are_own_alone = tuple(map(Sight, windows)), are_own_alone
        last_tokens = torch.arange(8) + 1000  # slot 3's is 1003
        tables = DeviceTables(torch.from_numpy(self.tables.blocks), last_tokens, scratch)
        self._rows = RowOperators(tables, 0, 0)

    def build(self, plan: StepPlan) -> Built:
        self.tables.grow(plan)
        layout = lay_out(plan, self.tables.num_prompt_tokens, self._are_own_alone)
        num_asked = 0 if layout.asked is None else len(layout.asked)
        inputs = inputs_in(torch.from_numpy(pack(layout, layout.shape, num_asked)), layout.shape, num_asked)
        columns = (*self._rows.tables_of(inputs, self.tables.width), inputs.ends, inputs.offsets)
        rows = RaggedRows(*columns, layout.num_own, window=None, host=self.tables.rows_of(layout))
        attending = rows_by_sight(rows, self._sights, self.tables.width * 16)
        return Built(layout, inputs, self._rows.tokens_of(inputs), attending)
