"""Code that a site allows a config to name: its own files, by their sha256, and nothing else."""

import shutil

from ..core.imports import Code
from ..engines.codec import digest
from ..errors import ConfigError
from .site_folder import SiteFolder

CODE = "code"  # in a site's folder: copies of the files that are allowed


def allowed_code(folder: SiteFolder) -> Code:
    """The places from which code may be imported: copies of the files that the site allows.

    Only files with the sha256 that ``site.toml`` names are copied; nothing else lies beside them.
    """
    place = folder.path / CODE
    shutil.rmtree(place, ignore_errors=True)
    if not folder.code:
        return Code()
    place.mkdir(mode=0o700)
    for name, sha in folder.code.items():
        path = folder.path / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"[code] '{name}': cannot be read ({error.strerror})") from error
        if digest(data) != sha:
            raise ConfigError(
                f"[code] '{name}': has the sha256 {digest(data)}; expected {sha}; look at what "
                "changed, and name the new sha256 in site.toml if you allow it"
            )
        (place / path.name).write_bytes(data)
    return Code(folders=(place.resolve(),))
