"""Where the base model of an adapter is. Free of torch."""

import os
from pathlib import Path

from stepjepa.base.files import json_or_empty

_RUN = "run.json"  # of a run folder, whose modules stand above this one


def base_as_trained(folder: str | os.PathLike[str], base: str) -> str:
    """Return the folder that ``base``, a path in an adapter's file, named where its training was started.

    Relative to the working directory it may be missing, or another model. Unchanged where the record of the run says
    no directory, or nothing is there, as after a move to another machine; a hub id is unchanged, too.
    """
    starts = (json_or_empty(place / _RUN).get("directory") for place in (Path(folder), Path(folder).parent))
    named = (Path(start) / base for start in starts if isinstance(start, str) and start)
    return next((str(path) for path in named if path.is_dir()), base)
