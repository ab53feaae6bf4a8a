"""What every command needs before it works."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcomm_p2p.settings import Settings


def load_settings() -> Settings:
    """Settings of this process, from the file and the environment. Raises ConfigError listing every problem.

    Call it before anything imports torch: it also lets the OpenMP threads of this process and its children share cores.
    """
    from kvcomm_p2p.settings import Settings, share_cores

    share_cores()
    return Settings.from_env()
