"""Captions → WordPiece ids."""

import collections
import hashlib
import os
import tempfile
from collections.abc import Iterable

import numpy as np
import tokenizers
from etils import epath

from xe_retrieval.data import paths

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # [PAD] is 0: the towers mask zeros
_CACHED_WORDS = 200_000  # at most; then the cache starts again


class Tokenizer:
  """Strings → int32 [n, tokens], zero-padded, [CLS] first, truncated at `tokens`."""

  def __init__(self, fast, tokens: int):
    if fast.pad_token_id != 0:
      raise ValueError(f"the tokenizer pads with id {fast.pad_token_id}; the text tower masks id 0")
    self._fast, self.tokens, self.vocab_size = fast, tokens, len(fast)
    self._pieces = fast.backend_tokenizer
    self._pieces.no_padding()
    self._pieces.no_truncation()
    self._first, *self._last = self._pieces.encode("").ids  # [CLS], [SEP]
    # BERT's pre-tokenizer splits at every space: the ids of a word can be cached.
    self._by_word = isinstance(
      self._pieces.pre_tokenizer, tokenizers.pre_tokenizers.BertPreTokenizer
    )
    self._cache = {}

  def __call__(self, captions: list[str]) -> np.ndarray:
    split = [caption.split(" ") if self._by_word else [caption] for caption in captions]
    known = self._cache = self._cache if len(self._cache) < _CACHED_WORDS else {}
    new = list(set().union(*split).difference(known))
    encoded = self._pieces.encode_batch_fast(new, add_special_tokens=False)
    known.update((word, pieces.ids) for word, pieces in zip(new, encoded, strict=True))
    out = np.zeros((len(captions), self.tokens), np.int32)
    room = self.tokens - 1 - len(self._last)
    for row, words in zip(out, split, strict=True):
      ids = [i for word in words for i in known[word]][:room]
      row[: len(ids) + 1 + len(self._last)] = [self._first, *ids, *self._last]
    return out

  def fingerprint(self) -> str:
    """A hash of all that determines the ids of a caption; part of the key of cached features."""
    return hashlib.sha256(f"{self.tokens} {self._pieces.to_str()}".encode()).hexdigest()

  def save(self, directory) -> None:
    if not paths.is_remote(directory):
      self._fast.save_pretrained(directory)
      return
    with tempfile.TemporaryDirectory() as scratch:
      self._fast.save_pretrained(scratch)
      epath.Path(directory).mkdir(parents=True, exist_ok=True)
      for file in epath.Path(scratch).iterdir():
        (epath.Path(directory) / file.name).write_bytes(file.read_bytes())


def load(path: str, tokens: int) -> Tokenizer:
  """The tokenizer of a pretrained tower: a directory, local or remote, or a Hugging Face id."""
  import transformers

  if paths.is_remote(path):
    with tempfile.TemporaryDirectory() as scratch:
      for file in epath.Path(path).iterdir():
        (epath.Path(scratch) / file.name).write_bytes(file.read_bytes())
      return load(scratch, tokens)
  try:
    return Tokenizer(transformers.AutoTokenizer.from_pretrained(path), tokens)
  except (OSError, ValueError) as e:
    raise ValueError(f"no tokenizer in {str(path)!r} (tokenizer.json or vocab.txt): {e}") from e


def train(captions: Iterable[str], vocab_size: int, tokens: int) -> Tokenizer:
  """A lower-case WordPiece vocabulary: the most frequent words, and letters to spell the others.

  (The trainer in `tokenizers` is not deterministic.)
  """
  import transformers

  pieces = tokenizers.BertWordPieceTokenizer(lowercase=True)
  counted, words = collections.Counter(), collections.Counter()
  for caption in captions:
    counted.update(caption.split(" "))  # as in `Tokenizer`: each needs normalising only once
  for part, count in counted.items():
    clean = pieces.normalizer.normalize_str(part)
    for word, _ in pieces.pre_tokenizer.pre_tokenize_str(clean):
      words[word] += count
  letters = sorted(set("".join(words)))
  spelling = _SPECIAL + letters + [f"##{letter}" for letter in letters]
  known = set(spelling)
  common = sorted((w for w in words if w not in known), key=lambda w: (-words[w], w))
  vocab = (spelling + common)[:vocab_size]
  fast = transformers.BertTokenizerFast(vocab={piece: i for i, piece in enumerate(vocab)})
  return Tokenizer(fast, tokens)
