"""The processes of the other ranks, as the first one sees them: started, told, and looked after. Thread: engine.

They end with this process: the kernel kills them, and their pipes end. One that ends before is a device that is lost.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from core.errors import ExitCode, StartupError
from core.plan import DeviceError
from gpu.parallel.messages import Answer, Job, Load, Step, read_message, write_message

ROOT = Path(__file__).parent.parent.parent
END_S = 5.0  # for a process to end by itself


class Followers:
    """Ranks 1 to num_ranks - 1.

    Args:
        meeting: a descriptor that they get too, with the same number.
    """

    def __init__(self, num_ranks: int, meeting: int) -> None:
        # not the settings: there may be keys among them, and a rank is told what it needs
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STEPLOOP_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "gpu.parallel.follower"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[meeting],
                env={**inherited, "PYTHONPATH": path},
            )
            for _ in range(1, num_ranks)
        ]

    def tell(self, order_of: Callable[[int], Job | Load | Step]) -> None:
        """
        Args:
            order_of: rank -> what it is told.

        Raises:
            DeviceError: a rank is lost.
        """
        for rank, process in self._ranks():
            assert process.stdin is not None
            try:
                write_message(process.stdin, order_of(rank))
            except OSError as error:
                raise DeviceError(f"{self._end_of(rank, process)}") from error

    def answers(self) -> list[Answer]:
        """What each has to say, in the order of ranks.

        Raises:
            StartupError: one has refused, or ended.
        """
        found = []
        for rank, process in self._ranks():
            assert process.stdout is not None
            answer = read_message(process.stdout, Answer)
            if answer is None:
                cause = f"{self._end_of(rank, process)} while it was loading."
                raise StartupError(cause, "see what it has logged above, or --tensor-parallel 1.", ExitCode.DEVICE)
            if answer.refusal is not None:
                refusal = answer.refusal
                raise StartupError(f"Rank {rank}: {refusal.cause}", refusal.fix, refusal.exit_code)
            found.append(answer)
        return found

    def check(self) -> None:
        """
        Raises:
            DeviceError: one has ended.
        """
        for rank, process in self._ranks():
            if process.poll() is not None:
                raise DeviceError(self._end_of(rank, process))

    def end(self) -> None:
        """Have them end, and wait for it."""
        for _, process in self._ranks():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not read any more
                    pipe.close()

    def _ranks(self) -> "list[tuple[int, subprocess.Popen[bytes]]]":
        return list(enumerate(self.processes, start=1))

    def _end_of(self, rank: int, process: "subprocess.Popen[bytes]") -> str:
        """How it has ended, which its pipes may tell a moment before."""
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"Rank {rank} (process {process.pid}) listens no more"
        return f"Rank {rank} (process {process.pid}) has ended by {f'signal {-code}' if code < 0 else f'code {code}'}"
