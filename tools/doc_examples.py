"""Examples in docstrings as blocks of code: an extension of griffe, which `mkdocs.yml` names.

A docstring's `>>>` lines are a nested quotation to Markdown, and what they print may look like a link. Here they get
fences before anything reads them.
"""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    r"""A docstring with each run of examples between fences.

    >>> fenced("Adds.\n\n>>> 1 + 1\n2\n\n>>> 2 + 2\n4\n\nDone.").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '', '>>> 2 + 2', '4', '```', '', 'Done.']
    """
    found: list[str] = []
    for paragraph in text.split("\n\n"):
        if not paragraph.lstrip("\n").startswith(">>>"):
            found.append(paragraph)
            continue
        code = paragraph.strip("\n")
        if found and found[-1].startswith("```pycon\n"):
            found[-1] = f"{found[-1].removesuffix('```')}\n{code}\n```"
        else:
            found.append(f"```pycon\n{code}\n```")
    return "\n\n".join(found)


class Examples(griffe.Extension):
    """Puts fences around the examples of everything that is documented."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
