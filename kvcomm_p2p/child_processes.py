"""How processes are started that belong to the one that starts them."""

from __future__ import annotations

import sys
from typing import Any


def own_group() -> dict[str, Any]:
    """Arguments for `subprocess` that keep Ctrl-C in a terminal from a child, which whoever started it ends instead.

    A process group does that; a session of its own would too, but Linux may share its cores among sessions first
    (`sched_autogroup`): a node that moves bulk data then waits for its turn with all it does, and answers questions up to
    three times as late as one whose threads stand beside everybody's. Python 3.10 can only start a session.
    """
    return {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
