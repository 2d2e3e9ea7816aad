"""A pipeline's stages as a picture: SVG text from the plan. Pure, and without any drawing library.

A stage is a box with its chain of operators inside, from left to right; an exchange is a thick arrow from
box to box with its key on it; a thin line is a call inside a chain. The picture follows the viewer's light
or dark theme where the viewer has one.

Two layouts of the same kind, one inside the other: operators in the columns of a box, boxes in the columns
of the picture (one for each wave). A line that skips a column gets an empty place in it, so that it runs
beside what stands there and not through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape

from holdfast.plan import graph as g
from holdfast.plan.describe import detail_of, title_of
from holdfast.plan.stages import Exchange, Stage, Stages, takers
