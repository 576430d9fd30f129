"""The long description of the built distribution: README.md with links that lead somewhere from a package index too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"\((?![a-z]+:|#)(?P<path>[^)\s]+)\)"
_IMAGE = re.compile(r"!\[(?P<text>[^\[\]]*)\]" + _RELATIVE)
#: The text of a link may be an image that was made absolute before.
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:!\[[^\[\]]*\]\([^)]*\)|[^\[\]])*)\]" + _RELATIVE)


def description(readme: str, address: str | None) -> str:
    """`readme` for a reader without the repository beside it.

    With the repository's `address` (GitHub's layout) relative links and images point there. Without one a link is its
    text, and an image is left out.
    """
    image, link = ("", r"\g<text>")
    if address:
        image, link = (rf"![\g<text>]({address}/raw/HEAD/\g<path>)", rf"[\g<text>]({address}/blob/HEAD/\g<path>)")
    return _LINK.sub(link, _IMAGE.sub(image, readme))


class Description(MetadataHookInterface):
    """Gives hatchling the long description; the address is `Repository` of `[project.urls]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = description(readme, metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
