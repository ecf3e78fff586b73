"""For mkdocs: a link to a file of the repository that the built site lacks becomes plain text."""

import posixpath
import re


def on_page_markdown(markdown, *, page, config, files):
    """The page, with its dead links as text."""

    def shown(link):
        text, target = link.groups()
        at = target.partition("#")[0]
        if not at or "://" in at or at.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), at))
        file = files.get_file_from_path(path)
        return link[0] if file is not None and file.inclusion.is_included() else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", shown, markdown)
