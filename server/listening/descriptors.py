"""Open files: every connection is one, and the usual limit on them is below what may be connected. Thread: main."""

import logging
import resource

logger = logging.getLogger(__name__)

RESERVED = 256  # for the model's files, the listening sockets, libraries and whatever a handler opens


def allow_connections(num_connections: int) -> None:
    """Raise the process's limit on open files so far that all may be open at once; warn where it cannot be."""
    needed = num_connections + RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed:
        logger.warning(
            "this process may open %d files, too few for %d connections: raise the limit (LimitNOFILE=%d in the unit,"
            " ulimit -n %d), or lower --max-connections",
            wanted,
            num_connections,
            needed,
            needed,
        )
