"""Sinks show what was decided: of an epoch, what its commit names, and each file once."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.engine.calls import method_error
from holdfast.errors import HoldfastError, SinkError
from holdfast.faults.points import reach
from holdfast.io.base import Decided
from holdfast.log.journal import Journal
from holdfast.log.records import Commit
from holdfast.plan import graph as g


def publish(commit: Commit, sinks: Mapping[str, g.Node], journal: Journal, staging: str) -> None:
    """Let every sink show its files. Who is replaced meanwhile ends as one that was, and not with an error of the sink."""
    for uid, node in sinks.items():
        files = commit.sinks.get(uid, [])
        if not files:
            continue
        decided = Decided(uid, commit.epoch, journal.generation, files, staging)
        reach("publish.before_sink")
        try:
            node.body.publish(decided)
        except HoldfastError as error:
            journal.check_fence()  # who was replaced may find that another has published
            raise error.at(uid, node.where) from None
        except OSError as error:
            journal.check_fence()
            raise SinkError(
                f"Epoch {commit.epoch} is decided but can't be published: {error}",
                uid=uid,
                where=node.where,
                remedy="Make room or mend the folder, and start again: it is published then, and only once.",
            ) from None
        except Exception as error:
            journal.check_fence()
            raise method_error(
                error, node, f"Epoch {commit.epoch} is decided but can't be published"
            ) from error
        reach("publish.after_sink")
