"""The table of families. A new one is a file with a `Family` and a line here."""

from typing import Any

from metagym.models.config import Family
from metagym.models.errors import ModelError
from metagym.models.llama import LLAMA
from metagym.models.qwen2 import QWEN2
from metagym.models.qwen3 import QWEN3
from metagym.models.qwen3_moe import QWEN3_MOE

FAMILIES = {f.model_type: f for f in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}


def family(model_type: Any, where: str) -> Family:
    """Raises ModelError, naming `where`, for one that is not in the table."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"{where}: model_type is {model_type!r}; supported: {', '.join(map(repr, FAMILIES))}"
        )
    return FAMILIES[model_type]
