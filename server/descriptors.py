"""The process's limit of open files: each connection takes one. Any thread; called once, before the port is opened."""

import logging
import resource

logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 256  # beside connections: listening sockets, model files, the event loop, pipes, libraries


def make_room_for_connections(max_connections: int) -> None:
    """Raise the soft limit of open files to what max_connections need; it is never lowered.

    Where the hard limit is below that, the soft one becomes as high as it may, and a warning says what fits: further
    clients would be dropped by the system, uncounted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    reachable = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < needed:
        logger.warning(
            "%d connections are allowed, but this process may open %d files only: raise the hard limit"
            " (`ulimit -Hn %d`, or LimitNOFILE= in a unit), or set --max-connections %d",
            max_connections,
            reachable,
            needed,
            max(1, reachable - SPARE_DESCRIPTORS),
        )
