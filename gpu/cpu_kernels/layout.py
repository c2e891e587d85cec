"""How a matrix lies that rows are multiplied with, and their sums: blocks of 64 outputs, pairs of inputs side by side.

As oneDNN packs bf16. A pair's 64 outputs are 256 bytes; sums are float32, a row's 64 side by side.
"""

from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES

BLOCK_OUTPUTS = 64
BLOCK_REGISTERS = BLOCK_OUTPUTS // LANES
PAIR_BYTES = BLOCK_REGISTERS * REGISTER_BYTES  # of a pair of inputs, all outputs of a block
SUM_ROW_BYTES = 4 * BLOCK_OUTPUTS
STEP_PAIRS = 16  # parts of a block are whole steps of so many pairs: of a tile
