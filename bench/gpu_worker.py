"""A process that runs the cases of one part: `python -m bench.gpu_worker`, a Job on stdin, news on a descriptor.

A kernel that reads what it may not breaks its process's device for good, and one that waits for ever cannot be stopped
from within. Each line of news is JSON: a case has begun, a row, state for those who come later, a case has ended.
"""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from bench.gpu_parts import FAILED, Case, Context, Job, Row, last_line

PARTS = {
    "environment": "bench.gpu_environment",
    "kernels": "bench.gpu_kernels",
    "model": "bench.gpu_model",
    "http": "bench.gpu_http",
    "peers": "bench.gpu_peers",
}
MORE_TO_DO = 3  # exit code: the next case needs another process


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line.

    Args:
        began, ended: a case's name.
    """

    began: str | None = None
    ended: str | None = None
    row: Row | None = None
    state: dict[str, Any] | None = None


def cases_of(job: Job) -> list[Case]:
    """All of the part's, in order."""
    module = importlib.import_module(job.module)
    found: list[Case] = module.cases(job.is_quick, job.device == "cuda")
    return found


def run_cases(job: Job, tell: Callable[[News], None]) -> bool:
    """Run the job's cases. False: those behind the last one told of want another process."""
    context = Context(torch.device(job.device), job.is_quick, dict(job.state))
    for case in cases_of(job):
        if case.name in job.cases and not _run(case, context, tell):
            return False
    context.drop()
    return True


def _run(case: Case, context: Context, tell: Callable[[News], None]) -> bool:
    tell(News(began=case.name))
    is_lost = False
    try:
        for row in case.run(context):
            tell(News(row=row))
        if context.is_device:
            torch.cuda.synchronize(context.device)  # a fault is told by whoever comes next: let that be its own case
    except Exception as error:  # whatever is wrong with one case, the others are still to be tried
        tell(News(row=Row(case.table, {"case": case.name}, FAILED, last_line(error))))
        is_lost = context.is_device and not _is_alive(context.device)
    tell(News(state=context.state))
    tell(News(ended=case.name))
    return not (is_lost or case.is_alone)


def _is_alive(device: torch.device) -> bool:
    """A CUDA error is sticky: nothing on that device succeeds after it."""
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_worker", description=__doc__)
    parser.add_argument("--news", type=int, required=True, metavar="FD", help="where news go")
    arguments = parser.parse_args()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    warnings.simplefilter("ignore")  # torch's on deterministic fills, as many as there are operators
    with os.fdopen(arguments.news, "wb", buffering=0) as pipe:

        def tell(news: News) -> None:
            pipe.write(msgspec.json.encode(news) + b"\n")

        is_whole = run_cases(job, tell)
    return 0 if is_whole else MORE_TO_DO


if __name__ == "__main__":
    sys.exit(main())
