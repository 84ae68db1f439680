"""Husks of containers: what stays on the disk of a container that was uploaded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from neuzip.formats.container import HEADER_ENTRY, Container

from .workspace import partial_name, writing


def put_husk(path: Path) -> None:
    """Put a husk in the place of a container: a file of its size, without the streams and their blocks.

    It has the header and the records. The rest is a hole, which takes no space.
    """
    with Container(path) as container:
        file = container.file
        size = path.stat().st_size
        start = file.data_start + file.header.tensors[HEADER_ENTRY].start
        front, back = np.empty(file.data_start, np.uint8), np.empty(size - start, np.uint8)
        file.read_at(0, front)
        file.read_at(start, back)
    with writing(path):
        with open(partial_name(path), "wb") as husk:
            husk.write(front.data)
            husk.seek(start)
            husk.write(back.data)
        os.replace(partial_name(path), path)
