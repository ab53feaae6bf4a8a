"""Other machines for sweeps: executors of engines that somebody runs already."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvcomm_p2p.errors import ConfigError


@contextmanager
def executor_of(address: str | None) -> Iterator[Executor | None]:
    """An executor of the engine at dask://HOST:PORT or ray://HOST:PORT; None for this machine. Raises ConfigError."""
    if address is None:
        yield None
        return
    scheme, separator, place = address.partition("://")
    if not separator or scheme not in ("dask", "ray"):
        raise ConfigError(f"--engine {address!r}: write dask://HOST:PORT or ray://HOST:PORT")
    if scheme == "dask":
        try:
            connect: Any = import_module("distributed").Client  # it says no types
        except ImportError as error:
            raise ConfigError("a Dask engine needs its client: pip install 'kvcomm-p2p[dask]'") from error
        try:
            client = connect(f"tcp://{place}", timeout="10s")
        except (OSError, ValueError) as error:
            raise _nobody_there(address, error) from error
        with client:
            yield client.get_executor()
        return
    try:
        import ray
        from ray.util.client import ray as _  # noqa: F401
        from ray.util.multiprocessing import Pool
    except ImportError as error:
        raise ConfigError("a Ray engine needs its client: pip install 'kvcomm-p2p[ray]'") from error
    try:
        ray.init(address, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise _nobody_there(address, error) from error
    try:
        yield _PoolExecutor(Pool())
    finally:
        ray.shutdown()


def _nobody_there(address: str, error: Exception) -> ConfigError:
    return ConfigError(f"no engine answers at {address}: {error}; is its scheduler (Ray: its client server) running?")


class _PoolExecutor(Executor):
    """A multiprocessing-like pool as an executor."""

    def __init__(self, pool: object) -> None:
        self._pool = pool

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        from concurrent.futures import Future

        future: Future[object] = Future()
        self._pool.apply_async(  # type: ignore[attr-defined]
            fn, args, kwargs, callback=future.set_result, error_callback=future.set_exception
        )
        return future
