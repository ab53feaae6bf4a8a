"""MessagePack through `msgpack`, under limits, and back into the declared types through `msgspec`."""

from __future__ import annotations

from typing import Any, TypeVar

import msgpack
import msgspec

from kvcomm_p2p.protocol.messages.fields import DELTA_ENTRIES_MAX, DIGEST_ENTRIES_MAX, ROW_BYTES, ROWS_MAX

_ARRAY_LEN_MAX = max(DELTA_ENTRIES_MAX, DIGEST_ENTRIES_MAX)
_TEXT_BYTES_MAX = 4096
_BINARY_BYTES_MAX = ROWS_MAX * ROW_BYTES

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """The bytes of a message, of an entry, or of a part of one."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(value, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def unpack(body: bytes, kind: type[T]) -> T:
    """What was packed, checked against `kind`. Raises ValueError for anything else; nothing else for any bytes."""
    try:
        fields = msgpack.unpackb(
            body,
            raw=False,
            use_list=False,
            max_str_len=_TEXT_BYTES_MAX,
            max_bin_len=_BINARY_BYTES_MAX,
            max_array_len=_ARRAY_LEN_MAX,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"not MessagePack as expected: {error!s:.160}") from None
    try:
        return msgspec.convert(fields, type=kind, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ValueError(f"{error!s:.200}") from None
