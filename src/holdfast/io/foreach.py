"""A function of the user's, called with each decided epoch's rows: for systems without a sink of their own."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from holdfast.errors import HoldfastError, PipelineError, UserCodeError
from holdfast.io.base import Decided, Sink, SinkWriter, TableWriter, Target, staged_table


def foreach_epoch(function: Callable[..., Any]) -> ForeachSink:
    """Call `function(table, epoch)` or `function(table, epoch, fence)` with what each decided epoch wrote.

    It is called on the driver, in order, once for each epoch that has rows, with all of them as one
    `pyarrow.Table`. After a fault it is called again for the last epoch, with the same table: whether the
    first call got through can't be known from outside. So let the target know the epoch: replace rows by it, or
    store it in the same transaction and do nothing if it is there already. `fence` grows whenever a new driver
    takes over: a target that stores the highest it has seen can refuse a driver that was replaced but does not know yet.

    >>> import pyarrow as pa
    >>> seen = {}
    >>> sink = foreach_epoch(lambda table, epoch: seen.update({epoch: table.num_rows}))
    >>> sink.describe()
    'function <lambda>'
    """
    return ForeachSink(function)


class ForeachSink(Sink):
    """Hands decided epochs to a function; made by `foreach_epoch`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise PipelineError(f"foreach_epoch needs a function, not {function!r}.")
        self._function = function
        self._wants_fence = _takes(function, 3)
        if not self._wants_fence and not _takes(function, 2):
            raise PipelineError(
                "The function for foreach_epoch must take (table, epoch) or (table, epoch, fence).",
                remedy="def save(table, epoch): …",
            )

    def describe(self) -> str:
        return f"function {getattr(self._function, '__name__', type(self._function).__name__)}"

    def writer(self, target: Target) -> SinkWriter:
        return TableWriter(target)

    def publish(self, decided: Decided) -> None:
        table = staged_table(decided)
        if table is None or not table.num_rows:
            return
        fence = (decided.fence,) if self._wants_fence else ()
        try:
            self._function(table, decided.epoch, *fence)
        except HoldfastError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"The function for foreach_epoch raised {type(error).__name__} at epoch {decided.epoch}: {error}",
                uid=decided.uid,
                remedy="The epoch is decided: mend the function or its target and start again, and it is called again.",
                detail=_users_lines(error),
            ) from error


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return count == 2  # a function of C that tells nothing
    return True


def _users_lines(error: BaseException) -> str:
    """The traceback without our own frames."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])
