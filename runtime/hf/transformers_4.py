"""What has transformers 4.57 read a compressed folder's config.json as version 5 does.

`transformers_weights` there is a sentence in place of a file, on which transformers without neuzip stumbles
(formats/checkpoint.py). Version 5 looks at it after our quantizer has put the original's value back. 4.57
looks before there is a quantizer, so there the value is put back when the file is read.
"""

from __future__ import annotations

from functools import wraps
from threading import Lock
from typing import Any

KEY = "transformers_weights"

_registering = Lock()


def register_earlier() -> None:
    """Have 4.57 read the original's value; other versions stay. For any thread, any number of times."""
    from transformers import __version__, configuration_utils

    config: Any = configuration_utils.PretrainedConfig
    with _registering:
        read = config.get_config_dict.__func__
        if __version__.startswith("4.") and not hasattr(read, _MARK):
            config.get_config_dict = classmethod(_with_original_s(read))


_MARK = "_reads_compressed_folders"


def _with_original_s(read: Any) -> Any:
    """What reads a config.json, with the original's `transformers_weights` in one of ours."""

    @wraps(read)
    def get_config_dict(cls: Any, *arguments: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        document, unused = read(cls, *arguments, **options)
        how = document.get("quantization_config")
        if isinstance(how, dict) and how.get("quant_method") == "neuzip":
            document = {name: value for name, value in document.items() if name != KEY}
            document |= {name: value for name, value in how.items() if name == KEY}
        return document, unused

    setattr(get_config_dict, _MARK, True)
    return get_config_dict
