"""What a user declares: the states of a keyed operator, their types, defaults and life times.

The handles that `self.total` becomes while records are processed are in `handles`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.config import parse_duration_s
from holdfast.data.types import arrow_type
from holdfast.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator


class State:
    """A declared state of a `KeyedProcess`: one value, list or map for each key."""

    kind = "value"

    def __init__(self, *, ttl: str | float | None = None) -> None:
        self.name = ""
        self.ttl_s = None if ttl is None else parse_duration_s(ttl)
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise PipelineError(f"ttl must be longer than nothing, not {ttl!r}.")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def value_type(self) -> pa.DataType:
        """The Arrow type of one stored value."""
        raise NotImplementedError

    @property
    def sub_type(self) -> pa.DataType | None:
        """The Arrow type of the key inside a map or the place in a list; None for a single value."""
        return None

    def facts(self) -> dict[str, str | float | None]:
        """What must not change under stored state, as plain data."""
        return {
            "kind": self.kind,
            "value": str(self.value_type),
            "sub": None if self.sub_type is None else str(self.sub_type),
            "ttl_s": self.ttl_s,
        }


class ValueState(State):
    """One value for each key.

    Inside `process`, `self.<name>.value` reads and writes it and `self.<name>.clear()` forgets it; a
    key that has none reads `default`.

    Args:
        type: a Python or Arrow type. Values are stored as this type.
        default: what a key without a value reads.
        ttl: forget a value this long after it was last written ("30s", "2h"), by the epoch's clock.

    >>> import holdfast as hf
    >>> class Balance(hf.KeyedProcess):
    ...     total = hf.ValueState(float, default=0.0)
    ...
    ...     def process(self, account, transfer, ctx):
    ...         self.total.value += transfer["amount"]
    ...         yield {"account": account, "balance": self.total.value}
    >>> harness = hf.testing.Harness(Balance())
    >>> harness.process("ann", {"amount": 5.0})
    [{'account': 'ann', 'balance': 5.0}]
    """

    kind = "value"

    if TYPE_CHECKING:
        value: Any

        def clear(self) -> None: ...

    def __init__(self, type: Any, *, default: Any = None, ttl: str | float | None = None) -> None:
        super().__init__(ttl=ttl)
        self._type = arrow_type(type)
        self.default = default

    @property
    def value_type(self) -> pa.DataType:
        return self._type


class ListState(State):
    """A list for each key that is cheap to append to: only what was added is stored again.

    Inside `process`, `self.<name>` is iterable, has a length, `add(value)`, `extend(values)`,
    `update(values)` (replaces all) and `clear()`.

    >>> import holdfast as hf
    >>> class Last(hf.KeyedProcess):
    ...     seen = hf.ListState(int)
    ...
    ...     def process(self, key, record, ctx):
    ...         self.seen.add(record["v"])
    ...         yield {"key": key, "seen": list(self.seen)}
    >>> harness = hf.testing.Harness(Last())
    >>> harness.process("a", {"v": 1})
    [{'key': 'a', 'seen': [1]}]
    >>> harness.process("a", {"v": 2})
    [{'key': 'a', 'seen': [1, 2]}]
    """

    kind = "list"

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]: ...
        def __len__(self) -> int: ...
        def add(self, value: Any) -> None: ...
        def extend(self, values: Any) -> None: ...
        def update(self, values: Any) -> None: ...
        def clear(self) -> None: ...

    def __init__(self, type: Any, *, ttl: str | float | None = None) -> None:
        super().__init__(ttl=ttl)
        self._type = arrow_type(type)

    @property
    def value_type(self) -> pa.DataType:
        return self._type

    @property
    def sub_type(self) -> pa.DataType | None:
        return pa.int64()


class MapState(State):
    """A map for each key whose entries are stored one by one, so that a large one costs what is touched.

    Inside `process`, `self.<name>` is used like a dict: `[k]`, `get`, `in`, `del`, `items()`, `keys()`,
    `values()`, `len()`, `pop`, `clear()`.

    >>> import holdfast as hf
    >>> class PerPage(hf.KeyedProcess):
    ...     visits = hf.MapState(str, int)
    ...
    ...     def process(self, user, record, ctx):
    ...         self.visits[record["page"]] = self.visits.get(record["page"], 0) + 1
    ...         yield {"user": user, "pages": len(self.visits)}
    >>> hf.testing.Harness(PerPage()).process("ann", {"page": "/"})
    [{'user': 'ann', 'pages': 1}]
    """

    kind = "map"

    if TYPE_CHECKING:

        def __getitem__(self, key: Any) -> Any: ...
        def __setitem__(self, key: Any, value: Any) -> None: ...
        def __delitem__(self, key: Any) -> None: ...
        def __contains__(self, key: Any) -> bool: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __len__(self) -> int: ...
        def get(self, key: Any, default: Any = None) -> Any: ...
        def pop(self, key: Any, default: Any = None) -> Any: ...
        def items(self) -> Iterator[tuple[Any, Any]]: ...
        def keys(self) -> Iterator[Any]: ...
        def values(self) -> Iterator[Any]: ...
        def clear(self) -> None: ...

    def __init__(self, key_type: Any, value_type: Any, *, ttl: str | float | None = None) -> None:
        super().__init__(ttl=ttl)
        self._key_type = arrow_type(key_type)
        self._type = arrow_type(value_type)

    @property
    def value_type(self) -> pa.DataType:
        return self._type

    @property
    def sub_type(self) -> pa.DataType | None:
        return self._key_type


def declared_states(owner: type) -> dict[str, State]:
    """The states that a class and its bases declare, by name: a class that was pickled by value forgets its order."""
    found: dict[str, State] = {}
    for base in reversed(owner.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, State):
                found[name] = value
    return dict(sorted(found.items()))
