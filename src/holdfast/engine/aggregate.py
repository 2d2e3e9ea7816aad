"""Aggregates in batches: partial results before the exchange, merged after it, then joined with the state.

Each of the house's aggregates keeps one or two columns. Three steps use them, all of them vectorised:

    partial   records of a range, by key      -> columns
    merged    partial columns, by key         -> columns (before the exchange, and again after it)
    joined    state's columns and new columns -> columns, element by element

The user's own aggregates and `reduce` go record by record and are combined in the same places.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasketches as ds
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.data.rows import column_values, one_array, to_rows
from holdfast.data.types import arrow_type
from holdfast.engine.calls import user_error
from holdfast.errors import SchemaError
from holdfast.functions import Aggregate, Column
from holdfast.plan import graph as g
from holdfast.state.keygroups import check_key_type

_ROW = "__row"
_LG_K = 12
_SUM = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
_ORDERED = pc.ScalarAggregateOptions(skip_nulls=False, min_count=0)


def partial_edge(edge: str) -> str:
    """The name under which the schema of partial results is pinned."""
    return f"{edge}#partial"


@dataclasses.dataclass(frozen=True)
class _Part:
    """One column of partial results: how Arrow makes it from records, merges it, and joins it with state."""

    make: str
    merge: str
    join: Callable[[pa.Array, pa.Array, pa.Array], pa.Array]
    options: Any = None
    merge_options: Any = None


def _added(old: pa.Array, new: pa.Array, known: pa.Array) -> pa.Array:
    added = _decimals_added(old, new) if pa.types.is_decimal(old.type) else pc.add_checked(old, new)
    return pc.coalesce(added, old, new)


def _decimals_added(old: pa.Array, new: pa.Array) -> pa.Array:
    """Arrow gives a sum one digit more than its parts and has no type for a 39th: it is told of one less."""
    kind = old.type
    wide = pa.decimal128 if pa.types.is_decimal128(kind) else pa.decimal256
    narrower = wide(kind.precision - 1, kind.scale)
    added = pc.add(old.view(narrower), new.view(narrower))
    added.validate(full=True)
    return added


def _smaller(old: pa.Array, new: pa.Array, known: pa.Array) -> pa.Array:
    return pc.min_element_wise(_in_order(old), _in_order(new))


def _larger(old: pa.Array, new: pa.Array, known: pa.Array) -> pa.Array:
    return pc.max_element_wise(_in_order(old), _in_order(new))


def _in_order(values: pa.Array) -> pa.Array:
    """Values as others in the same order: of truths and of times with a zone Arrow takes no element-wise minimum."""
    if pa.types.is_boolean(values.type):
        return values.cast(pa.int8())
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


def _kept(old: pa.Array, new: pa.Array, known: pa.Array) -> pa.Array:
    return pc.if_else(known, old, new)


def _replaced(old: pa.Array, new: pa.Array, known: pa.Array) -> pa.Array:
    return new


_COUNT_ALL = _Part("count", "sum", _added, pc.CountOptions(mode="all"), _SUM)
_COUNT = _Part("count", "sum", _added, pc.CountOptions(mode="only_valid"), _SUM)
_TOTAL = _Part("sum", "sum", _added, _SUM, _SUM)
_PARTS: dict[str, list[_Part]] = {
    "count": [_COUNT],
    "sum": [_TOTAL],
    "mean": [_TOTAL, _COUNT],
    "min": [_Part("min", "min", _smaller)],
    "max": [_Part("max", "max", _larger)],
    "first": [_Part("first", "first", _kept, _ORDERED, _ORDERED)],
    "last": [_Part("last", "last", _replaced, _ORDERED, _ORDERED)],
    "approx_distinct": [_Part("distinct", "list", _replaced, pc.CountOptions(mode="only_valid"))],
}


class Combiner:
    """What an exchange to an aggregate or a reduce does with records before it sends them."""

    by_record = False
    own_schema = True
    """Whether what it sends are no records any more, but has a schema of its own."""
    outside = 0
    """How many records are in no window, so far."""

    @staticmethod
    def of(target: g.Node, key: g.Key, redact: bool) -> Combiner | None:
        """The combiner for an exchange's target; None where records go as they are."""
        if target.kind == g.REDUCE:
            return _ReduceCombiner(target, key, redact)
        if target.kind == g.AGGREGATE:
            return _ColumnCombiner(target, key, redact)
        return None

    def sorted_out(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Records as they are to be combined, and those that must not be, because they come too late."""
        return table, table.slice(0, 0)

    def partial(self, table: pa.Table) -> pa.Table:
        """Records of a batch as partial results."""
        raise NotImplementedError

    def merged(self, table: pa.Table) -> pa.Table:
        """Partial results, one row for each key."""
        raise NotImplementedError

    def add_rows(self, rows: list[Any], keys: list[Any]) -> None:
        raise NotImplementedError

    def take_rows(self) -> tuple[list[Any], list[Any]]:
        """Keys and folded records since the last call."""
        raise NotImplementedError


class _ReduceCombiner(Combiner):
    """Folds a range's records by key; what is sent has the shape of a record."""

    by_record = True

    def __init__(self, target: g.Node, key: g.Key, redact: bool) -> None:
        self._node, self._key, self._redact = target, key, redact
        self._folded: dict[Any, Any] = {}

    def add_rows(self, rows: list[Any], keys: list[Any]) -> None:
        function, folded = self._node.body, self._folded
        for key, row in zip(keys, rows, strict=True):
            if key not in folded:
                folded[key] = row
                continue
            try:
                folded[key] = function(folded[key], row)
            except Exception as error:
                raise user_error(error, self._node, row, self._redact, key) from None

    def take_rows(self) -> tuple[list[Any], list[Any]]:
        folded, self._folded = self._folded, {}
        return list(folded), list(folded.values())


class _ColumnCombiner(Combiner):
    """Aggregates of columns, by Arrow; the user's own by record, beside them."""

    def __init__(self, target: g.Node, key: g.Key, redact: bool) -> None:
        self._node, self._key, self._redact = target, key, redact
        self._parts = Parts(target)

    def partial(self, table: pa.Table) -> pa.Table:
        keys = key_columns_of(self._key, table.schema)
        for name in keys:
            if name not in table.schema.names:
                raise SchemaError(f"There is no column {name!r} to key by; there are {table.schema.names}.")
            check_key_type(table.schema.field(name).type)
        return self._parts.partial(table, keys, self._redact)

    def merged(self, table: pa.Table) -> pa.Table:
        return self._parts.merged(table, key_columns_of(self._key, table.schema), self._redact)


def check_aggregates(node: g.Node, columns: Iterable[Column], schema: pa.Schema) -> None:
    """Raise for an aggregate of a column whose type has no such aggregate."""
    for one in columns:
        if one.column is None or one.column not in schema.names:
            continue
        kind = schema.field(one.column).type
        if not _can_be_taken(one.kind, kind):
            raise SchemaError(
                f"hf.{one.kind} can't be taken of the column {one.column!r}, which is {kind}.",
                uid=node.uid,
                where=node.where,
                remedy="Cast it before, or use an Aggregate of your own.",
            )


@functools.lru_cache(maxsize=256)
def _can_be_taken(aggregate: str, kind: pa.DataType) -> bool:
    """Whether Arrow has what an aggregate of a type needs; it is asked, for its versions differ."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_null(value):
        return True
    one = pa.table({"key": [0], "value": pa.nulls(1, value)}).group_by("key", use_threads=False)
    try:
        for part in _PARTS[aggregate]:
            made = one_array(one.aggregate([("value", part.make, part.options)])[f"value_{part.make}"])
            part.join(made, made, pa.array([True]))
    except pa.ArrowNotImplementedError:
        return False
    return True


def key_columns_of(key: g.Key, schema: pa.Schema) -> list[str]:
    return list(key.columns) if key.columns else [n for n in schema.names if n.startswith("__key")]


class Parts:
    """The columns that an aggregate operator keeps, and the three steps over them."""

    def __init__(self, node: g.Node, body: Mapping[str, Column | Aggregate] | None = None) -> None:
        self._node = node
        self._body: Mapping[str, Column | Aggregate] = node.body if body is None else body
        self.columns: dict[str, Column] = {n: c for n, c in self._body.items() if isinstance(c, Column)}
        self.own: dict[str, Aggregate] = {n: a for n, a in self._body.items() if isinstance(a, Aggregate)}
        self._plan: list[tuple[str, str | None, _Part]] = []
        for name, column in self.columns.items():
            parts = [_COUNT_ALL] if column.kind == "count" and column.column is None else _PARTS[column.kind]
            self._plan += [(f"{name}.{i}", column.column, part) for i, part in enumerate(parts)]

    @property
    def names(self) -> list[str]:
        """The names of the kept columns, in order."""
        return [name for name, _, _ in self._plan] + list(self.own)

    def partial(self, table: pa.Table, keys: list[str], redact: bool, hidden: Sequence[str] = ()) -> pa.Table:
        """Records as partial results, one row for each key, keys in the order they first came.

        `hidden`: columns of ours among the keys, which are no part of a record.
        """
        for _, column, _ in self._plan:
            if column is not None and column not in table.schema.names:
                raise SchemaError(
                    f"There is no column {column!r} to aggregate; there are {table.schema.names}."
                )
        check_aggregates(self._node, self.columns.values(), table.schema)
        asked = [(column or keys[0], part.make, part.options) for _, column, part in self._plan]
        result = self._grouped(table, keys, asked)
        if self.own:
            result = self._own_partials(table, keys, result, redact, hidden)
        return result

    def merged(self, table: pa.Table, keys: list[str], redact: bool) -> pa.Table:
        """Partial results of several batches, ranges or shards as one row for each key."""
        asked = [(name, part.merge, part.merge_options) for name, _, part in self._plan]
        places: list[list[int]] = []
        if self.own:
            rows = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
            result = self._grouped(rows, keys, [*asked, (_ROW, "list", None)])
            places = column_values(result[_ROW])
            result = result.drop_columns([_ROW])
        else:
            result = self._grouped(table, keys, asked)
        for name, column in self.columns.items():
            if column.kind == "approx_distinct":
                result = _set(
                    result,
                    f"{name}.0",
                    pa.array([_union(s) for s in result[f"{name}.0"].to_pylist()], pa.binary()),
                )
        for name, own in self.own.items():
            accs = column_values(table[name])
            values = [self._fold(own, [accs[i] for i in mine], redact) for mine in places]
            result = result.append_column(name, self._own_array(own, values))
        return result

    def _grouped(self, table: pa.Table, keys: list[str], asked: Sequence[tuple[str, str, Any]]) -> pa.Table:
        table, typed = _with_types(table, {column for column, _, _ in asked})
        wanted = [(typed.get(c, c), f, o) for c, f, o in asked]
        for summed in sorted({column for column, function, _ in wanted if function == "sum"}):
            self._check_sum(table, keys, summed)
        grouped = table.group_by(keys, use_threads=False)
        made = grouped.aggregate([(c, f, o) if o is not None else (c, f) for c, f, o in wanted])
        columns = made.columns
        # Arrow puts keys first and the aggregates behind them, in the order they were asked for.
        values = columns[len(keys) :] if made.schema.names[: len(keys)] == keys else columns[: len(asked)]
        kept = [
            pa.nulls(made.num_rows)
            if pa.types.is_null(table.schema.field(column).type) and function in _TYPED
            else value
            for (column, function, _), value in zip(asked, values, strict=True)
        ]
        arrays = [made.column(k) for k in keys] + kept
        names = [*keys, *(name for name, _, _ in self._plan), _ROW][: len(arrays)]
        result = pa.Table.from_arrays(arrays, names=names)
        if any(f == "distinct" for _, f, _ in asked):
            for name, column in self.columns.items():
                if column.kind == "approx_distinct":
                    sketches = [_sketch(v) for v in result[f"{name}.0"].to_pylist()]
                    result = _set(result, f"{name}.0", pa.array(sketches, pa.binary()))
        return result

    def _check_sum(self, table: pa.Table, keys: list[str], summed: str) -> None:
        """Arrow's sums of integers and decimals begin anew where they are too large, without a word."""
        values = table[summed]
        if not _may_overflow(values):
            return
        wide = values.cast(_wider_sum(values.type), safe=False)
        rough = pa.table([*(table[k] for k in keys), wide], [*keys, _ROW])
        sums = rough.group_by(keys, use_threads=False).aggregate([(_ROW, "sum")])[f"{_ROW}_sum"]
        if (pc.max(pc.abs(sums)).as_py() or 0) >= _greatest(values.type):
            raise self._too_large(values.type)

    def _too_large(self, kind: pa.DataType) -> SchemaError:
        fewer = "with fewer digits behind the point " if pa.types.is_decimal(kind) else ""
        return SchemaError(
            f"A sum is too large for {kind}.",
            uid=self._node.uid,
            where=self._node.where,
            remedy=f"Cast the column to float64 or to a decimal {fewer}before.",
        )

    def _own_partials(
        self, table: pa.Table, keys: list[str], result: pa.Table, redact: bool, hidden: Sequence[str]
    ) -> pa.Table:
        ours = [n for n in table.schema.names if n.startswith("__key") or n in hidden]
        rows = to_rows(table.drop_columns(ours))
        parts = [_instants(table[k]) for k in keys]
        made: dict[Any, list[Any]] = {}
        for key, row in zip(zip(*parts, strict=True), rows, strict=True):
            accs = made.get(key)
            try:
                if accs is None:
                    accs = made[key] = [own.create() for own in self.own.values()]
                for place, own in enumerate(self.own.values()):
                    accs[place] = own.add(accs[place], row)
            except Exception as error:
                raise user_error(error, self._node, row, redact, key) from None
        order = zip(*(_instants(result[k]) for k in keys), strict=True)
        lists = [made[key] for key in order]
        for place, (name, own) in enumerate(self.own.items()):
            result = result.append_column(name, self._own_array(own, [accs[place] for accs in lists]))
        return result

    def _own_array(self, own: Aggregate, values: list[Any]) -> pa.Array:
        kind = own.arrow_accumulator()
        try:
            return pa.array(values, type=kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise SchemaError(
                f"An accumulator of {type(own).__name__} does not fit its type {kind}: {error}"
            ) from None

    def _fold(self, own: Aggregate, accs: list[Any], redact: bool) -> Any:
        folded = accs[0]
        for acc in accs[1:]:
            try:
                folded = own.merge(folded, acc)
            except Exception as error:
                raise user_error(error, self._node, acc, redact) from None
        return folded

    def joined(
        self, known: pa.Array, old: list[pa.Array], new: list[pa.Array], redact: bool
    ) -> list[pa.Array]:
        """The state's columns with the epoch's; `known` says which keys had state."""
        result = []
        for place, (name, _, part) in enumerate(self._plan):
            if self.columns.get(name.rsplit(".", 1)[0], Column("", None)).kind == "approx_distinct":
                pairs = zip(column_values(old[place]), column_values(new[place]), strict=True)
                result.append(pa.array([_union([o, n]) for o, n in pairs], pa.binary()))
            else:
                try:
                    result.append(_joined(part, old[place], new[place], known))
                except pa.ArrowInvalid:
                    raise self._too_large(old[place].type) from None
        for place, own in enumerate(self.own.values(), start=len(self._plan)):
            olds, news = column_values(old[place]), column_values(new[place])
            hits = column_values(known)
            folded = [
                self._fold(own, [o, n], redact) if k else n for o, n, k in zip(olds, news, hits, strict=True)
            ]
            result.append(self._own_array(own, folded))
        return result

    def results(self, columns: list[pa.Array], redact: bool) -> list[tuple[str, pa.Array]]:
        """What is emitted, by the user's names, in the user's order."""
        kept = dict(zip(self.names, columns, strict=True))
        made: list[tuple[str, pa.Array]] = []
        for name, body in self._body.items():
            if isinstance(body, Aggregate):
                made.append((name, self._own_result(body, kept[name], redact)))
            elif body.kind == "mean":
                total = kept[f"{name}.0"]
                counted = kept[f"{name}.1"]
                divisor = counted.cast(pa.float64())
                amount = total.cast(pa.float64(), safe=False)
                divisor = pc.if_else(pc.equal(counted, 0), pa.scalar(None, divisor.type), divisor)
                made.append((name, pc.divide(amount, divisor)))
            elif body.kind == "approx_distinct":
                made.append(
                    (name, pa.array([_estimate(s) for s in column_values(kept[f"{name}.0"])], pa.int64()))
                )
            else:
                made.append((name, kept[f"{name}.0"]))
        return made

    def _own_result(self, own: Aggregate, accumulators: pa.Array, redact: bool) -> pa.Array:
        kind = own.arrow_accumulator() if own.result_type is None else arrow_type(own.result_type)
        values = []
        for acc in column_values(accumulators):
            try:
                values.append(own.result(acc))
            except Exception as error:
                raise user_error(error, self._node, acc, redact) from None
        return pa.array(values, type=kind)


def _instants(column: pa.ChunkedArray) -> list[Any]:
    """Values that are equal only where Arrow's are: datetimes of a zone are, when its clocks are put back."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    return column_values(column)


def _wider_sum(kind: pa.DataType) -> pa.DataType:
    """The type in which a sum that is too large shows."""
    return pa.decimal256(76, kind.scale) if pa.types.is_decimal128(kind) else pa.float64()


def _greatest(kind: pa.DataType) -> float | decimal.Decimal:
    """What a sum of a type must stay below, by what its wider type can tell."""
    if pa.types.is_decimal128(kind):
        return decimal.Decimal(1).scaleb(38 - kind.scale)
    if pa.types.is_decimal(kind):
        return float((1 - 2.0**-23) * 10.0 ** (76 - kind.scale))
    return float((1 << 64 if pa.types.is_unsigned_integer(kind) else 1 << 63) - (1 << 40))


def _may_overflow(column: pa.ChunkedArray) -> bool:
    """Whether integers or decimals are so many and so large that their sum could be."""
    if not (pa.types.is_integer(column.type) or pa.types.is_decimal(column.type)) or not len(column):
        return False
    bounds = pc.min_max(column).as_py()
    return bool(max(abs(bounds["min"] or 0), abs(bounds["max"] or 0)) * len(column) >= _greatest(column.type))


_TYPED = ("sum", "min", "max", "first", "last")


def _with_types(table: pa.Table, columns: set[str]) -> tuple[pa.Table, dict[str, str]]:
    """The table with a column that Arrow can aggregate beside each that it can't, and the names of these columns.

    What was null so far is null as numbers; what is a dictionary's is its values.
    """
    typed = {}
    for name in sorted(columns):
        kind = table.schema.field(name).type
        if pa.types.is_null(kind) or pa.types.is_dictionary(kind):
            typed[name] = f"__typed_{name}"
            plain = pa.int64() if pa.types.is_null(kind) else kind.value_type
            table = table.append_column(typed[name], table[name].cast(plain))
    return table, typed


def _joined(part: _Part, old: pa.Array, new: pa.Array, known: pa.Array) -> pa.Array:
    if pa.types.is_null(old.type):
        return new
    return one_array(part.join(old, new, known)).cast(old.type)


def _set(table: pa.Table, name: str, array: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, array)


def _sketch(values: list[Any]) -> bytes:
    sketch = ds.hll_sketch(_LG_K)
    for value in values:
        sketch.update(value if isinstance(value, (int, float, str)) else repr(value))
    return bytes(sketch.serialize_compact())


def _union(sketches: list[bytes | None]) -> bytes:
    union = ds.hll_union(_LG_K)
    for data in sketches:
        if data is not None:
            union.update(ds.hll_sketch.deserialize(data))
    return bytes(union.get_result().serialize_compact())


def _estimate(data: bytes) -> int:
    sketch, union = ds.hll_sketch.deserialize(data), ds.hll_union(_LG_K)
    union.update(sketch)
    union.update(sketch)  # a sketch that was merged is not estimated by the order in which its values came
    return int(union.get_result().get_estimate() + 0.5)
